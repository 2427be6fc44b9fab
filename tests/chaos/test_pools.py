"""Every pool: forks, threads, code that holds the interpreter, what is open meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from harness.journal import Journal
from harness.length import by_length
from harness.rows import Rows
from harness.statements import StatementCounter
from harness.workers import Crew

POOLS = ("prefork", "threads", "solo")

#: The user's app has used the lease database, and its own, when the pool forks.
TOUCHED = """
import threading
import sqlalchemy
from harness.trap_app import app
from celery_lease.runtime import Runtime

engine = sqlalchemy.create_engine(app.conf.lease_url)
with engine.connect() as connection:
    connection.execute(sqlalchemy.text("SELECT count(*) FROM celery_lease"))
runtime = Runtime.of(app)
runtime.store.find("nobody")
runtime.heartbeat.wake_soon()
threading.Thread(target=threading.Event().wait, name="users", daemon=True).start()
"""


#: What no database can change is tested on one of them in a short run.
ONE_DATABASE = pytest.mark.parametrize(
    "lease_database", by_length(["sqlite"], ["postgresql", "sqlite"]), indirect=True
)


@pytest.fixture
def postgresql_rows(postgresql_database: str) -> Iterator[Rows]:
    found = Rows(postgresql_database)
    yield found
    found.close()


@pytest.mark.parametrize("pool", POOLS)
def test_a_body_is_kept_and_fenced_in_every_pool(
    pool: str, crew: Crew, rows: Rows, journal: Journal
) -> None:
    """Claim, beats past the lease, commit; and a body whose lease is lost is broken off."""
    worker = crew.start(pool=pool)
    sent = crew.task("sleeper").delay(4.0, "kept")
    assert ("kept", 1) == tuple(sent.get(timeout=15)[key] for key in ("value", "token"))
    assert 1 == len(journal.entries("start"))
    worker.wait_for_log("heartbeat_ok")
    lost = crew.task("sleeper").delay(30.0, "lost")
    journal.wait("start", task_id=lost.id)
    rows.execute("UPDATE celery_lease SET owner_id = 'thief' WHERE task_id = :id", id=lost.id)
    worker.wait_for_log("heartbeat_lost")
    assert 3 == crew.task("adder").delay(1, 2).get(timeout=10)
    assert [] == journal.entries("end", task_id=lost.id)
    row = rows.get(lost.id)
    assert row is not None
    assert ("running", "thief") == (row["state"], row["owner_id"])


@pytest.mark.parametrize("pool", POOLS)
def test_trap_8_nothing_crosses_a_fork(pool: str, crew: Crew, rows: Rows, journal: Journal) -> None:
    """AC14: the app has used the database at import, every child runs one task: no error."""
    argv = ["--max-tasks-per-child", "1"] if pool == "prefork" else []
    worker = crew.start(pool=pool, source=TOUCHED, argv=argv, concurrency=3)
    number = by_length(30, 1000)
    sent = [crew.task("adder").delay(n, n) for n in range(number)]
    assert [2 * n for n in range(number)] == [one.get(timeout=120) for one in sent]
    assert number == len([row for row in rows.all() if row["state"] == "succeeded"])
    assert all((1, 0) == (row["attempt"], row["crashes"]) for row in rows.all())
    log = worker.log()
    assert "ERROR" not in log.replace("CRITICAL/ERROR", "")
    assert "Traceback" not in log
    assert "job_postponed" not in log


def test_trap_8_a_child_opens_nothing_before_its_first_claim(
    crews: Callable[..., Crew], postgresql_database: str, postgresql_rows: Rows
) -> None:
    """No connection and no thread of ours in a fresh child; with its first claim both."""
    crew = crews(postgresql_database, conf={"lease_reaper": False})
    worker = crew.start(app="harness.trap_app", concurrency=3)
    clients = _connections(postgresql_rows)
    ordinary = crew.app.send_task("threads_here").get(timeout=10)
    assert [] == [name for name in ordinary if "lease" in name or "heartbeat" in name]
    leased = crew.app.send_task("leased_threads_here").get(timeout=10)
    assert 2 <= len([name for name in leased if "lease" in name or "heartbeat" in name]), leased
    assert clients + 1 <= _connections(postgresql_rows) <= clients + 2
    assert "Traceback" not in worker.log()


def _connections(rows: Rows) -> int:
    (found,) = rows.query(
        "SELECT count(*) AS number FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    return int(found["number"])


@ONE_DATABASE
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_code_that_holds_the_interpreter_is_never_a_second_success(
    pool: str, crew: Crew, rows: Rows, journal: Journal
) -> None:
    """AC12: no beat for two leases: the late commit is refused, one result is accepted."""
    first = crew.start("first", pool=pool, app="harness.trap_app")
    sent = crew.app.send_task("holds_interpreter", [6.0])
    journal.wait("start", token=1)
    crew.start("second", app="harness.trap_app")
    assert 2 == sent.get(timeout=20)
    assert 2 == rows.wait(sent.id, state="succeeded")["fencing_token"]
    # Broken off at its end, or refused at its commit: whichever thread comes first.
    log = first.wait_for_log(f"holds_interpreter[{sent.id}] ignored", timeout=20)
    assert "result_rejected" in log or "heartbeat_lost" in log
    assert "job_committed" not in log
    assert 2 == crew.app.AsyncResult(sent.id).get(timeout=5)
    assert 2 == rows.wait(sent.id)["fencing_token"]


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_no_transaction_is_open_while_a_body_runs(
    pool: str,
    crews: Callable[..., Crew],
    postgresql_database: str,
    postgresql_rows: Rows,
    journal: Journal,
) -> None:
    """K4: never idle in a transaction; and few connections, whatever the bodies."""
    crew = crews(postgresql_database)
    crew.start(pool=pool, concurrency=4)
    sent = [crew.task("sleeper").delay(3.0, n) for n in range(4)]
    journal.wait("start", count=4)
    seen = 0
    while not all(one.ready() for one in sent):
        found = postgresql_rows.query(
            "SELECT state, xact_start, now() - xact_start AS age FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        assert [] == [row for row in found if str(row["state"]).startswith("idle in")]
        seen = max(seen, len(found))
    # A child: one for its task and one for its beats; the main process: its reaper.
    assert seen <= (2 * 4 if pool == "prefork" else 4 + 1) + 2


def test_a_body_that_drains_its_own_pool_starves_no_beat(
    crews: Callable[..., Crew], postgresql_database: str, journal: Journal
) -> None:
    """K7: the lease has connections of its own; the user's only one may be held for ever."""
    crew = crews(postgresql_database)
    worker = crew.start(source=DRAINED)
    sent = crew.app.send_task("drained", [6.0])
    assert 1 == sent.get(timeout=20)
    assert "heartbeat_lost" not in worker.log()
    assert "ownership_unknown" not in worker.log()


DRAINED = """
import time
import sqlalchemy
from celery_lease import LeasedTask
from harness.apps import AppSettings, build

app = build(AppSettings.from_environment())
engine = sqlalchemy.create_engine(app.conf.lease_url, pool_size=1, max_overflow=0)

@app.task(base=LeasedTask, bind=True, name="drained")
def drained(self, seconds):
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("SELECT 1"))
        time.sleep(seconds)
    return self.lease.fencing_token
"""


def test_many_processes_share_one_sqlite_file(
    crews: Callable[..., Crew], sqlite_database: str
) -> None:
    """Trap 11, K8: two workers, four processes, short and beating tasks: no locked database."""
    crew = crews(sqlite_database)
    workers = [crew.start(name, concurrency=2) for name in ("first", "second")]
    rows = Rows(sqlite_database)
    number = by_length(80, 400)
    beating = [crew.task("sleeper").delay(1.2, n) for n in range(4)]
    sent = [crew.task("adder").delay(n, 0) for n in range(number)]
    assert list(range(number)) == [one.get(timeout=60) for one in sent]
    assert [0, 1, 2, 3] == [one.get(timeout=30)["value"] for one in beating]
    assert {1} == {row["fencing_token"] for row in rows.all()}
    for worker in workers:
        assert "locked" not in worker.log()
        assert "job_postponed" not in worker.log()
    rows.close()


def test_trap_11_nothing_depends_on_a_database_session(
    crews: Callable[..., Crew], statement_counter: StatementCounter
) -> None:
    """Behind PgBouncer in transaction mode: no LISTEN, no advisory lock, no temp table.

    The one SET is for the planner, and for connections that are straight: see
    `test_behind_a_pooler_nothing_is_left_in_its_connections`.
    """
    crew = crews(statement_counter.url)
    crew.start()
    assert 1 == crew.task("sleeper").delay(1.0, 1).get(timeout=10)["value"]
    forbidden = ("SET ", "LISTEN", "pg_advisory", "TEMP", "PREPARE", "DISCARD", "RESET")
    said = {query for query in statement_counter.calls() if query.startswith(forbidden)}
    assert said <= {"SET enable_seqscan = $1", "SET enable_seqscan = off"}
