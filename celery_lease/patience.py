"""Bounds the time that a call to the database may take.

A connection into a black hole never returns by itself: the server's own
timeouts do not reach the client, and TCP gives up after many minutes. So one
daemon thread per process looks at the calls in flight and shuts the socket of
one that is overdue; the driver then sees the end of the connection and raises.

Knows sockets and a clock, nothing of SQL. The thread starts at the first call,
polls only while calls are in flight, and does not survive a fork.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import socket
import threading
import time

__all__ = ("Line", "Watch", "watch")

_POLL_INTERVAL = 0.2
#: Polls without a call in flight before the thread sleeps until the next one.
_IDLE_POLLS = 10
#: Seconds that the thread has to show that it runs.
_START_TIME = 1.0


class Line:
    """The socket of one connection, held by a descriptor of our own.

    The driver's descriptor may be closed, and its number given to somebody
    else, at the very moment at which it is to be shut.
    """

    _descriptor = -1

    def __init__(self, descriptor: int) -> None:
        self._lock = threading.Lock()
        self._descriptor = os.dup(descriptor)
        #: When the call in flight is overdue, on the monotonic clock.
        self.deadline: float | None = None
        #: Whether this line was cut.
        self.cut = False

    def shut(self) -> None:
        """Cut the connection for everybody who holds it."""
        with self._lock:
            self.cut = True
            if self._descriptor < 0:
                return
            end = socket.socket(fileno=self._descriptor)
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.detach()

    def close(self) -> None:
        """Give the descriptor back; the connection itself is the driver's to close."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            self.close()


class Watch:
    """Shuts overdue lines, in the process that made it.

    Asynchronous exceptions strike in the threads that call this, so there is no
    lock here that one could leave taken, and nobody waits for the thread to
    start: such an exception may even hit the new thread instead, which then
    ends at once. Whoever comes next starts another.
    """

    def __init__(self) -> None:
        self.in_flight: dict[int, Line] = {}
        self._running = False
        self._started_at = -math.inf
        self._asleep = False
        self._idle = 0
        # Taken: nobody has rung.
        self._bell = _thread.allocate_lock()
        self._bell.acquire()

    def add(self, line: Line, deadline: float) -> None:
        """Begin a call that is to end before the deadline."""
        line.deadline = deadline
        self.in_flight[id(line)] = line
        if self._asleep:
            # Rung already, if it says that nobody holds it.
            with contextlib.suppress(RuntimeError):
                self._bell.release()
        elif not self._running:
            self._start()

    def remove(self, line: Line) -> None:
        """End a call."""
        self.in_flight.pop(id(line), None)

    def _start(self) -> None:
        now = time.monotonic()
        if now - self._started_at > _START_TIME:
            self._started_at = now
            # Not by threading, whose start() waits for a sign of life.
            _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        self._running = True
        try:
            while True:
                self._sleep_without_calls()
                time.sleep(_POLL_INTERVAL)
                self._shut_overdue()
        finally:
            self._running = self._asleep = False

    def _sleep_without_calls(self) -> None:
        self._idle = 0 if self.in_flight else self._idle + 1
        if self._idle <= _IDLE_POLLS:
            return
        self._asleep = True
        # A call that came before it could see that has not rung.
        if not self.in_flight:
            self._bell.acquire()
        self._asleep = False
        self._idle = 0

    def _shut_overdue(self) -> None:
        now = time.monotonic()
        for line in tuple(self.in_flight.copy().values()):
            if line.deadline is not None and line.deadline <= now:
                self.remove(line)
                line.shut()


#: The watch of this process; a child of a fork gets its own.
_watches: dict[str, Watch] = {}
os.register_at_fork(after_in_child=_watches.clear)


def watch() -> Watch:
    """Return the watch of this process."""
    found = _watches.get("")
    # One step for all threads, without a lock that a fork could find taken.
    return found if found is not None else _watches.setdefault("", Watch())
