"""One run of one leased task: claim, body, fenced outcome.

This is everything that :meth:`LeasedTask.__call__` puts around the body.
Celery sends callbacks before it stores a result, so the outcome is committed
here, before Celery learns of it:

#. claim (a refusal ends here: the body does not run),
#. the body, while the heartbeat renews,
#. commit or fail under the fencing token,
#. only then does Celery see a result or an exception, and tells everybody;
   the row is marked as announced with the next claim or beat.

Killed before 3: the lease expires and the task runs again. Killed after 3:
a later copy gets the stored outcome and Celery tells it then.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from celery.app.task import Task
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from celery_lease import outcome, report
from celery_lease.accepted import store_unasked
from celery_lease.admission import Admission, ignores_result
from celery_lease.exceptions import (
    DatabaseUnavailable,
    LeaseLost,
    LeaseNotGranted,
    TaskCancelled,
)
from celery_lease.lease import Claim, Encoded, LeaseRef, Verdict
from celery_lease.running import RunningLease, running
from celery_lease.runtime import TaskHold, is_pool_child

__all__ = ("Execution",)


@functools.cache
def _has_handlers(task_class: type) -> bool:
    """Whether code of the user's runs when Celery learns of an outcome."""
    names = ("on_success", "on_failure", "after_return")
    return any(getattr(task_class, name) is not getattr(Task, name) for name in names)


class Execution:
    """One execution of a leased task in this process.

    Args:
        admission: The delivered message.
    """

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.task = admission.task
        self.settings = admission.settings
        self.runtime = admission.runtime
        self.request = admission.request
        self.timeout = admission.timeout
        self.hold: TaskHold | None = None
        self.lease: RunningLease | None = None
        #: What Celery's signal will mark as announced.
        self.outcome_ref: LeaseRef | None = None
        #: Telling it twice would do no more than store the same result again.
        self.harmless = False
        #: The body has begun: the task may call itself as a plain function.
        self.entered = False
        #: ``retry()`` is under way: the next message with this id is its.
        self.retrying = False
        #: The lease went to the next message (a retry): nothing is left to commit.
        self.handed_on = False

    def run(self, body: Callable[[], Any]) -> Any:
        """Run the body if the claim is granted.

        Returns:
            The body's result, or the stored one of an earlier execution.

        Raises:
            LeaseNotGranted: This copy was turned away.
            LeaseLost: The outcome was refused, or the body was broken off.
            Exception: What the body raised, accepted as the task's failure.
        """
        started = self.runtime.heartbeat.clock()
        claim = self.admission.claim()
        if claim.verdict is not Verdict.GRANTED:
            try:
                return self.admission.refused(claim)
            finally:
                self.outcome_ref = self.admission.outcome_ref
        hold = self.hold = self._make_hold(claim, started)
        tag, keeper = self.admission.tag, self.runtime.keeper
        self.lease = RunningLease(
            hold,
            attempt=claim.attempt,
            details=json.loads(claim.details) if claim.details else None,
            margin=self.settings.margin,
        )
        if self.settings.interrupt:
            # Before anybody can find the lease lost: entering the body then raises.
            hold.armed = self.runtime.interrupter.armed()
        self.runtime.heartbeat.add(hold)
        if tag:
            keeper.keep(tag, hold, self.settings.heartbeat_interval)
        try:
            self.admission.tell_started(claim)
            return self._run(hold, body)
        finally:
            if tag:
                keeper.leave(tag)
            self.runtime.heartbeat.discard(hold)

    def forget_request(self) -> None:
        """The execution is over; only what became of it is still asked for."""
        self.request = self.admission.request = None

    def _make_hold(self, claim: Claim, started: float) -> TaskHold:
        assert claim.ref is not None  # noqa: S101 - granted
        hold = TaskHold(
            claim.ref,
            task_name=self.task.name,
            lease_duration=self.settings.duration,
            interval=self.settings.heartbeat_interval,
            lease_until=claim.lease_until,
            requested_at=started,
            executor=threading.current_thread(),
            watch_parent=is_pool_child(),
            clock=self.runtime.heartbeat.clock,
        )
        hold.task = self.task
        hold.sends_events = self.admission.sends_events
        return hold

    def _run(self, hold: TaskHold, body: Callable[[], Any]) -> Any:
        try:
            result = self._body(hold, body)
            encoded = outcome.encode(self.task, result)
        except Exception as exc:
            self._ended_by(hold, exc)
            raise
        if self.handed_on:
            raise self._too_late(hold, "result")
        self._finish(hold, "succeeded", encoded)
        return result

    def _body(self, hold: TaskHold, body: Callable[[], Any]) -> Any:
        assert self.lease is not None  # noqa: S101 - set by run()
        with running(self.lease), hold.armed or contextlib.nullcontext():
            return body()

    def _ended_by(self, hold: TaskHold, exc: Exception) -> None:
        """Settle the row after an exception; raises instead where the outcome is another."""
        if self.handed_on:
            if isinstance(exc, (Retry, Ignore, Reject)):
                return
            # A soft time limit, or cleaning up that failed.
            raise self._too_late(hold, type(exc).__name__) from exc
        if isinstance(exc, LeaseLost) or (isinstance(exc, TaskCancelled) and hold.cancel_reason):
            self._broken_off(hold, exc)
        elif isinstance(exc, Retry):
            self._release(hold, cause="retry")
        elif isinstance(exc, Reject) and getattr(exc, "requeue", False):
            self._release(hold, cause="rejected")
        elif isinstance(exc, Ignore):
            self._finish(hold, "succeeded", None, announced=True)
        elif isinstance(exc, Reject):
            self._finish(hold, "failed", outcome.encode_error(self.task, exc), announced=True)
        else:
            self._finish(hold, "failed", outcome.encode_error(self.task, exc))

    def _too_late(self, hold: TaskHold, outcome: str) -> LeaseNotGranted:
        """The next message is on its way, and its outcome alone counts."""
        report.line(logging.WARNING, "ended_too_late", job=hold.ref.task_id, outcome=outcome)
        return LeaseNotGranted(hold.ref.task_id, None, None, "superseded", True)

    def _broken_off(self, hold: TaskHold, exc: Exception) -> None:
        if isinstance(exc, TaskCancelled) and hold.status != "lost":
            self._release(hold, cause="cancelled")
            raise LeaseNotGranted(hold.ref.task_id, None, None, "cancelled", True) from exc
        if hold.status != "lost":
            # The body raised it by itself: it is an Ignore, as Celery knows it.
            self._finish(hold, "succeeded", None, announced=True)
            return
        raise self.lost_error(hold) from exc

    def _finish(
        self,
        hold: TaskHold,
        state: str,
        value: Encoded | str | None,
        *,
        announced: bool = False,
    ) -> None:
        """Commit an outcome under the fence.

        The database decides, even where this process has lost its trust: it
        alone knows whether the lease is over.

        Raises:
            LeaseLost: The outcome was refused, or nobody can say.
        """
        self.runtime.heartbeat.discard(hold)
        if hold.lost_reason == "zero_rows":
            raise self._rejected(hold, value)
        follows = self._follows(state)
        announced = announced or not (follows or self._stores())
        accepted = self.until_answered(
            hold, lambda timeout: self._write(hold.ref, state, value, announced, timeout)
        )
        if not accepted:
            hold.lose("zero_rows")
            raise self._rejected(hold, value)
        if not announced:
            store_unasked(self.task.backend, hold.ref.task_id)
            self.outcome_ref = hold.ref
            self.harmless = not follows and not _has_handlers(self.task.__class__)
        report.committed(self.task, hold.ref, state)

    def _write(
        self,
        ref: LeaseRef,
        state: str,
        value: Encoded | str | None,
        announced: bool,  # noqa: FBT001
        timeout: float,
    ) -> bool:
        store = self.runtime.store
        announce_in = self.settings.duration
        if state == "failed":
            return store.fail(
                ref, str(value), announced=announced, announce_in=announce_in, timeout=timeout
            )
        encoded = None if isinstance(value, str) else value
        return store.commit(
            ref, encoded, announced=announced, announce_in=announce_in, timeout=timeout
        )

    def until_answered(self, hold: TaskHold, write: Callable[[float], Any]) -> Any:
        """Repeat a write while the lease may still be ours; repeating is safe by its condition."""
        pause = 0.1
        while True:
            try:
                return write(self.timeout)
            except DatabaseUnavailable as exc:  # noqa: PERF203 - one statement per round
                left = hold.remaining
                if left <= 0:
                    hold.lose("deadline")
                    raise self.lost_error(hold) from exc
                time.sleep(min(left, pause * random.uniform(0.5, 1.5)))  # noqa: S311
                pause = min(pause * 2, 2.0)
            except SoftTimeLimitExceeded:
                # The work is done, only its record is under way: ask again what became of it.
                report.line(logging.WARNING, "soft_time_limit_at_commit", job=hold.ref.task_id)

    def _follows(self, state: str) -> bool:
        """Whether Celery sends messages when it learns of the outcome."""
        request = self.request
        called = request.errbacks if state == "failed" else request.callbacks
        return bool(called or request.chain or request.chord)

    def _stores(self) -> bool:
        """Whether Celery stores the outcome."""
        ignored = ignores_result(self.task, self.request)
        return not ignored or bool(self.task.store_errors_even_if_ignored)

    def _release(self, hold: TaskHold, *, cause: str) -> None:
        self.runtime.heartbeat.discard(hold)
        released = self.until_answered(
            hold,
            lambda timeout: self.runtime.store.release(
                hold.ref,
                cause=cause,
                charge=False,
                dispatch=False,
                details=hold.details,
                timeout=timeout,
            ),
        )
        if released is None:
            hold.lose("zero_rows")
            raise self.lost_error(hold)
        report.released(self.task, hold.ref, cause)

    def _rejected(self, hold: TaskHold, value: Encoded | str | None) -> LeaseLost:
        digest, size = outcome.digest(value)
        report.rejected(self.task, hold.ref, digest=digest, size=size)
        try:
            self.runtime.store.note(
                hold.ref,
                "result_rejected",
                cause=hold.lost_reason,
                facts={"sha256": digest, "bytes": size},
                timeout=self.timeout,
            )
        except DatabaseUnavailable as exc:
            report.line(
                logging.WARNING, "rejection_not_noted", job=hold.ref.task_id, error=str(exc)
            )
        return self.lost_error(hold)

    def lost_error(self, hold: TaskHold) -> LeaseLost:
        """Report that the lease is somebody else's, and make the exception."""
        if hold.sends_events:
            reason = hold.lost_reason or "deadline"
            lost = LeaseLost(hold.ref.task_id, hold.ref.fencing_token, reason)
            report.send_event(
                self.task,
                "task-lease-lost",
                reason=reason,
                lease_token=hold.ref.fencing_token,
                exception=repr(lost),
            )
        return LeaseLost(hold.ref.task_id, hold.ref.fencing_token, hold.lost_reason or "deadline")
