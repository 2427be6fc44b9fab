"""A task that kills whoever runs it: so many starts, then one failure that everybody is told."""

from __future__ import annotations

from typing import Any

import celery
import pytest
from celery.exceptions import ChordError
from harness.journal import Journal
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew

from celery_lease.exceptions import AttemptsExhausted

HOUR = {"broker_transport_options": {"visibility_timeout": 3600}}
#: Neither the code of the task nor a worker of its queue: a reaper needs only where to look.
REAPER = """
from celery import Celery
from harness.apps import AppSettings

settings = AppSettings.from_environment()
app = Celery("harness", broker=settings.broker_url, backend=settings.result_backend)
app.conf.update(lease_url=settings.lease_url, lease_reaper_interval=0.5)
"""


def check_given_up(result: Any, rows: Rows, journal: Journal, *, starts: int) -> None:
    """The caller and the row know why, and the errback was called once."""
    with pytest.raises(AttemptsExhausted) as caught:
        result.get(timeout=25)
    assert (result.id, starts, starts) == caught.value.args
    assert "FAILURE" == result.state
    row = rows.wait(result.id, state="failed")
    assert (starts, starts) == (row["attempt"], row["crashes"])
    assert "AttemptsExhausted" in row["error"]
    journal.wait("errback", failed=result.id)
    until(lambda: (rows.get(result.id) or {})["announced_at"], what="the end was told")
    assert 1 == len(journal.entries("errback", failed=result.id))
    assert list(range(1, starts + 1)) == [
        start.token for start in journal.entries("start", task_id=result.id)
    ]


def test_a_task_that_kills_its_process_is_given_up(
    crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue
) -> None:
    """Exactly `lease_max_attempts` starts, FAILURE with AttemptsExhausted, one errback."""
    crew.start(conf=HOUR)
    result = crew.task("suicide").apply_async(link_error=crew.task("errback").s())
    check_given_up(result, rows, journal, starts=3)
    redis_queue.wait_empty()


def test_a_task_that_kills_its_worker_is_given_up(
    crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue
) -> None:
    """The count is in the database: it survives workers, and a reaper makes an end of it."""
    conf = {**HOUR, "lease_max_attempts": 2, "lease_duration": 2.5}
    result = crew.task("suicide").apply_async(
        kwargs={"group": True}, link_error=crew.task("errback").s()
    )
    for count in (1, 2):
        worker = crew.start(conf=conf, ready=False)
        journal.wait("start", count=count, timeout=25)
        until(lambda worker=worker: not worker.running, what="the worker is dead")
    crew.start(conf=conf)
    check_given_up(result, rows, journal, starts=2)
    redis_queue.wait_empty()


def test_a_reaper_gives_up_without_the_task_and_its_workers(
    crew: Crew, journal: Journal, rows: Rows
) -> None:
    """`celery lease reap` alone ends it; the errback goes to a queue that has a worker."""
    conf = {**HOUR, "lease_max_attempts": 1, "lease_reaper": False}
    crew.start("aside", argv=["-Q", "aside"], conf=conf)
    worker = crew.start(conf=conf)
    crew.start_reaper(source=REAPER)
    result = crew.task("suicide").apply_async(
        kwargs={"group": True}, link_error=crew.task("errback").s().set(queue="aside")
    )
    journal.wait("start")
    until(lambda: not worker.running, what="the worker is dead")
    check_given_up(result, rows, journal, starts=1)


def test_a_poisoned_header_fails_its_chord_once(
    crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue
) -> None:
    """The body never runs; its error is told once."""
    crew.start(concurrency=2, conf={**HOUR, "lease_max_attempts": 2})
    body = crew.task("collector").s(label="body").on_error(crew.task("errback").s())
    headers = [crew.task("suicide").s(), crew.task("sleeper").s(0.1)]
    result = celery.chord(headers)(body)
    until(result.ready, timeout=25, what="the chord has ended")
    assert "FAILURE" == result.state
    assert isinstance(result.result, ChordError)
    assert "AttemptsExhausted" in str(result.result)
    poisoned = result.parent.results[0].id
    rows.wait(poisoned, state="failed")
    until(lambda: (rows.get(poisoned) or {})["announced_at"], what="the end was told")
    journal.wait("errback")
    redis_queue.wait_empty()
    assert 1 == len(journal.entries("errback"))
    assert 2 == len(journal.entries("start", task_id=poisoned))
    assert [] == journal.entries("collected")
