"""The process that keeps one throw-away server: started by `celery_lease.servers`, as a script.

What it is: it prepares a temporary folder, starts the server in it, obeys the lines `start`,
`stop` and `kill` on its standard input (each answered by one JSON line), and ends the server and
erases the folder when that input ends. As root it runs the server as `nobody`, with a copy of the
programs where `nobody` cannot reach them (a virtual environment below /root).

What it knows: processes, folders, ports, and how PostgreSQL and Redis are set up. It must not
know where the programs were found, nor anything of leases or Celery. It runs without
site-packages, so it imports the standard library only.

Invariant: it outlives its starter by a moment, and the server never outlives it. It has a session
of its own, so that what ends the starter's terminal or process group does not end it first. Only
the starter holds the other end of its input, so the kernel itself reports the starter's death, by
end of file; and should a forked child of the starter still hold a copy of that end, the
supervisor sees that its parent has changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import random
import secrets
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_START_TIMEOUT = 20.0
_STOP_TIMEOUT = 10.0
_POLL_INTERVAL = 0.01
_ORPHAN_CHECK_INTERVAL = 0.25
#: Below the ports that Linux and macOS give to outgoing connections. Were it one of those, a
#: client that knocks while the server is down could be given the very port, and keep it.
_PORTS = range(15_000, 32_000)
_READY = "ready to accept connections"
_IN_USE = "in use"


class NotStarted(RuntimeError):  # noqa: N818 (the state of a server, not a fault of the code)
    """The server did not start; the message says why."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on, and no outgoing connection is given."""
    for port in random.sample(_PORTS, 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise NotStarted(f"no free port between {_PORTS.start} and {_PORTS.stop}")


class _Supervised:
    """The supervisor's side of one server; what differs between servers is in the subclasses."""

    stop_signal = signal.SIGTERM

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.options: dict[str, str] = plan["options"]
        self.password = secrets.token_hex(16)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.directory = Path(tempfile.mkdtemp(prefix="celery-lease-", dir=_open_folder()))
        self.log = self.directory / "log"
        self.program = Path(plan["tree"]) / plan["program"]
        self.prepared = False
        self.identity: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self.identity = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            self._adopt(Path(plan["tree"]), plan["program"], nobody)

    def _adopt(self, tree: Path, program: str, owner: pwd.struct_passwd) -> None:
        """Give the folder to another user, with a copy of programs that he may not reach."""
        if not _open_to_all(self.program):
            copy = self.directory / "programs" / tree.name
            # The wheel's programs find their libraries beside the package (auditwheel's RPATH).
            for source in (tree, tree.with_name(f"{tree.name}.libs")):
                if source.is_dir():
                    shutil.copytree(source, copy.with_name(source.name), ignore=_UNUSED)
            self.program = copy / program
        for folder, _, files in os.walk(self.directory):
            for path in (Path(folder), *(Path(folder, file) for file in files)):
                os.chown(path, owner.pw_uid, owner.pw_gid)

    def prepare(self) -> None:
        """Do what a first start needs."""

    def write(self, name: str, text: str) -> Path:
        """Write a file for the server into the folder, which only the server's user may enter."""
        file = self.directory / name
        file.write_text(text)
        file.chmod(0o644)
        return file

    def argv(self) -> list[str]:
        raise NotImplementedError

    def url(self) -> str:
        raise NotImplementedError

    def run(self, argv: list[str]) -> subprocess.Popen[bytes]:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                argv,
                env=environ | {"LC_ALL": "C", "TZ": "UTC"},
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **self.identity,
            )

    def start(self) -> None:
        """Start the server and wait until it serves."""
        if self.process is not None and self.process.poll() is None:
            return
        first, deadline = not self.prepared, time.monotonic() + _START_TIMEOUT
        if first:
            self.prepare()
            self.prepared = True
        while not self._started(deadline):
            # Somebody took the port meanwhile; or, after a kill, the old backends still leave.
            if first:
                self.port = free_port()
            time.sleep(_POLL_INTERVAL * 10)

    def _started(self, deadline: float) -> bool:
        offset = self.log.stat().st_size if self.log.exists() else 0
        self.process = self.run(self.argv())
        while True:
            ended = self.process.poll() is not None
            news = self.log.read_bytes()[offset:].decode(errors="replace")
            if _READY in news.lower() and not ended:
                return True
            late = time.monotonic() > deadline
            if late or (ended and _IN_USE not in news):
                self.end(signal.SIGKILL)
                raise NotStarted(f"{self.argv()[0]} did not start: {news[-2000:].strip()}")
            if ended:
                return False
            time.sleep(_POLL_INTERVAL)

    def end(self, by: signal.Signals) -> None:
        """End the server by a signal, and by SIGKILL if it takes too long."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(by)
        self.process.send_signal(signal.SIGCONT)  # a server that a test has stopped hears nothing
        try:
            self.process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def answer(self, command: str) -> dict[str, Any]:
        """Obey one command of the starter."""
        if command != "start":
            self.end(signal.SIGKILL if command == "kill" else self.stop_signal)
            return {}
        self.start()
        pid = self.process.pid if self.process else 0
        return {"url": self.url(), "port": self.port, "pid": pid, "directory": str(self.directory)}


class _PostgreSQL(_Supervised):
    stop_signal = signal.SIGINT  # the fast shutdown: does not wait for clients

    defaults: Mapping[str, str] = {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "fsync": "off",
        "max_connections": "200",
    }

    def prepare(self) -> None:
        secret = self.write("password", self.password)
        argv = [str(self.program / "initdb"), "-D", str(self.directory / "data"), "-U", "postgres"]
        argv += ["--auth=password", f"--pwfile={secret}", "-E", "UTF8", "--locale=C", "--no-sync"]
        if self.run(argv).wait() != 0:
            raise NotStarted(f"initdb failed: {self.log.read_text()[-2000:].strip()}")

    def argv(self) -> list[str]:
        settings = {**self.defaults, **self.options, "port": str(self.port)}
        argv = [str(self.program / "postgres"), "-D", str(self.directory / "data")]
        return argv + [part for item in settings.items() for part in ("-c", "=".join(item))]

    def url(self) -> str:
        return f"postgresql+psycopg://postgres:{self.password}@127.0.0.1:{self.port}/postgres"


class _Redis(_Supervised):
    # Written before each answer, so that not even SIGKILL loses what a client was told.
    defaults: Mapping[str, str] = {"appendonly": "yes", "appendfsync": "no", "save": '""'}

    def argv(self) -> list[str]:
        settings = {**self.defaults, **self.options, "bind": "127.0.0.1", "port": str(self.port)}
        settings |= {"requirepass": self.password, "dir": f'"{self.directory}"'}
        # A file, for every user of the machine can read the arguments of a process.
        file = self.write("conf", "".join(f"{name} {settings[name]}\n" for name in settings))
        return [str(self.program), str(file)]

    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"


_UNUSED = shutil.ignore_patterns("*.py", "*.pyc", "include", "locale", "doc", "man")


def _open_to_all(path: Path) -> bool:
    """Tell whether every user may reach and run a program, or enter a folder."""
    return all(step.stat().st_mode & stat.S_IXOTH for step in [path, *path.parents])


def _open_folder() -> str:
    """Return a folder for temporary data that a server of another user can reach."""
    places = [tempfile.gettempdir(), "/tmp", "/var/tmp"]  # noqa: S108 (a private folder is made)
    if os.geteuid() != 0:
        return places[0]
    return next((place for place in places if _open_to_all(Path(place))), places[0])


def _commands() -> Iterator[str]:
    """Yield the starter's commands until it is gone."""
    parent, pending = os.getppid(), b""
    while os.getppid() == parent:
        if not select.select([0], [], [], _ORPHAN_CHECK_INTERVAL)[0]:
            continue
        received = os.read(0, 4096)
        if not received:
            return
        *lines, pending = (pending + received).split(b"\n")
        yield from (line.decode() for line in lines)


def _supervise(plan: Mapping[str, Any]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    server: _Supervised | None = None
    try:
        for command in _commands():
            try:
                server = server or {"postgres": _PostgreSQL, "redis": _Redis}[plan["kind"]](plan)
                answer = server.answer(command)
            except (NotStarted, OSError, subprocess.SubprocessError, LookupError) as error:
                answer = {"error": str(error)}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        if server is not None:
            # In no order: what it would save is erased with it.
            server.end(signal.SIGQUIT if plan["kind"] == "postgres" else signal.SIGKILL)
            shutil.rmtree(server.directory, ignore_errors=True)


if __name__ == "__main__":
    _supervise(json.loads(sys.argv[1]))
