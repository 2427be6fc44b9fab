"""The lease as the running task sees it: ``self.lease`` and :func:`current_lease`.

Everything here is free of I/O: it reads what the heartbeat's threads keep up
to date, judges time by the local monotonic clock, and leaves word for the next
renewal. Outside a worker (a direct call, eager mode) an always-held stand-in
takes its place, so that tasks stay unit-testable.
"""

from __future__ import annotations

import contextvars
import json
import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery_lease import report
from celery_lease.exceptions import LeaseLost, OwnershipUnknown, TaskCancelled

if TYPE_CHECKING:
    from celery_lease.hold import Hold

__all__ = ("Effect", "RunningLease", "StandInLease", "current_lease")

_current: contextvars.ContextVar[RunningLease | None] = contextvars.ContextVar(
    "celery_lease_current", default=None
)
#: Leases of this process; a helper thread of the body has no context of its own.
_running: dict[int, RunningLease] = {}


@dataclass(frozen=True, slots=True)
class Effect:
    """One action on the outside world, and what its receiver must check."""

    name: str
    #: Id of the outside request, also in the log.
    request_id: str
    #: The same over all attempts of the task.
    idempotency_key: str
    #: Higher with each attempt; a receiver refuses lower ones.
    fencing_token: int
    #: Both as HTTP headers.
    headers: Mapping[str, str]


class RunningLease:
    """The lease of the execution that runs here.

    Args:
        hold: What the heartbeat keeps up to date.
        attempt: Which execution of the task this is, from 1.
        details: The checkpoint of the previous execution, or None.
        margin: Seconds at the end of a lease in which no effect may start.
    """

    def __init__(self, hold: Hold, *, attempt: int, details: Any, margin: float) -> None:
        self._hold = hold
        # The trusted time ends a safety before the lease does.
        safety = hold.confirmed_at + hold.lease_duration - hold.trusted_until
        self._margin = margin - safety
        #: Which execution of the task this is, from 1.
        self.attempt = attempt
        #: The checkpoint of the previous execution, or None.
        self.details = details

    @property
    def task_id(self) -> str:
        """Id of the task."""
        return self._hold.ref.task_id

    @property
    def task_name(self) -> str:
        """Name of the task."""
        return self._hold.task_name

    @property
    def owner_id(self) -> str:
        """Who this execution is in the database; never used twice."""
        return self._hold.ref.owner_id

    @property
    def fencing_token(self) -> int:
        """Grows with every grant of this task's lease."""
        return self._hold.ref.fencing_token

    @property
    def lease_until(self) -> datetime | None:
        """End of the lease by the database's clock, as last confirmed."""
        return self._hold.lease_until

    @property
    def trusted_until(self) -> float:
        """End of trust on this machine's monotonic clock (see ``docs``, clocks).

        The start of the last confirmed request + the lease's duration − a
        safety margin: never later than the database's own end of the lease.
        """
        return self._hold.trusted_until

    @property
    def status(self) -> str:
        """``held``, ``unknown`` (no new irreversible step) or ``lost``."""
        return self._hold.status

    def heartbeat(self, details: Any = None) -> None:
        """Report progress and learn whether to go on. No I/O, microseconds.

        Args:
            details: A checkpoint (JSON). The latest is saved with the next
                renewal and is the next execution's :attr:`details`.

        Raises:
            LeaseLost: This execution no longer owns the task.
            TaskCancelled: Somebody asked for the task to be cancelled.
            TypeError: ``details`` is not JSON.
        """
        hold = self._hold
        if details is not None:
            hold.details = json.dumps(details)
        if hold.cancel_reason is not None:
            raise TaskCancelled(self.task_id, hold.cancel_reason)
        self.check_not_lost()

    def check_not_lost(self) -> None:
        """Raise if this execution no longer owns the task; report no progress.

        Raises:
            LeaseLost: It is so.
        """
        if self._hold.status == "lost":
            raise self._lost()

    def ensure(self, seconds: float = 0) -> None:
        """Raise unless ownership is certain now and for so many seconds more.

        Raises:
            LeaseLost: This execution no longer owns the task.
            TaskCancelled: Somebody asked for the task to be cancelled.
            OwnershipUnknown: It may own the task, but that is not certain for
                so long: start no irreversible step.
        """
        self.heartbeat()
        hold = self._hold
        if hold.status != "held" or hold.remaining < seconds:
            raise OwnershipUnknown(self.task_id, self.fencing_token)

    @contextmanager
    def effect(self, name: str, request_id: str | None = None) -> Iterator[Effect]:
        """Guard one action on the outside world.

        Ownership is certain when it starts, and never within the last margin
        of the lease; start and end are logged with the request's id.

        Args:
            name: What is done; the same in every attempt.
            request_id: Id of the outside request; made up if None.

        Raises:
            LeaseLost, TaskCancelled, OwnershipUnknown: See :meth:`ensure`;
                the body of the ``with`` block has not run.
        """
        self.ensure()
        if self._hold.remaining < self._margin:
            raise OwnershipUnknown(self.task_id, self.fencing_token)
        request = request_id or f"{name}-{secrets.token_hex(4)}"
        effect = Effect(
            name, request, self.idempotency_key(name), self.fencing_token, self.headers(name)
        )
        facts = {"job": self.task_id, "token": self.fencing_token, "request": request}
        started = time.monotonic()
        self._hold.request_id = request
        report.line(logging.INFO, "tool_request_started", **facts, effect=name)
        try:
            yield effect
        except BaseException as exc:
            report.line(
                logging.WARNING,
                "tool_request_unknown",
                **facts,
                seconds=round(time.monotonic() - started, 3),
                error=type(exc).__name__,
            )
            raise
        finally:
            self._hold.request_id = None
        report.line(
            logging.INFO,
            "tool_request_finished",
            **facts,
            seconds=round(time.monotonic() - started, 3),
        )

    def idempotency_key(self, name: str) -> str:
        """A key for one outside action that is the same in every attempt."""
        return f"celery-lease:{self.task_id}:{name}"

    def headers(self, name: str) -> dict[str, str]:
        """Fencing token and idempotency key as HTTP headers."""
        return {
            "X-Execution-Fence": str(self.fencing_token),
            "Idempotency-Key": self.idempotency_key(name),
        }

    def _lost(self) -> LeaseLost:
        return LeaseLost(self.task_id, self.fencing_token, self._hold.lost_reason or "deadline")


class StandInLease:
    """An always-held lease for code that runs outside a worker. See :class:`RunningLease`."""

    owner_id = "local"
    fencing_token = 1
    attempt = 1
    details = None
    status = "held"
    lease_until = datetime.max.replace(tzinfo=timezone.utc)
    trusted_until = float("inf")

    def __init__(self, task_id: str = "local", task_name: str = "") -> None:
        self.task_id = task_id
        self.task_name = task_name

    def heartbeat(self, details: Any = None) -> None:
        """Only check that the details are JSON."""
        if details is not None:
            json.dumps(details)

    def ensure(self, seconds: float = 0) -> None:
        """Ownership is always certain."""

    @contextmanager
    def effect(self, name: str, request_id: str | None = None) -> Iterator[Effect]:
        """Guard nothing."""
        request = request_id or f"{name}-{secrets.token_hex(4)}"
        yield Effect(
            name, request, self.idempotency_key(name), self.fencing_token, self.headers(name)
        )

    def idempotency_key(self, name: str) -> str:
        """See :meth:`RunningLease.idempotency_key`."""
        return f"celery-lease:{self.task_id}:{name}"

    def headers(self, name: str) -> dict[str, str]:
        """See :meth:`RunningLease.headers`."""
        return {
            "X-Execution-Fence": str(self.fencing_token),
            "Idempotency-Key": self.idempotency_key(name),
        }


def current_lease() -> RunningLease | StandInLease:
    """The lease of the task that runs here, anywhere below its body.

    A thread that the body started has no context of its own: it gets the
    lease if exactly one is running in this process. Outside a leased task an
    always-held stand-in is returned.
    """
    lease = _current.get()
    if lease is not None:
        return lease
    if len(_running) == 1:
        for only in list(_running.values()):
            return only
    return StandInLease()


class running:  # noqa: N801 - reads as the function it stands for: a generator costs thrice as much
    """Make a lease the current one while the body runs."""

    __slots__ = ("_lease", "_token")

    def __init__(self, lease: RunningLease) -> None:
        self._lease = lease

    def __enter__(self) -> None:
        """The body begins."""
        self._token = _current.set(self._lease)
        _running[id(self._lease)] = self._lease

    def __exit__(self, *_: object) -> None:
        """The body has ended."""
        _running.pop(id(self._lease), None)
        _current.reset(self._token)
