"""The main process's desk: a thread that settles the leases of lost children.

A worker's event loop must never wait for the lease database, and its channels
belong to its own thread. So whatever the main process has to tell the database
is left here; the desk asks, tries again while the database is away, publishes
over connections of its own, and leaves what concerns the event loop with the
loop's timer. It is started with the first job, and never before a fork of its
own doing.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_lease import report
from celery_lease.exceptions import DatabaseUnavailable
from celery_lease.lease import LeaseRef, State
from celery_lease.options import is_leased, settings_of
from celery_lease.publisher import Publisher
from celery_lease.reaper import Reaper
from celery_lease.runtime import Runtime

if TYPE_CHECKING:
    from celery import Celery

    from celery_lease.config import Settings

__all__ = ("Desk",)

log = logging.getLogger("celery_lease")

_TIMEOUT = 5.0
_PAUSE = 1.0
#: Seconds after which a reaper sends what the desk had taken and not sent.
_RETRY_IN = 10.0


@dataclass(order=True)
class _Job:
    due: float
    number: int
    until: float = field(compare=False)
    work: Callable[[], None] = field(compare=False)


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
        self._settings: dict[str, Settings | None] = {}
        self._jobs: list[_Job] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None

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

    def submit(self, work: Callable[[], None], *, patience: float) -> None:
        """Leave a job; while the database is away it is tried again for ``patience`` seconds."""
        now = time.monotonic()
        with self._wake:
            heapq.heappush(self._jobs, _Job(now, next(self._numbers), now + patience, work))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="lease-desk", daemon=True)
                self._thread.start()
            self._wake.notify()

    def on_loop(self, call: Callable[[], None], *, after: float = 0.05) -> None:
        """Leave a call with the worker's own timer: channels belong to the event loop."""
        if self.consumer is not None:
            self.consumer.timer.call_after(after, call)

    # -- jobs ----------------------------------------------------------------

    def child_lost(self, task_id: str, owner_id: str) -> str:
        """Release the lease of a child that died, and send the task again at once.

        Returns:
            ``settled`` (sent again, or ended: this copy is needed no more),
            ``foreign`` (somebody else has the task, perhaps by this very entry
            in the broker) or ``unclaimed`` (the message is the only trace).

        Raises:
            DatabaseUnavailable: Nothing is known; the lease expires by itself.
        """
        store = Runtime.of(self.app).store
        row = store.crashed(task_id, owner_id, timeout=_TIMEOUT)
        if row is None:
            return "foreign" if store.find(task_id, timeout=_TIMEOUT) else "unclaimed"
        report.released(row.task_name, LeaseRef(task_id, owner_id, row.fencing_token), "crash")
        return "foreign" if self._send_now(task_id) == "failed" else "settled"

    def fail(
        self, task_id: str, owner_id: str, error: str, *, announce_in: float
    ) -> LeaseRef | None:
        """Fail a task whose child was killed at its time limit, under the fence."""
        ref = self._ref(task_id, owner_id)
        store = Runtime.of(self.app).store
        if ref and store.fail(ref, error, announce_in=announce_in, timeout=_TIMEOUT):
            return ref
        return None

    def cancel(self, task_id: str, owner_id: str, reason: str) -> None:
        """A revoke was told by Celery: let the row know, so that nobody runs the task again."""
        store = Runtime.of(self.app).store
        store.cancel(task_id, reason, timeout=_TIMEOUT)
        store.crashed(task_id, owner_id, timeout=_TIMEOUT)
        row = store.find(task_id, timeout=_TIMEOUT)
        if row is not None and row.state is State.CANCELLED:
            self.announce(LeaseRef(task_id, owner_id, row.fencing_token))

    def hand_back(self, task_id: str, owner_id: str, cause: str) -> None:
        """Celery took the task from its child: send it again without a charge."""
        ref = self._ref(task_id, owner_id)
        store = Runtime.of(self.app).store
        if ref is None:
            return
        released = store.release(ref, cause=cause, charge=False, dispatch=True, timeout=_TIMEOUT)
        if released is not None:
            report.released(task_id, ref, cause)
            self._send_now(task_id)

    def announce(self, ref: LeaseRef) -> None:
        """Celery has told the outcome."""
        Runtime.of(self.app).store.announce([ref], timeout=_TIMEOUT)

    def _ref(self, task_id: str, owner_id: str) -> LeaseRef | None:
        """The grant of an owner. Only a hint: every statement checks it again."""
        row = Runtime.of(self.app).store.find(task_id, timeout=_TIMEOUT)
        if row is None or row.owner_id != owner_id:
            return None
        return LeaseRef(task_id, owner_id, row.fencing_token)

    def _send_now(self, task_id: str) -> str:
        """Do what a reaper would do in its next pass, unless one has begun to."""
        runtime = Runtime.of(self.app)
        row = runtime.store.take_one(task_id, retry_in=_RETRY_IN, timeout=_TIMEOUT)
        if row is None:
            return "taken"
        publisher = Publisher(self.app)
        reaper = Reaper(
            runtime.store,
            publish=publisher,
            owner="",
            interval=runtime.settings.reaper_interval,
            retention=runtime.settings.retention,
        )
        try:
            return reaper.send(row, timeout=_TIMEOUT)
        finally:
            publisher.close()

    # -- thread --------------------------------------------------------------

    def _run(self) -> None:
        while True:
            job = self._next()
            try:
                job.work()
            except DatabaseUnavailable as exc:
                if time.monotonic() < job.until:
                    self._again(job)
                else:
                    log.warning("desk_gave_up detail=%s", exc.detail)
            except Exception:
                log.exception("desk_job_failed")

    def _next(self) -> _Job:
        with self._wake:
            while True:
                wait = self._jobs[0].due - time.monotonic() if self._jobs else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._jobs)
                self._wake.wait(wait)

    def _again(self, job: _Job) -> None:
        with self._wake:
            due = time.monotonic() + _PAUSE
            heapq.heappush(self._jobs, _Job(due, job.number, job.until, job.work))
