"""Turns rows of the database into the values of :mod:`celery_lease.lease`, and back.

Knows the order of columns and how instants are kept; decides nothing.
"""

from __future__ import annotations

from typing import Any

from celery_lease.dialects import Dialect
from celery_lease.lease import (
    ClaimRequest,
    HistoryEntry,
    LeaseRef,
    LeaseRow,
    Reclaimed,
    Renewed,
    State,
)
from celery_lease.sql_phrases import COLUMNS

__all__ = ("claim_params", "history_entry", "lease_row", "reclaimed", "ref_params", "renewed")

_NAMES = (*COLUMNS, "read_at")
_INSTANTS = tuple(name for name in _NAMES if name.endswith(("_at", "_until")))
#: More than any history of a task needs, and far from the column's end: a forged
#: number in a message is cut to it instead of making every statement fail.
_HIGHEST = 1_000_000_000


def lease_row(values: tuple[Any, ...], dialect: Dialect) -> LeaseRow:
    """Return a row as read."""
    row: dict[str, Any] = dict(zip(_NAMES, values, strict=True))
    for name in _INSTANTS:
        row[name] = dialect.instant(row[name])
    row["state"] = State(row["state"])
    row["keep_payload"] = bool(row["keep_payload"])
    return LeaseRow(**row)


def history_entry(values: tuple[Any, ...], dialect: Dialect) -> HistoryEntry:
    """Return a history row."""
    task_id, event, token, owner_id, attempt, cause, at, facts = values
    instant = dialect.instant(at)
    if instant is None:
        raise ValueError("a history row has no instant")
    return HistoryEntry(task_id, event, token, owner_id, attempt, cause, instant, facts)


def renewed(values: tuple[Any, ...], dialect: Dialect) -> Renewed:
    """Return a lease that was renewed."""
    task_id, owner_id, token, lease_until, cancel_requested_at, cancel_reason = values
    until = dialect.instant(lease_until)
    if until is None:
        raise ValueError("a renewed lease has no end")
    reason = None if cancel_requested_at is None else cancel_reason or ""
    return Renewed(LeaseRef(task_id, owner_id, token), until, reason)


def reclaimed(values: tuple[Any, ...]) -> Reclaimed:
    """Return what a reclaim did."""
    task_id, task_name, state, owner_id, token, attempt, crashes, late = values
    return Reclaimed(
        task_id, task_name, State(state), owner_id, token, attempt, crashes, float(late)
    )


def ref_params(ref: LeaseRef) -> dict[str, Any]:
    """Return the parameters that name one grant."""
    return {
        "task_id": ref.task_id,
        "owner_id": ref.owner_id,
        "fencing_token": ref.fencing_token,
    }


def claim_params(request: ClaimRequest, namespace: str) -> dict[str, Any]:
    """Return the parameters of a claim."""
    message = request.message
    return {
        "task_id": request.task_id,
        "namespace": namespace,
        "task_name": request.task_name,
        "owner_id": request.owner_id,
        "lease_duration": float(request.lease_duration),
        "max_attempts": request.max_attempts,
        "dispatch": _sane(request.dispatch),
        "retries": _sane(request.retries),
        "payload": message.body if message else None,
        "message": message.envelope if message else None,
        "delivery_tag": request.delivery_tag,
        "labels": request.labels,
        "keep_payload": request.keep_payload,
    }


def _sane(number: int) -> int:
    return min(max(number, 0), _HIGHEST)
