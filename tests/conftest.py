"""Fixtures of all tests; what they are made of lives in `harness`.

Servers are chosen or started once per test process (`harness.sources`). A test has a database of
its own, and the broker is erased after it. Where a server cannot be had the tests that need it
are skipped and say why; where the environment has CI=true, every skip is an error, except in
tests marked `may_skip`.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import databases, sources, statements
from harness.journal import Journal
from harness.proxy import Proxy
from harness.redis_queue import RedisQueue
from harness.redis_room import RedisRoom
from harness.rows import Rows

from celery_lease import servers

if TYPE_CHECKING:
    from harness.workers import Crew


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "may_skip: some platforms or users cannot run it; skipping is no error in CI"
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    outcome = yield
    report = outcome.get_result()
    if _in_ci() and item.get_closest_marker("may_skip") is None:
        _refuse_skip(report)


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, None]:
    outcome = yield
    if _in_ci():
        _refuse_skip(outcome.get_result())


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("true", "1")


def _refuse_skip(report: Any) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped where CI=true allows no skip: {reason}"


@dataclass(frozen=True)
class OwnPostgreSQL:
    """A PostgreSQL server that a test may stop, with a migrated database."""

    server: servers.Server
    url: str


@pytest.fixture(scope="session")
def postgresql_source() -> Iterator[sources.Source]:
    """Give the PostgreSQL server of this test process."""
    with ExitStack() as stack:
        yield _or_skip(lambda: sources.postgresql(stack))


@pytest.fixture(scope="session")
def redis_source() -> Iterator[sources.Source]:
    """Give the Redis server of this test process."""
    with ExitStack() as stack:
        yield _or_skip(lambda: sources.redis(stack))


@pytest.fixture(scope="session")
def postgresql_databases(
    postgresql_source: sources.Source,
) -> Iterator[databases.PostgreSQLDatabases]:
    """Create databases on the PostgreSQL server; the session's end drops them."""
    made = databases.PostgreSQLDatabases(postgresql_source.url)
    yield made
    made.close()


@pytest.fixture(scope="session")
def sqlite_databases(tmp_path_factory: pytest.TempPathFactory) -> databases.SQLiteDatabases:
    """Create databases as files."""
    return databases.SQLiteDatabases(tmp_path_factory.mktemp("sqlite"))


@pytest.fixture(scope="session")
def redis_room(redis_source: sources.Source) -> Iterator[RedisRoom]:
    """Give the reserved database index of the Redis server."""
    room = RedisRoom(redis_source.url, private=redis_source.embedded is not None)
    yield room
    room.close()


@pytest.fixture
def postgresql_database(postgresql_databases: databases.PostgreSQLDatabases) -> Iterator[str]:
    """Give the URL of a migrated PostgreSQL database."""
    url = postgresql_databases.migrated()
    yield url
    postgresql_databases.drop(url)


@pytest.fixture
def sqlite_database(sqlite_databases: databases.SQLiteDatabases, tmp_path: Path) -> str:
    """Give the URL of a migrated SQLite database."""
    return sqlite_databases.migrated(tmp_path / "lease.db")


@pytest.fixture(params=["postgresql", "sqlite"])
def lease_database(request: pytest.FixtureRequest) -> str:
    """Give the URL of a migrated database, of each kind in turn."""
    return str(request.getfixturevalue(f"{request.param}_database"))


@pytest.fixture
def empty_postgresql(postgresql_databases: databases.PostgreSQLDatabases) -> Iterator[str]:
    """Give the URL of a PostgreSQL database without tables."""
    url = postgresql_databases.create()
    yield url
    postgresql_databases.drop(url)


@pytest.fixture(params=["postgresql", "sqlite"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Give the URL of a database without tables, of each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'empty.db'}"
    return str(request.getfixturevalue("empty_postgresql"))


@pytest.fixture
def broker_url(redis_room: RedisRoom) -> Iterator[str]:
    """Give the URL of an empty Redis database, erased after the test."""
    redis_room.erase()
    yield redis_room.url
    redis_room.erase()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Give the test's journal."""
    return Journal(tmp_path / "journal.jsonl")


@pytest.fixture
def crews(broker_url: str, journal: Journal, tmp_path: Path) -> Iterator[Callable[..., Crew]]:
    """Make crews on databases of the test's choice: `crews(lease_url, **AppSettings fields)`."""
    from harness.apps import AppSettings
    from harness.workers import Crew

    with ExitStack() as stack:

        def make(lease_url: str, **settings: Any) -> Crew:
            given = {
                "broker_url": broker_url,
                "result_backend": broker_url,
                "journal": str(journal.path),
                "queue": f"queue-{uuid.uuid4().hex[:8]}",
                **settings,
            }
            crew = Crew(AppSettings(lease_url=lease_url, **given), tmp_path)
            stack.callback(crew.close)
            return crew

        yield make


@pytest.fixture
def crew(crews: Callable[..., Crew], lease_database: str) -> Crew:
    """Give a crew without workers yet, on a database of each kind in turn."""
    return crews(lease_database)


@pytest.fixture
def redis_queue(crew: Crew, broker_url: str) -> Iterator[RedisQueue]:
    """Read the crew's queue in Redis."""
    queue = RedisQueue(broker_url, crew.settings.queue)
    yield queue
    queue.close()


@pytest.fixture
def rows(lease_database: str) -> Iterator[Rows]:
    """Read the lease rows of the test's database."""
    found = Rows(lease_database)
    yield found
    found.close()


@pytest.fixture
def proxies() -> Iterator[Callable[[str], Proxy]]:
    """Put a faulty network before a server: `proxies(url).url`."""
    with ExitStack() as stack:
        yield lambda url: stack.enter_context(Proxy(url))


@pytest.fixture
def own_postgresql() -> Iterator[OwnPostgreSQL]:
    """Give a PostgreSQL server that the test may stop, kill and start."""
    with _or_skip(servers.postgres) as server:
        databases.migrate(server.url)
        yield OwnPostgreSQL(server, server.url)


@pytest.fixture
def own_redis() -> Iterator[servers.Server]:
    """Give a Redis server that the test may stop, kill and start."""
    with _or_skip(servers.redis) as server:
        yield server


@pytest.fixture(scope="session")
def counting_databases() -> Iterator[databases.PostgreSQLDatabases]:
    """Create databases on a PostgreSQL server that counts statements."""
    with _or_skip(statements.counting_server) as server:
        made = databases.PostgreSQLDatabases(server.url)
        yield made
        made.close()


@pytest.fixture
def statement_counter(
    counting_databases: databases.PostgreSQLDatabases,
) -> Iterator[statements.StatementCounter]:
    """Count the statements of a migrated database of the test's own: `.url`."""
    url = counting_databases.migrated()
    counter = statements.StatementCounter(url)
    yield counter
    counter.close()
    counting_databases.drop(url)


def _or_skip(start: Callable[[], Any]) -> Any:
    try:
        return start()
    except servers.ServerUnavailable as unavailable:
        pytest.skip(str(unavailable))
