"""The receiver's side of a fencing token: refuse those who were overtaken.

What it is: a guard for whatever a leased task changes outside its lease row,
such as a ledger, a bucket or a remote service. The receiver remembers, per
resource, the highest token that it has accepted, and refuses lower ones. It
keeps that in ``celery_lease_fence``, in a database of the receiver's choice
(``migrations.upgrade`` makes the table there).

What it knows: SQLAlchemy and one table. It must not know who holds a lease,
or ask: a receiver that trusted the lease database instead of the token would
be fooled by a request that was sent while the lease was good.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, literal_column, select
from sqlalchemy.dialects import postgresql, sqlite

from celery_lease.exceptions import StaleFence
from celery_lease.schema import tables

__all__ = ("FenceGuard",)

#: The databases' own clocks, and their ways to write "insert, or else update".
_DIALECTS: dict[str, tuple[Any, str]] = {
    "postgresql": (postgresql.insert, "clock_timestamp()"),
    "sqlite": (sqlite.insert, "strftime('%Y-%m-%d %H:%M:%f', 'now') || '000'"),
}


class FenceGuard:
    """Accepts requests for a resource as long as their fencing tokens do not fall.

    Args:
        engine: SQLAlchemy engine of the receiver's database (PostgreSQL or SQLite).
        schema: Database schema of the table.
    """

    def __init__(self, engine: Engine, *, schema: str | None = None) -> None:
        self.engine = engine
        self._fence = tables(schema).fence

    def accept(
        self, resource: str, fencing_token: int, *, connection: Connection | None = None
    ) -> None:
        """Remember the token, or refuse it. The same token is accepted again.

        Args:
            resource: What is protected. Tokens of different tasks cannot be
                compared, so its name usually holds the task's id.
            fencing_token: The request's ``X-Execution-Fence``.
            connection: A connection in a transaction of the receiver's own.
                What it does to the resource belongs there too: the row stays
                locked until it ends, so nobody overtakes between the check
                and the change. None: a transaction by itself.

        Raises:
            StaleFence: A higher token was accepted before.
        """
        if connection is not None:
            self._accept(connection, resource, fencing_token)
            return
        with self.engine.begin() as own:
            self._accept(own, resource, fencing_token)

    def _accept(self, connection: Connection, resource: str, fencing_token: int) -> None:
        insert, now = _DIALECTS[connection.dialect.name]
        fence = self._fence
        instant: ColumnElement[Any] = literal_column(now)
        statement = insert(fence).values(
            resource=resource, fencing_token=fencing_token, accepted_at=instant
        )
        statement = statement.on_conflict_do_update(
            index_elements=[fence.c.resource],
            set_={"fencing_token": fencing_token, "accepted_at": instant},
            where=fence.c.fencing_token <= fencing_token,
        ).returning(fence.c.fencing_token)
        if connection.execute(statement).first() is not None:
            return
        highest = select(fence.c.fencing_token).where(fence.c.resource == resource)
        raise StaleFence(resource, fencing_token, connection.scalar(highest) or 0)
