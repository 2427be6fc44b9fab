"""The demo's worker processes, and the keeper that ends them should the demo be killed.

What it is: `Crew` starts real `celery worker` processes, each the leader of a session of its own
with its log in a file, and sends them signals. Run as a script it is the keeper: it reads process
groups from its standard input (`+123` when one was started, `-123` when it was reaped); at the
end of that input it kills the groups that are left and erases the demo's folder.

What it knows: processes, signals, files. It must not know leases or Celery's Python interface,
and imports nothing but the standard library, for the keeper runs without site-packages.

Invariant: nothing that the demo started outlives it, however it ended. Only the demo holds the
other end of the keeper's input, so the kernel itself reports the demo's death.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

__all__ = ("Crew", "Worker")

_PACKAGE_PARENT = Path(__file__).resolve().parents[1]


class Worker:
    """One worker with one pool process.

    Attributes:
        name: As the demo calls it, "worker 1".
        node: Its Celery node name, which its owner ids begin with.
        log: The file with its log.
        killed: Whether the demo has killed it.
    """

    def __init__(self, name: str, app: str, directory: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.node = f"{name.replace(' ', '')}@demo"
        self.log = directory / f"{self.node}.log"
        command = [sys.executable, "-m", "celery", "-A", app, "worker", "-n", self.node]
        command += ["-c", "1", "-P", "prefork", "-l", "INFO"]
        command += ["--without-gossip", "--without-mingle"]  # they wait a second at start
        path = [str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=directory,
                env={
                    **os.environ,
                    **env,
                    "PYTHONPATH": os.pathsep.join(filter(None, path)),
                    "TMPDIR": str(directory),  # what a killed worker leaves there is erased too
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid
        self.killed = False

    @property
    def running(self) -> bool:
        """Whether its main process is there."""
        return self.process.poll() is None

    @property
    def ready(self) -> bool:
        """Whether it has begun to consume."""
        return f"{self.node} ready." in self.log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL the main process and its pool at once, as the loss of a host does."""
        if self.killed:
            return  # the number of its process group may be another's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self.killed = True


class Crew:
    """The demo's workers; leaving the context kills all that are left.

    Args:
        app: Module of the Celery app, as `-A` takes it.
        directory: The demo's folder, which the keeper erases.

    Attributes:
        workers: Those that were started, the killed ones too.
        env: Variables for the workers that start from now on.
    """

    def __init__(self, app: str, directory: Path) -> None:
        self.workers: list[Worker] = []
        self.env: dict[str, str] = {}
        self._app, self._directory = app, directory
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(directory)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def start(self, name: str) -> Worker:
        """Start a worker; it consumes some two seconds later."""
        worker = Worker(name, self._app, self._directory, self.env)
        self._tell(f"+{worker.pid}\n")
        self.workers.append(worker)
        return worker

    def kill(self, worker: Worker) -> None:
        """SIGKILL a worker with its pool, at once."""
        worker.kill()
        self._tell(f"-{worker.pid}\n")

    def named(self, node: str | None) -> str:
        """Return the demo's name for a node or an owner id, or "nobody"."""
        for worker in self.workers:
            if node and (node == worker.node or node.startswith(f"{worker.node}:")):
                return worker.name
        return "nobody"

    def close(self) -> None:
        """Kill what is left, and have the folder erased."""
        for worker in self.workers:
            worker.kill()
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        self._keeper.wait()

    def __enter__(self) -> Crew:  # noqa: PYI034 - Self is in typing from 3.11 on
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _tell(self, line: str) -> None:
        if self._keeper.stdin is not None:
            self._keeper.stdin.write(line.encode())
            self._keeper.stdin.flush()


def _keep(directory: str) -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    _keep(sys.argv[1])
