"""Traps of the protocol: each was a real bug somewhere, each test fails without its guard.

The number in a test's name is the trap's in the design's list ("Known traps").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TimeLimitExceeded
from harness.journal import Journal
from harness.length import by_length
from harness.proxy import Proxy
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew, WorkerProcess

from celery_lease.database import Database
from celery_lease.lease import ClaimRequest
from celery_lease.reaper import Reaper
from celery_lease.runtime import new_owner
from celery_lease.store import LeaseStore

#: No beat comes before a body ends, so that the database alone decides.
BLIND = {
    "lease_duration": 60,
    "lease_heartbeat_interval": 25,
    "lease_margin": 5,
    "lease_interrupt": False,
}
_LATER = {
    "postgresql": "clock_timestamp() + interval '1 hour'",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', '+1 hour') || '000'",
}


#: What no database can change is tested on one of them in a short run.
ONE_DATABASE = pytest.mark.parametrize(
    "lease_database", by_length(["sqlite"], ["postgresql", "sqlite"]), indirect=True
)


@pytest.fixture
def blind(crews: Callable[..., Crew], lease_database: str) -> Crew:
    """Give a crew whose holders learn of a loss from the database's refusal only."""
    return crews(lease_database, conf=BLIND)


def _steal(rows: Rows, task_id: str) -> dict[str, Any]:
    """Let another owner have the lease, as after an expiry that nobody here has seen."""
    later = _LATER[rows.engine.dialect.name]
    assert 1 == rows.execute(
        "UPDATE celery_lease SET owner_id = 'thief', fencing_token = fencing_token + 1,"
        f" attempt = attempt + 1, lease_until = {later} WHERE task_id = :id",
        id=task_id,
    )
    row = rows.get(task_id)
    assert row is not None
    return row


def _start(crew: Crew, **options: Any) -> WorkerProcess:
    return crew.start(**{"app": "harness.trap_app", **options})


def _meta(crew: Crew, task_id: str) -> str:
    """Return the state that the result backend has stored."""
    return str(crew.app.backend.get_task_meta(task_id, cache=False)["status"])


@ONE_DATABASE
def test_trap_1_a_result_that_no_serializer_takes_fails_before_the_commit(
    crew: Crew, rows: Rows, journal: Journal
) -> None:
    """The row says failed, not succeeded; the caller sees FAILURE; no callback runs."""
    _start(crew)
    sent = crew.app.send_task("unserializable", link=crew.task("collector").s())
    with pytest.raises(Exception, match="serializ"):
        sent.get(timeout=10)
    assert "failed" == rows.wait(sent.id)["state"]
    assert [] == journal.entries("collected")


@ONE_DATABASE
def test_trap_2_a_copy_that_is_turned_away_writes_no_started(
    crew: Crew, rows: Rows, journal: Journal, broker_url: str
) -> None:
    """With `task_track_started` the owner writes STARTED; a second copy leaves no trace."""
    conf = {"task_track_started": True}
    first = crew.start("first", conf=conf)
    sent = crew.task("sleeper").delay(3.0, 1)
    journal.wait("start")
    until(lambda: "STARTED" == _meta(crew, sent.id), what="STARTED")
    crew.app.backend.forget(sent.id)
    second = crew.start("second", conf=conf)
    crew.app.control.cancel_consumer(crew.settings.queue, destination=[first.node], reply=True)
    crew.task("sleeper").apply_async([3.0, 1], task_id=sent.id)
    second.wait_for_log("job_turned_away")
    assert "PENDING" == _meta(crew, sent.id)
    assert 1 == sent.get(timeout=10)["value"]
    assert 1 == len(journal.entries("start"))


def test_trap_3_a_stale_run_publishes_no_retry(
    blind: Crew, rows: Rows, journal: Journal, broker_url: str, tmp_path: Path
) -> None:
    """The lease goes to the next message first, fenced; refused, nothing is published."""
    worker = _start(blind, conf={"lease_reaper": False})
    gate = tmp_path / "gate"
    sent = blind.app.send_task("held_up", [str(gate), "retry"])
    journal.wait("start")
    before = _steal(rows, sent.id)
    gate.touch()
    worker.wait_for_log(f"held_up[{sent.id}] ignored")
    assert "x" == blind.task("plain").delay("x").get(timeout=10)
    assert 1 == worker.log().count(f"held_up[{sent.id}] received")
    assert 1 == len(journal.entries("start"))
    assert "PENDING" == _meta(blind, sent.id)
    assert before == rows.get(sent.id)
    queue = RedisQueue(broker_url, blind.settings.queue)
    assert 0 == queue.waiting()
    queue.close()


def test_trap_3_a_retry_is_released_and_then_published(
    crew: Crew, rows: Rows, journal: Journal, tmp_path: Path
) -> None:
    """The owner's retry runs, as the next attempt, under the next token."""
    _start(crew)
    gate = tmp_path / "gate"
    gate.touch()
    sent = crew.app.send_task("held_up", [str(gate), "retry"])
    assert "retried" == sent.get(timeout=10)
    assert [1, 2] == [entry.token for entry in journal.entries("start")]
    assert 0 == rows.wait(sent.id, state="succeeded")["crashes"]


@pytest.mark.parametrize("then", ["return", "raise"])
def test_trap_4_a_stale_outcome_reaches_no_backend_and_no_callback(
    then: str, blind: Crew, rows: Rows, journal: Journal, tmp_path: Path
) -> None:
    """The first SUCCESS in a backend is final; a stale one, or a FAILURE, never gets there."""
    worker = _start(blind)
    gate = tmp_path / "gate"
    collector, errback = blind.task("collector"), blind.task("errback")
    sent = blind.app.send_task(
        "held_up", [str(gate), then], link=collector.s(), link_error=errback.s()
    )
    journal.wait("start")
    before = _steal(rows, sent.id)
    gate.touch()
    worker.wait_for_log("result_rejected")
    assert "x" == blind.task("plain").delay("x").get(timeout=10)
    assert "PENDING" == _meta(blind, sent.id)
    assert [] == journal.entries("collected") + journal.entries("errback")
    assert before == rows.get(sent.id)
    assert "stale" not in worker.log()


def test_trap_5_what_follows_is_sent_by_a_later_copy(
    crew: Crew, rows: Rows, journal: Journal, tmp_path: Path
) -> None:
    """Killed between commit and callbacks: the result arrives, the link and the body run once."""
    _start(crew, source=KILLED_AFTER_COMMIT, env={"MARK": str(tmp_path / "mark")})
    link = crew.task("collector").s()
    sent = crew.task("sleeper").apply_async([0.1, "kept"], link=link)
    assert "kept" == sent.get(timeout=20)["value"]
    journal.wait("collected")
    assert 1 == rows.wait(sent.id, state="succeeded")["fencing_token"]
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


def test_trap_6_the_main_processs_failure_at_a_time_limit_is_fenced(
    blind: Crew, rows: Rows, journal: Journal, tmp_path: Path
) -> None:
    """A stale run that is killed at its time limit stores no FAILURE; an owner's does."""
    _start(blind)
    errback = blind.task("errback").s()
    options = {"time_limit": 1.5, "link_error": errback}
    stale = blind.app.send_task("held_up", [str(tmp_path / "never")], **options)
    journal.wait("start")
    before = _steal(rows, stale.id)
    own = blind.app.send_task("held_up", [str(tmp_path / "never")], **options)
    with pytest.raises(TimeLimitExceeded):
        own.get(timeout=15)
    assert "failed" == rows.wait(own.id)["state"]
    assert "PENDING" == _meta(blind, stale.id)
    assert before == rows.get(stale.id)
    # Celery's pool reports a time limit twice; both have been heard when this task has run.
    assert "x" == blind.task("plain").delay("x").get(timeout=10)
    assert [own.id] == [entry.facts["failed"] for entry in journal.wait("errback")]


def test_trap_6_the_main_process_never_waits_for_a_dead_database(
    postgresql_database: str,
    crews: Callable[..., Crew],
    proxies: Callable[[str], Proxy],
    journal: Journal,
    tmp_path: Path,
) -> None:
    """With the database in a black hole a time limit and a dead child leave the loop alive."""
    proxy = proxies(postgresql_database)
    crew = crews(proxy.url, conf=BLIND)
    worker = _start(crew, concurrency=3)
    sent = [
        crew.app.send_task("held_up", [str(tmp_path / "never")], time_limit=limit)
        for limit in (1.5, 30)
    ]
    started = journal.wait("start", count=2)
    proxy.cut()
    worker.kill_child(next(entry.pid for entry in started if entry.task_id == sent[1].id))
    worker.wait_for_log("child_lost")
    until(lambda: 2 == worker.log().count("exited with 'signal 9"), what="the time limit")
    for number in range(5):
        assert number == crew.task("plain").delay(number).get(timeout=2)
    assert crew.app.control.ping(destination=[worker.node], timeout=2)


@ONE_DATABASE
def test_trap_7_an_owner_id_never_comes_back(crew: Crew, journal: Journal, rows: Rows) -> None:
    """Same host, same process, same task: another execution is another owner."""
    assert new_owner("host") != new_owner("host")
    _start(crew)
    sent = crew.app.send_task("retrier", [3])
    assert 3 == sent.get(timeout=10)
    assert 1 == len({entry.pid for entry in journal.entries("start")})
    owners = [entry["owner_id"] for entry in rows.history(sent.id, "released")]
    assert 3 == len(owners)
    assert 3 == len(set(owners))


def test_trap_9_retries_and_turned_away_copies_are_no_attempts(
    crew: Crew, journal: Journal, rows: Rows
) -> None:
    """Five retries with `lease_max_attempts=2`, and duplicates: nothing is charged."""
    worker = _start(crew, concurrency=2)
    sent = crew.app.send_task("retrier", [5])
    assert 5 == sent.get(timeout=15)
    assert (0, 6) == tuple(rows.wait(sent.id)[key] for key in ("crashes", "attempt"))
    held = crew.task("sleeper").delay(2.0, 1)
    journal.wait("start", task_id=held.id)
    for _ in range(4):
        crew.task("sleeper").apply_async([2.0, 1], task_id=held.id)
    until(lambda: 4 <= worker.log().count(f"job_turned_away job={held.id}"), what="refusals")
    assert 1 == held.get(timeout=10)["value"]
    assert (0, 1) == tuple(rows.wait(held.id)[key] for key in ("crashes", "attempt"))


def test_trap_12_one_missed_beat_is_no_death(
    postgresql_database: str,
    crews: Callable[..., Crew],
    proxies: Callable[[str], Proxy],
    journal: Journal,
) -> None:
    """Short faults, each longer than a beat and shorter than the lease: one run, held again."""
    proxy = proxies(postgresql_database)
    crew = crews(proxy.url)
    worker = crew.start()
    sent = crew.task("sleeper").delay(by_length(5.0, 60.0), 1)
    journal.wait("start")
    beats = 0
    for fault in (proxy.refuse, proxy.cut):
        until(lambda: worker.log().count("heartbeat_ok") > beats, what="a beat")  # noqa: B023
        fault()
        worker.wait_for_log("ownership_unknown")
        proxy.restore()
        beats = worker.log().count("heartbeat_ok")
    result = sent.get(timeout=90)
    assert (1, 1) == (result["value"], result["token"])
    assert "heartbeat_lost" not in worker.log()
    assert 1 == len(journal.entries("start"))


@ONE_DATABASE
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_trap_13_a_users_call_and_the_lease_go_together(pool: str, crew: Crew, rows: Rows) -> None:
    """In either order of bases both run, with the request intact, and one claim in all."""
    worker = _start(crew, pool=pool)
    kinds = ("LeasedTask", "LeaseFirst", "ContextFirst", "LeaseFirstRun", "RunFirst")
    for kind in kinds:
        name = f"surroundings_{kind}"
        sent = crew.app.send_task(name)
        told = sent.get(timeout=10)
        row = rows.wait(sent.id)
        assert (sent.id, 1, 1) == (told["id"], told["token"], told["attempt"])
        assert row["owner_id"] == told["owner"]
        assert 1 == row["attempt"]
        expected = [] if kind == "LeasedTask" else [name]
        assert expected == told["inside"]
        # The body called its own task as a function: that is part of this run.
        assert (expected * 2, 1) == (told["inner"]["inside"], told["inner"]["token"])
        for line in ("job_claimed", "job_committed"):
            assert 1 == worker.log().count(f"{line} job={sent.id}")
    assert len(kinds) == len(rows.all())


@ONE_DATABASE
def test_trap_16_a_message_chooses_nothing(crew: Crew, rows: Rows, journal: Journal) -> None:
    """Headers, properties and arguments named as settings or as ours are data, no commands."""
    crew.start()
    forged = {
        "lease_duration": 9999,
        "lease_max_attempts": 99,
        "lease_policy": "none",
        "lease_mode": "off",
        "lease_owner": "me",
        "lease_token": 77,
        "fencing_token": 77,
        "lease": {"owner": "me"},
        "lease_interrupt": False,
        "_lease_execution": "x",
        "is_eager": True,
        "called_directly": True,
        "_protected": 1,
        "hostname": "me",
        "properties": {"lease": {"owner": "me"}},
    }
    sent = crew.task("sleeper").apply_async([0.3, 1], headers=forged)
    assert (1, 1) == tuple(sent.get(timeout=10)[key] for key in ("value", "token"))
    row = rows.wait(sent.id)
    assert (3.0, 3, 1) == (row["lease_duration"], row["max_attempts"], row["fencing_token"])
    assert "me" != row["owner_id"]
    failed = crew.app.send_task("sleeper", [0.1], {"lease_duration": 9999})
    with pytest.raises(TypeError):
        failed.get(timeout=10)
    assert 3.0 == rows.wait(failed.id)["lease_duration"]


@pytest.mark.parametrize(
    "number",
    [1_000_000_000, 2**31 - 1, 2**80, -1, True, "3", 1.5, [1]][: by_length(3, 8)],
    ids=repr,
)
def test_trap_16_a_forged_dispatch_number_harms_nobody(
    number: Any, crews: Callable[..., Crew], postgresql_database: str, journal: Journal
) -> None:
    """Whatever a sender writes there, its task runs once, is recovered, and ends."""
    crew = crews(postgresql_database)
    rows = Rows(postgresql_database)
    first = crew.start("first")
    sent = crew.task("sleeper").apply_async([0.8, 1], headers={"lease_dispatch": number})
    journal.wait("start")
    first.kill_group()
    rows.expire(sent.id)
    crew.start("second", conf={"lease_reaper_interval": 0.2})
    assert (1, 2) == tuple(sent.get(timeout=20)[key] for key in ("value", "token"))
    assert 2 == len(journal.entries("start"))
    rows.close()


@pytest.fixture
def store(lease_database: str) -> Iterator[LeaseStore]:
    database = Database(lease_database)
    yield LeaseStore(database, "n")
    database.dispose()


def _reaper(store: LeaseStore, name: str, interval: float) -> Reaper:
    return Reaper(store, publish=lambda _: "sent", owner=name, interval=interval, retention=3600.0)


def test_trap_10_a_reaper_that_has_just_started_condemns_nobody(
    store: LeaseStore, rows: Rows
) -> None:
    """The first pass after a gap only looks; the next one takes expired leases away."""
    store.claim(ClaimRequest("task", "t", "owner", 3.0, 3))
    rows.expire("task")
    reaper = _reaper(store, "reaper", 0.2)
    first = reaper.pass_once()
    assert (True, 0) == (first.granted, first.reclaimed)
    assert "running" == (rows.get("task") or {})["state"]
    until(lambda: reaper.pass_once().reclaimed, what="the second pass")
    assert "queued" == (rows.get("task") or {})["state"]


def test_trap_14_many_reapers_scan_as_often_as_one(store: LeaseStore, rows: Rows) -> None:
    """Twenty reapers that ask all the time get one pass per interval between them."""
    interval = 0.5
    reapers = [_reaper(store, f"reaper-{n}", interval) for n in range(20)]
    started = time.monotonic()
    granted = asked = 0
    while time.monotonic() - started < 3 * interval:
        for reaper in reapers:
            granted += reaper.pass_once().granted
            asked += 1
    assert asked > 10 * granted
    assert 3 <= granted <= 1 + (time.monotonic() - started) / interval
