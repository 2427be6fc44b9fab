"""SIGTERM while a leased task runs: the lease is kept until its body has ended."""

from __future__ import annotations

import signal
from typing import Any

from harness.apps import SHORT_LEASE
from harness.journal import Journal
from harness.length import by_length
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.workers import Crew

#: So short that a second worker would start the task if the lease were not renewed.
BODY = 2 * SHORT_LEASE["lease_duration"]


def test_a_lease_is_kept_through_a_warm_shutdown(
    crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue
) -> None:
    """The body ends, its result is accepted once, and an idle second worker has nothing to do."""
    leaving = crew.start("leaving")
    result = crew.task("sleeper").delay(BODY)
    journal.wait("start")
    crew.start("idle")
    assert 0 == leaving.stop(timeout=BODY + 15)
    assert 1 == result.get(timeout=5)["token"]
    row = rows.wait(result.id, state="succeeded")
    assert (1, 0) == (row["attempt"], row["crashes"])
    assert row["announced_at"], "the last act of a child is to note that the outcome was told"
    redis_queue.wait_empty()
    assert 1 == len(journal.entries("start"))
    assert [] == rows.history(result.id)


def test_what_ends_during_a_shutdown_is_not_run_again(
    crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue
) -> None:
    """Two SIGTERMs a second apart, at random moments of short tasks, then another worker."""
    sent: list[Any] = []
    for number in range(by_length(short=2, long=10)):
        worker = crew.start(concurrency=2)
        results = [crew.task("sleeper").delay(0.5 + 0.25 * one) for one in range(4)]
        for one in results[: 1 + number % 2]:
            journal.wait("start", task_id=one.id)
        worker.process.send_signal(signal.SIGTERM)
        journal.wait("end", task_id=results[0].id)
        assert 0 == worker.stop()
        sent += results
    crew.start("next", concurrency=2)
    for result in sent:
        assert result.get(timeout=20)["token"] <= 2
    redis_queue.wait_empty()
    for result in sent:
        assert 1 == len(journal.entries("end", task_id=result.id))
        assert 1 == len(journal.entries("start", task_id=result.id))
        assert 0 == rows.wait(result.id, state="succeeded")["crashes"]
