"""Where a worker's main process leaves work for its clerk, and gets the answers.

A worker's event loop must never wait for the lease database, and its channels
belong to its own thread. So nothing here waits: a job is written to a socket
that never blocks (or, in pools that do not fork, left with threads), and an
answer comes back through the event loop. See :mod:`celery_lease.clerk`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from billiard import process
from celery import platforms
from celery.worker import state as worker_state
from kombu.asynchronous import set_event_loop

from celery_lease.acknowledge import Acknowledgements
from celery_lease.clerk import Clerk
from celery_lease.logbook import line
from celery_lease.options import is_leased, settings_of

if TYPE_CHECKING:
    from celery import Celery

    from celery_lease.config import Settings

__all__ = ("Desk",)


Then = Callable[[Any], None]

#: Seconds in which a clerk finishes its jobs after its worker has ended.
_LAST_JOBS = 5.0
#: Bytes that may wait for a clerk that does not read.
_MOST_UNSENT = 1_000_000
#: Seconds between two clerks.
_PAUSE = 2.0
#: Seconds after which a claim without an answer is no longer part of the same fault.
_FORGOTTEN = 60.0
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")


class Desk:
    """One per app in a worker's main process.

    Args:
        app: The app.
    """

    _desks: dict[tuple[int, int], Desk] = {}  # noqa: RUF012 - per process, by pid

    def __init__(self, app: Celery) -> None:
        self.app = app
        #: The worker's consumer, while there is one.
        self.consumer: Any = None
        self._forks = False
        self._acknowledgements = Acknowledgements()
        self._unanswered_from = self._unanswered_at = -_FORGOTTEN
        self._settings: dict[str, Settings | None] = {}
        self._numbers = itertools.count()
        self._then: dict[int, Then] = {}
        self._clerk: Clerk | None = None
        self._hostname = ""
        self._pid = 0
        self._engaged_at = 0.0
        self._socket: socket.socket | None = None
        self._read = self._unsent = b""
        #: What a thread reads, where there is no event loop.
        self._reader: socket.socket | None = None

    def acknowledge(self, message: Any) -> bool:
        """Acknowledge a message together with others; False: acknowledge it yourself.

        Only where the event loop is never busy with a task: it may be a while
        until it comes round again.
        """
        hub = getattr(self.consumer, "hub", None)
        state: Any = worker_state
        stopping = (state.should_stop, state.should_terminate) != (None, None)
        if hub is None or not self._forks or stopping:
            return False
        return self._acknowledgements.add(message, hub)

    def leave(self) -> None:
        """The consumer's connection is going: its acknowledgements wait no longer."""
        self.consumer = None
        self._acknowledgements.leave()

    def without_answer(self) -> float:
        """Note that a claim got no answer, and return for how long that has been so, in seconds."""
        now = time.monotonic()
        if now - self._unanswered_at > _FORGOTTEN:
            self._unanswered_from = now
        self._unanswered_at = now
        return now - self._unanswered_from

    @classmethod
    def of(cls, app: Celery) -> Desk:
        """The desk of this process for an app."""
        key = (os.getpid(), id(app))
        desk = cls._desks.get(key)
        if desk is None:
            desk = cls._desks.setdefault(key, cls(app))
        return desk

    def settings_for(self, task: Any) -> Settings | None:
        """The settings of a task, worked out once; None if it takes no lease."""
        if task.name not in self._settings:
            self._settings[task.name] = settings_of(task) if is_leased(task) else None
        return self._settings[task.name]

    def open(self, hostname: str, *, forks: bool) -> None:
        """Engage the clerk.

        Args:
            hostname: The worker's node name.
            forks: Whether this process forks its pool.
        """
        self._hostname, self._forks = hostname, forks
        if forks:
            self._fork()
        else:
            self._clerk = Clerk(self.app, hostname)
            self._clerk.start()

    def close(self) -> None:
        """The worker is ending: let the clerk finish what it has."""
        if self._clerk is not None:
            self._clerk.stop()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def submit(self, work: str, *arguments: Any, patience: float, then: Then | None = None) -> None:
        """Leave a job; ``then`` is called with its answer in the event loop."""
        job = {"work": work, "args": arguments, "patience": patience}
        if self._clerk is not None:
            self._clerk.submit(job, lambda answer: self._answered(then, answer))
            return
        number = next(self._numbers)
        if then is not None:
            self._then[number] = then
        self._send({**job, "number": number})

    def look(self) -> None:
        """Engage another clerk if the process of this one has ended, but not in a hot loop."""
        with contextlib.suppress(OSError):
            self._push()
        if self._socket is None or time.monotonic() < self._engaged_at + _PAUSE:
            return
        if _has_ended(self._pid):
            line(logging.WARNING, "clerk_ended", pid=self._pid)
            self._then.clear()
            self._fork()
            self.attach(getattr(self.consumer, "hub", None))

    def attach(self, hub: Any = None) -> None:
        """Have the answers read by the event loop, or by a thread where there is none."""
        if self._socket is None:
            return
        if hub is not None:
            hub.add_reader(self._socket.fileno(), self._on_readable)
        elif self._reader is not self._socket:
            self._reader = self._socket
            threading.Thread(target=self._keep_reading, name="lease-answers", daemon=True).start()

    def _send(self, job: dict[str, Any]) -> None:
        self.look()
        try:
            if self._socket is None or len(self._unsent) > _MOST_UNSENT:
                raise BrokenPipeError("no clerk that reads")
            self._unsent += json.dumps(job).encode() + b"\n"
            self._push()
        except OSError as exc:
            # The lease expires by itself, and a reaper finds it.
            error = type(exc).__name__
            line(logging.WARNING, "clerk_not_reached", work=job["work"], error=error)
            self._then.pop(job["number"], None)

    def _push(self) -> None:
        """Write what the socket takes; the rest of a line follows with the next look."""
        if self._socket is None or not self._unsent:
            return
        with contextlib.suppress(BlockingIOError):
            self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def _on_readable(self, *_: Any) -> None:
        try:
            data = self._socket.recv(65536) if self._socket is not None else b""
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            hub = getattr(self.consumer, "hub", None)
            if hub is not None and self._socket is not None:
                hub.remove(self._socket.fileno())
            return
        *answers, self._read = (self._read + data).split(b"\n")
        for answer in map(json.loads, answers):
            self._answered(self._then.pop(answer["number"], None), answer["answer"])

    def _keep_reading(self) -> None:
        watched = self._socket
        while watched is not None and watched is self._socket:
            with contextlib.suppress(OSError, ValueError):
                watched.setblocking(True)
                data = watched.recv(1, socket.MSG_PEEK)
                if not data:
                    return
            self._on_readable()

    def _answered(self, then: Then | None, answer: Any) -> None:
        """Channels belong to the event loop, so its timer makes the call."""
        if then is not None and self.consumer is not None:
            self.consumer.timer.call_after(0.0, then, (answer,))

    def _fork(self) -> None:
        mine, its = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            mine.close()
            try:
                _be_clerk(self.app, self._hostname, its)
            finally:
                os._exit(0)
        its.close()
        mine.setblocking(False)
        old, self._socket, self._pid = self._socket, mine, pid
        self._read = self._unsent = b""
        if old is not None:
            old.close()
        # Else a child that is forked later would keep the clerk from seeing the end of this process.
        os.register_at_fork(after_in_child=mine.close)
        self._engaged_at = time.monotonic()
        line(logging.INFO, "clerk_engaged", pid=pid)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return True


def _be_clerk(app: Celery, hostname: str, line: socket.socket) -> None:
    """The clerk's process, until its worker has ended."""
    for name in _IGNORED:
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    set_event_loop(None)
    worker_state.reset_state()
    me: Any = process.current_process()
    me._name = "LeaseClerk"  # noqa: SLF001 - what the log calls this process
    platforms.set_mp_process_title("celeryd", info="lease clerk", hostname=hostname)
    forked: Any = app
    forked._after_fork()  # noqa: SLF001 - celery has no other name for it
    lock = threading.Lock()

    def reply_to(number: int) -> Then:
        def reply(answer: Any) -> None:
            with lock, contextlib.suppress(OSError):
                line.sendall(json.dumps({"number": number, "answer": answer}).encode() + b"\n")

        return reply

    clerk = Clerk(app, hostname)
    clerk.start()
    with line.makefile("rb") as jobs:
        for job in map(json.loads, jobs):
            clerk.submit(job, reply_to(job["number"]))
    clerk.stop()
    clerk.finish(_LAST_JOBS)
