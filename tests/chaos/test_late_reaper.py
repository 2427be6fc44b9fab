"""A reaper that is stopped half-way, while the task is taken over and finished by others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy
from harness.journal import Journal
from harness.length import by_length
from harness.proxy import Proxy
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew, WorkerProcess

from celery_lease.database import Database
from celery_lease.lease import ClaimRequest, Encoded, LeaseRef, Verdict
from celery_lease.store import LeaseStore

NAMESPACE = "late-reaper"
#: A long interval, so that the last pass counts as recent and there is no grace.
CONF = {"lease_namespace": NAMESPACE, "lease_reaper_interval": 30.0}

#: The reclaim stops at the first row until the test lets go of an advisory lock: after it has
#: read what is expired, and before it writes.
_PAUSE = """
CREATE FUNCTION pause() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NEW; END $$;
CREATE TRIGGER pause BEFORE UPDATE ON celery_lease FOR EACH ROW
WHEN (OLD.task_id = 'first' AND OLD.state = 'running' AND NEW.state = 'queued')
EXECUTE FUNCTION pause()
"""


@pytest.fixture
def rows(postgresql_database: str) -> Iterator[Rows]:
    found = Rows(postgresql_database)
    yield found
    found.close()


@pytest.fixture
def store(postgresql_database: str) -> Iterator[LeaseStore]:
    database = Database(postgresql_database)
    yield LeaseStore(database, NAMESPACE)
    database.dispose()


def _claim(store: LeaseStore, task_id: str, owner: str) -> LeaseRef:
    claim = store.claim(ClaimRequest(task_id, "adder", owner, 30.0, 3))
    assert Verdict.GRANTED is claim.verdict
    assert claim.ref is not None
    return claim.ref


def _grace_is_over(rows: Rows) -> None:
    rows.execute(
        "INSERT INTO celery_lease_reaper (namespace, pass_at, next_pass_at)"
        " VALUES (:namespace, clock_timestamp(), clock_timestamp())",
        namespace=NAMESPACE,
    )


@pytest.mark.parametrize("meanwhile", ["finished", "claimed", "renewed"])
def test_a_row_that_changes_between_read_and_write_is_left_alone(
    meanwhile: str, crews: Callable[..., Crew], store: LeaseStore, rows: Rows
) -> None:
    """Both rows are expired when the reaper reads; the second is another's when it writes."""
    crew = crews(store.database.url.render_as_string(hide_password=False), conf=CONF)
    refs = [_claim(store, task_id, "one") for task_id in ("first", "second")]
    rows.expire("first")
    rows.execute("UPDATE celery_lease SET lease_until = lease_until - interval '1 min'")
    rows.execute(
        "UPDATE celery_lease SET lease_until = lease_until - interval '1 s' WHERE task_id = 'first'"
    )
    _grace_is_over(rows)
    for statement in _PAUSE.split(";\nCREATE TRIGGER"):
        prefix = "" if "FUNCTION pause() RETURNS" in statement else "CREATE TRIGGER"
        rows.execute(prefix + statement)
    with rows.engine.connect() as holder:
        holder.execute(sqlalchemy.text("SELECT pg_advisory_lock(4711)"))
        reaper = crew.start("reaper", command=["lease", "reap", "--once"], ready=False)
        until(lambda: _waits(rows), timeout=20, what=lambda: f"the pause\n{reaper.log()}")
        if meanwhile == "renewed":
            rows.execute(
                "UPDATE celery_lease SET lease_until = clock_timestamp() + interval '1 min'"
                " WHERE task_id = 'second'"
            )
        else:
            refs[1] = _claim(store, "second", "two")
        if meanwhile == "finished":
            assert store.commit(refs[1], Encoded(b"3", "application/json", "utf-8"), announce_in=9)
        before = rows.get("second")
        holder.execute(sqlalchemy.text("SELECT pg_advisory_unlock(4711)"))
        assert 0 == reaper.process.wait(20), reaper.log()
    assert before == rows.get("second")
    assert [] == rows.history("second", "reclaimed")
    first = rows.get("first")
    assert first is not None
    assert "queued" == first["state"]
    assert "reclaimed=1 " in reaper.log()


def _waits(rows: Rows) -> list[dict[str, Any]]:
    return rows.query("SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")


def test_an_owner_is_fenced_while_the_reaper_is_half_way(
    crews: Callable[..., Crew], store: LeaseStore, rows: Rows
) -> None:
    """An owner that commits while its row is being reclaimed waits for the verdict: refused."""
    crew = crews(store.database.url.render_as_string(hide_password=False), conf=CONF)
    ref = _claim(store, "first", "one")
    rows.expire("first")
    _grace_is_over(rows)
    for statement in _PAUSE.split(";\nCREATE TRIGGER"):
        prefix = "" if "FUNCTION pause() RETURNS" in statement else "CREATE TRIGGER"
        rows.execute(prefix + statement)
    with rows.engine.connect() as holder:
        holder.execute(sqlalchemy.text("SELECT pg_advisory_lock(4711)"))
        reaper = crew.start("reaper", command=["lease", "reap", "--once"], ready=False)
        until(lambda: _waits(rows), timeout=20, what=lambda: f"the pause\n{reaper.log()}")
        holder.execute(sqlalchemy.text("SELECT pg_advisory_unlock(4711)"))
        assert not store.commit(ref, Encoded(b"3", "application/json", "utf-8"), announce_in=9)
        assert 0 == reaper.process.wait(20), reaper.log()
    row = rows.get("first")
    assert row is not None
    assert ("queued", None) == (row["state"], row["result"])


def _behind(crew: Crew, proxy: Proxy) -> WorkerProcess:
    return crew.start_reaper(settings=dataclasses.replace(crew.settings, broker_url=proxy.url))


def test_a_reaper_that_publishes_after_the_task_has_ended(
    lease_database: str,
    crews: Callable[..., Crew],
    proxies: Callable[[str], Proxy],
    broker_url: str,
    journal: Journal,
) -> None:
    """Stopped between its update and its message: another one sends, and the row never changes."""
    crew = crews(lease_database, conf={**CONF, "lease_reaper_interval": 0.3})
    rows = Rows(lease_database)
    proxy = proxies(broker_url)
    first = crew.start("first", conf={"lease_reaper": False})
    for _ in range(by_length(1, 10)):
        late = _behind(crew, proxy)
        proxy.cut()
        sent = crew.task("sleeper").delay(0.6, "value")
        journal.wait("start", task_id=sent.id)
        first.kill_group()
        late.wait_for_log("job_reclaimed", timeout=15)
        first = crew.start("second")
        assert 2 == sent.get(timeout=30)["token"]
        rows.wait(sent.id, state="succeeded", dispatch_at=None)
        ended = rows.get(sent.id)
        told = rows.history(sent.id)
        proxy.restore()
        _wait_for_copies(first, f"sleeper[{sent.id}] received", 2)
        queue = RedisQueue(broker_url, crew.settings.queue)
        queue.wait_empty()
        queue.close()
        assert (ended, told) == (rows.get(sent.id), rows.history(sent.id))
        assert 2 == len(journal.entries("start", task_id=sent.id))
        late.kill_group()
    rows.close()


def _wait_for_copies(worker: WorkerProcess, line: str, count: int) -> None:
    until(lambda: worker.log().count(line) >= count, timeout=20, what=worker.log)
