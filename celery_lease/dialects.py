"""What differs between the databases: the clock, spans of time, JSON, placeholders.

Knows how to say small things in one database's SQL. The statements made of them
are in the ``sql_…`` modules; running them is :mod:`celery_lease.database`'s.

The clock is always the database's. PostgreSQL's ``clock_timestamp()`` is read
where it stands in the statement, so after a wait for a row lock it is still
right. SQLite has one writer: :mod:`celery_lease.connections` reads its clock
once per transaction, and every statement in it uses that as ``:now``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from celery.exceptions import ImproperlyConfigured

from celery_lease.schema import instant_from_text

__all__ = ("POSTGRESQL", "SQLITE", "SQLITE_NOW", "Dialect", "Names", "Script", "dialect_named")

#: Read first in every SQLite transaction.
SQLITE_NOW = "SELECT strftime('%Y-%m-%d %H:%M:%f', 'now') || '000'"

# A name after one colon; two colons are a cast.
_PLACEHOLDER = re.compile(r"(?<![:\w]):([a-z_]\w*)")


@dataclass(frozen=True, slots=True)
class Script:
    """One operation: a single statement on PostgreSQL, one transaction on SQLite."""

    steps: tuple[str, ...]
    #: Which step's rows are the answer.
    answer: int = -1
    #: False: nothing is written, so SQLite needs no write lock.
    writes: bool = True
    #: PostgreSQL: the names of the numbered placeholders, in order.
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Names:
    """The tables' names as they stand in a statement."""

    lease: str
    history: str
    reaper: str
    fence: str
    version: str
    #: PostgreSQL's type of a row's state.
    state: str

    @classmethod
    def of(cls, schema: str | None) -> Names:
        """Return the names in a database schema; None: the connection's default."""
        prefix = '"' + schema.replace('"', '""') + '".' if schema is not None else ""
        return cls(
            lease=f"{prefix}celery_lease",
            history=f"{prefix}celery_lease_history",
            reaper=f"{prefix}celery_lease_reaper",
            fence=f"{prefix}celery_lease_fence",
            version=f"{prefix}celery_lease_version",
            state=f"{prefix}celery_lease_state",
        )


@dataclass(frozen=True, slots=True)
class Dialect:
    """One database's ways of saying things."""

    name: str
    #: The current instant.
    now: str
    #: SQL of seconds -> SQL of the instant so many seconds from now.
    later: Callable[[str], str]
    #: SQL of an instant, SQL of seconds -> SQL of their sum.
    plus: Callable[[str, str], str]
    #: SQL of two instants -> SQL of the seconds from the second to the first.
    seconds: Callable[[str, str], str]
    #: Names and SQL of values -> SQL of a JSON object as text. Instants become ISO 8601.
    json_object: Callable[[dict[str, str]], str]
    #: SQL of values -> SQL of a JSON array, as a member of ``json_object``.
    json_array: Callable[..., str]
    #: SQL of an instant -> SQL of it as a member of ``json_object``.
    json_instant: Callable[[str], str]
    #: SQL of a truth value -> SQL of it as a member of ``json_object``.
    json_truth: Callable[[str], str]
    #: SQL of a state as text, name of its type -> SQL of it as a state.
    state: Callable[[str, str], str]
    #: SQL of a column -> SQL of it by which no index is sought: the row is found otherwise.
    unsought: Callable[[str], str]
    #: A script with ``:name`` placeholders -> with the driver's.
    placed: Callable[[Script], Script]
    #: A value of an instant's column -> an aware datetime in UTC.
    instant: Callable[[Any], datetime | None]
    #: A name, rows that begin with a task id -> the parameters that carry them.
    batch: Callable[[str, Sequence[Sequence[Any]]], dict[str, Any]]


def dialect_named(name: str) -> Dialect:
    """Return a database's dialect.

    Raises:
        celery.exceptions.ImproperlyConfigured: No statements exist for it.
    """
    for dialect in (POSTGRESQL, SQLITE):
        if dialect.name == name:
            return dialect
    raise ImproperlyConfigured(f"no statements for {name!r}: expected postgresql or sqlite")


def _numbered(script: Script) -> Script:
    """Return a script of one statement with PostgreSQL's own placeholders."""
    (statement,) = script.steps
    names = tuple(dict.fromkeys(_PLACEHOLDER.findall(statement)))
    numbers = {name: f"${number}" for number, name in enumerate(names, 1)}
    placed = _PLACEHOLDER.sub(lambda match: numbers[match.group(1)], statement)
    return replace(script, steps=(placed,), names=names)


def _from_timestamptz(value: datetime | None) -> datetime | None:
    return None if value is None else value.astimezone(timezone.utc)


def _from_text(value: str | None) -> datetime | None:
    return None if value is None else instant_from_text(value)


def _sqlite_plus(instant: str, seconds: str) -> str:
    return f"strftime('%Y-%m-%d %H:%M:%f', {instant}, printf('%+.3f seconds', {seconds})) || '000'"


def _by_task(name: str, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    return {
        f"{name}_ids": [task_id for task_id, *_ in rows],
        name: json.dumps({task_id: rest for task_id, *rest in rows}),
    }


def _members(members: dict[str, str]) -> str:
    return ", ".join(f"'{name}', {value}" for name, value in members.items())


POSTGRESQL = Dialect(
    name="postgresql",
    now="clock_timestamp()",
    later=lambda seconds: f"clock_timestamp() + make_interval(secs => {seconds})",
    plus=lambda instant, seconds: f"{instant} + make_interval(secs => {seconds})",
    seconds=lambda end, start: f"EXTRACT(EPOCH FROM {end} - {start})::float8",
    json_object=lambda members: f"json_build_object({_members(members)})::text",
    json_array=lambda *values: f"json_build_array({', '.join(values)})",
    json_instant=lambda instant: instant,
    json_truth=lambda truth: f"({truth})",
    state=lambda text, kind: f"CAST({text} AS {kind})",
    unsought=lambda column: f"{column}::text",
    placed=_numbered,
    instant=_from_timestamptz,
    batch=_by_task,
)

SQLITE = Dialect(
    name="sqlite",
    now=":now",
    later=lambda seconds: _sqlite_plus(":now", seconds),
    plus=_sqlite_plus,
    seconds=lambda end, start: f"((julianday({end}) - julianday({start})) * 86400.0)",
    json_object=lambda members: f"json_object({_members(members)})",
    json_array=lambda *values: f"json_array({', '.join(values)})",
    json_instant=lambda instant: f"replace({instant}, ' ', 'T') || '+00:00'",
    json_truth=lambda truth: f"json(CASE WHEN {truth} THEN 'true' ELSE 'false' END)",
    state=lambda text, _: text,
    unsought=lambda column: f"+{column}",
    placed=lambda script: script,
    instant=_from_text,
    batch=lambda name, rows: {name: json.dumps(rows)},
)
