"""One statement on one connection of psycopg's, within a bound of time.

Speaks to psycopg at the level of libpq (``psycopg.pq``), for two reasons:

- **Time.** A connection into a black hole never returns by itself: the server's
  own timeouts do not reach the client, and TCP gives up after many minutes. Here
  every wait for the network ends at the call's deadline.
- **Cost.** psycopg's cursor can do much that a statement of the store does not
  need, and takes more processor time than libpq and the server's round trip
  together.

The waiting is a ``poll`` in short turns, so that signals and asynchronous
exceptions strike in time, and that gevent can put its own in its place. A wire
from which an exception came is to be closed: an answer may still be under way.

Knows psycopg and sockets, nothing of what a statement means.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any, Final

from celery_lease.dialects import Script

__all__ = ("Overdue", "Rows", "Wire")

Rows = list[tuple[Any, ...]]

#: Seconds after which a wait looks whether it was interrupted.
_TURN = 0.2
#: Where ``select.poll`` is missing (eventlet takes it away): ``select`` takes turns.
_HAS_POLL = hasattr(select, "poll")
_TEXT: Final = 0
_BINARY: Final = 1
# Of ``psycopg.pq.ExecStatus``, which cannot be imported without the extra.
_COMMAND_OK: Final = 1
_TUPLES_OK: Final = 2
# Types by their number in PostgreSQL's catalog, which never changes; 0: the server finds out.
_UNKNOWN, _BOOL, _BYTEA, _INT8, _FLOAT8 = 0, 16, 17, 20, 701


class Overdue(Exception):  # noqa: N818 - not an error of the interface
    """The time that a call may take was over before it was answered."""


class Wire:
    """A connection in autocommit, for one statement at a time.

    Args:
        connection: A psycopg connection; from now on it is the wire's.
    """

    __slots__ = (
        "_codec",
        "_errors",
        "_names",
        "_pgconn",
        "_poll",
        "_transformer",
        "_used",
        "connection",
        "prepare_threshold",
        "used_at",
    )

    def __init__(self, connection: Any) -> None:
        # Here, since it is the extra `postgresql` that brings it.
        import psycopg
        from psycopg.adapt import Transformer

        self._errors: Any = psycopg.errors
        self.connection = connection
        #: Runs of a statement before it is prepared; None: it never is.
        self.prepare_threshold: int | None = None
        self.used_at = time.monotonic()
        self._pgconn = connection.pgconn
        self._pgconn.nonblocking = 1
        self._transformer: Any = Transformer(connection)
        codec = connection.info.encoding
        # SQL_ASCII takes whatever bytes it is given, and psycopg calls that ASCII.
        self._codec = "utf-8" if codec == "ascii" else codec
        self._used: dict[tuple[str, tuple[int, ...]], int] = {}
        self._names: dict[tuple[str, tuple[int, ...]], bytes] = {}
        self._poll: Any = None
        if _HAS_POLL:
            self._poll = select.poll()
            self._poll.register(self._pgconn.socket, select.POLLIN)

    def run(self, script: Script, params: dict[str, Any], deadline: float) -> Rows:
        """Run a statement and return its rows.

        Args:
            script: Its text, with numbered placeholders, and their names.
            params: A value for each name; more may be given.
            deadline: On the monotonic clock.

        Raises:
            Overdue: No answer came in time.
            psycopg.Error: The server refused, or the connection broke.
        """
        values: list[bytes | None] = []
        types: list[int] = []
        formats: list[int] = []
        for name in script.names:
            value = params[name]
            if type(value) is str:
                types.append(_UNKNOWN)
                formats.append(_TEXT)
                values.append(self._text(value))
            else:
                data, kind, layout = self._encoded(value)
                types.append(kind)
                formats.append(layout)
                values.append(data)
        sql = script.steps[0]
        key = (sql, tuple(types))
        prepared = self._names.get(key) or self._prepared(key, deadline)
        if prepared is not None:
            self._pgconn.send_query_prepared(prepared, values, formats)
        else:
            self._pgconn.send_query_params(sql.encode(self._codec), values, types, formats)
        return self._answer(deadline)

    def close(self) -> None:
        """Close the connection, whatever state it is in."""
        self.connection.close()

    def _prepared(self, key: tuple[str, tuple[int, ...]], deadline: float) -> bytes | None:
        if self.prepare_threshold is None:
            return None
        used = self._used[key] = self._used.get(key, 0) + 1
        if used <= self.prepare_threshold:
            return None
        name = b"celery_lease_%d" % len(self._names)
        sql, types = key
        self._pgconn.send_prepare(name, sql.encode(self._codec), types)
        self._answer(deadline)
        self._names[key] = name
        return name

    def _answer(self, deadline: float) -> Rows:
        result = self._exchange(deadline)
        status = int(result.status)
        if status == _TUPLES_OK:
            if not result.ntuples:
                return []
            self._transformer.set_pgresult(result)
            return self._transformer.load_rows(0, result.ntuples, tuple)  # type: ignore[no-any-return]
        if status == _COMMAND_OK:
            return []
        raise self._errors.error_from_result(result, self._codec)

    def _exchange(self, deadline: float) -> Any:
        """Send what is to be sent, and wait for the last result."""
        pgconn = self._pgconn
        while pgconn.flush():
            self._wait(deadline, writing=True)
            # The server may want to be rid of something before it reads on.
            pgconn.consume_input()
        result = None
        while True:
            try:
                while pgconn.is_busy():
                    self._wait(deadline)
                    pgconn.consume_input()
                found = pgconn.get_result()
            except self._errors.Error:
                if result is None or int(result.status) in (_COMMAND_OK, _TUPLES_OK):
                    # Done, but nobody has said that it is committed.
                    raise
                # Said why before it closed the connection.
                return result
            if found is None:
                if result is None:
                    raise self._errors.OperationalError("the connection was lost")
                return result
            result = found

    def _wait(self, deadline: float, *, writing: bool = False) -> None:
        """Wait until the network has something for us, or takes something from us."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Overdue
            turn = min(left, _TURN)
            if self._poll is None:
                sockets = [self._pgconn.socket]
                ready = any(select.select(sockets, sockets if writing else [], [], turn))
            elif writing:
                poll = select.poll()
                poll.register(self._pgconn.socket, select.POLLIN | select.POLLOUT)
                ready = bool(poll.poll(turn * 1000))
            else:
                ready = bool(self._poll.poll(turn * 1000))
            if ready:
                return

    def _text(self, value: str) -> bytes:
        if "\0" in value:
            # libpq would end the value there, without a word.
            raise self._errors.DataError("PostgreSQL text cannot hold NUL (0x00) characters")
        return value.encode(self._codec)

    def _encoded(self, value: Any) -> tuple[bytes | None, int, int]:
        if isinstance(value, str):
            return self._text(value), _UNKNOWN, _TEXT
        if isinstance(value, list):
            return self._text(_array(value)), _UNKNOWN, _TEXT
        for kind, encode in _ENCODERS:
            if isinstance(value, kind):
                return encode(value)
        raise TypeError(f"no parameter of a statement can be a {type(value).__name__}")


def _array(texts: list[str]) -> str:
    """Return PostgreSQL's notation of an array of texts."""
    escaped = (text.replace("\\", "\\\\").replace('"', '\\"') for text in texts)
    return "{" + ",".join(f'"{text}"' for text in escaped) + "}"


#: A value's type -> its form, PostgreSQL's number of its type, and whether the form is binary.
_ENCODERS: tuple[tuple[Any, Callable[[Any], tuple[bytes | None, int, int]]], ...] = (
    (type(None), lambda _: (None, _UNKNOWN, _TEXT)),
    (bool, lambda value: (b"t" if value else b"f", _BOOL, _TEXT)),
    (int, lambda value: (b"%d" % value, _INT8, _TEXT)),
    (float, lambda value: (repr(float(value)).encode(), _FLOAT8, _TEXT)),
    ((bytes, bytearray, memoryview), lambda value: (bytes(value), _BYTEA, _BINARY)),
)
