"""Runs scripts on connections: held ones for PostgreSQL, fresh ones for SQLite.

**PostgreSQL.** A small stack of AUTOCOMMIT connections per process: no pool
check-out, no BEGIN, one round trip per statement. A connection returns to the
stack only from a statement that ended well. Whatever else happens, be it an
error, a signal's exception or an asynchronous one in the middle of a statement,
the connection is thrown away. After a fork the inherited ones are neither used
nor closed, for closing would tell the server on the parent's behalf.

SQLAlchemy knows how to connect (URL, options, ``do_connect``). Its pool is left
to others: an exception that strikes inside it leaks a place in the pool, and the
pool is empty one day. Statements go to the driver's cursor, which costs half as
much as the way through SQLAlchemy. They are prepared where
the connection is really the server's: a pooler in transaction mode (PgBouncer)
gives each transaction another server connection, where a prepared statement may
be missing, or be somebody else's. Poolers show themselves by the process id that
they make up.

**SQLite.** A connection per transaction, and none while the process forks: a
child forked while its parent is inside SQLite inherits the library's notes
about locks that it does not have, and sees "database is locked" for ever.

Errors come out as the driver's; :mod:`celery_lease.database` translates them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Engine, event

from celery_lease.dialects import SQLITE_NOW, Script
from celery_lease.wire import Overdue, Rows, Wire

__all__ = ("FreshConnections", "HeldConnections", "Overdue")

#: Runs of a statement before it is prepared, as psycopg has it.
_PREPARE_THRESHOLD = 5
_WHO = Script(("SELECT pg_backend_pid()",))
_NO_SCANS = Script(("SET enable_seqscan = off",))


class HeldConnections:
    """The connections of this process to PostgreSQL.

    Args:
        engine: Makes the connections.
        prepare: Whether to prepare statements on a connection straight to the
            server; False leaves it as the engine's options have it.
    """

    def __init__(self, engine: Engine, *, prepare: bool = False) -> None:
        self._engine = engine
        self._prepare = prepare
        self._stack: list[Wire] = []
        self._calls = threading.local()
        self._pid = os.getpid()
        self._inherited: list[Wire] = []
        event.listen(engine, "do_connect", self._bound_connecting)

    @property
    def idle(self) -> tuple[Any, ...]:
        """The driver's connections that lie on the stack."""
        return tuple(wire.connection for wire in self._stack)

    def take(self, deadline: float) -> tuple[Wire, bool]:
        """Return a connection and whether it is new."""
        if self._pid != os.getpid():
            self._leave_inherited()
        with contextlib.suppress(IndexError):
            return self._stack.pop(), False
        return self._connect(deadline), True

    def run(self, wire: Wire, script: Script, params: dict[str, Any], deadline: float) -> Rows:
        """Run a statement, and put the connection back only if it ended well."""
        try:
            rows = wire.run(script, params, deadline)
        except BaseException:
            _discard(wire)
            raise
        wire.used_at = time.monotonic()
        self._stack.append(wire)
        return rows

    def close_idle(self, seconds: float) -> None:
        """Close what has not been used for so long."""
        if self._pid != os.getpid():
            self._leave_inherited()
        oldest = time.monotonic() - seconds
        # Taken off before it is looked at: what is off the stack is nobody else's.
        kept = []
        for _ in range(len(self._stack)):
            with contextlib.suppress(IndexError):
                wire = self._stack.pop(0)
                if wire.used_at < oldest:
                    _discard(wire)
                else:
                    kept.append(wire)
        self._stack[:0] = kept

    def _leave_inherited(self) -> None:
        self._inherited.extend(self._stack)
        self._stack = []
        self._pid = os.getpid()
        self._engine.dispose(close=False)

    def _connect(self, deadline: float) -> Wire:
        if deadline <= time.monotonic():
            raise Overdue
        self._calls.deadline = deadline
        try:
            connection = _connected(self._engine)
        finally:
            self._calls.deadline = None
        connection.autocommit = True
        wire = Wire(connection)
        try:
            if self._prepare:
                self._begin_preparing(wire, deadline)
            else:
                wire.prepare_threshold = connection.prepare_threshold
        except BaseException:
            _discard(wire)
            raise
        return wire

    def _begin_preparing(self, wire: Wire, deadline: float) -> None:
        if _is_straight(wire, deadline):
            # A plan is kept for as long as the connection lives. Made when the table is empty it
            # would read the whole table, and go on so when there are a million rows.
            wire.run(_NO_SCANS, {}, deadline)
            wire.prepare_threshold = _PREPARE_THRESHOLD

    def _bound_connecting(self, _: Any, __: Any, ___: Any, params: dict[str, Any]) -> None:
        deadline = getattr(self._calls, "deadline", None)
        if deadline is not None:
            # libpq counts whole seconds, and none below two.
            left = max(2, int(deadline - time.monotonic()))
            given = int(params.get("connect_timeout") or left)
            params["connect_timeout"] = min(given, left)


def _connected(engine: Engine) -> Any:
    """Return a new connection of the driver's, made as the engine makes its own."""
    return engine.pool._creator()  # type: ignore[call-arg]  # noqa: SLF001 - see the module


def _is_straight(wire: Wire, deadline: float) -> bool:
    """Return whether no pooler stands between this process and the server."""
    ((pid,),) = wire.run(_WHO, {}, deadline)
    return bool(pid == wire.connection.info.backend_pid)


def _discard(wire: Wire) -> None:
    """Close a connection, whatever state it is in."""
    with contextlib.suppress(Exception):
        wire.close()


class _ForkLock:
    """Held while this process is inside SQLite, and while it forks."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        os.register_at_fork(
            before=self._before, after_in_parent=self._after_in_parent, after_in_child=self._renew
        )

    def _before(self) -> None:
        self.lock.acquire()

    def _after_in_parent(self) -> None:
        self.lock.release()

    def _renew(self) -> None:
        self.lock = threading.RLock()


_fork_lock = _ForkLock()


class FreshConnections:
    """Connections to a SQLite file, each for one transaction."""

    idle = ()

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._checked = False

    def run(self, script: Script, params: dict[str, Any], deadline: float) -> Rows:
        """Run the steps in one transaction and return the rows of the answer."""
        with _fork_lock.lock:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Overdue
            with contextlib.closing(_connected(self._engine)) as connection:
                # Transactions are begun and ended here, by hand.
                connection.isolation_level = None
                connection.execute(f"PRAGMA busy_timeout = {int(left * 1000)}")
                self._use_log(connection)
                with _transaction(connection, writes=script.writes):
                    return _steps(connection, script, params)

    def close_idle(self, seconds: float) -> None:
        """Do nothing: no connection outlives its transaction."""

    def _use_log(self, connection: Any) -> None:
        """Turn the write-ahead log on, once: readers and the writer then do not wait."""
        if not self._checked:
            (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
            if mode != "wal":
                with contextlib.suppress(Exception):  # somebody else is busy: next time
                    connection.execute("PRAGMA journal_mode = WAL")
            self._checked = True


@contextlib.contextmanager
def _transaction(connection: Any, *, writes: bool) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(Exception):  # SQLite may have rolled back by itself
            connection.execute("ROLLBACK")
        raise


def _steps(connection: Any, script: Script, params: dict[str, Any]) -> Rows:
    (now,) = connection.execute(SQLITE_NOW).fetchone()
    values = {**params, "now": now}
    answers: list[Rows] = [connection.execute(step, values).fetchall() for step in script.steps]
    return answers[script.answer]
