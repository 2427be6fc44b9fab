"""Creates, upgrades and removes the tables, in numbered steps.

Three ways lead here, and all run the same frozen statements:

- ``celery -A proj lease migrate`` calls :func:`upgrade`;
- ``celery -A proj lease migrate --sql`` prints :func:`sql`;
- a revision of the user's own Alembic calls :func:`up` and :func:`down` with
  ``alembic.op``, and so keeps one history for all tables of a project::

      from alembic import op
      from celery_lease import migrations

      def upgrade() -> None:
          migrations.up(op, version=1)

      def downgrade() -> None:
          migrations.down(op, version=0)

The version found is kept in a table of its own, ``celery_lease_version``, so
that Alembic's table is left alone. Workers never come here: they check the
version and refuse to start (``SchemaOutdated``).

Two upgrades at once do not break each other: the version is read under a lock
that lasts until the transaction ends, so the second finds nothing to do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery.exceptions import ImproperlyConfigured
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError

from celery_lease.exceptions import SchemaOutdated
from celery_lease.migrations import v01
from celery_lease.schema import SCHEMA_VERSION

__all__ = ("current_version", "down", "downgrade", "sql", "up", "upgrade")

_STEPS = {1: v01}
_DIALECTS = ("postgresql", "sqlite")
#: In seconds: how long another process may keep SQLite's journal mode from changing.
_WAL_PATIENCE = 30.0
#: Any constant will do, as long as every release uses the same one.
_LOCK = "SELECT pg_advisory_xact_lock(7161923346190281801)"


def upgrade(engine: Engine, *, schema: str | None = None, version: int = SCHEMA_VERSION) -> int:
    """Bring the tables up to a version, in one transaction; nothing is done twice.

    Args:
        engine: Of the lease database.
        schema: Database schema of the tables; it is created if it is missing.
        version: Where to stop.

    Returns:
        The version that was found before.
    """
    with _transaction(engine) as connection:
        _lock(connection)
        _create_schema(connection, schema)
        found = current_version(connection, schema=schema)
        up(connection, version=version, schema=schema)
    return found


def downgrade(engine: Engine, *, schema: str | None = None, version: int = 0) -> int:
    """Take the tables back to a version; 0 removes them and all they hold.

    Returns:
        The version that was found before.
    """
    with _transaction(engine) as connection:
        _lock(connection)
        found = current_version(connection, schema=schema)
        down(connection, version=version, schema=schema)
    return found


def up(target: Any, version: int = SCHEMA_VERSION, *, schema: str | None = None) -> None:
    """Run the steps from the version found to the one asked for.

    Args:
        target: A SQLAlchemy connection in a transaction of the caller's, or
            ``alembic.op`` (its offline mode emits every step).
        version: The last step to run.
        schema: Database schema of the tables.

    Raises:
        SchemaOutdated: A later release has made the tables.
    """
    _check_version(version)
    connection = _connection(target)
    if connection is None:
        for statement in _all_steps(_dialect_name(target), schema, 0, version):
            target.execute(text(statement))
        return
    _lock(connection)
    found = current_version(connection, schema=schema)
    if found > SCHEMA_VERSION:
        raise SchemaOutdated(found, SCHEMA_VERSION)
    for statement in _all_steps(connection.dialect.name, schema, found, version):
        connection.exec_driver_sql(statement)


def down(target: Any, version: int = 0, *, schema: str | None = None) -> None:
    """Undo the steps above a version, the last one first.

    Args:
        target: As for :func:`up`.
        version: The version to go back to; 0 removes all tables.
        schema: Database schema of the tables.
    """
    _check_version(version)
    connection = _connection(target)
    if connection is None:
        for statement in _undo_steps(_dialect_name(target), schema, SCHEMA_VERSION, version):
            target.execute(text(statement))
        return
    _lock(connection)
    found = current_version(connection, schema=schema)
    for statement in _undo_steps(connection.dialect.name, schema, found, version):
        connection.exec_driver_sql(statement)


def current_version(connection: Connection, *, schema: str | None = None) -> int:
    """Return the version of the tables found; 0 if there are none."""
    statement = f"SELECT max(version) FROM {_prefix(schema)}celery_lease_version"
    if not _has_version_table(connection, schema):
        return 0
    return connection.exec_driver_sql(statement).scalar() or 0


def sql(dialect_name: str, *, schema: str | None = None, start: int = 0) -> str:
    """Return the statements of an upgrade as text, for somebody else to run.

    Args:
        dialect_name: ``postgresql`` or ``sqlite``.
        schema: Database schema of the tables.
        start: The version the database has.
    """
    statements = list(_all_steps(dialect_name, schema, start, SCHEMA_VERSION))
    if schema is not None and dialect_name == "postgresql":
        statements.insert(0, f"CREATE SCHEMA IF NOT EXISTS {_quoted(schema)}")
    begin = "BEGIN IMMEDIATE" if dialect_name == "sqlite" else "BEGIN"
    return ";\n\n".join([begin, *statements, "COMMIT"]) + ";\n"


def _all_steps(dialect_name: str, schema: str | None, found: int, version: int) -> Iterator[str]:
    _check_dialect(dialect_name)
    prefix = _prefix(schema)
    if found == 0 < version:
        yield f"CREATE TABLE {prefix}celery_lease_version (version INTEGER NOT NULL)"
        yield f"INSERT INTO {prefix}celery_lease_version (version) VALUES (0)"
    for number in range(found + 1, version + 1):
        yield from _STEPS[number].up(dialect_name, prefix)
        yield f"UPDATE {prefix}celery_lease_version SET version = {number}"


def _undo_steps(dialect_name: str, schema: str | None, found: int, version: int) -> Iterator[str]:
    _check_dialect(dialect_name)
    prefix = _prefix(schema)
    for number in range(found, version, -1):
        yield from _STEPS[number].down(dialect_name, prefix)
        yield f"UPDATE {prefix}celery_lease_version SET version = {number - 1}"
    if version == 0 < found:
        yield f"DROP TABLE {prefix}celery_lease_version"


def _has_version_table(connection: Connection, schema: str | None) -> bool:
    # to_regclass follows the search path, as the statements of the store do.
    name = f"{_prefix(schema)}celery_lease_version"
    if connection.dialect.name == "postgresql":
        found = connection.execute(text("SELECT to_regclass(:name) IS NOT NULL"), {"name": name})
        return bool(found.scalar())
    master = f"{_prefix(schema)}sqlite_master"
    query = f"SELECT count(*) FROM {master} WHERE type = 'table' AND name = 'celery_lease_version'"
    return bool(connection.exec_driver_sql(query).scalar())


@contextmanager
def _transaction(engine: Engine) -> Iterator[Connection]:
    _check_dialect(engine.dialect.name)
    if engine.dialect.name != "sqlite":
        with engine.begin() as connection:
            yield connection
        return
    # The sqlite3 module begins no transaction before DDL, so it is done by hand.
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout = 30000")
        _switch_to_wal(connection)
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        try:
            yield connection
        except BaseException:
            connection.exec_driver_sql("ROLLBACK")
            raise
        connection.exec_driver_sql("COMMIT")


def _switch_to_wal(connection: Connection) -> None:
    """Switch to the write-ahead log; SQLite's own patience does not cover this statement."""
    end = time.monotonic() + _WAL_PATIENCE
    while not _is_in_wal(connection, last=time.monotonic() > end):
        time.sleep(0.05)


def _is_in_wal(connection: Connection, *, last: bool) -> bool:
    try:
        connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    except OperationalError as error:
        if last or "locked" not in str(error):
            raise
        return False
    return True


def _lock(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(_LOCK)


def _create_schema(connection: Connection, schema: str | None) -> None:
    if schema is None or connection.dialect.name != "postgresql":
        return
    # Asked first: CREATE SCHEMA IF NOT EXISTS needs the right to create even if it exists.
    found = connection.execute(
        text("SELECT 1 FROM pg_namespace WHERE nspname = :name"), {"name": schema}
    )
    if found.first() is None:
        connection.exec_driver_sql(f"CREATE SCHEMA {_quoted(schema)}")


def _connection(target: Any) -> Connection | None:
    if isinstance(target, Connection):
        return target
    context = target.get_context()
    return None if context.as_sql else context.connection


def _dialect_name(target: Any) -> str:
    return str(target.get_context().dialect.name)


def _check_version(version: int) -> None:
    if version not in range(SCHEMA_VERSION + 1):
        raise ValueError(f"version={version!r} is not legal: expected 0 to {SCHEMA_VERSION}")


def _check_dialect(dialect_name: str) -> None:
    if dialect_name not in _DIALECTS:
        raise ImproperlyConfigured(
            f"celery_lease has no tables for {dialect_name!r}: expected one of "
            + ", ".join(_DIALECTS)
        )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _prefix(schema: str | None) -> str:
    return f"{_quoted(schema)}." if schema is not None else ""
