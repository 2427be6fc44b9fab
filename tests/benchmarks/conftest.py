"""Servers of their own for the benchmarks: durable where it counts, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest
import redis
from harness import databases

from benchmarks.findings import Findings
from benchmarks.handwritten import TABLE
from benchmarks.settings import BenchmarkSettings
from celery_lease import servers

_DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}


@pytest.fixture(scope="session")
def findings() -> Iterator[Findings]:
    """Collect the figures; they are printed and written when all have been measured."""
    found = Findings()
    yield found
    found.write()


@pytest.fixture(scope="session")
def bench_settings(findings: Findings) -> Iterator[BenchmarkSettings]:
    """Give settings with servers behind them: Redis without persistence, PostgreSQL durable."""
    with (
        _started(lambda: servers.postgres(_DURABLE)) as postgresql,
        # Celery's own half of the work is to be as quick as it can be.
        _started(lambda: servers.redis({"appendonly": "no"})) as broker,
    ):
        databases.migrate(postgresql.url)
        address = postgresql.url.replace("postgresql+psycopg:", "postgresql:")
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(TABLE)
            for name, value in _DURABLE.items():
                assert (value,) == connection.execute(f"SHOW {name}").fetchone()
            number = connection.info.server_version
            findings.servers["PostgreSQL"] = f"{number // 10_000}.{number % 10_000}, durable"
        with redis.Redis.from_url(broker.url) as client:
            told = client.info("server")
            kind = "Valkey" if "valkey_version" in told else "Redis"
            number = told.get("valkey_version", told["redis_version"])
            findings.servers[kind] = f"{number}, no persistence"
        yield BenchmarkSettings(broker.url, postgresql.url)


def _started(start: Callable[[], servers.Server]) -> servers.Server:
    try:
        return start()
    except servers.ServerUnavailable as unavailable:
        pytest.skip(str(unavailable))
