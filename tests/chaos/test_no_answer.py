"""The lease database gives no answer to a claim: no body runs, nothing is lost, no loop is hot."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from harness.journal import Journal
from harness.proxy import Proxy
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew
from sqlalchemy.engine import make_url

#: Seconds for which the database is away.
AWAY = 5.0


class FarDatabase:
    """PostgreSQL behind a proxy that refuses or swallows what it is sent."""

    def __init__(self, url: str, proxy: Proxy, fault: Callable[[], None]) -> None:
        self.direct, self.url = url, proxy.url
        self._proxy, self._fault = proxy, fault

    @contextmanager
    def away(self) -> Iterator[None]:
        """Apply the fault."""
        self._fault()
        try:
            yield
        finally:
            self._proxy.restore()


class LockedDatabase:
    """SQLite, locked for writers by somebody else."""

    def __init__(self, url: str) -> None:
        self.direct = self.url = url

    @contextmanager
    def away(self) -> Iterator[None]:
        """Hold the lock."""
        path = str(make_url(self.url).database)
        with closing(sqlite3.connect(path, timeout=10, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.execute("ROLLBACK")


@pytest.fixture(params=["refused", "silent", "locked"])
def database(request: pytest.FixtureRequest, proxies: Callable[[str], Proxy]) -> Any:
    """Give a lease database that can be made to give no answer."""
    if request.param == "locked":
        return LockedDatabase(request.getfixturevalue("sqlite_database"))
    url = request.getfixturevalue("postgresql_database")
    proxy = proxies(url)
    return FarDatabase(url, proxy, proxy.refuse if request.param == "refused" else proxy.cut)


@pytest.fixture
def far_rows(database: Any) -> Iterator[Rows]:
    """Read the rows past the fault."""
    found = Rows(database.direct)
    yield found
    found.close()


def test_a_claim_without_an_answer_waits(
    database: Any,
    crews: Callable[..., Crew],
    broker_url: str,
    journal: Journal,
    far_rows: Rows,
) -> None:
    """The worker tries again, ever more rarely, while ordinary tasks of the queue go on."""
    crew = crews(database.url)
    worker = crew.start()
    # The child has claimed before: it holds a connection, which the fault will meet.
    assert 3 == crew.task("adder").delay(1, 2).get(timeout=15)
    with database.away():
        began = time.monotonic()
        result = crew.task("sleeper").delay(0.2, "late")
        worker.wait_for_log("claim_failed")
        numbers = []
        while time.monotonic() < began + AWAY:
            numbers.append(crew.task("plain").delay(len(numbers)).get(timeout=15))
            time.sleep(0.2)
        tries = worker.log().count("claim_failed")
        assert [] == journal.entries("start")
        assert list(range(len(numbers))) == numbers
        assert len(numbers) > 3, "a claim that waits blocks its child for a moment only"
    # One at once, then after half a second to a second, twice that, four times that …
    assert 2 <= tries <= 5
    assert "late" == result.get(timeout=20)["value"]
    assert 1 == len(journal.entries("start"))
    # A claim that was swallowed may arrive late and be granted to nobody: an attempt, no crash.
    assert 0 == far_rows.wait(result.id, state="succeeded")["crashes"]
    queue = RedisQueue(broker_url, crew.settings.queue)
    try:
        queue.wait_empty()
    finally:
        queue.close()


def test_a_worker_that_ends_while_its_claim_waits_loses_nothing(
    database: Any, crews: Callable[..., Crew], journal: Journal, far_rows: Rows
) -> None:
    """The message was never acknowledged: another worker has it when the database is back."""
    crew = crews(database.url)
    worker = crew.start()
    with database.away():
        result = crew.task("sleeper").delay(0.2, "late")
        worker.wait_for_log("job_postponed")
        assert 0 == worker.stop()
    crew.start("next")
    assert "late" == result.get(timeout=20)["value"]
    until(lambda: (far_rows.get(result.id) or {}).get("state") == "succeeded", what="its row")
    assert 1 == len(journal.entries("start"))
