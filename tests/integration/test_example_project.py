"""The example project, on PostgreSQL and Redis, by the commands of its own README."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.waiting import until
from harness.workers import PACKAGE, WorkerProcess

import celery_lease

PROJECT = Path(__file__).resolve().parents[2] / "example_project"
PUBLIC_MODULES = {"celery_lease", "celery_lease.receiver", "celery_lease.signals"}
QUEUE = "example"


def command(words: str) -> list[str]:
    """Return the README's command that holds these words, run by this Python."""
    commands = re.findall(r"^\$ (.*)$", (PROJECT / "README.md").read_text(), re.MULTILINE)
    found = [shlex.split(text) for text in commands if words in text]
    assert 1 == len(found), (words, commands)
    program, *arguments = found[0]
    run_by = [] if program == "python" else ["-m", program]
    return [sys.executable, *run_by, *arguments]


class Project:
    """The project's commands, with servers of the test's choice."""

    def __init__(self, broker_url: str, lease_url: str, folder: Path) -> None:
        self.folder = folder
        self.workers: list[WorkerProcess] = []
        self.senders: list[subprocess.Popen[str]] = []
        self.env = {
            "BROKER_URL": broker_url,
            "LEASE_URL": lease_url,
            "QUEUE": QUEUE,
            "PYTHONPATH": os.pathsep.join([str(PROJECT), str(PACKAGE)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SECONDS_PER_WORD": "0.15",
        }

    def run(self, words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(words),
            env={**os.environ, **self.env},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def worker(self, name: str) -> WorkerProcess:
        # The README's command, but for the log, which goes to a file, and the node's name.
        arguments = shlex.split(f"-A assistant worker -l INFO -c 1 -n {name}@%h")
        assert arguments == command(f"-n {name}@%h")[3:]
        worker = WorkerProcess(name, self.folder, env=self.env, app="assistant")
        self.workers.append(worker)
        return worker.wait_ready()

    def send(self, what: str) -> tuple[str, subprocess.Popen[str]]:
        """Send a task; return its id and the process that waits for it."""
        sender = subprocess.Popen(
            command(f"assistant.send {what}"),
            env={**os.environ, **self.env},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.senders.append(sender)
        assert sender.stdout is not None
        return sender.stdout.readline().strip(), sender

    def owner_of(self, rows: Rows, task_id: str) -> WorkerProcess:
        """Return the worker that runs a task, once a checkpoint was saved."""
        row = until(lambda: _with_checkpoint(rows, task_id), timeout=20, what="a checkpoint")
        return next(w for w in self.workers if row["owner_id"].startswith(f"{w.node}:"))

    def close(self) -> None:
        for sender in self.senders:
            sender.kill()
            sender.communicate()
        for worker in self.workers:
            worker.kill_group()


def _with_checkpoint(rows: Rows, task_id: str) -> dict[str, object] | None:
    row = rows.get(task_id)
    return row if row is not None and row["details"] else None


@pytest.fixture
def project(empty_postgresql: str, broker_url: str, tmp_path: Path) -> Iterator[Project]:
    made = Project(broker_url, empty_postgresql, tmp_path)
    migrated = made.run("lease migrate")
    assert 0 == migrated.returncode, migrated.stderr
    yield made
    made.close()


@pytest.fixture
def rows(empty_postgresql: str) -> Iterator[Rows]:
    found = Rows(empty_postgresql)
    yield found
    found.close()


def test_a_killed_workers_answer_comes_from_the_other(project: Project, rows: Rows) -> None:
    """Steps 3 to 6: one answer, from the checkpoint on, and one callback."""
    workers = [project.worker(name) for name in ("one", "two")]
    task_id, sender = project.send("ask")
    killed = project.owner_of(rows, task_id)
    killed.kill_group()
    answer, _ = sender.communicate(timeout=60)
    assert (0, 2) == (sender.returncode, rows.wait(task_id)["fencing_token"])
    assert answer.startswith("A task that runs")
    assert answer.endswith("an old number.\n")
    (other,) = [worker for worker in workers if worker is not killed]
    started = re.search(r"token 2 starts at word (\d+)", other.wait_for_log("filed away"))
    assert started is not None
    assert 0 < int(started[1]) < len(answer.split())
    assert 1 == other.log().count("filed away")


def test_a_payment_is_an_effect(project: Project) -> None:
    """Step 7: the outside action is logged, and carries the fencing token."""
    worker = project.worker("one")
    task_id, sender = project.send("pay")
    receipt, _ = sender.communicate(timeout=30)
    assert "4200 cents of invoice-7, fence 1\n" == receipt
    log = worker.wait_for_log("tool_request_finished")
    assert 1 == log.count(f"tool_request_started job={task_id} token=1")
    assert "4200" not in "".join(line for line in log.splitlines() if "tool_request" in line)


def test_a_single_pass_recovers_a_task_without_workers(
    project: Project, rows: Rows, broker_url: str
) -> None:
    """Step 8: with all workers dead, `reap --once` puts the message back into the queue."""
    worker = project.worker("one")
    task_id, sender = project.send("ask")
    project.owner_of(rows, task_id)
    worker.kill_group()
    rows.expire(task_id)
    rows.execute("UPDATE celery_lease_reaper SET pass_at = pass_at - interval '1 hour'")
    reaped = project.run("lease reap --once")
    assert 0 == reaped.returncode, reaped.stderr
    assert "reclaimed=1 sent=1 announced=0 failed=0\n" == reaped.stdout
    queue = RedisQueue(broker_url, QUEUE)
    assert 1 == queue.waiting()
    queue.close()
    project.worker("two")
    answer, _ = sender.communicate(timeout=60)
    assert answer.endswith("an old number.\n")
    assert 2 == rows.wait(task_id)["fencing_token"]


def test_only_public_names_are_used() -> None:
    """A user may copy every line: nothing in it can change without notice."""
    used = set()
    for file in PROJECT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("celery_lease"):
                assert node.module in PUBLIC_MODULES
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("celery_lease") for alias in node.names)
    assert used <= set(celery_lease.__all__)
    assert "LeasedTask" in used
