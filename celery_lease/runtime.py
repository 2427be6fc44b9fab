"""What one process keeps for the leases of one app: store, heartbeat, announcements.

Made at the first claim in a process, never at import and never before a fork;
a forked child finds another pid and makes its own. Threads: the task's (claims
and commits), the heartbeat's two, and one that extends visibility where the
broker has such a thing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from billiard import process

from celery_lease import report
from celery_lease.broker import broker_of
from celery_lease.broker.keeper import VisibilityKeeper
from celery_lease.database import Database
from celery_lease.exceptions import DatabaseUnavailable, LeaseLost, TaskCancelled
from celery_lease.heartbeat import Heartbeat
from celery_lease.hold import Hold
from celery_lease.interrupt import Armed, Interrupter
from celery_lease.lease import LeaseRef, Renewal, Renewed
from celery_lease.options import app_settings, settings_of
from celery_lease.store import LeaseStore

if TYPE_CHECKING:
    from celery import Celery

    from celery_lease.config import Settings

__all__ = ("Runtime", "TaskHold", "flush_all", "is_pool_child", "new_owner")

#: So many marks ride on a claim together: one by one they would cost the database half as
#: much again as claims and commits do.
_RIDERS = 16
#: Seconds for which the first of them waits for others. Shorter than the heartbeat's flush.
_RIDE_AFTER = 0.5

_lock = threading.Lock()
_runtimes: dict[tuple[int, int], Runtime] = {}


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - another thread may have held it when the parent forked
    _lock = threading.Lock()
    _runtimes.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def new_owner(hostname: str) -> str:
    """An owner id that never comes back: host and pid do, so a random part is added."""
    return f"{hostname}:{os.getpid()}:{secrets.token_hex(6)}"[:255]


def is_pool_child() -> bool:
    """Whether this process is a worker's forked child, which must not outlive its parent."""
    return getattr(process.current_process(), "index", None) is not None


class TaskHold(Hold):
    """A lease held by a task that runs here."""

    task: Any = None
    #: Whether the app sends task events.
    sends_events = False
    #: The armed body, if running code may be broken off.
    armed: Armed | None = None

    def break_off(self, error: Exception) -> None:
        """Break the running code off, as far as the pool allows."""
        if self.armed is not None:
            self.armed.interrupt(error)


class Runtime:
    """Everything one process needs to hold leases of one app.

    Args:
        app: The app.
        settings: Its app-wide settings.
    """

    def __init__(self, app: Celery, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.pid = os.getpid()
        self._by_task: dict[str, Settings] = {}
        self.database = Database(settings.url, settings.engine_options, schema=settings.schema)
        self.store = LeaseStore(self.database, settings.namespace)
        self.interrupter = Interrupter()
        self._announced: list[LeaseRef] = []
        #: From when on, by the heartbeat's clock, the next claim takes the marks along.
        self._ride_at = 0.0
        self._announced_lock = threading.Lock()
        self.heartbeat = Heartbeat(
            self._renew,
            on_renewed=_on_renewed,
            on_unknown=_on_unknown,
            on_lost=_on_lost,
            on_cancel=_on_cancel,
            flush=self.flush,
            idle=lambda: self.database.close_idle(5.0),
        )
        self.keeper = VisibilityKeeper(broker_of(app))

    @classmethod
    def of(cls, app: Celery) -> Runtime:
        """The runtime of this process for an app, made when first asked for. No I/O.

        Raises:
            celery.exceptions.ImproperlyConfigured: The app's settings are wrong.
        """
        key = (os.getpid(), id(app))
        found = _runtimes.get(key)
        if found is None:
            with _lock:
                found = _runtimes.get(key)
                if found is None:
                    found = _runtimes[key] = cls(app, app_settings(app))
        return found

    def settings_for(self, task: Any) -> Settings:
        """The settings of one task, worked out once per process."""
        found = self._by_task.get(task.name)
        if found is None:
            found = self._by_task[task.name] = settings_of(task)
        return found

    def announce_later(self, ref: LeaseRef, *, harmless: bool = False) -> None:
        """Celery has told the outcome: mark the row with the next claim or beat.

        Args:
            ref: The grant that ended.
            harmless: Telling it twice, should this process die before the
                mark, would harm nobody: the mark may wait for others.
        """
        with self._announced_lock:
            if not harmless:
                self._ride_at = 0.0
            elif not self._announced:
                self._ride_at = self.heartbeat.clock() + _RIDE_AFTER
            self._announced.append(ref)
        self.heartbeat.wake_soon()

    def riders(self, task_id: str) -> list[LeaseRef]:
        """Take what the claim of a task is to mark on its way."""
        if len(self._announced) < _RIDERS and self.heartbeat.clock() < self._ride_at:
            return []
        return self.take_announced(but=task_id)

    def take_announced(self, but: str = "") -> list[LeaseRef]:
        """Take what is to be marked, except for one task."""
        if not self._announced:
            return []
        with self._announced_lock:
            taken = [ref for ref in self._announced if ref.task_id != but]
            self._announced = [ref for ref in self._announced if ref.task_id == but]
        return taken

    def give_back(self, refs: Sequence[LeaseRef]) -> None:
        """The statement that was to mark these failed: keep them for the next one."""
        if refs:
            with self._announced_lock:
                self._announced[:0] = refs
                self._ride_at = 0.0

    def flush(self, timeout: float = 5.0) -> None:
        """Mark what is to be marked now, in a statement of its own."""
        refs = self.take_announced()
        if not refs:
            return
        try:
            self.store.announce(refs, timeout=timeout)
        except BaseException:
            self.give_back(refs)
            raise

    def _renew(self, renewals: Sequence[Renewal], timeout: float) -> list[Renewed]:
        announced = self.take_announced()
        try:
            renewed = self.store.renew(renewals, announced=announced, timeout=timeout)
        except BaseException:
            self.give_back(announced)
            raise
        return renewed


def flush_all(timeout: float = 2.0) -> None:
    """A process is about to end: mark what was announced, as far as the database answers."""
    for runtime in list(_runtimes.values()):
        with contextlib.suppress(DatabaseUnavailable):  # a reaper replays what stays unmarked
            runtime.flush(timeout)


def _on_renewed(hold: Hold) -> None:
    if isinstance(hold, TaskHold) and hold.lease_until is not None:
        report.renewed(hold.task, hold.ref, hold.lease_until)


def _on_unknown(hold: Hold, _: BaseException | None) -> None:
    if isinstance(hold, TaskHold):
        report.unknown(hold.task, hold.ref, confirmed=hold.lease_until, request_id=hold.request_id)


def _on_lost(hold: Hold) -> None:
    if isinstance(hold, TaskHold):
        reason = hold.lost_reason or "deadline"
        # First, for a receiver of the user's may take its time.
        hold.break_off(LeaseLost(hold.ref.task_id, hold.ref.fencing_token, reason))
        report.lost(hold.task, hold.ref, reason)


def _on_cancel(hold: Hold) -> None:
    if isinstance(hold, TaskHold):
        hold.break_off(TaskCancelled(hold.ref.task_id, hold.cancel_reason or ""))
        report.line(
            logging.INFO, "job_cancel_seen", job=hold.ref.task_id, token=hold.ref.fencing_token
        )
