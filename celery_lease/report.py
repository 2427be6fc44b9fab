"""One place that tells the outside what happened: log line, signal, Celery event.

Every happening has one line in the logger ``celery_lease`` (``event key=value …``,
the same keys as ``extra``), one signal and, only where the app sends task
events, one event. Arguments, results and checkpoints never come here, so they
cannot leave from here.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery_lease import signals
from celery_lease.logbook import line, log

if TYPE_CHECKING:
    from celery.app.task import Task
    from celery.utils.dispatch import Signal

    from celery_lease.lease import LeaseRef

__all__ = ("line", "log", "send_event", "tell")


def tell(signal: Signal, sender: object, ref: LeaseRef, **facts: Any) -> None:
    """Send a signal about one lease; a receiver that raises harms nobody."""
    if signal.receivers:
        signal.send(
            sender=sender,
            task_id=ref.task_id,
            fencing_token=ref.fencing_token,
            owner_id=ref.owner_id,
            **facts,
        )


def send_event(task: Task[Any, Any], event: str, **fields: Any) -> None:
    """Send a monitoring event from a worker; a broker in trouble costs the event only."""
    try:
        task.send_event(event, retry=False, **fields)
    except Exception as exc:  # noqa: BLE001 - monitoring must never change an outcome
        line(logging.DEBUG, "event_not_sent", type=event, error=type(exc).__name__)


def claimed(task: Task[Any, Any], ref: LeaseRef, *, attempt: int, lease_until: datetime) -> None:
    """A claim was granted."""
    line(
        logging.INFO,
        "job_claimed",
        job=ref.task_id,
        token=ref.fencing_token,
        lease_until=lease_until,
        owner=ref.owner_id,
        attempt=attempt,
        task=task.name,
    )
    tell(signals.lease_claimed, task, ref, attempt=attempt, lease_until=lease_until)


def renewed(task: Task[Any, Any], ref: LeaseRef, lease_until: datetime) -> None:
    """A renewal was confirmed."""
    line(
        logging.INFO,
        "heartbeat_ok",
        job=ref.task_id,
        token=ref.fencing_token,
        lease_until=lease_until,
    )
    tell(signals.lease_renewed, task, ref, lease_until=lease_until)


def unknown(
    task: Task[Any, Any], ref: LeaseRef, *, confirmed: datetime | None, request_id: str | None
) -> None:
    """Ownership is not certain: the event an operator needs at two in the morning."""
    line(
        logging.WARNING,
        "ownership_unknown",
        job=ref.task_id,
        token=ref.fencing_token,
        last_confirmed_until=confirmed,
        request=request_id or "none",
    )
    tell(signals.lease_unknown, task, ref, request_id=request_id)


def lost(task: Task[Any, Any], ref: LeaseRef, reason: str) -> None:
    """The lease is lost to this execution."""
    line(
        logging.WARNING,
        "heartbeat_lost",
        job=ref.task_id,
        token=ref.fencing_token,
        reason=reason,
        owner=ref.owner_id,
    )
    tell(signals.lease_lost, task, ref, reason=reason)


def committed(task: Task[Any, Any], ref: LeaseRef, state: str) -> None:
    """The outcome was accepted."""
    line(logging.INFO, "job_committed", job=ref.task_id, token=ref.fencing_token, state=state)
    tell(signals.lease_committed, task, ref, state=state)


def released(sender: object, ref: LeaseRef, cause: str) -> None:
    """The lease was given back before an outcome."""
    line(logging.INFO, "job_released", job=ref.task_id, token=ref.fencing_token, cause=cause)
    tell(signals.lease_released, sender, ref, cause=cause)


def rejected(task: Task[Any, Any], ref: LeaseRef, *, digest: str, size: int) -> None:
    """An outcome came too late; only its hash and size are told."""
    line(
        logging.WARNING,
        "result_rejected",
        job=ref.task_id,
        token=ref.fencing_token,
        sha256=digest,
        bytes=size,
        owner=ref.owner_id,
    )
    tell(signals.result_rejected, task, ref, digest=digest, size=size)


def turned_away(task_id: str, *, reason: str, owner: str | None, lease_until: object) -> None:
    """A copy of the message was refused before its body ran."""
    line(
        logging.INFO,
        "job_turned_away",
        job=task_id,
        reason=reason,
        owner=owner,
        lease_until=lease_until,
    )
