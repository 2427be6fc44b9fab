"""What a user's type checker sees. Checked by mypy, never run."""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_lease import (
    AttemptsExhausted,
    LeasedTask,
    LeaseError,
    LeaseLost,
    OwnershipUnknown,
    TaskCancelled,
    current_lease,
)
from celery_lease.receiver import FenceGuard
from celery_lease.signals import lease_lost

app = Celery("typed")


class Base(LeasedTask):
    """A user's own base class."""

    lease_duration = 300.0
    lease_max_attempts = 5


@app.task(base=Base, bind=True)
def export(self: Base, report_id: int) -> int:
    """Use every member of the lease."""
    lease = self.lease
    lease.heartbeat()
    lease.heartbeat({"page": 1})
    lease.ensure(10)
    with lease.effect("pay", request_id="r1") as effect:
        token: int = effect.fencing_token
        headers: dict[str, str] = dict(effect.headers)
    key: str = lease.idempotency_key("pay")
    status: str = lease.status
    name: str = lease.task_name
    return token + len(headers) + len(key) + len(status) + len(name) + report_id


def below() -> str:
    """Anywhere below the task."""
    return current_lease().task_id


def errors(error: LeaseError) -> str:
    """Tell the errors apart."""
    if isinstance(error, LeaseLost):
        return f"{error.task_id} {error.fencing_token + 1} {error.reason}"
    if isinstance(error, TaskCancelled):
        return error.reason
    if isinstance(error, AttemptsExhausted):
        return str(error.crashes + error.limit)
    if isinstance(error, OwnershipUnknown):
        return error.task_id
    return str(error)


def receive(guard: FenceGuard, token: int) -> None:
    """On the receiving side."""
    guard.accept("invoice:7", token)


def on_lost(sender: object, task_id: str, fencing_token: int, **_: Any) -> None:
    """Receive a signal."""


lease_lost.connect(on_lost)
