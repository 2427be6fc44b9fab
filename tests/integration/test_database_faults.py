"""The database goes away, hangs or is slow: bounded, told apart, and nothing is leaked."""

from __future__ import annotations

import ctypes
import gc
import itertools
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import sqlalchemy
from harness import leases
from harness.leases import NAMESPACE, RESULT, held, open_store, request
from harness.proxy import Proxy
from harness.rows import Rows
from harness.waiting import until

from celery_lease import connections
from celery_lease.database import Database
from celery_lease.exceptions import DatabaseUnavailable
from celery_lease.lease import LeaseRef, Renewal, Verdict
from celery_lease.store import LeaseStore
from celery_lease.wire import Wire

#: Two polls of the thread that watches the calls.
_SLACK = 2.0


@pytest.fixture
def postgresql_store(postgresql_database: str) -> Iterator[LeaseStore]:
    """Give a store on PostgreSQL."""
    store = open_store(postgresql_database)
    yield store
    store.database.dispose()


@pytest.fixture
def postgresql_rows(postgresql_database: str) -> Iterator[Rows]:
    """Read the rows of that database."""
    rows = Rows(postgresql_database)
    yield rows
    rows.close()


@pytest.fixture
def far(
    postgresql_database: str, proxies: Callable[[str], Proxy]
) -> Iterator[tuple[LeaseStore, Proxy]]:
    """Give a store that reaches its database through a network that can fail."""
    proxy = proxies(postgresql_database)
    store = open_store(proxy.url)
    yield store, proxy
    proxy.restore()
    store.database.dispose()


def _backends(rows: Rows) -> list[int]:
    """Return the server processes of the store's connections: those that hold still."""
    found = rows.query(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )
    return [row["pid"] for row in found]


def _terminate(rows: Rows) -> None:
    for pid in _backends(rows):
        rows.query("SELECT pg_terminate_backend(:pid)", pid=pid)
    until(lambda: not _backends(rows), what="the end of the server processes")


@contextmanager
def _locked(rows: Rows) -> Iterator[sqlalchemy.Connection]:
    """Hold a lock on every row, so that statements on them wait."""
    with rows.engine.connect() as connection:
        connection.exec_driver_sql("BEGIN")
        connection.exec_driver_sql("SELECT 1 FROM celery_lease FOR UPDATE")
        yield connection
        connection.exec_driver_sql("ROLLBACK")


def _blocked(rows: Rows) -> list[int]:
    found = rows.query("SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    return [row["pid"] for row in found]


def test_a_connection_that_died_between_statements_is_replaced(
    postgresql_store: LeaseStore, postgresql_rows: Rows
) -> None:
    """The server ended the idle connection: the next statement does not notice."""
    ref = held(postgresql_store)
    _terminate(postgresql_rows)
    assert postgresql_store.commit(ref, RESULT, announce_in=30)


def test_all_connections_that_lay_idle_are_suspect(
    postgresql_store: LeaseStore, postgresql_rows: Rows
) -> None:
    """After a restart of the server each dead connection would cost a failed statement."""
    held(postgresql_store)
    with ThreadPoolExecutor(3) as threads, _locked(postgresql_rows):
        waiting = [
            threads.submit(postgresql_store.claim, request(owner=f"other-{number}", dispatch=1))
            for number in range(3)
        ]
        until(lambda: 3 == len(_blocked(postgresql_rows)))
    assert {Verdict.HELD} == {answer.result().verdict for answer in waiting}
    _terminate(postgresql_rows)
    postgresql_store.find("task")
    assert 1 == len(_backends(postgresql_rows))


def test_a_held_connection_that_dies_in_a_statement_is_replaced(
    postgresql_store: LeaseStore, postgresql_rows: Rows
) -> None:
    """The statement is repeated once on a new connection, and finds the row as it is."""
    ref = held(postgresql_store)
    with ThreadPoolExecutor(1) as threads, _locked(postgresql_rows):
        renewal = threads.submit(postgresql_store.renew, [Renewal(ref, 30)])
        (first,) = until(lambda: _blocked(postgresql_rows))
        postgresql_rows.query("SELECT pg_terminate_backend(:pid)", pid=first)
        until(lambda: _blocked(postgresql_rows) not in ([], [first]))
    assert [ref] == [answer.ref for answer in renewal.result(10)]


def test_a_new_connection_that_dies_in_a_statement_is_an_error(
    postgresql_store: LeaseStore, postgresql_rows: Rows
) -> None:
    """Once is enough: a database that ends connections at once is not available."""
    ref = held(postgresql_store)
    postgresql_store.database.dispose()
    with ThreadPoolExecutor(1) as threads, _locked(postgresql_rows):
        renewal = threads.submit(postgresql_store.renew, [Renewal(ref, 30)])
        (pid,) = until(lambda: _blocked(postgresql_rows))
        postgresql_rows.query("SELECT pg_terminate_backend(:pid)", pid=pid)
        with pytest.raises(DatabaseUnavailable, match="terminating connection"):
            renewal.result(10)
    assert 1 == len(postgresql_store.renew([Renewal(ref, 30)]))


def test_a_lost_answer_to_a_claim(far: tuple[LeaseStore, Proxy]) -> None:
    """The row was taken, the answer lost: the same owner holds token 1, not 2."""
    store, proxy = far
    store.find("connected")
    lost = proxy.drop_next_response(b"task-of-the-lost-answer")
    claim = store.claim(request("task-of-the-lost-answer"))
    assert lost.happened()
    assert (LeaseRef("task-of-the-lost-answer", "owner-1", 1), 1) == (claim.ref, claim.attempt)


def test_a_lost_answer_to_a_claim_on_a_new_connection(far: tuple[LeaseStore, Proxy]) -> None:
    """Here the caller learns that nothing is known; asking again gives the same token."""
    store, proxy = far
    lost = proxy.drop_next_response(b"task-of-the-lost-answer")
    with pytest.raises(DatabaseUnavailable):
        store.claim(request("task-of-the-lost-answer"))
    assert lost.happened()
    assert 1 == held(store, "task-of-the-lost-answer").fencing_token


def test_a_lost_answer_to_a_commit(far: tuple[LeaseStore, Proxy]) -> None:
    """The result is in the row, the answer lost: the commit is known to have been done."""
    store, proxy = far
    ref = held(store, owner="owner-of-the-lost-answer")
    lost = proxy.drop_next_response(b"owner-of-the-lost-answer")
    assert store.commit(ref, RESULT, announce_in=30)
    assert lost.happened()


def test_a_lost_answer_to_a_release(far: tuple[LeaseStore, Proxy]) -> None:
    """The row waits already: the number of its message is found again."""
    store, proxy = far
    ref = held(store, owner="owner-of-the-lost-answer")
    lost = proxy.drop_next_response(b"owner-of-the-lost-answer")
    assert 1 == store.release(ref, cause="retry", charge=False, dispatch=True)
    assert lost.happened()


def test_a_black_hole_is_left_in_time(far: tuple[LeaseStore, Proxy]) -> None:
    """Nothing comes back and nothing fails: the call ends by its own bound."""
    store, proxy = far
    ref = held(store)
    proxy.cut()
    began = time.monotonic()
    with pytest.raises(DatabaseUnavailable, match="no answer within 1 s"):
        store.renew([Renewal(ref, 30)], timeout=1)
    assert 1 <= time.monotonic() - began < 1 + _SLACK
    proxy.restore()
    assert 1 == len(store.renew([Renewal(ref, 30)]))


def test_a_black_hole_at_connecting_is_left_in_time(far: tuple[LeaseStore, Proxy]) -> None:
    """Also where not even a connection comes about."""
    store, proxy = far
    proxy.cut()
    began = time.monotonic()
    with pytest.raises(DatabaseUnavailable):
        store.find("task", timeout=2)
    assert time.monotonic() - began < 2 + _SLACK


def test_a_black_hole_behind_the_door_is_left_in_time(
    far: tuple[LeaseStore, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection comes about, and then nothing answers its first question."""
    store, proxy = far
    ask = connections._is_straight

    def ask_nobody(wire: Wire, deadline: float) -> bool:
        proxy.cut()
        return ask(wire, deadline)

    monkeypatch.setattr(connections, "_is_straight", ask_nobody)
    began = time.monotonic()
    with pytest.raises(DatabaseUnavailable, match="no answer within 1 s"):
        store.find("task", timeout=1)
    assert time.monotonic() - began < 1 + _SLACK


def test_a_refused_connection_is_an_error_at_once(far: tuple[LeaseStore, Proxy]) -> None:
    """A server that is gone is not waited for, and is found again when it is back."""
    store, proxy = far
    ref = held(store)
    proxy.refuse()
    began = time.monotonic()
    with pytest.raises(DatabaseUnavailable):
        store.renew([Renewal(ref, 30)], timeout=10)
    assert time.monotonic() - began < _SLACK
    proxy.restore()
    assert 1 == len(store.renew([Renewal(ref, 30)]))


def test_a_statement_that_waits_for_a_lock_is_left_in_time(
    postgresql_store: LeaseStore, postgresql_rows: Rows
) -> None:
    """Whatever the server waits for, the caller does not wait longer than it said."""
    ref = held(postgresql_store)
    with _locked(postgresql_rows):
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailable, match=r"no answer within 0\.5 s"):
            postgresql_store.renew([Renewal(ref, 30)], timeout=0.5)
        assert time.monotonic() - began < 0.5 + _SLACK


def test_sqlite_that_stays_locked_is_left_in_time(sqlite_database: str) -> None:
    """A writer that does not end is waited for as long as the caller said."""
    store, rows = open_store(sqlite_database), Rows(sqlite_database)
    with rows.engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailable, match="locked"):
            store.claim(request(), timeout=0.5)
        assert 0.4 <= time.monotonic() - began < 0.5 + _SLACK
        connection.exec_driver_sql("ROLLBACK")
    assert 1 == held(store).fencing_token
    rows.close()


def test_threads_that_queue_for_sqlite_keep_their_bounds(sqlite_database: str) -> None:
    """Each of many threads gives up by its own bound, not by the sum of the others'."""
    store, rows = open_store(sqlite_database), Rows(sqlite_database)

    def claim(number: int) -> float:
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailable):
            store.claim(request(f"task-{number}"), timeout=0.5)
        return time.monotonic() - began

    with rows.engine.connect() as connection, ThreadPoolExecutor(8) as threads:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        assert max(threads.map(claim, range(8))) < 0.5 + _SLACK
        connection.exec_driver_sql("ROLLBACK")
    rows.close()


def test_an_asynchronous_exception_leaves_no_used_connection(
    postgresql_store: LeaseStore, postgresql_rows: Rows
) -> None:
    """A thread pool breaks a body off inside a statement: that connection is thrown away.

    Python delivers such an exception when the driver comes back from waiting.
    """
    held(postgresql_store)
    caught: list[BaseException] = []

    class Interrupt(BaseException):
        pass

    def claim() -> None:
        try:
            postgresql_store.claim(request(owner="owner-2", dispatch=1))
        except Interrupt as interrupt:
            caught.append(interrupt)

    with _locked(postgresql_rows):
        thread = threading.Thread(target=claim)
        thread.start()
        (pid,) = until(lambda: _blocked(postgresql_rows))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Interrupt)
        )
    thread.join(10)
    assert [Interrupt] == [type(interrupt) for interrupt in caught]
    until(lambda: pid not in _backends(postgresql_rows), what="the end of its server process")
    row = postgresql_store.find("task")
    assert row is not None
    assert "task" == row.task_id


def test_a_signal_leaves_no_used_connection(
    postgresql_store: LeaseStore, postgresql_rows: Rows
) -> None:
    """Celery's soft time limit strikes inside a statement: that connection is thrown away."""
    held(postgresql_store)

    class SoftTimeLimit(Exception):  # noqa: N818 - as Celery's
        pass

    def strike(*_: object) -> None:
        raise SoftTimeLimit

    before = signal.signal(signal.SIGALRM, strike)
    try:
        with _locked(postgresql_rows):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(SoftTimeLimit):
                postgresql_store.claim(request(owner="owner-2", dispatch=1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    until(lambda: not _backends(postgresql_rows), what="the end of its server process")
    assert postgresql_store.find("task") is not None


# An exception inside the driver's own connecting leaves the closing to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("url", ["postgresql", "sqlite"])
def test_interruptions_anywhere_do_no_harm(url: str, request: pytest.FixtureRequest) -> None:
    """Exceptions at random moments: later calls get their own answers, and nothing hangs."""
    store = open_store(request.getfixturevalue(f"{url}_database"))

    class Interrupt(BaseException):
        pass

    wrong: list[object] = []

    def work(running: threading.Event) -> None:
        # Ends at the interruption; anything else is a fault.
        try:
            running.set()
            for count in itertools.count():
                name = str(count % 50)
                ref = held(store, f"task-{name}", owner=f"owner-{name}")
                row = store.find(ref.task_id)
                if (ref.task_id, row and row.task_id) != (f"task-{name}", ref.task_id):
                    wrong.append((ref, row))
        except Interrupt:
            return
        except BaseException as error:  # noqa: BLE001 - all of them are told
            wrong.append(error)

    for number in range(60):
        running = threading.Event()
        thread = threading.Thread(target=work, args=(running,), daemon=True)
        thread.start()
        assert running.wait(20)
        # Not the same moment each time: while connecting, in a statement, beside it.
        time.sleep(0.002 * (number % 15))
        for _ in range(20):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Interrupt)
            )
            # Again, if it was swallowed: Python does that where it strikes a finalizer.
            thread.join(1)
            if not thread.is_alive():
                break
        assert (False, []) == (thread.is_alive(), wrong)
    assert store.claim(leases.request("last"), timeout=5).ref is not None
    store.database.dispose()
    gc.collect()  # here, where what it says is expected


def test_idle_connections_are_closed(postgresql_store: LeaseStore, postgresql_rows: Rows) -> None:
    """A worker that has nothing to do keeps no connections."""
    held(postgresql_store)
    postgresql_store.database.close_idle(60)
    assert 1 == len(_backends(postgresql_rows))
    postgresql_store.database.close_idle(0)
    until(lambda: not _backends(postgresql_rows), what="the end of the connection")
    assert postgresql_store.find("task") is not None


def test_one_thread_needs_one_connection(
    postgresql_store: LeaseStore, postgresql_rows: Rows
) -> None:
    """The last connection used is the next one used."""
    for number in range(20):
        held(postgresql_store, f"task-{number}")
    assert 1 == len(_backends(postgresql_rows))


def test_held_connections_leave_the_engine_to_others(postgresql_database: str) -> None:
    """A pool of one is enough for transactions of tasks: the store's are outside of it."""
    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 1}
    store = LeaseStore(Database(postgresql_database, options), NAMESPACE)
    held(store)
    with store.database.engine.connect() as connection:
        assert 1 == connection.exec_driver_sql("SELECT 1").scalar()
        assert store.find("task") is not None
    store.database.dispose()


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, True), ({"prepare_threshold": None}, False), ({"prepare_threshold": 0}, True)],
    ids=["ours", "given: never", "given: at once"],
)
def test_statements_are_prepared_on_a_straight_connection(
    postgresql_database: str, given: dict[str, object], *, expected: bool
) -> None:
    """Unless the user decides otherwise, in the options or in the URL."""
    database = Database(postgresql_database, {"connect_args": given})
    store = LeaseStore(database, NAMESPACE)
    for number in range(10):
        held(store, f"task-{number}")
    (connection,) = database.connections
    connection.pgconn.nonblocking = 0
    found = connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone()
    assert expected == (found[0] > 0)
    database.dispose()


def test_behind_a_pooler_nothing_is_left_in_its_connections(
    postgresql_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next client of the server's connection finds it as it would be without us."""
    monkeypatch.setattr(connections, "_is_straight", lambda *_: False)
    database = Database(postgresql_database)
    store = LeaseStore(database, NAMESPACE)
    for number in range(10):
        held(store, f"task-{number}")
    (connection,) = database.connections
    connection.pgconn.nonblocking = 0
    assert ("on",) == connection.execute("SHOW enable_seqscan").fetchone()
    assert (0,) == connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone()
    database.dispose()


_FORKING = """
    import os, sys, threading
    from harness.leases import held, open_store

    store = open_store(sys.argv[1])
    before = held(store, "parent")
    {parent}
    children = []
    for number in range({children}):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ref = held(store, f"child-{{number}}")
                assert store.commit(ref, None, announce_in=30, timeout=10)
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    {done}
    assert store.commit(before, None, announce_in=30)
    print(codes)
"""


def _run_forking(url: str, **parts: object) -> str:
    program = textwrap.dedent(_FORKING).format(**parts)
    ran = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, url],
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "" == ran.stderr
    return ran.stdout.strip()


def test_a_connection_does_not_cross_a_fork(postgresql_database: str) -> None:
    """Children work on connections of their own; the parent's goes on working."""
    parent = "backend = store.database.connections[0].info.backend_pid"
    done = "assert backend == store.database.connections[0].info.backend_pid"
    told = _run_forking(postgresql_database, children=3, parent=parent, done=done)
    assert "[0, 0, 0]" == told


def test_a_fork_finds_nobody_inside_sqlite(sqlite_database: str) -> None:
    """A parent whose thread writes without a pause forks children that can write too."""
    parent = (
        "stop = threading.Event(); writer = threading.Thread(target=lambda: ["
        "held(store, 'parent') for _ in iter(stop.is_set, True)]); writer.start()"
    )
    done = "stop.set(); writer.join()"
    told = _run_forking(sqlite_database, children=20, parent=parent, done=done)
    assert str([0] * 20) == told


def test_errors_name_no_parameters(postgresql_store: LeaseStore) -> None:
    """Whatever is wrong, arguments and results of tasks are not in the message."""
    secret = "secret\x00secret"
    with pytest.raises(Exception, match="NUL") as caught:
        postgresql_store.fail(LeaseRef("task", "owner", 1), secret, announce_in=1)
    assert "secret" not in str(caught.value)


def test_no_server_at_all() -> None:
    """The detail says what the driver said, and no password."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        store = open_store(f"postgresql+psycopg://user:s3cret@127.0.0.1:{port}/leases")
        with pytest.raises(DatabaseUnavailable, match="refused") as caught:
            store.find("task")
    assert "s3cret" not in str(caught.value)
