"""A thread that keeps the messages of trusted leases invisible.

One per process, started with the first lease of a broker that has visibility
timeouts. It never touches the database, and the heartbeat never waits for a
broker: either may hang without the other. A lease that is not trusted any
more is not extended, so the broker never outlives the database's word.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Protocol

from celery_lease.logbook import line

if TYPE_CHECKING:
    from celery_lease.broker.plain import Broker

__all__ = ("VisibilityKeeper",)


class Trusted(Protocol):
    """What the keeper asks of a lease."""

    @property
    def status(self) -> str:
        """``held``, ``unknown`` or ``lost``."""


class VisibilityKeeper:
    """Extends what is kept, once per period.

    Args:
        broker: The transport.
    """

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._kept: dict[str, Trusted] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None
        self._period = 0.0
        #: What the broker has answered; settings do not change in a process that works.
        self._periods: dict[float, float | None] = {}

    def keep(self, tag: str, lease: Trusted, longest: float) -> None:
        """Extend this delivery from now on, at least every ``longest`` seconds."""
        if longest not in self._periods:
            self._periods[longest] = self.broker.period(longest)
        period = self._periods[longest]
        if period is None:
            return
        with self._lock:
            self._kept[tag] = lease
            self._period = min(period, self._period or period)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="lease-visibility", daemon=True
                )
                self._thread.start()
        if not self._changed.is_set():
            self._changed.set()

    def leave(self, tag: str) -> None:
        """Stop extending this delivery."""
        with self._lock:
            self._kept.pop(tag, None)

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            while self._kept:
                threading.Event().wait(self._period)
                self._extend()

    def _extend(self) -> None:
        with self._lock:
            tags = [tag for tag, lease in self._kept.items() if lease.status != "lost"]
        if not tags:
            return
        try:
            self.broker.extend(tags)
        except Exception as exc:  # noqa: BLE001 - the lease turns copies away, this only saves work
            error = type(exc).__name__
            line(logging.WARNING, "visibility_not_extended", messages=len(tags), error=error)
