"""One statement on one connection: values there and back, an end to every wait, clear errors."""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from harness.proxy import READY_FOR_QUERY, Proxy

from celery_lease import wire as wires
from celery_lease.dialects import POSTGRESQL, Script
from celery_lease.wire import Overdue, Wire


def _address(url: str) -> str:
    return url.replace("postgresql+psycopg:", "postgresql:")


@pytest.fixture(params=["prepared", "unprepared"])
def wire(postgresql_database: str, request: pytest.FixtureRequest) -> Iterator[Wire]:
    """Give a wire to the test's database."""
    wire = Wire(psycopg.connect(_address(postgresql_database), autocommit=True))
    wire.prepare_threshold = 0 if request.param == "prepared" else None
    yield wire
    wire.close()


def _run(wire: Wire, statement: str, timeout: float = 5.0, **params: Any) -> list[tuple[Any, ...]]:
    script = POSTGRESQL.placed(Script((statement,)))
    return wire.run(script, params, time.monotonic() + timeout)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("text", "ä 漢 '\"\\ %s $1 :name"),
        ("text", ""),
        ("text", None),
        ("boolean", True),
        ("boolean", False),
        ("bigint", 2**63 - 1),
        ("integer", -1),
        ("double precision", 0.1),
        ("double precision", 1e300),
        ("bytea", bytes(range(256))),
        ("bytea", b""),
        ("varchar[]", ["", 'a"b', "c\\d", "{e,f}", "NULL", "ä\n"]),
        ("varchar[]", []),
        ("text", "x" * 5_000_000),
    ],
)
def test_values_come_back_as_they_went(wire: Wire, kind: str, value: object) -> None:
    """Every kind of value that a statement of the store has, with its odd cases."""
    for _ in range(2):
        assert [(value,)] == _run(wire, f"SELECT :value::{kind}", value=value)


def test_a_type_of_text_or_number_is_one_too(wire: Wire) -> None:
    """What looks like a string or a number to Python is one here: ids are made by anybody."""
    text, number = type("Id", (str,), {})("a-1"), type("Number", (int,), {})(7)
    found = _run(
        wire,
        "SELECT :text::text, :number::bigint, :view::bytea",
        text=text,
        number=number,
        view=memoryview(b"raw"),
    )
    assert [("a-1", 7, b"raw")] == found


def test_a_zero_in_a_text_is_refused(wire: Wire) -> None:
    """A text that ends early would be another id."""
    for value in ("task\0id", ["task", "task\0id"]):
        with pytest.raises(psycopg.DataError, match="NUL"):
            _run(wire, "SELECT :value", value=value)
    assert [(1,)] == _run(wire, "SELECT 1")


def test_a_value_of_an_unknown_kind_is_refused(wire: Wire) -> None:
    """The message names the kind."""
    with pytest.raises(TypeError, match="complex"):
        _run(wire, "SELECT :value", value=1j)


@pytest.mark.parametrize(
    ("statement", "error", "state"),
    [
        ("SELECT 1 / 0", psycopg.errors.DivisionByZero, "22012"),
        ("SELECT * FROM missing_table", psycopg.errors.UndefinedTable, "42P01"),
        ("DO $$BEGIN RAISE EXCEPTION 'odd' USING ERRCODE = 'ZZ123'; END$$", psycopg.Error, "ZZ123"),
        ("SELECT pg_terminate_backend(pg_backend_pid())", psycopg.errors.AdminShutdown, "57P01"),
    ],
)
def test_errors_are_the_drivers(
    postgresql_database: str, statement: str, error: type[Exception], state: str
) -> None:
    """Class and SQLSTATE say what happened, as with the driver's own cursor."""
    wire = Wire(psycopg.connect(_address(postgresql_database), autocommit=True))
    with pytest.raises(error) as raised:
        _run(wire, statement)
    assert state in (getattr(raised.value, "sqlstate", None), raised.value.diag.sqlstate)
    wire.close()


def test_notices_on_the_way_are_passed_over(wire: Wire) -> None:
    """More of them than a buffer holds, before the answer."""
    noise = "DO $$BEGIN FOR i IN 1..5000 LOOP RAISE NOTICE 'noise %', i; END LOOP; END$$"
    assert [] == _run(wire, noise)
    assert [(2,)] == _run(wire, "SELECT 2")


def test_a_wait_ends_at_the_deadline(wire: Wire) -> None:
    """Whatever the server does meanwhile."""
    began = time.monotonic()
    with pytest.raises(Overdue):
        _run(wire, "SELECT pg_sleep(5)", timeout=0.3)
    assert 0.3 <= time.monotonic() - began < 2


def test_a_statement_that_cannot_be_sent_ends_at_the_deadline(
    postgresql_database: str, proxies: Callable[[str], Proxy]
) -> None:
    """Nobody reads: the network takes a part of it, and then no more."""
    proxy = proxies(postgresql_database)
    wire = Wire(psycopg.connect(_address(proxy.url), autocommit=True))
    proxy.cut()
    began = time.monotonic()
    with pytest.raises(Overdue):
        _run(wire, "SELECT :value::text", timeout=0.5, value="x" * 50_000_000)
    assert 0.5 <= time.monotonic() - began < 3
    wire.close()


def test_a_signal_strikes_while_an_answer_is_awaited(wire: Wire) -> None:
    """A soft time limit does not wait for the database."""

    class Struck(Exception):  # noqa: N818 - not one
        pass

    def strike(*_: object) -> None:
        raise Struck

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    began = time.monotonic()
    try:
        with pytest.raises(Struck):
            _run(wire, "SELECT pg_sleep(5)", timeout=10)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 2


def test_without_poll_select_waits(
    postgresql_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where eventlet has taken `poll` away."""
    monkeypatch.delattr(select, "poll")
    monkeypatch.setattr(wires, "_HAS_POLL", False)
    wire = Wire(psycopg.connect(_address(postgresql_database), autocommit=True))
    assert [(1,)] == _run(wire, "SELECT 1")
    value = "x" * 5_000_000
    assert [(value,)] == _run(wire, "SELECT :value::text", value=value)
    with pytest.raises(Overdue):
        _run(wire, "SELECT pg_sleep(5)", timeout=0.3)
    wire.close()


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1", "SQL_ASCII"])
def test_the_connections_encoding_is_kept_to(postgresql_database: str, encoding: str) -> None:
    """A client's encoding may have been set in the URL or for the role."""
    connection = psycopg.connect(
        _address(postgresql_database), autocommit=True, client_encoding=encoding
    )
    wire = Wire(connection)
    assert [(4,)] == _run(wire, "SELECT length(:value::text)", value="käse")
    wire.close()


def _relay_all_but_ready(listener: socket.socket, server: socket.socket, marker: bytes) -> None:
    """Forward a connection, and close it before the end of the answer that holds the marker."""
    client, _ = listener.accept()
    with client, server:
        answer, logged_in = b"", False
        while True:
            ready, _, _ = select.select([client, server], [], [])
            if client in ready:
                server.sendall(client.recv(65536))
            if server in ready:
                answer += server.recv(65536)
                whole = answer.endswith(READY_FOR_QUERY)
                if not logged_in:
                    # A password takes several answers, and none of them ends so.
                    logged_in = whole
                    client.sendall(answer)
                    answer = b""
                if not whole or not answer:
                    continue
                if marker in answer:
                    client.sendall(answer.removesuffix(READY_FOR_QUERY))
                    return
                client.sendall(answer)
                answer = b""


def test_rows_without_the_word_that_they_are_committed_are_none(postgresql_database: str) -> None:
    """The server sends them before it commits; a connection that ends in between has no answer."""
    parts = urlsplit(postgresql_database)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = socket.create_connection((parts.hostname or "", parts.port or 5432))
        relay = threading.Thread(
            target=_relay_all_but_ready, args=(listener, server, b"half-done"), daemon=True
        )
        relay.start()
        conninfo = psycopg.conninfo.make_conninfo(
            _address(postgresql_database),
            host="127.0.0.1",
            port=listener.getsockname()[1],
            sslmode="disable",
            gssencmode="disable",
        )
        wire = Wire(psycopg.connect(conninfo, autocommit=True))
        with pytest.raises(psycopg.OperationalError):
            _run(wire, "SELECT 'half-' || 'done'")
        relay.join(5)
        wire.close()
