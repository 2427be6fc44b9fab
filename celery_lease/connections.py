"""Runs scripts on connections: held ones for PostgreSQL, fresh ones for SQLite.

**PostgreSQL.** A small stack of AUTOCOMMIT connections per process: no pool
check-out, no BEGIN, one round trip per statement. A connection returns to the
stack only from a statement that ended well. Whatever else happens, be it an
error, a signal's exception or an asynchronous one in the middle of a statement,
the connection is thrown away. After a fork the inherited ones are neither used
nor closed, for closing would tell the server on the parent's behalf.

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

from sqlalchemy import Connection, Engine, event

from celery_lease.dialects import SQLITE_NOW, Script
from celery_lease.patience import Line, watch

__all__ = ("FreshConnections", "HeldConnections", "Overdue")

Rows = list[tuple[Any, ...]]
_LINE = "celery_lease_line"


class Overdue(Exception):  # noqa: N818 - not an error of the interface
    """The time that a call may take was over before it began, or it was cut off."""


class _Held:
    """One connection of the stack."""

    __slots__ = ("connection", "line", "used_at")

    def __init__(self, connection: Connection, line: Line) -> None:
        self.connection = connection
        self.line = line
        self.used_at = time.monotonic()

    def discard(self) -> None:
        """Close the connection, whatever state it is in."""
        with contextlib.suppress(Exception):
            self.connection.invalidate()
        with contextlib.suppress(Exception):
            self.connection.close()
        self.line.close()


class HeldConnections:
    """The connections of this process to PostgreSQL."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._stack: list[_Held] = []
        self._calls = threading.local()
        self._pid = os.getpid()
        self._inherited: list[_Held] = []
        event.listen(engine, "do_connect", self._bound_connecting)
        # First in the row: SQLAlchemy's own first questions are bounded as well.
        event.listen(engine, "connect", self._bound_connection, insert=True)

    def take(self, deadline: float) -> tuple[_Held, bool]:
        """Return a connection and whether it is new."""
        if self._pid != os.getpid():
            self._leave_inherited()
        with contextlib.suppress(IndexError):
            return self._stack.pop(), False
        return self._connect(deadline), True

    def run(self, held: _Held, script: Script, params: dict[str, Any], deadline: float) -> Rows:
        """Run a statement, and put the connection back only if it ended well."""
        patience = watch()
        try:
            patience.add(held.line, deadline)
            try:
                result = held.connection.exec_driver_sql(script.steps[0], params)
                rows = result.fetchall() if result.returns_rows else []
            finally:
                patience.remove(held.line)
        except BaseException:
            held.discard()
            if held.line.cut:
                raise Overdue from None
            raise
        held.used_at = time.monotonic()
        self._stack.append(held)
        return rows  # type: ignore[return-value]

    def close_idle(self, seconds: float) -> None:
        """Close what has not been used for so long."""
        if self._pid != os.getpid():
            self._leave_inherited()
        oldest = time.monotonic() - seconds
        # Taken off before it is looked at: what is off the stack is nobody else's.
        kept = []
        for _ in range(len(self._stack)):
            with contextlib.suppress(IndexError):
                held = self._stack.pop(0)
                if held.used_at < oldest:
                    held.discard()
                else:
                    kept.append(held)
        self._stack[:0] = kept

    def _leave_inherited(self) -> None:
        self._inherited.extend(self._stack)
        self._stack = []
        self._pid = os.getpid()
        self._engine.dispose(close=False)

    def _connect(self, deadline: float) -> _Held:
        if deadline <= time.monotonic():
            raise Overdue
        self._calls.deadline, self._calls.line = deadline, None
        try:
            connection = self._autocommit.connect()
            line = connection.info.pop(_LINE)
            # Out of the pool: it is never reset by it, nor handed to somebody else.
            connection.detach()
            return _Held(connection, line)
        except BaseException:
            if self._calls.line is not None and self._calls.line.cut:
                raise Overdue from None
            raise
        finally:
            if self._calls.line is not None:
                watch().remove(self._calls.line)
            self._calls.deadline = self._calls.line = None

    def _bound_connecting(self, _: Any, __: Any, ___: Any, params: dict[str, Any]) -> None:
        deadline = getattr(self._calls, "deadline", None)
        if deadline is not None:
            # libpq counts whole seconds, and none below two.
            left = max(2, int(deadline - time.monotonic()))
            given = int(params.get("connect_timeout") or left)
            params["connect_timeout"] = min(given, left)

    def _bound_connection(self, driver_connection: Any, record: Any) -> None:
        deadline = getattr(self._calls, "deadline", None)
        if deadline is not None:
            line = Line(driver_connection.fileno())
            record.info[_LINE] = self._calls.line = line
            watch().add(line, deadline)


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

    def __init__(self, engine: Engine) -> None:
        self._autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._checked = False

    def run(self, script: Script, params: dict[str, Any], deadline: float) -> Rows:
        """Run the steps in one transaction and return the rows of the answer."""
        with _fork_lock.lock:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Overdue
            with self._autocommit.connect() as connection:
                connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(left * 1000)}")
                self._use_log(connection)
                with _transaction(connection, writes=script.writes):
                    return _steps(connection, script, params)

    def close_idle(self, seconds: float) -> None:
        """Do nothing: no connection outlives its transaction."""

    def _use_log(self, connection: Connection) -> None:
        """Turn the write-ahead log on, once: readers and the writer then do not wait."""
        if not self._checked:
            mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar()
            if mode != "wal":
                with contextlib.suppress(Exception):  # somebody else is busy: next time
                    connection.exec_driver_sql("PRAGMA journal_mode = WAL")
            self._checked = True


@contextlib.contextmanager
def _transaction(connection: Connection, *, writes: bool) -> Iterator[None]:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # SQLite may have rolled back by itself
            connection.exec_driver_sql("ROLLBACK")
        raise
    connection.exec_driver_sql("COMMIT")


def _steps(connection: Connection, script: Script, params: dict[str, Any]) -> Rows:
    now = connection.exec_driver_sql(SQLITE_NOW).scalar()
    values = {**params, "now": now}
    answers: list[Rows] = []
    for step in script.steps:
        result = connection.exec_driver_sql(step, values)
        answers.append(list(result) if result.returns_rows else [])
    return answers[script.answer]
