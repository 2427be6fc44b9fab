"""What a lease costs the database, by the database's own count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from harness.beats import Clock
from harness.journal import Journal
from harness.length import by_length
from harness.rows import Rows
from harness.statements import StatementCounter
from harness.waiting import until
from harness.workers import Crew

from celery_lease.database import Database
from celery_lease.heartbeat import Heartbeat, Hold
from celery_lease.lease import LeaseRef
from celery_lease.store import LeaseStore

CLAIM = "INSERT INTO celery_lease AS lease"
RENEW = "RETURNING lease.task_id, lease.owner_id, lease.fencing_token, lease.lease_until"
LEASES = 1000

#: Nothing else speaks: no beat is due, and the reaper is somebody else's.
QUIET = {
    "lease_duration": 90,
    "lease_heartbeat_interval": 30,
    "lease_margin": 20,
    "lease_reaper": False,
}


@pytest.fixture
def crew(crews: Callable[..., Crew], statement_counter: StatementCounter) -> Crew:
    return crews(statement_counter.url, conf=QUIET)


@pytest.fixture
def rows(statement_counter: StatementCounter) -> Iterator[Rows]:
    found = Rows(statement_counter.url)
    yield found
    found.close()


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_short_task_costs_two_statements(
    pool: str, crew: Crew, statement_counter: StatementCounter, rows: Rows
) -> None:
    """Claim and commit; announcements ride on later claims; no BEGIN, no COMMIT, no ping."""
    crew.start(pool=pool)
    assert 3 == crew.task("adder").delay(1, 2).get(timeout=10)
    until(lambda: rows.all()[0]["announced_at"], what="the first announcement")
    rows.close()
    statement_counter.reset()
    number = by_length(100, 2000)
    sent = [crew.task("adder").delay(n, 1) for n in range(number)]
    assert [n + 1 for n in range(number)] == [one.get(timeout=60) for one in sent]
    calls = statement_counter.calls()
    claims = statement_counter.total(CLAIM)
    commits = statement_counter.total("SET state = $", "result")
    assert number == claims, calls
    assert number == commits, calls
    # What is left is an announcement by itself, about one per second, never one per task.
    assert statement_counter.total() - 2 * number <= 2 + number / 20, calls
    assert 0 == sum(statement_counter.total(word) for word in ("BEGIN", "COMMIT", "ROLLBACK"))
    until(
        lambda: number + 1 == sum(row["announced_at"] is not None for row in rows.all()),
        what="every announcement",
    )


def test_nothing_beats_before_it_is_due(
    crew: Crew, statement_counter: StatementCounter, journal: Journal
) -> None:
    """A task that is shorter than the heartbeat interval costs no renewal."""
    crew.start()
    sent = crew.task("sleeper").delay(2.5, 1)
    journal.wait("start")
    assert 1 == sent.get(timeout=10)["value"]
    assert 0 == statement_counter.total(RENEW)


def test_a_failed_short_task_costs_two_statements(
    crew: Crew, statement_counter: StatementCounter
) -> None:
    """Claim and failure."""
    crew.start()
    assert 3 == crew.task("adder").delay(1, 2).get(timeout=10)
    time.sleep(1.5)
    statement_counter.reset()
    for _ in range(10):
        crew.task("fragile").delay().get(timeout=10, propagate=False)
    calls = statement_counter.calls()
    assert 10 == statement_counter.total(CLAIM), calls
    assert 10 == statement_counter.total("SET state = $", "error"), calls
    assert statement_counter.total() <= 22, calls


def test_a_thousand_leases_of_a_process_cost_one_statement_a_beat(
    statement_counter: StatementCounter, rows: Rows
) -> None:
    """The heartbeat with the real store, its clock set by hand: three beats, three statements."""
    rows.execute(
        "INSERT INTO celery_lease (task_id, namespace, task_name, state, owner_id, lease_until,"
        " fencing_token, attempt, max_attempts, lease_duration, created_at)"
        " SELECT 'task-' || n, 'n', 't', 'running', 'owner', clock_timestamp() + interval '90 s',"
        " 1, 1, 3, 90, clock_timestamp() FROM generate_series(1, :number) AS n",
        number=LEASES,
    )
    database = Database(statement_counter.url)
    store = LeaseStore(database, "n")
    clock = Clock()
    renewed: list[Hold] = []
    lost: list[Hold] = []
    heartbeat = Heartbeat(
        lambda renewals, timeout: store.renew(renewals, timeout=timeout),
        on_renewed=renewed.append,
        on_unknown=lambda *_: None,
        on_lost=lost.append,
        on_cancel=lambda _: None,
        clock=clock,
        threads=False,
    )
    # Claimed at moments of their own, spread over half an interval.
    for number in range(1, LEASES + 1):
        heartbeat.add(
            Hold(
                LeaseRef(f"task-{number}", "owner", 1),
                lease_duration=90,
                interval=30,
                lease_until=None,
                requested_at=clock() - 14.9 * number / LEASES,
                clock=clock,
            )
        )
    database.version(timeout=5)
    statement_counter.reset()
    for beat in range(1, 4):
        clock.at += 30.1
        while heartbeat.talk() <= 0:
            pass
        assert beat == statement_counter.total(RENEW), statement_counter.calls()
        assert beat == statement_counter.total()
        assert beat * LEASES == len(renewed)
    assert [] == lost
    database.dispose()


def test_many_leases_in_a_worker_share_their_beats(
    crews: Callable[..., Crew], statement_counter: StatementCounter, journal: Journal
) -> None:
    """Forty bodies in one process of threads: about one renewal per interval, not forty."""
    conf = {"lease_reaper": False, "lease_heartbeat_interval": 0.5}
    crew = crews(statement_counter.url, conf=conf)
    crew.start(pool="threads", concurrency=40)
    sent = [crew.task("sleeper").delay(4.0, n) for n in range(40)]
    journal.wait("start", count=40)
    time.sleep(0.6)
    before, started = statement_counter.total(RENEW), time.monotonic()
    time.sleep(2.0)
    beats = statement_counter.total(RENEW) - before
    intervals = (time.monotonic() - started) / 0.5
    assert 2 <= beats <= 2 * intervals + 1
    assert list(range(40)) == [one.get(timeout=20)["value"] for one in sent]
