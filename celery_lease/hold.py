"""What one holder of a lease may believe, computed from its own clock and nothing else.

Knows the clock, and the grant. Must not know the database, or who renews.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Literal

from celery_lease.lease import LeaseRef, Renewed

__all__ = ("Clock", "Hold", "Status", "now")

Status = Literal["held", "unknown", "lost"]
Clock = Callable[[], float]

#: A suspended machine must not extend trust; only this clock counts its sleep.
_CLOCK_ID: int | None = getattr(time, "CLOCK_BOOTTIME", None)
_LEAST_RETRY = 0.2


def now() -> float:
    """Seconds on a clock that never jumps and that goes on in suspension."""
    return time.monotonic() if _CLOCK_ID is None else time.clock_gettime(_CLOCK_ID)


class Hold:
    """One lease that an execution in this process was granted.

    The executing code reads it without taking a lock: it may be broken off at
    any byte code, and it may fork. Only a :class:`Heartbeat` changes it, but
    for ``details``, ``request_id`` and :meth:`release`.

    Args:
        ref: The grant.
        task_name: For those who are told about it.
        lease_duration: L, seconds.
        interval: H, seconds.
        lease_until: When the lease ends by the database's clock.
        requested_at: When the claim *started*, by ``clock``.
        executor: The thread that runs the body; when it ends, so do renewals.
        watch_parent: Whether renewals end when the parent process is gone.
        clock: Seconds that never jump.
    """

    def __init__(  # noqa: PLR0913 - these are facts about a lease, all by keyword
        self,
        ref: LeaseRef,
        *,
        task_name: str = "",
        lease_duration: float,
        interval: float,
        lease_until: datetime | None,
        requested_at: float,
        executor: threading.Thread | None = None,
        watch_parent: bool = False,
        clock: Clock = now,
    ) -> None:
        self.ref = ref
        self.task_name = task_name
        self.lease_duration = lease_duration
        self.interval = interval
        self.lease_until = lease_until
        self.executor = executor
        self.cancel_reason: str | None = None
        #: Id of the outside request that runs now, for the log.
        self.request_id: str | None = None
        #: Renewals that failed since the last one that was confirmed.
        self.failures = 0
        self.released = False
        self.confirmed_at = requested_at
        self._trust = lease_duration - min(0.05 * lease_duration, 2.0)
        self.trusted_until = requested_at + self._trust
        self.due_at = requested_at + interval
        self._clock = clock
        self._parent = os.getppid() if watch_parent else None
        self._lost: str | None = None
        # Made when somebody asks for it: next to nobody does, and it costs more than all the rest.
        self._lost_event: threading.Event | None = None
        self._told_unknown = False
        # Compared by identity: each has one writer, so no lock and no lost update.
        self._details: list[str] | None = None
        self._saved: list[str] | None = None
        self._lock = threading.Lock()

    @property
    def remaining(self) -> float:
        """Seconds for which the lease can still be trusted; not above 0 when it is lost."""
        return 0.0 if self._lost else self.trusted_until - self._clock()

    @property
    def status(self) -> Status:
        """What the holder may believe now. No I/O, no lock."""
        # The clock first: an extension that comes between the two reads is then harmless.
        instant = self._clock()
        if self._lost or instant >= self.trusted_until:
            return "lost"
        return "unknown" if self.failures or self.is_overdue(instant) else "held"

    @property
    def lost_reason(self) -> str | None:
        """Why it is lost: ``zero_rows``, ``deadline``, ``executor_gone``, … or None."""
        return self._lost or ("deadline" if self.remaining <= 0 else None)

    @property
    def details(self) -> str | None:
        """The checkpoint that is not saved yet, as JSON; setting replaces it."""
        pending = self.unsaved
        return None if pending is None else pending[0]

    @details.setter
    def details(self, text: str) -> None:
        self._details = [text]

    @property
    def unsaved(self) -> list[str] | None:
        """The checkpoint to send, boxed: handed to :meth:`confirm`, it says which one was saved."""
        pending = self._details
        return None if pending is self._saved else pending

    def release(self) -> None:
        """The execution ends: renew no more. Call it before the statement that ends the lease.

        Else a renewal that meets the ended lease is taken for a loss.
        """
        self.released = True

    def lose(self, reason: str) -> bool:
        """Note that the lease is lost.

        Returns:
            True for the first to note it.
        """
        with self._lock:
            if self._lost:
                return False
            self._lost = reason
            event = self._lost_event
        if event is not None:
            event.set()
        return True

    @property
    def is_lost(self) -> bool:
        """Whether a thread of the heartbeat has noted the loss."""
        return self._lost is not None

    @property
    def lost_event(self) -> threading.Event:
        """Set as soon as a thread of the heartbeat knows that the lease is lost."""
        with self._lock:
            event = self._lost_event = self._lost_event or threading.Event()
            if self._lost:
                event.set()
        return event

    def is_overdue(self, instant: float) -> bool:
        """Whether a renewal should have been confirmed more than one interval ago."""
        return instant > self.confirmed_at + 2 * self.interval

    def find_loss(self, instant: float) -> str | None:
        """Return a reason that shows without asking anybody, or None."""
        if instant >= self.trusted_until:
            return "deadline"
        if self.executor is not None and not self.executor.is_alive():
            return "executor_gone"
        if self._parent is not None and self._parent != os.getppid():
            return "parent_gone"
        return None

    def confirm(self, started: float, renewed: Renewed, sent: list[str] | None) -> bool:
        """Take over an answer; False if it came too late to count."""
        with self._lock:
            if self._lost or self.released or self._clock() >= self.trusted_until:
                return False
            self.confirmed_at = started
            self.trusted_until = started + self._trust
            self.lease_until = renewed.lease_until
            self.due_at = started + self.interval
            self.failures = 0
            self._told_unknown = False
            if sent is not None:
                self._saved = sent
            return True

    def fail(self, instant: float) -> None:
        """Plan the next try: soon, then less often, and always once more before the deadline."""
        pause = min(1.0, self.interval / 4) * 2 ** min(self.failures, 16)
        pause = min(pause, self.interval / 2) * random.uniform(0.75, 1.0)  # noqa: S311 - jitter
        self.failures += 1
        near_the_end = max(_LEAST_RETRY, (self.trusted_until - instant) / 2)
        self.due_at = instant + min(pause, near_the_end)

    def is_news(self, instant: float) -> bool:
        """Whether it has become unknown, and nobody was told since the last confirmation."""
        with self._lock:
            if self._told_unknown or not (self.failures or self.is_overdue(instant)):
                return False
            self._told_unknown = True
            return True
