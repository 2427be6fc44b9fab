"""Bounds the time that a call to the database may take.

A connection into a black hole never returns by itself: the server's own
timeouts do not reach the client, and TCP gives up after many minutes. So one
daemon thread per process looks at the calls in flight and shuts the socket of
one that is overdue; the driver then sees the end of the connection and raises.

Knows sockets and a clock, nothing of SQL. The thread starts at the first call,
polls only while calls are in flight, and does not survive a fork.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

__all__ = ("Line", "Watch", "watch")

_POLL_INTERVAL = 0.2
#: Polls without a call in flight before the thread sleeps until the next one.
_IDLE_POLLS = 10


class Line:
    """The socket of one connection, held by a descriptor of our own.

    The driver's descriptor may be closed, and its number given to somebody
    else, at the very moment at which it is to be shut.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = os.dup(descriptor)
        self._lock = threading.Lock()
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
        self.close()


class Watch:
    """Shuts overdue lines, in the process that made it."""

    def __init__(self) -> None:
        self.in_flight: dict[int, Line] = {}
        self._busy = threading.Event()
        self._thread = threading.Thread(target=self._run, name="celery-lease-patience", daemon=True)
        self._thread.start()

    def add(self, line: Line, deadline: float) -> None:
        """Begin a call that is to end before the deadline."""
        line.deadline = deadline
        self.in_flight[id(line)] = line
        if not self._busy.is_set():
            self._busy.set()

    def remove(self, line: Line) -> None:
        """End a call."""
        self.in_flight.pop(id(line), None)

    def _run(self) -> None:
        idle = 0
        while True:
            if not self.in_flight and idle >= _IDLE_POLLS:
                self._busy.clear()
                # A call may have come between the look and the clearing.
                if not self.in_flight:
                    self._busy.wait()
                idle = 0
            time.sleep(_POLL_INTERVAL)
            idle = 0 if self.in_flight else idle + 1
            self._shut_overdue()

    def _shut_overdue(self) -> None:
        now = time.monotonic()
        for line in tuple(self.in_flight.copy().values()):
            if line.deadline is not None and line.deadline <= now:
                self.remove(line)
                line.shut()


class _PerProcess:
    """The watch of this process; a child of a fork gets its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watch: Watch | None = None
        os.register_at_fork(after_in_child=self._forget)

    def get(self) -> Watch:
        watch = self._watch
        if watch is not None:
            return watch
        with self._lock:
            if self._watch is None:
                self._watch = Watch()
            return self._watch

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._watch = None


_per_process = _PerProcess()


def watch() -> Watch:
    """Return the watch of this process."""
    return _per_process.get()
