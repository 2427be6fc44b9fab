"""Many reapers at once: each expired lease is taken away once, and sent once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness.journal import Journal
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew

from celery_lease.database import Database
from celery_lease.lease import ClaimRequest, Message, Verdict
from celery_lease.options import app_settings
from celery_lease.store import LeaseStore

REAPERS = 5
LEASES = 100

#: A reaper that does not wait for its turn and takes a few rows at a time: all meet at the rows.
GREEDY = """
import time
from pathlib import Path

from celery_lease import reaper
from celery_lease.lease import ReaperTurn
from celery_lease.store import LeaseStore
from harness.worker_app import app


def at_once(self, owner, **options):
    while not Path("go").exists():
        time.sleep(0.001)
    return ReaperTurn(granted=True, next_in=0.01)


reaper._BATCH = reaper._SEND_BATCH = 7
LeaseStore.reaper_turn = at_once
"""


def claim_for_the_dead(crew: Crew, rows: Rows) -> list[str]:
    """Claim the leases of tasks whose messages nobody has, as a dead worker left them."""
    settings = app_settings(crew.app)
    database = Database(settings.url, settings.engine_options)
    store = LeaseStore(database, settings.namespace)
    ids = [f"task-{number}" for number in range(LEASES)]
    for task_id in ids:
        headers = {"lang": "py", "task": "adder", "id": task_id, "root_id": task_id, "retries": 0}
        envelope = {
            "content_type": "application/json",
            "content_encoding": "utf-8",
            "headers": headers,
            "properties": {"correlation_id": task_id, "delivery_mode": 2, "priority": 0},
            "exchange": "",
            "routing_key": crew.settings.queue,
            "canvas": {},
        }
        request = ClaimRequest(
            task_id=task_id,
            task_name="adder",
            owner_id=f"dead:{task_id}",
            lease_duration=3.0,
            max_attempts=3,
            message=Message(json.dumps([[1, 2], {}, {}]).encode(), json.dumps(envelope)),
        )
        assert Verdict.GRANTED is store.claim(request).verdict
    database.dispose()
    rows.execute("UPDATE celery_lease SET lease_duration = 30")
    for task_id in ids:
        rows.expire(task_id)
    return ids


def sent_ids(queue: RedisQueue) -> list[str]:
    """Return the task id of each waiting message."""
    raw: Any = queue.client.lrange(queue.queue, 0, -1)
    return [json.loads(message)["headers"]["id"] for message in raw]


@pytest.mark.parametrize("source", [None, GREEDY], ids=["in turn", "all at once"])
def test_each_expired_lease_is_sent_once(
    crew: Crew, rows: Rows, redis_queue: RedisQueue, journal: Journal, source: str | None
) -> None:
    """Five reapers, a hundred expired leases: a hundred messages, and each token raised once."""
    options = {} if source is None else {"source": source}
    ids = claim_for_the_dead(crew, rows)
    reapers = [
        crew.start("reaper", command=["lease", "reap"], ready=False, **options)
        for _ in range(REAPERS)
    ]
    for reaper in reapers:
        reaper.wait_for_log("reaping every", timeout=40)
    (crew.directory / "go").touch()
    until(lambda: len(sent_ids(redis_queue)) >= LEASES, timeout=20, what="all are sent")
    # Told to end, each finishes the pass that it is in.
    for reaper in reapers:
        reaper.process.terminate()
        assert 0 == reaper.process.wait(20)
    assert sorted(ids) == sorted(sent_ids(redis_queue))
    for task_id in ids:
        (entry,) = rows.history(task_id)
        assert ("reclaimed", 1) == (entry["event"], entry["fencing_token"])
    found = {(row["state"], row["fencing_token"], row["dispatch"]) for row in rows.all()}
    assert {("queued", 1, 1)} == found
    crew.start(concurrency=2)
    for task_id in ids:
        assert 3 == crew.app.AsyncResult(task_id).get(timeout=30)
        rows.wait(task_id, state="succeeded", fencing_token=2)
    redis_queue.wait_empty()
