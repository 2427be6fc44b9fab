"""Killed after the outcome was accepted and before it was told, or before that was noted."""

from __future__ import annotations

import celery
import pytest
from harness.journal import Journal
from harness.length import by_length
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew

#: Kills its process, or its whole worker, once: where `{signal}` is sent for a sleeper.
SOURCE = """
import os
import signal

from celery.signals import task_success
from celery_lease.signals import lease_committed


def die(sender=None, **facts):
    if sender.name != "sleeper":
        return
    journal = Journal(app.conf.harness_journal)
    if journal.entries("died", task_id=sender.request.id):
        return
    journal.write("died", sender.request.id)
    if {group}:
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


# Connected before anything else: of the receivers of a signal the first dies.
{signal}.connect(die, weak=False)

from harness.journal import Journal
from harness.worker_app import app
"""
#: `lease_committed`: Celery knows nothing yet. `task_success`: it has stored and sent everything.
COMMITTED, TOLD = "lease_committed", "task_success"


@pytest.fixture(params=[False, True], ids=["child", "worker"])
def group(request: pytest.FixtureRequest) -> bool:
    """Whether the whole worker is killed, or the pool child alone."""
    return bool(request.param)


def start(crew: Crew, signal: str, *, group: bool) -> None:
    """Start a worker that is killed at a signal, and a sound one for what follows."""
    source = SOURCE.format(signal=signal, group=group)
    crew.start("doomed", source=source, argv=["-Q", "doomed"], ready=False)
    crew.start("sound", argv=["-Q", "sound"])


def finish(crew: Crew, *, group: bool) -> None:
    """Let somebody else take what a whole worker has left."""
    if group:
        crew.start("heir", argv=["-Q", "doomed"])


def wait_told(rows: Rows, queue: RedisQueue, task_id: str) -> None:
    """Wait until the row says that its outcome was told, and nothing is with the broker."""
    rows.wait(task_id, state="succeeded")
    until(lambda: (rows.get(task_id) or {})["announced_at"], what=lambda: str(rows.get(task_id)))
    queue.wait_empty()
    assert 0 == sum(queue.client.llen(name) for name in ("doomed", "sound"))


@pytest.mark.timeout(by_length(short=120, long=600))
def test_a_chain_goes_on_after_a_death_between_commit_and_callbacks(
    crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue, *, group: bool
) -> None:
    """The next link and the callback run once, and the result arrives; the body ran once."""
    sleeper, collector = crew.task("sleeper"), crew.task("collector")
    for number in range(by_length(short=1, long=5)):
        link, follows = f"link {number}", f"next {number}"
        start(crew, COMMITTED, group=group)
        first = sleeper.s(0.3, number).set(
            queue="doomed", link=collector.s(label=link).set(queue="sound")
        )
        result = celery.chain(first, collector.s(label=follows).set(queue="sound")).delay()
        journal.wait("died", task_id=result.parent.id)
        assert [] == journal.entries("collected", label=link)
        finish(crew, group=group)
        value = result.get(timeout=25)
        assert (number, 1) == (value["value"], value["token"])
        assert value == result.parent.get(timeout=10)
        journal.wait("collected", label=link)
        wait_told(rows, redis_queue, result.parent.id)
        for label in (link, follows):
            assert [value] == [e.facts["seen"] for e in journal.entries("collected", label=label)]
        assert 1 == len(journal.entries("start", task_id=result.parent.id))
        crew.close_workers()


@pytest.mark.timeout(by_length(short=120, long=600))
def test_a_leased_link_that_is_sent_twice_runs_once(
    crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue, *, group: bool
) -> None:
    """Killed when all was sent and that was not noted: the link has an id, so its claim is refused."""
    sleeper = crew.task("sleeper")
    for number in range(by_length(short=1, long=5)):
        start(crew, TOLD, group=group)
        first = sleeper.s(0.3, number).set(queue="doomed")
        result = celery.chain(first, sleeper.si(0.3, "next").set(queue="sound")).delay()
        journal.wait("died", task_id=result.parent.id)
        finish(crew, group=group)
        assert "next" == result.get(timeout=25)["value"]
        assert number == result.parent.get(timeout=10)["value"]
        for one in (result.parent, result):
            wait_told(rows, redis_queue, one.id)
            assert 1 == len(journal.entries("start", task_id=one.id))
        crew.close_workers()
