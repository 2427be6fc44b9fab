"""SIGKILL in the middle of a task: of a pool child, of the main process, of the whole worker."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import celery
import psutil
import pytest
from harness.apps import SHORT_LEASE, AppSettings
from harness.journal import Journal
from harness.length import by_length
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew, WorkerProcess

#: An hour: what brings the task back within seconds is not the broker.
HOUR = {"broker_transport_options": {"visibility_timeout": 3600}}
#: A minute: what brings the task back within seconds is not the end of its lease.
LONG_LEASE = {"lease_duration": 60.0, "lease_heartbeat_interval": 1.0}
#: Seconds for a machine with two cores that runs two tests.
SLACK = 10.0


def recovery(body: float) -> float:
    """Return the promised seconds from a host's death to the end of its task on another."""
    return SHORT_LEASE["lease_duration"] + SHORT_LEASE["lease_reaper_interval"] + body + SLACK


def owner_of(workers: list[WorkerProcess], pid: int) -> WorkerProcess:
    """Return the worker that has this child."""
    return next(worker for worker in workers if pid in worker.children())


def test_a_killed_worker_s_task_is_finished_by_another(
    crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue
) -> None:
    """Done within lease + reaper period + body, and nothing of it stays with the broker."""
    for _ in range(by_length(short=1, long=5)):
        workers = crew.start_many(2, conf=HOUR)
        result = crew.task("sleeper").delay(2.0)
        (start,) = journal.wait("start", task_id=result.id)
        owner_of(workers, start.pid).kill_group()
        killed = time.time()
        assert 2 == result.get(timeout=recovery(2.0))["token"]
        assert time.time() < killed + recovery(2.0)
        row = rows.wait(result.id, state="succeeded")
        assert (2, 2, 1) == (row["fencing_token"], row["attempt"], row["crashes"])
        redis_queue.wait_empty()
        assert 2 == len(journal.entries("start", task_id=result.id))
        for worker in workers:
            worker.kill_group()


def test_a_chord_survives_the_death_of_one_of_two_workers(
    crew: Crew, journal: Journal, redis_queue: RedisQueue
) -> None:
    """Ten headers on two workers, one killed: the body runs once, with ten results."""
    for number in range(by_length(short=1, long=5)):
        workers = crew.start_many(2, concurrency=2, conf=HOUR)
        sleeper, collector = crew.task("sleeper"), crew.task("collector")
        label = f"body {number}"
        headers = [sleeper.s(1.5, value) for value in range(10)]
        begun = len(journal.entries("start"))
        result = celery.chord(headers)(collector.s(label=label))
        # All four children are busy. A message that nobody has claimed yet has no row: were its
        # worker killed in those milliseconds, it would stay with the broker for the hour.
        starts = journal.wait("start", count=begun + 4)
        owner_of(workers, starts[-1].pid).kill_group()
        # Half the workers are left for at most ten bodies of a second and a half.
        collected = result.get(timeout=recovery(0) + 10)
        assert list(range(10)) == sorted(one["value"] for one in collected)
        redis_queue.wait_empty()
        assert 1 == len(journal.entries("collected", label=label))
        for worker in workers:
            worker.kill_group()


def test_a_killed_child_s_task_starts_again_at_once(
    crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue
) -> None:
    """Long before its lease ends; nobody is told of a failure; the attempt is counted."""
    crew.start(conf={**LONG_LEASE, **HOUR})
    for _ in range(by_length(short=2, long=10)):
        result = crew.task("sleeper").delay(1.5)
        (first,) = journal.wait("start", task_id=result.id)
        os.kill(first.pid, signal.SIGKILL)
        states = set()

        def again(result: Any = result, states: set[str] = states) -> bool:
            states.add(result.state)
            return len(journal.entries("start", task_id=result.id)) == 2

        until(again, timeout=2 + SLACK)
        assert 2 == result.get(timeout=1.5 + SLACK)["token"]
        assert states <= {"PENDING", "STARTED"}
        row = rows.wait(result.id, state="succeeded")
        assert (2, 1) == (row["attempt"], row["crashes"])
        redis_queue.wait_empty()
        assert 2 == len(journal.entries("start", task_id=result.id))


def test_a_killed_child_fails_no_chord(
    crew: Crew, journal: Journal, redis_queue: RedisQueue
) -> None:
    """The header that lost its process runs again, and the body gets both results, once."""
    crew.start(concurrency=2, conf={**LONG_LEASE, **HOUR})
    sleeper, collector = crew.task("sleeper"), crew.task("collector")
    result = celery.chord([sleeper.s(1.5, "a"), sleeper.s(1.5, "b")])(collector.s())
    starts = journal.wait("start", count=2)
    os.kill(starts[0].pid, signal.SIGKILL)
    assert ["a", "b"] == sorted(one["value"] for one in result.get(timeout=20))
    redis_queue.wait_empty()
    assert 1 == len(journal.entries("collected"))
    assert 3 == len(journal.entries("start"))


def test_a_worker_whose_clerk_is_killed_engages_another(
    crew: Crew, journal: Journal, redis_queue: RedisQueue
) -> None:
    """The process that reaps and settles dies: the task beside it goes on, and so does the rest."""
    worker = crew.start(concurrency=2, conf={**LONG_LEASE, **HOUR})
    undisturbed = crew.task("sleeper").delay(4.0)
    journal.wait("start")
    clerks = re.findall(r"clerk_engaged pid=(\d+)", worker.log())
    os.kill(int(clerks[0]), signal.SIGKILL)
    until(lambda: worker.log().count("clerk_engaged") == 2, timeout=SLACK, what=worker.log)
    result = crew.task("sleeper").delay(0.5)
    (first,) = journal.wait("start", task_id=result.id)
    os.kill(first.pid, signal.SIGKILL)
    assert 2 == result.get(timeout=2 + SLACK)["token"]
    assert 1 == undisturbed.get(timeout=4 + SLACK)["token"]
    redis_queue.wait_empty()


#: Elsewhere than on Linux nobody kills the children of a main process that was killed.
NOT_LINUX = """
from celery import platforms

platforms.set_pdeathsig = lambda name: None

from harness.worker_app import app
"""


@pytest.mark.parametrize("source", [None, NOT_LINUX], ids=["dies", "lives on"])
def test_an_orphaned_child_beats_no_longer(
    crew: Crew, journal: Journal, rows: Rows, source: str | None
) -> None:
    """SIGKILL of the main process alone: its child's lease ends, and another worker takes over."""
    first = crew.start(**({"source": source} if source else {}))
    result = crew.task("sleeper").delay(5.0)
    (start,) = journal.wait("start")
    second = crew.start("second", ready=False)
    os.kill(first.pid, signal.SIGKILL)
    again = journal.wait("start", count=2, timeout=recovery(0))[1]
    assert 2 == again.token
    assert again.pid in second.children()
    value = result.get(timeout=5 + SLACK)
    assert (2, again.pid) == (value["token"], value["pid"])
    until(lambda: not psutil.pid_exists(start.pid), what="the orphan has ended")
    assert 2 == rows.wait(result.id, state="succeeded")["fencing_token"]
    assert [] == journal.entries("end", token=1)


def test_workers_that_come_and_go_take_nothing_from_a_live_owner(
    crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue
) -> None:
    """Others start and stop every two seconds beside a long task: one run."""
    seconds = by_length(short=8.0, long=20.0)
    crew.start()
    result = crew.task("sleeper").delay(seconds)
    journal.wait("start")
    for number in range(by_length(short=3, long=8)):
        visitor = crew.start(f"visitor{number}")
        assert 0 == visitor.stop()
    assert 1 == result.get(timeout=seconds + SLACK)["token"]
    redis_queue.wait_empty()
    assert 1 == len(journal.entries("start"))
    assert 0 == rows.wait(result.id, state="succeeded")["crashes"]


@pytest.fixture
def folder_crew(sqlite_database: str, journal: Journal, tmp_path: Path) -> Any:
    """Give a crew that needs no server: a folder as the broker, SQLite, results in files."""
    folders = {name: tmp_path / name for name in ("messages", "control", "results")}
    for folder in folders.values():
        folder.mkdir()
    settings = AppSettings(
        broker_url="filesystem://",
        result_backend=f"file://{folders['results']}",
        lease_url=sqlite_database,
        journal=str(journal.path),
        transport_options={
            "data_folder_in": str(folders["messages"]),
            "data_folder_out": str(folders["messages"]),
            "control_folder": str(folders["control"]),
            "polling_interval": 0.05,
        },
    )
    crew = Crew(settings, tmp_path)
    yield crew
    crew.close()


def test_a_message_that_the_broker_lost_is_sent_again(
    folder_crew: Crew, journal: Journal, sqlite_database: str, tmp_path: Path
) -> None:
    """A folder as the broker loses a killed worker's message; the reaper rebuilds it."""
    crew = folder_crew
    workers = crew.start_many(2)
    link = crew.task("collector").s(label="next")
    result = (crew.task("sleeper").s(2.0, {"deep": [1, "two"]}) | link).delay()
    (start,) = journal.wait("start")
    owner_of(workers, start.pid).kill_group()
    assert [] == list((tmp_path / "messages").iterdir())
    value = result.get(timeout=recovery(2.0))
    assert (2, {"deep": [1, "two"]}) == (value["token"], value["value"])
    assert [value] == [entry.facts["seen"] for entry in journal.entries("collected")]
