"""Settings of Celery's own that meet a lease: each keeps a defined meaning (trap 17)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TimeLimitExceeded
from harness.journal import Journal
from harness.length import by_length
from harness.proxy import Proxy
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.workers import Crew

from celery_lease.exceptions import AttemptsExhausted

#: What no database can change is tested on one of them in a short run.
ONE_DATABASE = pytest.mark.parametrize(
    "lease_database", by_length(["sqlite"], ["postgresql", "sqlite"]), indirect=True
)


@pytest.fixture
def crew(crews: Callable[..., Crew], lease_database: str) -> Crew:
    return crews(lease_database, conf={"lease_reaper_interval": 0.3})


@ONE_DATABASE
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("task_reject_on_worker_lost", True),
        ("task_retry_on_worker_lost", True),
        ("task_acks_late", False),
    ],
)
def test_trap_17_who_counts_lost_children(
    *, setting: str, value: bool, crew: Crew, rows: Rows, journal: Journal, redis_queue: RedisQueue
) -> None:
    """The lease does, whatever Celery would do: exactly `lease_max_attempts` starts, one end."""
    crew.start(conf={setting: value})
    errback = crew.task("errback").s()
    sent = crew.task("suicide").apply_async(link_error=errback)
    with pytest.raises(AttemptsExhausted):
        sent.get(timeout=30)
    journal.wait("errback")
    redis_queue.wait_empty()
    assert (3, 1) == (len(journal.entries("start")), len(journal.entries("errback")))
    assert 3 == rows.wait(sent.id, state="failed")["crashes"]


@ONE_DATABASE
@pytest.mark.parametrize(
    "conf",
    [{"task_acks_on_failure_or_timeout": False}, {"task_acks_on_timeout": False}],
    ids=lambda conf: next(iter(conf)),
)
def test_trap_17_a_time_limit_ends_the_task(
    conf: dict[str, Any],
    crew: Crew,
    rows: Rows,
    journal: Journal,
    redis_queue: RedisQueue,
    tmp_path: Path,
) -> None:
    """The failure was accepted, so a message that comes back is dropped: no second run."""
    crew.start(app="harness.trap_app", conf=conf)
    sent = crew.app.send_task("held_up", [str(tmp_path / "never")], time_limit=1)
    with pytest.raises(TimeLimitExceeded):
        sent.get(timeout=20)
    assert 3 == crew.task("adder").delay(1, 2).get(timeout=10)
    redis_queue.wait_empty()
    assert 1 == len(journal.entries("start"))
    assert "failed" == rows.wait(sent.id)["state"]


@ONE_DATABASE
def test_trap_17_a_failure_ends_the_task(
    crew: Crew, rows: Rows, journal: Journal, redis_queue: RedisQueue
) -> None:
    """As a time limit, where `task_acks_on_failure_or_timeout` is off."""
    crew.start(conf={"task_acks_on_failure_or_timeout": False})
    sent = crew.task("fragile").delay("once")
    with pytest.raises(ValueError, match="once"):
        sent.get(timeout=20)
    assert 3 == crew.task("adder").delay(1, 2).get(timeout=10)
    redis_queue.wait_empty()
    assert 1 == len(journal.entries("start"))
    assert "failed" == rows.wait(sent.id)["state"]


@ONE_DATABASE
def test_trap_17_deduplication_loses_no_callback(
    crew: Crew, rows: Rows, journal: Journal, tmp_path: Path
) -> None:
    """`worker_deduplicate_successful_tasks` sees a success only once it was told."""
    crew.start(
        source=KILLED_AFTER_COMMIT,
        env={"MARK": str(tmp_path / "mark")},
        conf={"worker_deduplicate_successful_tasks": True},
    )
    link = crew.task("collector").s()
    sent = crew.task("sleeper").apply_async([0.1, "kept"], link=link)
    assert "kept" == sent.get(timeout=20)["value"]
    journal.wait("collected")
    crew.task("sleeper").apply_async([0.1, "kept"], task_id=sent.id, link=link)
    assert 3 == crew.task("adder").delay(1, 2).get(timeout=10)
    assert (1, 1) == (len(journal.entries("start")), len(journal.entries("collected")))


KILLED_AFTER_COMMIT = """
import os, signal
from pathlib import Path
from celery_lease.signals import lease_committed
from harness.trap_app import app

@lease_committed.connect(weak=False)
def die(**_):
    mark = Path(os.environ["MARK"])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@ONE_DATABASE
@pytest.mark.parametrize("cancels", [True, False])
def test_trap_17_the_broker_goes_away_during_a_body(
    *,
    cancels: bool,
    lease_database: str,
    crews: Callable[..., Crew],
    broker_url: str,
    proxies: Callable[[str], Proxy],
    journal: Journal,
) -> None:
    """Cancelled by `worker_cancel_long_running_tasks_on_connection_loss`, or not: one result.

    A task that Celery takes from its child is handed back at once, and not charged.
    """
    name = "worker_cancel_long_running_tasks_on_connection_loss"
    crew = crews(
        lease_database,
        conf={name: cancels, "lease_namespace": "n", "lease_reaper_interval": 0.3},
    )
    rows = Rows(lease_database)
    proxy = proxies(broker_url)
    crew.start(settings=dataclasses.replace(crew.settings, broker_url=proxy.url))
    sent = crew.task("sleeper").delay(3.0, "kept")
    journal.wait("start")
    proxy.refuse()
    proxy.restore()
    result = sent.get(timeout=40)
    row = rows.wait(sent.id, state="succeeded")
    runs = len(journal.entries("start"))
    assert ("kept", row["fencing_token"], 0) == (result["value"], result["token"], row["crashes"])
    assert (2 if cancels else 1) == runs == row["fencing_token"]
    rows.close()
