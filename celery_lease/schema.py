"""The tables of celery_lease, as SQLAlchemy Core sees them now.

Knows names, types and indexes, and nothing else: no statement is written here.
How the tables come to be is told by :mod:`celery_lease.migrations`, whose steps
are frozen text; a test compares the two.

Instants are ``timestamptz`` on PostgreSQL. SQLite has no such type, so there
they are text, ``YYYY-MM-DD HH:MM:SS.ffffff`` in UTC with always six digits:
that sorts and compares as the instants do. In Python they are aware, in UTC.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    text,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.types import TypeEngine

__all__ = ("SCHEMA_VERSION", "Instant", "Tables", "instant_from_text", "instant_to_text", "tables")

#: The version of the tables this release works with: the last migration step.
SCHEMA_VERSION = 1

_STATES = ("queued", "running", "succeeded", "failed", "cancelled")


def instant_to_text(instant: datetime) -> str:
    """Return the SQLite form of an aware datetime: UTC, always six digits."""
    return instant.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S.%f")


def instant_from_text(value: str) -> datetime:
    """Return the aware datetime of an instant in its SQLite form."""
    return datetime.fromisoformat(value).replace(tzinfo=timezone.utc)


class Instant(TypeDecorator[datetime]):
    """An aware UTC datetime: ``timestamptz``, or sortable text on SQLite."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Choose text for SQLite, a time zone aware timestamp elsewhere."""
        if dialect.name == "sqlite":
            return dialect.type_descriptor(Text())
        return dialect.type_descriptor(DateTime(timezone=True))

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> Any:
        """Write text on SQLite."""
        return instant_to_text(value) if value and dialect.name == "sqlite" else value

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """Read an aware datetime in UTC."""
        del dialect
        if value is None:
            return None
        if isinstance(value, str):
            return instant_from_text(value)
        return value.astimezone(timezone.utc)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables in one database schema."""

    metadata: MetaData
    lease: Table
    history: Table
    reaper: Table
    fence: Table
    version: Table


@lru_cache(maxsize=8)
def tables(schema: str | None = None) -> Tables:
    """Return the tables in the given database schema; None: the connection's default."""
    metadata = MetaData(schema=schema)
    return Tables(
        metadata=metadata,
        lease=_lease(metadata),
        history=_history(metadata),
        reaper=_reaper(metadata),
        fence=_fence(metadata),
        version=Table("celery_lease_version", metadata, Column("version", Integer, nullable=False)),
    )


def _required(name: str, kind: Any, default: str | None = None, **options: Any) -> Column[Any]:
    server_default = text(default) if default is not None else None
    return Column(name, kind, nullable=False, server_default=server_default, **options)


def _state(metadata: MetaData) -> TypeEngine[Any]:
    # A type of its own costs PostgreSQL nothing; a CHECK would be parsed with every statement.
    kind = postgresql.ENUM(
        *_STATES, name="celery_lease_state", schema=metadata.schema, metadata=metadata
    )
    return String(16).with_variant(kind, "postgresql")


def _lease(metadata: MetaData) -> Table:
    table = Table(
        "celery_lease",
        metadata,
        _required("task_id", String(255), primary_key=True),
        _required("namespace", String(128)),
        _required("task_name", String(255)),
        _required("created_at", Instant),
        _required("lease_duration", Float(53)),
        _required("max_attempts", Integer),
        _required("fencing_token", BigInteger, "0"),
        _required("attempt", Integer, "0"),
        _required("crashes", Integer, "0"),
        _required("retries", Integer, "0"),
        _required("dispatch", Integer, "0"),
        _required("dispatches", Integer, "0"),
        _required("keep_payload", Boolean, "false"),
        Column("claimed_at", Instant),
        Column("deadline_at", Instant),
        Column("idempotency_key", String(255)),
        Column("labels", Text),
        Column("delivery_tag", String(1024)),
        Column("payload", LargeBinary),
        Column("message", Text),
        _required("state", _state(metadata)),
        Column("owner_id", String(255)),
        Column("lease_until", Instant),
        Column("heartbeat_at", Instant),
        Column("dispatch_at", Instant),
        Column("announce_until", Instant),
        Column("announced_at", Instant),
        Column("finished_at", Instant),
        Column("cancel_requested_at", Instant),
        Column("cancel_reason", Text),
        Column("result_type", String(100)),
        Column("result_encoding", String(50)),
        Column("result", LargeBinary),
        Column("error", Text),
        Column("details", Text),
        # Not here: SQLite's check of the state; and PostgreSQL's fillfactor of 50, which the
        # migration sets, so that a beat finds a
        # free slot in the same page (HOT). SQLAlchemy has no name for it before 2.1.
    )
    # No index holds a column that a renewal changes: a beat stays a heap-only update.
    _partial(Index, "celery_lease_running", table.c.namespace, where="state = 'running'")
    _partial(
        Index,
        "celery_lease_due",
        table.c.namespace,
        table.c.dispatch_at,
        where="dispatch_at IS NOT NULL",
    )
    _partial(
        Index,
        "celery_lease_finished",
        table.c.namespace,
        table.c.finished_at,
        where="announced_at IS NOT NULL",
    )
    # Partial: a row without a key costs no index entry.
    _partial(
        Index,
        "celery_lease_key",
        table.c.idempotency_key,
        where="idempotency_key IS NOT NULL",
        unique=True,
    )
    return table


def _partial(
    kind: Callable[..., Index], name: str, *columns: Any, where: str, **options: Any
) -> None:
    kind(name, *columns, postgresql_where=text(where), sqlite_where=text(where), **options)


def _history(metadata: MetaData) -> Table:
    table = Table(
        "celery_lease_history",
        metadata,
        Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
        _required("task_id", String(255)),
        _required("namespace", String(128)),
        _required("event", String(32)),
        _required("fencing_token", BigInteger, "0"),
        Column("owner_id", String(255)),
        _required("attempt", Integer, "0"),
        Column("cause", String(64)),
        _required("at", Instant),
        Column("facts", Text),
    )
    Index("celery_lease_history_task", table.c.task_id, table.c.id)
    Index("celery_lease_history_at", table.c.at)
    return table


def _reaper(metadata: MetaData) -> Table:
    return Table(
        "celery_lease_reaper",
        metadata,
        _required("namespace", String(128), primary_key=True),
        Column("pass_at", Instant),
        Column("next_pass_at", Instant),
        Column("owner", String(255)),
        Column("outage_from", Instant),
        Column("outage_until", Instant),
    )


def _fence(metadata: MetaData) -> Table:
    return Table(
        "celery_lease_fence",
        metadata,
        _required("resource", String(255), primary_key=True),
        _required("fencing_token", BigInteger),
        _required("accepted_at", Instant),
    )
