"""A copy of the message while the owner lives, on Redis, where all copies share one entry."""

from __future__ import annotations

from typing import Any

from harness.apps import SHORT_LEASE
from harness.journal import Journal
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew, WorkerProcess

HOUR = {"broker_transport_options": {"visibility_timeout": 3600}}


def deliver_again(crew: Crew, queue: RedisQueue) -> str:
    """Do what kombu does with a message whose visibility timeout has passed; return its tag."""
    (tag,) = until(queue.unacked, what="one message under way")
    with crew.app.connection_for_write() as connection:
        channel: Any = connection.default_channel
        channel.qos.restore_by_tag(tag)
    return str(tag)


def turn_away_a_copy(
    crew: Crew, journal: Journal, queue: RedisQueue, seconds: float
) -> tuple[Any, WorkerProcess, WorkerProcess]:
    """Send a task, deliver it a second time, and wait until the copy was turned away."""
    workers = crew.start_many(2, conf=HOUR)
    result = crew.task("sleeper").delay(seconds)
    (start,) = journal.wait("start", task_id=result.id)
    # The owner has one child and takes one message, so that the copy goes to the other.
    owner, other = sorted(workers, key=lambda worker: start.pid not in worker.children())
    tag = deliver_again(crew, queue)
    other.wait_for_log("job_turned_away")
    # Its one child is free again, so what becomes of the copy has been settled.
    assert 1 == crew.task("plain").delay(1).get(timeout=10)
    # Shared with the owner: whoever removes it removes the owner's.
    assert [tag] == list(queue.unacked()) == list(queue.unacked_index())
    return result, owner, other


def test_a_copy_beside_a_live_owner_does_not_run(
    crew: Crew, journal: Journal, redis_queue: RedisQueue, rows: Rows
) -> None:
    """It is turned away, uncharged; the owner's result is the result, and the broker is empty."""
    result, owner, _ = turn_away_a_copy(crew, journal, redis_queue, 3.0)
    assert [] == journal.entries("end")
    value = result.get(timeout=20)
    assert 1 == value["token"]
    assert value["pid"] in owner.children()
    redis_queue.wait_empty()
    assert 1 == len(journal.entries("start"))
    row = rows.wait(result.id, state="succeeded")
    assert (1, 0) == (row["attempt"], row["crashes"])


def test_turning_a_copy_away_takes_nothing_from_its_owner(
    crew: Crew, journal: Journal, redis_queue: RedisQueue
) -> None:
    """The owner dies afterwards: the task is still done, within lease + period + body."""
    result, owner, other = turn_away_a_copy(crew, journal, redis_queue, 3.0)
    owner.kill_group()
    promised = SHORT_LEASE["lease_duration"] + SHORT_LEASE["lease_reaper_interval"] + 3.0
    value = result.get(timeout=promised + 10)
    assert 2 == value["token"]
    assert value["pid"] in other.children()
    redis_queue.wait_empty()
    assert 2 == len(journal.entries("start"))


def test_many_copies_end_quietly(crew: Crew, journal: Journal, redis_queue: RedisQueue) -> None:
    """A storm of redeliveries leaves one owner, one result and nothing behind."""
    workers = crew.start_many(2, concurrency=2, conf=HOUR)
    result = crew.task("sleeper").delay(4.0)
    journal.wait("start")
    for number in range(1, 11):
        deliver_again(crew, redis_queue)
        until(
            lambda count=number: (
                count == sum(worker.log().count("job_turned_away") for worker in workers)
            ),
            timeout=10,
            what="each copy is turned away",
        )
    assert 1 == result.get(timeout=20)["token"]
    redis_queue.wait_empty()
    assert 1 == len(journal.entries("start"))
