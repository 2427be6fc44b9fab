"""The main process's view of a leased message: what is acknowledged, and when.

Runs in the worker's event loop, so nothing here waits: what needs the database
is left with the :class:`~celery_lease.desk.Desk`. Three ends of a copy that
Celery does not know:

* turned away for good: acknowledged, nothing else,
* turned away because an owner lives, or stale: *forgotten*, which frees the
  prefetch slot and leaves the broker's entry alone, since that may be the
  live copy's,
* no answer from the database: postponed in this worker, unacknowledged.

A child that died is no failure of its task: the lease is released and the
task sent again, until its attempts are spent.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.worker.request import Request
from celery.worker.state import task_ready

from celery_lease import outcome, report
from celery_lease.broker import forget
from celery_lease.desk import Desk
from celery_lease.exceptions import LeaseLost, LeaseNotGranted
from celery_lease.runtime import new_owner

if TYPE_CHECKING:
    from celery_lease.config import Settings

__all__ = ("LeasedRequest",)

_LONGEST_POSTPONE = 10.0
#: Seconds without an answer from the database that may yet be a blip.
_BLIP = 10.0
_WRAPPED = "ExceptionWithTraceback"
#: celery-types knows the public half of it only.
_Request: Any = Request


class LeasedRequest(_Request):  # type: ignore[misc]
    """A request for a leased task."""

    acknowledged: bool

    def __init__(self, message: Any, headers: Any = None, **options: Any) -> None:
        super().__init__(message, headers=headers, **options)
        self._lease_settings: Settings | None = self._desk.settings_for(self._task)
        self._lease_owner = ""
        self._lease_postponed = 0
        if self._lease_settings is not None:
            self._lease_owner = new_owner(self._hostname)
            self._hand_over(headers if headers is not None else message.headers)

    def _hand_over(self, headers: Any) -> None:
        """Give the child the raw message, so that the row can keep it byte for byte.

        The body is the same object that Celery sends to the child anyway, so
        pickle sends it once. It travels among the properties, which, unlike
        headers, are never copied to the next message.
        """
        self._request_dict["properties"] = {
            **(self._request_dict.get("properties") or {}),
            "lease": {
                "owner": self._lease_owner,
                "body": None if self._decoded else self._body,
                "content_type": self._content_type,
                "content_encoding": self._content_encoding,
                "headers": dict(headers or {}),
                "events": self._sends_events(),
            },
        }

    def _sends_events(self) -> bool:
        """Whether the app sends *task* events: a worker's own go out in any case."""
        eventer = self._eventer
        groups = getattr(eventer, "groups", None)
        enabled = bool(eventer and eventer.enabled and self._task.send_events)
        return enabled and (not groups or "task" in groups)

    @property
    def _desk(self) -> Desk:
        return Desk.of(self._app)

    # -- the ends of a copy --------------------------------------------------

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """Tell the ends that Celery does not know from those it does."""
        exc = exc_info.exception
        # billiard wraps what came from a child, to bring its traceback along.
        exc = getattr(exc, "exc", exc) if type(exc).__name__ == _WRAPPED else exc
        if self._lease_settings is None:
            return super().on_failure(exc_info, *args, **kwargs)
        if isinstance(exc, LeaseNotGranted):
            return self._turned_away(exc)
        if isinstance(exc, LeaseLost):
            task_ready(self)
            return self._forget()
        if isinstance(exc, TimeLimitExceeded):
            if self._acks_on_timeout:
                self._fenced(exc, partial(super().on_failure, exc_info, *args, **kwargs))
            return None
        if self._is_child_lost(exc):
            return self._child_lost(exc)
        return super().on_failure(exc_info, *args, **kwargs)

    def on_timeout(self, soft: bool, timeout: float) -> None:  # noqa: FBT001
        """Fail the task at its hard time limit only if its lease is still its own.

        The pool reports a hard limit twice, as a failure and here, and Celery would call
        the errbacks both times. The failure's way says more, but says nothing of a
        message that is not to be acknowledged.
        """
        then = partial(super().on_timeout, soft, timeout)
        if soft or self._lease_settings is None:
            then()
        elif not self._acks_on_timeout:
            self._fenced(TimeLimitExceeded(timeout), then)

    @property
    def _acks_on_timeout(self) -> bool:
        chosen = getattr(self._task, "acks_on_timeout", None)  # new in Celery 5.7
        return bool(self._task.acks_on_failure_or_timeout if chosen is None else chosen)

    def acknowledge(self) -> None:
        """Acknowledge the message, on a way that it may share with others."""
        leased = self._lease_settings is not None and not self.acknowledged
        if leased and self._desk.acknowledge(self._message):
            self.acknowledged = True
        else:
            super().acknowledge()

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:  # noqa: FBT001, FBT002
        """The connection was lost and Celery kills the child: hand its lease back."""
        super().cancel(pool, signal, emit_retry)
        self._settle("hand_back", "connection_lost")

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:  # noqa: FBT001
        super()._announce_revoked(reason, terminated, signum, expired)
        self._settle("cancel", reason)

    def _turned_away(self, exc: LeaseNotGranted) -> None:
        task_ready(self)
        if exc.reason == "unavailable":
            self._postpone()
        elif exc.final:
            self.acknowledge()
        else:
            self._forget()

    def _forget(self) -> None:
        if self.acknowledged:
            return
        if forget(self._message):
            self.acknowledged = True
        else:
            # This transport has one entry per copy; the row carries the task on.
            self.acknowledge()

    def _postpone(self) -> None:
        """Keep the copy, unacknowledged, for a while; then ask again, or let others have it.

        At first it may be a blip, and a claim whose answer was lost is this owner's
        to repeat. If it lasts, the fault may lie between this worker and the database
        alone: then it must not hoard what another worker could run.
        """
        consumer = self._desk.consumer
        if consumer is None or self.acknowledged:
            self.reject(requeue=True)
            return
        then = self._resume if self._desk.without_answer() < _BLIP else self._hand_back
        delay = min(2.0**self._lease_postponed, _LONGEST_POSTPONE) * random.uniform(0.5, 1.0)  # noqa: S311
        self._lease_postponed += 1
        self.time_start = self.worker_pid = self._apply_result = None
        qos = consumer.qos
        qos.increment_eventually()
        report.line(logging.WARNING, "job_postponed", job=self.id, seconds=round(delay, 1))
        consumer.timer.call_after(delay, then, (consumer, qos))

    def _resume(self, consumer: Any, qos: Any) -> None:
        # A new connection has a new qos, and the broker delivers the message there again.
        if consumer.qos is qos and not self.acknowledged:
            consumer.apply_eta_task(self)

    def _hand_back(self, consumer: Any, qos: Any) -> None:
        if consumer.qos is qos and not self.acknowledged:
            qos.decrement_eventually()
            self.reject(requeue=True)

    # -- children ------------------------------------------------------------

    def _is_child_lost(self, exc: BaseException) -> bool:
        if self._already_cancelled or self._already_revoked or isinstance(exc, Terminated):
            return False
        return isinstance(exc, (WorkerLostError, SystemExit, KeyboardInterrupt))

    def _child_lost(self, exc: BaseException) -> None:
        task_ready(self)
        report.line(
            logging.WARNING,
            "child_lost",
            job=self.id,
            pid=self.worker_pid,
            error=type(exc).__name__,
        )

        self._settle("child_lost", then=self._settled)

    def _settled(self, found: str | None) -> None:
        if found == "unclaimed":
            self.reject(requeue=True)
        elif found == "settled":
            self.acknowledge()
        else:
            self._forget()

    def _fenced(self, exc: TimeLimitExceeded, then: Callable[[], Any]) -> None:
        """Do what Celery does at a hard time limit, once the row has accepted the failure."""
        if self._lease_settings is not None:
            error = outcome.encode_error(self._task, exc)
            announce_in = self._lease_settings.duration
            self._settle("fail", error, announce_in, then=partial(self._after_fence, then))

    def _after_fence(self, then: Callable[[], Any], token: int | None) -> None:
        if not token:
            task_ready(self)
            self._forget()
            return
        then()
        self._settle("announce", token)

    def _settle(
        self, work: str, *arguments: Any, then: Callable[[Any], None] | None = None
    ) -> None:
        if self._lease_settings is not None:
            self._desk.submit(
                work,
                self.id,
                self._lease_owner,
                *arguments,
                patience=self._lease_settings.duration,
                then=then,
            )
