"""The lease database: one engine, bounded calls, few kinds of error.

:meth:`Database.run` is the only way that a statement of the store takes. It
answers within a bound, or raises

- ``DatabaseUnavailable``: not reached, cut off, overdue, shutting down. The
  statement may or may not have been done; callers treat every one as open.
- ``SchemaOutdated``: the tables are missing or older than this release.

A *held* connection that turns out to be dead is replaced once without a word.
That is right because every statement of the store may be repeated: its condition
finds the row as the first run left it.

Makes no connection before it is needed, and none survives a fork.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery.exceptions import ImproperlyConfigured
from sqlalchemy import Engine, NullPool, create_engine
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from celery_lease.address import checked_url
from celery_lease.connections import FreshConnections, HeldConnections
from celery_lease.dialects import Dialect, Names, Script, dialect_named
from celery_lease.exceptions import DatabaseUnavailable, SchemaOutdated
from celery_lease.schema import SCHEMA_VERSION
from celery_lease.sql import scripts
from celery_lease.wire import Overdue, Rows

__all__ = ("Database",)

_CONNECT_TIMEOUT = 5
#: Serialization failure, deadlock, and a prepared statement older than the tables.
_STALE_PLAN = "0A000"
_CONFLICTS = ("40001", "40P01", _STALE_PLAN)
_CONFLICT_RETRIES = 3
#: Read-only: a standby after a failover.
_UNAVAILABLE_STATES = ("25006",)
_MISSING_STATES = ("42P01", "42703", "3F000")
_MISSING_WORDS = ("no such table", "no such column", "has no column named")
_LOCKED_WORDS = ("locked", "busy")
_LOCKED_PAUSE = 0.02


@dataclass(frozen=True, slots=True)
class _Opened:
    engine: Engine
    connections: HeldConnections | FreshConnections


class Database:
    """The lease database as one process sees it.

    Args:
        url: SQLAlchemy URL, ``lease_url``.
        engine_options: ``lease_engine_options``.
        schema: Database schema of the tables.

    Raises:
        celery.exceptions.ImproperlyConfigured: The URL is bad, or its driver is
            missing.
    """

    def __init__(
        self,
        url: str | URL,
        engine_options: Mapping[str, Any] | None = None,
        *,
        schema: str | None = None,
    ) -> None:
        self.url = checked_url(url)
        self.schema = schema
        self.names = Names.of(schema)
        self.dialect: Dialect = dialect_named(self.url.get_backend_name())
        self.scripts = scripts(self.dialect, schema)
        self._options = dict(engine_options or {})
        self._opened: dict[str, _Opened] = {}

    @property
    def _driver(self) -> Any:
        # The driver's module: DB-API 2 says what its errors are called.
        return self._open().engine.dialect.loaded_dbapi

    @property
    def engine(self) -> Engine:
        """The engine, made at its first use; it connects when it is asked to."""
        return self._open().engine

    @property
    def connections(self) -> tuple[Any, ...]:
        """The driver's connections of this process that are held and not in use now."""
        return tuple(
            connection for opened in self._opened.values() for connection in opened.connections.idle
        )

    def load_driver(self) -> None:
        """Import what a connection needs, and connect to nothing.

        A process that forks children does it for all of them: imported in each
        child it would cost their first claims more than a second together.
        """
        self._open()

    def run(self, script: str, params: dict[str, Any], *, timeout: float) -> Rows:
        """Run one of the scripts and return the rows of its answer.

        Args:
            script: Its name.
            params: Values of its placeholders; more may be given.
            timeout: Seconds that the call may take.

        Raises:
            DatabaseUnavailable: No answer; what was asked may have been done.
            SchemaOutdated: The tables are not those of this release.
        """
        deadline = time.monotonic() + timeout
        try:
            connections = self._open().connections
            if isinstance(connections, HeldConnections):
                return self._run_held(connections, self.scripts[script], params, deadline)
            return self._run_fresh(connections, self.scripts[script], params, deadline)
        except Overdue:
            raise DatabaseUnavailable(f"no answer within {timeout:g} s") from None
        except PoolTimeoutError as error:
            raise DatabaseUnavailable(str(error)) from error
        except self._driver.Error as error:
            if _is_missing(error):
                # SQLite says it with the class of error that stands for a database that is away.
                if script == "version":
                    raise
                raise self._outdated(deadline) from error
            if self._is_unavailable(error):
                raise DatabaseUnavailable(_detail(error)) from error
            raise

    def version(self, *, timeout: float) -> int:
        """Return the version of the tables; 0 if there are none."""
        try:
            rows = self.run("version", {}, timeout=timeout)
        except self._driver.Error as error:
            if _is_missing(error):
                return 0
            raise
        return rows[0][0] or 0

    def close_idle(self, seconds: float) -> None:
        """Close connections that have not been used for so long."""
        for opened in self._opened.values():
            opened.connections.close_idle(seconds)

    def dispose(self) -> None:
        """Close all connections; the next call opens new ones."""
        for opened in self._opened.values():
            opened.connections.close_idle(-1.0)
            opened.engine.dispose()

    def _open(self) -> _Opened:
        opened = self._opened.get("")
        if opened is None:
            engine = self._created()
            connections: HeldConnections | FreshConnections
            if self.dialect.name == "sqlite":
                connections = FreshConnections(engine)
            else:
                connections = HeldConnections(engine, prepare=not self._given("prepare_threshold"))
            # One step for all threads, without a lock that a fork could find taken.
            opened = self._opened.setdefault("", _Opened(engine, connections))
        return opened

    def _given(self, option: str) -> bool:
        """Return whether the user has set an option of the driver's."""
        arguments = self._options.get("connect_args") or {}
        return option in self.url.query or option in arguments

    def _created(self) -> Engine:
        options = {"hide_parameters": True, **self._options}
        given = dict(options.pop("connect_args", None) or {})
        if self.dialect.name == "sqlite":
            # A connection per transaction: none may be open while the process forks.
            options["poolclass"] = NullPool
        else:
            # Statements are prepared where that is safe, see connections; not by the driver.
            defaults = {"prepare_threshold": None, "connect_timeout": _CONNECT_TIMEOUT}
            missing = {key: value for key, value in defaults.items() if not self._given(key)}
            given = {**missing, **given}
        try:
            return create_engine(self.url, connect_args=given, **options)
        except (TypeError, SQLAlchemyError) as error:
            raise ImproperlyConfigured(
                f"lease_engine_options: keys {sorted(self._options)} are not legal for"
                f" {self.url.drivername}: {error}"
            ) from error

    def _run_held(
        self, connections: HeldConnections, script: Script, params: dict[str, Any], deadline: float
    ) -> Rows:
        conflicts = 0
        while True:
            wire, new = connections.take(deadline)
            try:
                return connections.run(wire, script, params, deadline)
            except self._driver.Error as error:
                if _state(error) in _CONFLICTS and conflicts < _CONFLICT_RETRIES:
                    conflicts += 1
                    if _state(error) == _STALE_PLAN:
                        # So are the plans of the other connections.
                        connections.close_idle(-1.0)
                elif not new and self._is_disconnect(error):
                    # One is dead, so the others that lay there are suspect: begin anew.
                    connections.close_idle(-1.0)
                else:
                    raise

    def _run_fresh(
        self, connections: FreshConnections, script: Script, params: dict[str, Any], deadline: float
    ) -> Rows:
        while True:
            try:
                return connections.run(script, params, deadline)
            except self._driver.OperationalError as error:
                # SQLite waits by itself, except where waiting could never end.
                locked = any(word in str(error) for word in _LOCKED_WORDS)
                if not locked or time.monotonic() + _LOCKED_PAUSE >= deadline:
                    raise
            time.sleep(_LOCKED_PAUSE)

    def _outdated(self, deadline: float) -> SchemaOutdated:
        found = self.version(timeout=max(deadline - time.monotonic(), 1.0))
        # The right version without its tables: they lie where this connection does not look.
        return SchemaOutdated(found if found != SCHEMA_VERSION else 0, SCHEMA_VERSION)

    def _is_disconnect(self, error: Exception) -> bool:
        # A conflict that was retried too often is an OperationalError as well, but has a state
        # of its own; a dead connection has none, or one of these classes.
        state = _state(error)
        return isinstance(error, (self._driver.OperationalError, self._driver.InterfaceError)) and (
            state is None or state.startswith(("08", "57P"))
        )

    def _is_unavailable(self, error: Exception) -> bool:
        return (
            # No class of its own: a file that is no database, or is damaged.
            type(error) is self._driver.DatabaseError
            or isinstance(error, (self._driver.OperationalError, self._driver.InterfaceError))
            or _state(error) in _UNAVAILABLE_STATES
        )


def _state(error: Exception) -> str | None:
    return getattr(error, "sqlstate", None)


def _is_missing(error: Exception) -> bool:
    return _state(error) in _MISSING_STATES or any(word in str(error) for word in _MISSING_WORDS)


def _detail(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
