"""The demo as a user runs it: its verdict, its exit status, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from harness.waiting import until
from harness.workers import PACKAGE

#: README.md promises less than this many seconds.
PROMISED = 90

COMMAND = "from celery_lease.cli import main; main(['demo'])"
WITHOUT_SERVERS = (
    "import sys; from celery_lease import demo; sys.exit(demo.run(with_servers=False))"
)


class Demo:
    """A running demo; its output goes to a file, its folder into `folder`."""

    def __init__(self, code: str, folder: Path) -> None:
        self.folder = folder / "temporary"
        self.folder.mkdir()
        self.folder.chmod(0o755)
        self.output = folder / "output"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=folder,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")]),
                    "TMPDIR": str(self.folder),
                    "PYTHONUNBUFFERED": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait_gone(self, processes: list[psutil.Process]) -> None:
        until(lambda: not any(map(_runs, processes)), timeout=15, what=lambda: str(processes))
        until(lambda: not list(self.folder.iterdir()), what=lambda: str([*self.folder.iterdir()]))


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def demos(tmp_path: Path) -> object:
    made: list[Demo] = []

    def make(code: str) -> Demo:
        made.append(Demo(code, tmp_path))
        return made[-1]

    yield make
    for demo in made:
        demo.process.kill()
        demo.process.wait()


@pytest.mark.parametrize("code", [COMMAND, WITHOUT_SERVERS], ids=["servers", "files"])
def test_every_check_holds(demos, code: str) -> None:
    """Exit status 0, in the time that the README promises, and nothing is left behind."""
    demo = demos(code)
    assert 0 == demo.process.wait(PROMISED), demo.text()
    told = demo.text()
    assert "All 8 checks hold" in told
    assert 8 == len(re.findall(r"^ holds ", told, re.MULTILINE))
    demo.wait_gone([])


def test_the_timeline_tells_what_happened(demos) -> None:
    """Each turn of the story is there, once per task and in its order."""
    demo = demos(WITHOUT_SERVERS)
    assert 0 == demo.process.wait(PROMISED), demo.text()
    told = demo.text()
    first, second = told.split("2. The unpleasant test")
    for act, turns in (
        (first, ["claims the task: token 1", "SIGKILL", "expired", "claims the task: token 2"]),
        (first, ["heartbeat: token 1 renewed", "SIGKILL", "from the checkpoint", "callback"]),
        (second, ["claims the task: token 1", "SIGSTOP", "expired", "claims the task: token 2"]),
        (second, ["callback", "SIGCONT", "told that the lease is lost", "was refused"]),
    ):
        places = [act.index(turn) for turn in turns]
        assert sorted(places) == places, act
    assert max(map(len, told.splitlines())) <= 100


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=["ctrl-c", "terminated", "killed"],
)
def test_nothing_outlives_the_demo(demos, number: signal.Signals, status: int) -> None:
    """However it ends: workers, servers and the folder are gone soon after it."""
    demo = demos(COMMAND)
    until(lambda: "heartbeat" in demo.text(), timeout=60, what=demo.text)
    started = demo.descendants()
    assert len(started) > 4
    demo.process.send_signal(number)
    assert status == demo.process.wait(20)
    demo.wait_gone(started)


def test_a_story_that_stops_says_where(demos) -> None:
    """A worker that cannot start ends the demo with status 1 and the end of its log."""
    broken = "demo.Crew = lambda app, folder: Crew('no_such_app', folder)"
    demo = demos(
        "import sys; from celery_lease import demo; from celery_lease.demo_processes import Crew;"
        f" {broken}; sys.exit(demo.run(with_servers=False))"
    )
    assert 1 == demo.process.wait(PROMISED), demo.text()
    assert "ended by itself" in demo.text()
    assert "no_such_app" in demo.text()
    demo.wait_gone([])
