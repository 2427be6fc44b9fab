"""The harness itself: a fault that is not applied, or an event that is lost, would prove nothing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import psycopg
import pytest
import redis
import sqlalchemy
from harness import sources, watchdog
from harness.journal import Journal
from harness.proxy import Proxy
from harness.redis_room import RedisRoom
from harness.rows import Rows
from harness.statements import StatementCounter
from harness.waiting import until

from celery_lease import servers

if TYPE_CHECKING:
    from harness.workers import Crew

TESTS = Path(__file__).resolve().parents[1]
#: An app without leases: the harness is tested apart from what it will test.
PLAIN = """
from celery import Celery
from harness.apps import AppSettings, plain

settings = AppSettings.from_environment()
app = Celery(broker=settings.broker_url, backend=settings.result_backend)
app.conf.update(task_default_queue=settings.queue, harness_journal=settings.journal)
app.task(bind=True, name="plain")(plain)
"""


# The journal


def _append(path: str, count: int) -> None:
    for number in range(count):
        Journal(path).write("noted", task_id=f"{os.getpid()}-{number}", padding="x" * 500)


def test_entries_of_many_processes_never_mix(journal: Journal) -> None:
    """Four processes append at once, and every line is whole."""
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_append, args=(str(journal.path), 50)) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert 4 * 50 == len({entry.task_id for entry in journal.entries("noted")})


def test_a_line_in_the_making_is_not_read(journal: Journal) -> None:
    """A reader sees whole entries only."""
    journal.write("whole", token=7, colour="red")
    with journal.path.open("a") as file:
        file.write('{"event": "half')
    assert ["whole"] == [entry.event for entry in journal.entries()]
    assert 1 == len(journal.entries("whole", token=7, colour="red"))
    assert [] == journal.entries(token=8)


def test_waiting_in_vain_shows_the_journal(journal: Journal) -> None:
    """A failure tells what happened in place of what was awaited."""
    journal.write("other")
    with pytest.raises(AssertionError, match="other"):
        journal.wait("awaited", timeout=0.01)


# The proxy


@pytest.fixture
def echo() -> Iterator[str]:
    """Give the URL of a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionResetError):
            while received := connection.recv(1024):
                connection.sendall(received)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.fixture
def proxy(echo: str, proxies: Callable[[str], Proxy]) -> Proxy:
    return proxies(echo)


def _connect(proxy: Proxy) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", proxy.port), timeout=5)
    connection.settimeout(5)
    return connection


def _silent(connection: socket.socket) -> bool:
    connection.settimeout(0.1)
    try:
        return not connection.recv(10)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(5)


def test_a_proxy_forwards(proxy: Proxy) -> None:
    """Without a fault, both directions pass."""
    with _connect(proxy) as connection:
        connection.sendall(b"hello")
        assert b"hello" == connection.recv(10)


def test_a_cut_is_silent_and_what_was_sent_arrives_late(proxy: Proxy) -> None:
    """A partition breaks no connection; when it heals, old and new connections go on."""
    with _connect(proxy) as old:
        old.sendall(b"1")
        assert b"1" == old.recv(10)
        proxy.cut()
        with _connect(proxy) as new:
            for connection in (old, new):
                connection.sendall(b"2")
                assert _silent(connection)
            proxy.restore()
            for connection in (old, new):
                assert b"2" == connection.recv(10)


def test_a_refusal_resets_old_connections_and_takes_no_new_ones(proxy: Proxy) -> None:
    """A server that is gone resets what was open; after the restoration it serves again."""
    with _connect(proxy) as old:
        until(lambda: proxy.connections == 1, what="the connection")
        proxy.refuse()
        with pytest.raises(ConnectionResetError):
            old.recv(10)
    with pytest.raises(ConnectionRefusedError):
        _connect(proxy)
    proxy.restore()
    with _connect(proxy) as connection:
        connection.sendall(b"back")
        assert b"back" == connection.recv(10)


def test_a_lost_response_was_acted_upon(
    postgresql_database: str, proxies: Callable[[str], Proxy]
) -> None:
    """The server has committed what the client, whose connection broke, heard nothing of."""
    proxy = proxies(postgresql_database)
    rows = Rows(postgresql_database)
    rows.execute("CREATE TABLE claims (name text)")
    lost = proxy.drop_next_response(b"precious")
    address = proxy.url.replace("+psycopg", "")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("INSERT INTO claims VALUES (%s)", ["cheap"])
        with pytest.raises(psycopg.OperationalError):
            connection.execute("INSERT INTO claims VALUES (%s)", ["precious"])
    lost.wait()
    assert ["cheap", "precious"] == [row["name"] for row in rows.query("SELECT * FROM claims")]
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("INSERT INTO claims VALUES (%s)", ["precious"])
    rows.close()


# Databases and brokers


def test_each_test_has_a_migrated_database_of_its_own(lease_database: str) -> None:
    """The tables are there, and they are empty."""
    rows = Rows(lease_database)
    assert [] == rows.all()
    rows.close()


def test_databases_of_two_tests_do_not_meet(postgresql_databases: Any) -> None:
    """What one test writes another does not see, and a database in use can be dropped."""
    first, second = postgresql_databases.migrated(), postgresql_databases.migrated()
    insert = "INSERT INTO celery_lease_fence VALUES ('door', 1, now())"
    with psycopg.connect(first.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(insert)
        with psycopg.connect(second.replace("+psycopg", "")) as other:
            assert (0,) == other.execute("SELECT count(*) FROM celery_lease_fence").fetchone()
        postgresql_databases.drop(first)
        with pytest.raises(psycopg.OperationalError):
            connection.execute(insert)
    postgresql_databases.drop(second)


def test_leases_are_aged_in_the_form_of_the_database(lease_database: str, rows: Rows) -> None:
    """`Rows.expire` moves the end of a lease a second into the database's past."""
    now = {"postgresql": "clock_timestamp()", "sqlite": "'2000-01-01 00:00:00.000000'"}
    dialect = rows.engine.dialect.name
    columns = {
        column["name"]: column
        for column in sqlalchemy.inspect(rows.engine).get_columns("celery_lease")
        if not column["nullable"] and column["default"] is None
    }
    values = dict.fromkeys(columns, "0") | {
        "task_id": "'aged'",
        "namespace": "'n'",
        "task_name": "'t'",
        "state": "'running'",
        "created_at": now[dialect],
        "fencing_token": "1",
        "attempt": "1",
        "owner_id": "'me'",
        "lease_until": now[dialect],
    }
    if "keep_payload" in columns:
        values["keep_payload"] = "false"
    names = ", ".join(values)
    rows.execute(f"INSERT INTO celery_lease ({names}) VALUES ({', '.join(values.values())})")
    rows.expire("aged")
    row = rows.get("aged")
    assert row is not None
    if dialect == "sqlite":
        assert len("2000-01-01 00:00:00.000000") == len(row["lease_until"])
    else:
        assert row["lease_until"].tzinfo is not None
    assert "running" == rows.wait("aged", state="running", owner_id="me")["state"]


def test_statements_are_counted_exactly(statement_counter: StatementCounter) -> None:
    """Each statement counts once, BEGIN and COMMIT too, prepared or not; the counter's never."""
    address = statement_counter.url.replace("+psycopg", "")
    with psycopg.connect(address, autocommit=True) as connection:
        for number in range(10):
            connection.execute("SELECT count(*) FROM celery_lease WHERE attempt = %s", [number])
        assert {10} == set(statement_counter.calls().values())
        with connection.transaction():
            connection.execute("SELECT 1")
    assert 13 == statement_counter.total()
    assert 10 == statement_counter.total("celery_lease", "attempt")
    statement_counter.reset()
    assert 0 == statement_counter.total()


@pytest.fixture
def shared_redis(own_redis: servers.Server) -> Iterator[redis.Redis]:
    """Give a Redis server with somebody's data in the databases 14 and 15."""
    for index in (14, 15):
        with redis.Redis(port=own_redis.port, password=_password(own_redis), db=index) as client:
            client.set("precious", index)
    with redis.Redis(port=own_redis.port, password=_password(own_redis), db=13) as client:
        yield client


def _password(server: servers.Server) -> str:
    return server.url.split(":")[2].partition("@")[0]


def test_nobodys_data_on_a_shared_redis_is_touched(
    own_redis: servers.Server, shared_redis: redis.Redis
) -> None:
    """An empty index is reserved, only it is erased, and two test processes take two."""
    first = RedisRoom(own_redis.url, private=False)
    second = RedisRoom(own_redis.url, private=False)
    assert (f"{own_redis.url[:-1]}13", f"{own_redis.url[:-1]}12") == (first.url, second.url)
    shared_redis.set("message", 1)
    first.erase()
    assert 1 == shared_redis.dbsize()
    first.close()
    second.close()
    assert {"db14", "db15"} == set(shared_redis.info("keyspace"))


def test_room_of_a_killed_test_process_is_taken_over(
    own_redis: servers.Server, shared_redis: redis.Redis
) -> None:
    """A marker whose process is gone does not hold its index for ever."""
    room = RedisRoom(own_redis.url, private=False)
    shared_redis.set("left", 1)
    marker = next(key for key in shared_redis.scan_iter() if key != b"left")
    shared_redis.set(marker, f"{os.getpid()}:0.0")
    heir = RedisRoom(own_redis.url, private=False)
    assert room.url == heir.url
    heir.close()
    assert 0 == shared_redis.dbsize()


def test_a_named_server_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who names a server wants the tests to run on it, and not to be skipped."""
    monkeypatch.setenv("CELERY_LEASE_TEST_REDIS_URL", "redis://127.0.0.1:1/0")
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(RuntimeError, match="CELERY_LEASE_TEST_REDIS_URL"),
    ):
        sources.redis(stack)


def test_the_machines_servers_may_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CELERY_LEASE_TEST_SERVERS=embedded no other server is asked."""
    monkeypatch.delenv("CELERY_LEASE_TEST_REDIS_URL", raising=False)
    monkeypatch.setenv("CELERY_LEASE_TEST_SERVERS", "embedded")
    with contextlib.ExitStack() as stack:
        try:
            source = sources.redis(stack)
        except servers.ServerUnavailable as unavailable:
            pytest.skip(str(unavailable))
        assert source.embedded is not None
        assert source.url == source.embedded.url


# Workers


@pytest.fixture
def plain_crew(crews: Callable[..., Crew], tmp_path: Path) -> Crew:
    return crews(f"sqlite:///{tmp_path / 'none.db'}")


def test_a_crew_runs_what_its_app_sends(crew: Crew, journal: Journal) -> None:
    """A worker is ready when it says so, runs what the sender's app sends, and ends warmly."""
    worker = crew.start()
    assert 5 == crew.task("plain").delay(5).get(timeout=10)
    (entry,) = journal.wait("plain", value=5)
    assert [entry.pid] == worker.children()
    assert 0 == worker.stop()
    assert not worker.running


def test_a_stopped_child_works_on_when_continued(plain_crew: Crew) -> None:
    """SIGSTOP halts a pool child, SIGCONT lets it go on."""
    worker = plain_crew.start(source=PLAIN)
    child = worker.sigstop_child()
    result = plain_crew.task("plain").delay(1)
    assert psutil.STATUS_STOPPED == psutil.Process(child).status()
    assert not result.ready()
    worker.cont(child)
    assert 1 == result.get(timeout=10)


def test_a_killed_group_leaves_no_process(plain_crew: Crew) -> None:
    """SIGKILL of the group ends main process and children, stopped ones too."""
    worker = plain_crew.start(source=PLAIN, concurrency=2)
    everything = [worker.pid, *worker.children()]
    assert 3 == len(everything)
    worker.sigstop_group()
    worker.kill_group()
    assert [] == [pid for pid in everything if _runs(pid)]


def test_an_app_that_does_not_start_shows_its_log(plain_crew: Crew) -> None:
    """A worker that ends before it is ready fails the wait at once."""
    with pytest.raises(AssertionError, match="no such thing"):
        plain_crew.start(source="raise RuntimeError('no such thing')\n")


def test_workers_die_with_the_test_process(tmp_path: Path) -> None:
    """SIGKILL of the test process ends the process groups that its watchdog was told of."""
    script = (
        "import subprocess, sys, time\nfrom harness.watchdog import Watchdog\n"
        "dog = Watchdog()\n"
        "args = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "kept = subprocess.Popen(args, start_new_session=True)\n"
        "freed = subprocess.Popen(args, start_new_session=True)\n"
        "dog.watch(kept.pid); dog.watch(freed.pid); dog.forget(freed.pid)\n"
        "print(kept.pid, freed.pid, flush=True)\ntime.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        kept, freed = map(int, process.stdout.readline().split())
        process.kill()
    assert Path(watchdog.__file__).is_file()
    until(lambda: not _runs(kept), what=f"{kept} is gone")
    assert _runs(freed)
    os.kill(freed, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# Skips


@pytest.mark.parametrize(
    ("ci", "expected"), [("true", {"failed": 1, "error": 1, "skipped": 1}), ("", {"skipped": 3})]
)
def test_a_skip_is_an_error_in_ci(tmp_path: Path, ci: str, expected: dict[str, int]) -> None:
    """With CI=true nothing is left out unseen; `may_skip` names the exceptions."""
    (tmp_path / "test_skips.py").write_text(
        "import pytest\n"
        "def test_body(): pytest.skip('a')\n"
        "@pytest.mark.skip(reason='b')\ndef test_mark(): pass\n"
        "@pytest.mark.may_skip\n@pytest.mark.skip(reason='c')\ndef test_allowed(): pass\n"
    )
    printed = _pytest(tmp_path, ci)
    for outcome, count in expected.items():
        assert f"{count} {outcome}" in printed, printed


def test_a_module_that_skips_itself_is_an_error_in_ci(tmp_path: Path) -> None:
    """An optional import that is missing does not silence a module."""
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('nowhere')\n")
    assert "1 error" in _pytest(tmp_path, "true")
    assert "1 skipped" in _pytest(tmp_path, "")


def _pytest(folder: Path, ci: str) -> str:
    places = [str(TESTS), str(Path(servers.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, places))
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_waiting_ends_at_its_time_limit() -> None:
    """A condition that never holds fails the test in time, and names what was awaited."""
    started = time.monotonic()
    with pytest.raises(AssertionError, match="the impossible"):
        until(lambda: False, timeout=0.05, what="the impossible")
    assert time.monotonic() - started < 1
