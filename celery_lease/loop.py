"""A daemon thread that calls one step over and over, and survives what the step raises.

Knows threads only, standard library. What a step does, when it is next due and
what its failure means is the owner's business.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable

from celery_lease.logbook import line

__all__ = ("Loop",)

_AFTER_ERROR = 0.2


class _Bell:
    """Wakes one thread; rung before it sleeps, it does not sleep.

    A bare lock, because ringing must survive a signal handler that raises at
    any byte code, and the lock inside a Condition does not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it rings already
            self._lock.release()

    def wait(self, seconds: float) -> None:
        self._lock.acquire(timeout=max(seconds, 0.0))


class Loop:
    """One such thread.

    Args:
        name: For the thread and the log.
        step: Does what is due and returns the seconds to sleep.
    """

    def __init__(self, name: str, step: Callable[[], float]) -> None:
        #: The instant of the next step, by the owner's clock.
        self.wakes_at = math.inf
        self._name = name
        self._step = step
        self._bell = _Bell()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def is_alive(self) -> bool:
        """Whether the thread runs; in a forked child it does not."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; after :meth:`stop` it ends at once.

        Raises:
            RuntimeError: The system has no thread left.
        """
        thread = threading.Thread(target=self._run, name=f"celery-lease-{self._name}", daemon=True)
        # Noted first: a thread that is not the noted one ends by itself.
        self._thread = thread
        thread.start()

    def stop(self) -> None:
        """Let the thread end after its present step, and start no other."""
        self._stopped = True
        self._bell.ring()

    def join(self, timeout: float) -> None:
        """Wait for the thread's end, so many seconds at most."""
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout)

    def wake(self) -> None:
        """Make the next step now."""
        self._bell.ring()

    def _run(self) -> None:
        while not self._stopped and self._thread is threading.current_thread():
            try:
                pause = self._step()
            except BaseException:  # noqa: BLE001 - the thread must live on
                line(logging.ERROR, "lease_thread_failed", exc_info=True, loop=self._name)
                pause = _AFTER_ERROR
            self._bell.wait(pause)
