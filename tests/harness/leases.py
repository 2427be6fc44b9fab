"""Shorthand for tests of the store: requests, and time that goes by on demand."""

from __future__ import annotations

from typing import Any

from celery_lease.database import Database
from celery_lease.lease import Claim, ClaimRequest, Encoded, LeaseRef, Message
from celery_lease.store import LeaseStore
from harness.rows import Rows

MESSAGE = Message(b'[[1], {}, {"chain": null}]\x00\xff', '{"headers": {"task": "app.export"}}')
RESULT = Encoded(b'"done"', "application/json", "utf-8")
NAMESPACE = "app"


def open_store(url: str, **options: Any) -> LeaseStore:
    """Return a store on a database of its own connections."""
    return LeaseStore(Database(url, **options), NAMESPACE)


def request(task_id: str = "task", owner: str = "owner-1", **values: Any) -> ClaimRequest:
    """Return a claim's request with sensible values."""
    given = {"lease_duration": 30.0, "max_attempts": 3, "message": MESSAGE, **values}
    return ClaimRequest(task_id, "app.export", owner, **given)


def claimed(
    store: LeaseStore, task_id: str = "task", owner: str = "owner-1", **values: Any
) -> Claim:
    """Claim a task that can be had."""
    claim = store.claim(request(task_id, owner, **values))
    assert claim.ref is not None, claim
    return claim


def held(
    store: LeaseStore, task_id: str = "task", owner: str = "owner-1", **values: Any
) -> LeaseRef:
    """Claim a task that can be had, and return the grant."""
    ref = claimed(store, task_id, owner, **values).ref
    assert ref is not None
    return ref


def finished(store: LeaseStore, task_id: str = "task", *, announced: bool = False) -> LeaseRef:
    """Claim a task and commit its result."""
    ref = held(store, task_id)
    assert store.commit(ref, RESULT, announced=announced, announce_in=30)
    return ref


def move(rows: Rows, column: str, seconds: float, *, table: str = "", **where: str) -> None:
    """Set an instant to so many seconds from now, by the database's clock.

    Args:
        rows: The database.
        column: The instant.
        seconds: Negative: in the past.
        table: What follows `celery_lease` in the table's name.
        where: The row.
    """
    now = {
        "postgresql": f"clock_timestamp() + interval '{seconds} seconds'",
        "sqlite": f"strftime('%Y-%m-%d %H:%M:%f', 'now', '{seconds:+} seconds') || '000'",
    }[rows.engine.dialect.name]
    condition = " AND ".join(f"{name} = :{name}" for name in where)
    found = rows.execute(
        f"UPDATE celery_lease{table} SET {column} = {now} WHERE {condition}", **where
    )
    assert found == 1
