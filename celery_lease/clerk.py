"""The clerk: does, away from the event loop, what a worker's main process has to have done.

Reaps, and settles the leases of lost children: talks to the database, tries
again while it is away, and publishes over connections of its own.

Under a pool that forks the clerk is a process of its own, forked once before
the main process has any thread. A thread there would hold a lock of some
library in the moment in which the pool forks a child, and the child would wait
for that lock for ever. Elsewhere the clerk is two threads.

A job is a JSON object with its ``work`` (a method here), ``args`` and
``patience``: seconds in which it is tried again.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_lease import report, signals
from celery_lease.exceptions import DatabaseUnavailable
from celery_lease.lease import LeaseRef, State
from celery_lease.logbook import line
from celery_lease.publisher import Publisher
from celery_lease.reaper import Reaper
from celery_lease.runtime import Runtime, new_owner

if TYPE_CHECKING:
    from celery import Celery

    from celery_lease.lease import Reclaimed

__all__ = ("Clerk", "make_reaper")


_TIMEOUT = 5.0
_PAUSE = 1.0
#: Seconds after which an unused connection is closed.
_IDLE = 10.0
#: Seconds after which a reaper sends what the clerk had taken and not sent.
_RETRY_IN = 10.0
_WORKS = frozenset({"child_lost", "fail", "cancel", "hand_back", "announce"})

Reply = Callable[[Any], None]


@dataclass(order=True)
class _Job:
    due: float
    number: int
    until: float = field(compare=False)
    job: Mapping[str, Any] = field(compare=False)
    reply: Reply = field(compare=False)


def make_reaper(app: Celery, hostname: str) -> tuple[Reaper, Publisher]:
    """A reaper for an app, and the publisher to close after it.

    Raises:
        celery.exceptions.ImproperlyConfigured: The app's settings are wrong.
    """
    runtime = Runtime.of(app)
    publisher = Publisher(app)
    reaper = Reaper(
        runtime.store,
        publish=publisher,
        owner=new_owner(hostname),
        interval=runtime.settings.reaper_interval,
        retention=runtime.settings.retention,
        on_reclaimed=_on_reclaimed,
    )
    return reaper, publisher


def _on_reclaimed(entry: Reclaimed) -> None:
    report.line(
        logging.WARNING,
        "job_reclaimed",
        job=entry.task_id,
        token=entry.fencing_token,
        owner=entry.owner_id,
        state=entry.state.value,
        late=round(entry.late, 1),
        crashes=entry.crashes,
    )
    ref = LeaseRef(entry.task_id, entry.owner_id or "", entry.fencing_token)
    report.tell(signals.lease_reclaimed, entry.task_name, ref, state=entry.state.value)


class Clerk:
    """One per app and worker.

    Args:
        app: The app.
        hostname: The worker's node name.
    """

    def __init__(self, app: Celery, hostname: str) -> None:
        self.app = app
        self.hostname = hostname
        self._jobs: list[_Job] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._stop = threading.Event()
        self._working = False

    def start(self) -> None:
        """Start the threads: one for jobs, and one to reap unless the settings say no."""
        threading.Thread(target=self._work, name="lease-clerk", daemon=True).start()
        if Runtime.of(self.app).settings.reaper:
            threading.Thread(target=self._reap, name="lease-reaper", daemon=True).start()

    def stop(self) -> None:
        """Reap no more; jobs that are there are still done."""
        self._stop.set()

    def submit(self, job: Mapping[str, Any], reply: Reply = lambda _: None) -> None:
        """Leave a job; ``reply`` gets its answer, or None if it had to be given up."""
        now = time.monotonic()
        until = now + float(job.get("patience", 0))
        with self._wake:
            heapq.heappush(self._jobs, _Job(now, next(self._numbers), until, job, reply))
            self._wake.notify()

    def finish(self, seconds: float) -> None:
        """Wait until no job is left, so long at most."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._wake:
                if not self._jobs and not self._working:
                    return
            time.sleep(0.05)

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

    def fail(self, task_id: str, owner_id: str, error: str, announce_in: float) -> int:
        """Fail a task whose child was killed at its time limit, under the fence.

        Returns:
            The token under which it failed; 0 if the row refused.
        """
        ref = self._ref(task_id, owner_id)
        store = Runtime.of(self.app).store
        if ref and store.fail(ref, error, announce_in=announce_in, timeout=_TIMEOUT):
            return ref.fencing_token
        return 0

    def cancel(self, task_id: str, owner_id: str, reason: str) -> None:
        """A revoke was told by Celery: let the row know, so that nobody runs the task again."""
        store = Runtime.of(self.app).store
        store.cancel(task_id, reason, timeout=_TIMEOUT)
        store.crashed(task_id, owner_id, timeout=_TIMEOUT)
        row = store.find(task_id, timeout=_TIMEOUT)
        if row is not None and row.state is State.CANCELLED:
            self.announce(task_id, owner_id, row.fencing_token)

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

    def announce(self, task_id: str, owner_id: str, token: int) -> None:
        """Celery has told the outcome."""
        ref = LeaseRef(task_id, owner_id, token)
        Runtime.of(self.app).store.announce([ref], timeout=_TIMEOUT)

    def _ref(self, task_id: str, owner_id: str) -> LeaseRef | None:
        """The grant of an owner. Only a hint: every statement checks it again."""
        row = Runtime.of(self.app).store.find(task_id, timeout=_TIMEOUT)
        if row is None or row.owner_id != owner_id:
            return None
        return LeaseRef(task_id, owner_id, row.fencing_token)

    def _send_now(self, task_id: str) -> str:
        """Do what a reaper would do in its next pass, unless one has begun to."""
        reaper, publisher = make_reaper(self.app, self.hostname)
        row = reaper.store.take_one(task_id, retry_in=_RETRY_IN, timeout=_TIMEOUT)
        if row is None:
            return "taken"
        try:
            return reaper.send(row, timeout=_TIMEOUT)
        finally:
            publisher.close()

    # -- threads -------------------------------------------------------------

    def _reap(self) -> None:
        reaper, publisher = make_reaper(self.app, self.hostname)
        try:
            reaper.run(self._stop)
        finally:
            publisher.close()

    def _work(self) -> None:
        while True:
            job = self._next()
            try:
                self._do(job)
            except Exception:  # noqa: BLE001 - told, and the next job is done
                line(logging.ERROR, "clerk_job_failed", exc_info=True, work=job.job.get("work"))
            finally:
                self._working = False

    def _do(self, job: _Job) -> None:
        work, arguments = str(job.job["work"]), job.job["args"]
        if work not in _WORKS:
            raise ValueError(f"work={work!r} is not one of {sorted(_WORKS)}")
        try:
            answer = getattr(self, work)(*arguments)
        except DatabaseUnavailable as exc:
            if time.monotonic() < job.until:
                self._again(job)
                return
            line(logging.WARNING, "clerk_gave_up", work=work, detail=exc.detail)
            answer = None
        job.reply(answer)

    def _next(self) -> _Job:
        with self._wake:
            while True:
                wait = self._jobs[0].due - time.monotonic() if self._jobs else None
                if wait is not None and wait <= 0:
                    self._working = True
                    return heapq.heappop(self._jobs)
                Runtime.of(self.app).database.close_idle(_IDLE)
                self._wake.wait(_IDLE if wait is None else min(wait, _IDLE))

    def _again(self, job: _Job) -> None:
        with self._wake:
            job.due = time.monotonic() + _PAUSE
            heapq.heappush(self._jobs, job)
