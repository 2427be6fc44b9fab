"""Acknowledgements of leased tasks share their way to Redis, and none of them is lost or early."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import redis
from harness.journal import Journal
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew

from celery_lease import servers

_TASKS = 200


@pytest.fixture
def calls(own_redis: servers.Server) -> Iterator[Callable[[str], int]]:
    """Tell how often a command has been given to the broker."""
    with redis.Redis.from_url(own_redis.url, decode_responses=True) as client:

        def count(command: str) -> int:
            return int(client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0))

        yield count


def test_a_busy_worker_acknowledges_several_at_once(
    crews: Callable[..., Crew],
    own_redis: servers.Server,
    postgresql_database: str,
    calls: Callable[[str], int],
) -> None:
    """Far fewer round trips than tasks, and an empty broker at the end."""
    url = own_redis.url
    crew = crews(postgresql_database, broker_url=url, result_backend=url)
    queue = RedisQueue(url, crew.settings.queue)
    results = [crew.task("adder").delay(number, 1) for number in range(_TASKS)]
    crew.start(concurrency=2, conf={"worker_prefetch_multiplier": 16})
    assert [number + 1 for number in range(_TASKS)] == [one.get(timeout=30) for one in results]
    queue.wait_empty()
    assert 0 < calls("zrem") < _TASKS / 2
    queue.close()


def test_an_acknowledgement_alone_does_not_wait_for_others(
    crew: Crew, redis_queue: RedisQueue
) -> None:
    """An idle worker's broker is empty a moment after the result is there."""
    crew.start()
    for number in range(5):
        assert number + 1 == crew.task("adder").delay(number, 1).get(timeout=15)
        redis_queue.wait_empty(timeout=2)


def test_the_place_in_the_window_is_free_at_once(crew: Crew, journal: Journal) -> None:
    """With one place for two tasks, the second starts as the first ends, not a window later."""
    crew.start(concurrency=1)
    for _ in range(10):
        crew.task("sleeper").delay(0.01)
    until(lambda: 10 == len(journal.entries("end")), timeout=20, what="ten tasks")


def test_killed_before_it_was_sent_it_costs_a_delivery_that_runs_nothing(
    crew: Crew, journal: Journal, redis_queue: RedisQueue, rows: Rows
) -> None:
    """The next worker meets the finished row, and acknowledges."""
    slow = {"CELERY_LEASE_TEST_ACKNOWLEDGE_WINDOW": "30"}
    conf = {"broker_transport_options": {"visibility_timeout": 2}}
    worker = crew.start("killed", app="harness.slow_acknowledgements", env=slow, conf=conf)
    result = crew.task("sleeper").delay(0.1)
    assert 1 == result.get(timeout=15)["token"]
    rows.wait(result.id, state="succeeded")
    until(lambda: rows.wait(result.id)["announced_at"], what="the mark")
    assert redis_queue.unacked()
    worker.kill_group()
    time.sleep(2.1)
    options = {**conf["broker_transport_options"], "unacked_restore_interval": 1}
    crew.start("next", conf={"broker_transport_options": options})
    redis_queue.wait_empty(timeout=30)
    assert 1 == len(journal.entries("start", task_id=result.id))
    assert (1, 0) == tuple(rows.wait(result.id)[name] for name in ("attempt", "crashes"))


def test_a_warm_shutdown_leaves_none_behind(crew: Crew, redis_queue: RedisQueue) -> None:
    """What waits when the worker is told to stop is sent before it ends."""
    slow = {"CELERY_LEASE_TEST_ACKNOWLEDGE_WINDOW": "30"}
    worker = crew.start(app="harness.slow_acknowledgements", env=slow)
    assert 3 == crew.task("adder").delay(1, 2).get(timeout=15)
    time.sleep(0.3)
    assert redis_queue.unacked(), "the window is thirty seconds here"
    assert 0 == worker.stop()
    redis_queue.wait_empty(timeout=1)


def test_a_pool_of_threads_acknowledges_by_itself(crew: Crew, redis_queue: RedisQueue) -> None:
    """Its results come in threads of the pool, which must not touch the event loop's list."""
    crew.start(pool="threads", concurrency=4)
    results = [crew.task("adder").delay(number, 1) for number in range(20)]
    assert list(range(1, 21)) == [one.get(timeout=20) for one in results]
    redis_queue.wait_empty()
