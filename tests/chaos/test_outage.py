"""The lease database is away while tasks run: shorter than a lease, and longer."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import databases
from harness.journal import Journal
from harness.length import by_length
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew, WorkerProcess
from sqlalchemy.engine import make_url

LEASE = 4.0
SETTINGS = {"lease_duration": LEASE, "lease_heartbeat_interval": 0.5, "lease_margin": 0.5}
#: Bodies that end in a long outage, and bodies that do not.
SECONDS = (3.0, 7.0)
TASKS = 12


class StoppedServer:
    """PostgreSQL is stopped and started again."""

    def __init__(self, server: Any) -> None:
        self.url = server.url
        self._server = server.server

    @contextmanager
    def away(self, seconds: float) -> Iterator[None]:
        """Keep it away for so long; the start counts."""
        back_at = time.monotonic() + seconds - 0.2
        self._server.stop()
        try:
            yield
            time.sleep(max(0.0, back_at - time.monotonic()))
        finally:
            self._server.start()


class LockedFile:
    """The SQLite file is locked for everybody else, readers too."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder / 'outage.db'}"
        databases.migrate(self.url)

    @contextmanager
    def away(self, seconds: float) -> Iterator[None]:
        """Hold the lock for so long."""
        back_at = time.monotonic() + seconds
        connection = sqlite3.connect(str(make_url(self.url).database), timeout=10)
        try:
            connection.execute("BEGIN EXCLUSIVE")
            yield
            time.sleep(max(0.0, back_at - time.monotonic()))
        finally:
            connection.close()


@pytest.fixture(params=["postgresql", "sqlite"])
def fragile(request: pytest.FixtureRequest, tmp_path: Path) -> StoppedServer | LockedFile:
    """Give a database that can be made unusable, of each kind in turn."""
    if request.param == "sqlite":
        return LockedFile(tmp_path)
    return StoppedServer(request.getfixturevalue("own_postgresql"))


@pytest.mark.parametrize("leases", [0.7, 3.0])
def test_an_outage_of_the_database(
    fragile: StoppedServer | LockedFile,
    leases: float,
    crews: Callable[..., Crew],
    journal: Journal,
) -> None:
    """Nothing is lost, nothing is committed twice, and no attempt is charged to the outage."""
    crew = crews(fragile.url, conf=SETTINGS)
    workers = [crew.start(f"worker{n}", concurrency=7) for n in range(2)]
    for _ in range(by_length(1, 3)):
        _endure(crew, workers, fragile, leases, journal)


def _endure(
    crew: Crew,
    workers: list[WorkerProcess],
    database: StoppedServer | LockedFile,
    leases: float,
    journal: Journal,
) -> None:
    begun = len(journal.entries("start"))
    sent = [crew.task("sleeper").delay(SECONDS[n % 2], n) for n in range(TASKS)]
    journal.wait("start", count=begun + TASKS, timeout=20)
    rows = Rows(database.url)
    until(lambda: _all_beaten(rows, [one.id for one in sent]), what="a beat of each")
    with database.away(leases * LEASE):
        # The worker with room for it runs an ordinary task meanwhile.
        assert "x" == crew.task("plain").delay("x").get(timeout=10)
    results = [one.get(timeout=60) for one in sent]
    assert list(range(TASKS)) == [result["value"] for result in results]
    assert all(worker.running for worker in workers)
    for one, result in zip(sent, results, strict=True):
        row = rows.wait(one.id, state="succeeded")
        assert (0, row["fencing_token"]) == (row["crashes"], result["token"])
        assert result == json.loads(row["result"])
        charges = [json.loads(entry["facts"] or "{}") for entry in rows.history(one.id)]
        assert not any(facts.get("charged") for facts in charges)
        starts = len(journal.entries("start", task_id=one.id))
        if leases < 1:
            assert (1, 1) == (starts, row["fencing_token"])
        else:
            assert starts == row["attempt"]
    committed = "".join(worker.log() for worker in workers)
    for one in sent:
        assert 1 == committed.count(f"job_committed job={one.id}")
    rows.close()


def _all_beaten(rows: Rows, ids: list[str]) -> bool:
    found = {row["task_id"]: row for row in rows.all()}
    return all(found[one]["heartbeat_at"] > found[one]["claimed_at"] for one in ids)


def test_short_tasks_wait_for_the_database(
    fragile: StoppedServer | LockedFile, crews: Callable[..., Crew], journal: Journal
) -> None:
    """A task that arrives in an outage does not run and is not lost; it runs after it."""
    crew = crews(fragile.url)
    worker = crew.start()
    with fragile.away(2.0):
        sent = crew.task("sleeper").delay(0.1, 5)
        worker.wait_for_log("job_postponed")
        assert [] == journal.entries("start")
    assert 5 == sent.get(timeout=15)["value"]
    assert 1 == len(journal.entries("start"))
