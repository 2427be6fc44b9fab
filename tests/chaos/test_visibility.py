"""Redis hands a message out again while its first worker still has it: the body runs once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from harness.journal import Journal
from harness.length import by_length
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew

from celery_lease import servers


def visibility(seconds: float) -> dict[str, Any]:
    """Return settings of a worker that restores what is older, and looks every second."""
    # A kombu that does not know the last two looks every 100 s, and when a worker starts.
    return {
        "broker_transport_options": {
            "visibility_timeout": seconds,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        }
    }


def test_a_task_longer_than_the_visibility_timeout_runs_once(
    crew: Crew, journal: Journal, redis_queue: RedisQueue
) -> None:
    """Two workers, timeout 3 s: one run, one run of the chain's next link, an empty broker."""
    seconds = by_length(short=8.0, long=12.0)
    crew.start_many(2, conf=visibility(3))
    result = (crew.task("sleeper").s(seconds) | crew.task("collector").s()).delay()
    assert 1 == result.get(timeout=seconds + 20)["token"]
    redis_queue.wait_empty()
    assert 1 == len(journal.entries("start"))
    assert 1 == len(journal.entries("collected"))


def test_a_neighbour_with_a_smaller_timeout_starts_nothing(
    crew: Crew, journal: Journal, redis_queue: RedisQueue
) -> None:
    """The owner's timeout is an hour, an idle worker's 2 s: extensions cover that one too."""
    owner = crew.start("owner", concurrency=2, conf=visibility(3600), ready=False)
    # Of another queue: what it brings back goes to the owner's second child.
    crew.start("neighbour", argv=["-Q", "aside"], conf=visibility(2))
    result = crew.task("sleeper").delay(5.0)
    assert 1 == result.get(timeout=25)["token"]
    redis_queue.wait_empty()
    assert 1 == len(journal.entries("start"))
    assert "job_turned_away" not in owner.log()


def test_what_a_smaller_timeout_brings_back_is_turned_away(
    crew: Crew, journal: Journal, redis_queue: RedisQueue
) -> None:
    """Beats too rare for a neighbour's timeout: copies come, and the claim turns them away."""
    slow = {"lease_duration": 13.0, "lease_heartbeat_interval": 6.0}
    owner = crew.start("owner", concurrency=2, conf={**visibility(3600), **slow}, ready=False)
    crew.start("neighbour", argv=["-Q", "aside"], conf={**visibility(1), **slow})
    result = crew.task("sleeper").delay(5.0)
    owner.wait_for_log("job_turned_away")
    assert [] == journal.entries("end")
    assert 1 == result.get(timeout=25)["token"]
    redis_queue.wait_empty(timeout=30)
    assert 1 == len(journal.entries("start"))


def test_an_eta_beyond_the_visibility_timeout_runs_once_and_in_time(
    crew: Crew, journal: Journal, redis_queue: RedisQueue, rows: Rows
) -> None:
    """Copies multiply while they wait for their time; none is claimed before, one runs then."""
    crew.start_many(2, concurrency=2, conf=visibility(2))
    wait = by_length(short=6.0, long=10.0)
    due = time.time() + wait
    result = crew.task("sleeper").apply_async([1.0], countdown=wait)
    until(redis_queue.unacked, what="the message is with a worker")
    until(lambda: rows.get(result.id) or time.time() > due - 1, timeout=wait)
    assert rows.get(result.id) is None
    assert 1 == result.get(timeout=20)["token"]
    redis_queue.wait_empty(timeout=30)
    (start,) = journal.entries("start")
    assert due - 1 < start.t < due + 5


@pytest.fixture
def snapshot_redis() -> Iterator[servers.Server]:
    """Give a Redis that loses, when it is killed, what came after its last snapshot."""
    try:
        server = servers.redis({"appendonly": "no"})
    except servers.ServerUnavailable as unavailable:
        pytest.skip(str(unavailable))
    with server:
        yield server


@pytest.fixture
def snapshot_queue(snapshot_redis: servers.Server) -> Iterator[RedisQueue]:
    """Read the queue of that Redis."""
    queue = RedisQueue(snapshot_redis.url, "snapshot")
    yield queue
    queue.close()


def test_a_broker_that_comes_back_from_a_snapshot_starts_nothing(
    crews: Callable[..., Crew],
    lease_database: str,
    snapshot_redis: servers.Server,
    snapshot_queue: RedisQueue,
    journal: Journal,
) -> None:
    """The message is in the queue again without a sign that it was delivered: one run."""
    crew = crews(lease_database, broker_url=snapshot_redis.url, queue=snapshot_queue.queue)
    result = crew.task("sleeper").delay(6.0, "whole")
    snapshot_queue.client.save()
    workers = crew.start_many(2)
    (start,) = journal.wait("start")
    snapshot_redis.kill()
    snapshot_redis.start()
    until(
        lambda: any("job_turned_away" in worker.log() for worker in workers),
        timeout=25,
        what=lambda: "\n".join(worker.log() for worker in workers),
    )
    (end,) = journal.wait("end", timeout=25)
    assert (1, start.pid) == (end.token, end.pid)
    assert "whole" == result.get(timeout=25)["value"]
    assert 1 == len(journal.entries("start"))
