"""Celery's own default for prefetching: what a worker holds and has not begun is no hostage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import celery
import pytest
from harness.journal import Journal
from harness.redis_queue import RedisQueue
from harness.workers import Crew, WorkerProcess

_WARNING = "prefetched_messages_wait_for_broker"


def _prefetched(crew: Crew, worker: WorkerProcess) -> int:
    (stats,) = crew.app.control.inspect(timeout=5).stats().values()
    assert worker.running
    return int(stats["prefetch_count"])


def test_by_default_a_worker_receives_no_more_than_it_runs(
    crews: Callable[..., Crew], postgresql_database: str
) -> None:
    """Without a word, and without a warning."""
    crew = crews(postgresql_database)
    worker = crew.start(concurrency=3, app="harness.default_prefetch")
    assert 3 == _prefetched(crew, worker)
    assert _WARNING not in worker.log()


@pytest.mark.parametrize(
    ("conf", "argv"),
    [({"worker_prefetch_multiplier": 4}, ()), ({}, ("--prefetch-multiplier", "5"))],
    ids=["setting", "option"],
)
def test_what_the_user_chose_is_kept_and_warned_of(
    conf: dict[str, Any], argv: tuple[str, ...], crews: Callable[..., Crew], sqlite_database: str
) -> None:
    """The default's value too, if somebody has written it down."""
    crew = crews(sqlite_database)
    app = "harness.default_prefetch" if argv else "harness.worker_app"
    worker = crew.start(concurrency=2, conf=conf, argv=argv, app=app)
    assert 2 * (5 if argv else 4) == _prefetched(crew, worker)
    worker.wait_for_log(_WARNING)


def test_a_broker_that_brings_messages_back_soon_needs_no_warning(
    crews: Callable[..., Crew], sqlite_database: str
) -> None:
    """A visibility timeout within the lease's own time is as good."""
    conf = {
        "worker_prefetch_multiplier": 4,
        "broker_transport_options": {"visibility_timeout": 3},
    }
    crew = crews(sqlite_database)
    assert _WARNING not in crew.start(conf=conf).log()


def test_a_chord_survives_a_death_under_celerys_defaults(
    crew: Crew, journal: Journal, redis_queue: RedisQueue
) -> None:
    """Ten headers on two workers, one killed, an hour of visibility: the body runs once."""
    hour = {"broker_transport_options": {"visibility_timeout": 3600}}
    settings = dataclasses.replace(crew.settings, conf={**crew.settings.conf, **hour})
    workers = [
        crew.start(concurrency=2, app="harness.default_prefetch", settings=settings, ready=False)
        for _ in range(2)
    ]
    for worker in workers:
        worker.wait_ready()
    headers = [crew.task("sleeper").s(1.0, value) for value in range(10)]
    result = celery.chord(headers)(crew.task("collector").s(label="body"))
    starts = journal.wait("start", count=4)
    victim = next(worker for worker in workers if starts[-1].pid in worker.children())
    victim.kill_group()
    collected = result.get(timeout=30)
    assert list(range(10)) == sorted(one["value"] for one in collected)
    redis_queue.wait_empty()
    assert 1 == len(journal.entries("collected", label="body"))
