"""Real workers: `celery -A … worker` as processes that tests may kill, stop and continue."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from celery import Celery

import celery_lease
from harness.apps import AppSettings, build
from harness.journal import Journal
from harness.waiting import until
from harness.watchdog import Watchdog

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = Path(celery_lease.__path__[0]).resolve().parent


@functools.cache
def _watchdog() -> Watchdog:
    import atexit

    watchdog = Watchdog()
    atexit.register(watchdog.close)
    return watchdog


class WorkerProcess:
    """One worker, the leader of a session of its own, with its log in a file.

    Args:
        name: Node name, and the log's.
        directory: Folder for the log and the source; the worker's working directory.
        env: Variables on top of this process's own.
        app: Module of the app, as `-A` takes it.
        source: Text of a module to write and to use in place of `app`.
        argv: Further arguments of `celery worker`.
        concurrency: Pool children.
        pool: Pool, as `-P` takes it.
        command: Another command than `worker`, with all its arguments.
    """

    def __init__(  # noqa: PLR0913 - what a command line and a process are made of, by keyword
        self,
        name: str,
        directory: Path,
        *,
        env: Mapping[str, str],
        app: str = "harness.worker_app",
        source: str | None = None,
        argv: Sequence[str] = (),
        concurrency: int = 1,
        pool: str = "prefork",
        command: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.node = f"{name}@{uuid.uuid4().hex[:8]}"
        self.log_path = directory / f"{self.node}.log"
        if source is not None:
            app = f"app_{uuid.uuid4().hex[:8]}"
            (directory / f"{app}.py").write_text(source)
        worker = ["worker", "-n", self.node, "-l", "INFO", "-c", str(concurrency), "-P", pool]
        worker += ["--without-gossip", "--without-mingle"]  # they wait a second at start
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", app, *(command or [*worker, *argv])],
                cwd=directory,
                env=_environment(directory) | dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self.process.pid
        _watchdog().watch(self.pid)
        self._forgotten = False

    def wait_ready(self, timeout: float = 30.0) -> WorkerProcess:
        """Wait until the worker consumes."""
        self.wait_for_log(f"{self.node} ready.", timeout=timeout)
        return self

    def wait_for_log(self, text: str, timeout: float = 15.0) -> str:
        """Wait until the log holds a text, and return the log."""

        def found() -> str:
            log = self.log()
            if text not in log and self.process.poll() is not None:
                raise AssertionError(
                    f"{self.node} ended ({self.process.returncode}):\n{self.log()}"
                )
            return log if text in log else ""

        return until(found, timeout=timeout, what=lambda: f"{text!r} in the log\n{self.log()}")

    def log(self) -> str:
        """Return everything logged so far."""
        return self.log_path.read_text(errors="replace")

    @property
    def running(self) -> bool:
        """Whether the main process is still there."""
        return self.process.poll() is None

    def children(self) -> list[int]:
        """Return the pool children's process ids, in ascending order; not the lease clerk's."""
        try:
            found = psutil.Process(self.pid).children()
        except psutil.NoSuchProcess:
            return []
        others = set(map(int, re.findall(r"clerk_engaged pid=(\d+)", self.log())))
        return sorted(
            child.pid
            for child in found
            if child.status() != psutil.STATUS_ZOMBIE and child.pid not in others
        )

    def stop(self, timeout: float = 20.0) -> int:
        """Shut down warmly (SIGTERM) and return the exit status.

        Raises:
            AssertionError: It did not end in time; it is killed then.
        """
        if self.running:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.node} did not shut down\n{self.log()}") from None
        finally:
            self.kill_group()

    def kill_group(self) -> None:
        """SIGKILL main process and children at once, as the loss of the host does, and reap."""
        stragglers = self._descendants()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._forgotten:
                os.killpg(self.pid, signal.SIGKILL)
        for child in stragglers:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.wait()
        until(lambda: not any(map(_runs, stragglers)), what=lambda: f"{stragglers} are gone")
        if not self._forgotten:
            _watchdog().forget(self.pid)
            self._forgotten = True

    def _descendants(self) -> list[psutil.Process]:
        try:
            found: list[psutil.Process] = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return found

    def kill_child(self, pid: int | None = None) -> int:
        """SIGKILL a pool child (the first one if none is named) and return its id."""
        return self._signal_child(pid, signal.SIGKILL)

    def sigstop_child(self, pid: int | None = None) -> int:
        """SIGSTOP a pool child (the first one if none is named), wait for it, return its id."""
        stopped = self._signal_child(pid, signal.SIGSTOP)
        _wait_stopped(stopped)
        return stopped

    def sigstop_group(self) -> None:
        """SIGSTOP main process and children, as a suspended host."""
        os.killpg(self.pid, signal.SIGSTOP)
        for pid in (self.pid, *(child.pid for child in self._descendants())):
            _wait_stopped(pid)

    def cont(self, pid: int | None = None) -> None:
        """SIGCONT one process, or all of the worker."""
        if pid is None:
            os.killpg(self.pid, signal.SIGCONT)
        else:
            os.kill(pid, signal.SIGCONT)

    def _signal_child(self, pid: int | None, number: signal.Signals) -> int:
        children = self.children()
        target = children[0] if pid is None else pid
        if target not in children:
            raise AssertionError(f"{target} is no child of {self.node}: {children}")
        os.kill(target, number)
        return target


class Crew:
    """The workers of one test, with the app that sends to them and their journal.

    Attributes:
        settings: The app's settings; a worker may be started with others.
        app: The sender's app, with the same tasks: `crew.app.tasks["sleeper"].delay(1)`.
        journal: The journal of the tasks.
    """

    def __init__(self, settings: AppSettings, directory: Path) -> None:
        self.settings = settings
        self.directory = directory
        self.app: Celery = build(settings)
        self.journal = Journal(settings.journal)
        self.workers: list[WorkerProcess] = []

    def start(
        self,
        name: str = "worker",
        *,
        settings: AppSettings | None = None,
        conf: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        ready: bool = True,
        **options: Any,
    ) -> WorkerProcess:
        """Start a worker.

        Args:
            name: First part of its node name.
            settings: Settings of its app, if not the crew's (`dataclasses.replace` makes others).
            conf: Settings of the app that only this worker has, on top.
            env: Further environment variables.
            ready: Wait until it consumes.
            options: See `WorkerProcess`: `concurrency`, `pool`, `argv`, `source`, `app`.
        """
        mine = settings or self.settings
        mine = dataclasses.replace(mine, conf={**mine.conf, **(conf or {})})
        worker = WorkerProcess(
            name, self.directory, env=mine.environment() | dict(env or {}), **options
        )
        self.workers.append(worker)
        return worker.wait_ready() if ready else worker

    def start_many(self, count: int, **options: Any) -> list[WorkerProcess]:
        """Start workers side by side, as `start`, and wait until all consume."""
        started = [self.start(ready=False, **options) for _ in range(count)]
        return [worker.wait_ready() for worker in started]

    def start_reaper(self, **options: Any) -> WorkerProcess:
        """Start `celery lease reap`, a reaper that is a process of its own; as `start`."""
        reaper = self.start("reaper", command=["lease", "reap"], ready=False, **options)
        reaper.wait_for_log("reaping every", timeout=30)
        return reaper

    def task(self, name: str) -> Any:
        """Return a task of the sender's app."""
        return self.app.tasks[name]

    def close_workers(self) -> None:
        """Kill what still runs."""
        for worker in self.workers:
            worker.kill_group()

    def close(self) -> None:
        """Kill what still runs, and let go of the sender's connections."""
        self.close_workers()
        disconnect(self.app)


def disconnect(app: Celery) -> None:
    """Close a sender's connections: one that is only collected is a warning in a later test."""
    backend: Any = app.backend
    client = vars(backend).get("client")  # a cached property of the Redis backend
    if client is not None:
        # A result that is collected later would connect anew, to say that it is not awaited.
        backend.result_consumer.cancel_for = lambda _: None
        backend.result_consumer.stop()
        client.connection_pool.disconnect()
    app.close()


def _environment(directory: Path) -> dict[str, str]:
    path = [str(directory), str(TESTS), str(PACKAGE), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def _runs(process: psutil.Process) -> bool:
    """Tell whether a process is more than a zombie, which only its new parent can reap."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _wait_stopped(pid: int) -> None:
    halted = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    until(lambda: psutil.Process(pid).status() in halted, what=f"{pid} is stopped")
