"""Which servers the tests use: given ones, this machine's, or embedded ones.

`CELERY_LEASE_TEST_POSTGRESQL_URL` and `CELERY_LEASE_TEST_REDIS_URL` name servers; one that is
named and does not answer is an error. Else the machine's own on the usual ports are used where
they answer, unless `CELERY_LEASE_TEST_SERVERS=embedded`; else embedded ones are started.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import psycopg
import redis as redis_client
from sqlalchemy.engine import make_url

from celery_lease import servers

MACHINE_POSTGRESQL = "postgresql+psycopg://postgres@127.0.0.1:5432/test"
MACHINE_REDIS = "redis://127.0.0.1:6379/0"


@dataclass(frozen=True)
class Source:
    """A server that tests may use.

    Attributes:
        url: SQLAlchemy or Redis URL.
        embedded: The server, if it was started for these tests; a test may stop no other.
    """

    url: str
    embedded: servers.Server | None = None


def embedded_only() -> bool:
    """Tell whether the machine's own servers are to be ignored."""
    return os.environ.get("CELERY_LEASE_TEST_SERVERS") == "embedded"


def postgresql(stack: ExitStack) -> Source:
    """Choose or start the PostgreSQL server; a started one ends with the stack."""
    return _choose(
        "CELERY_LEASE_TEST_POSTGRESQL_URL",
        MACHINE_POSTGRESQL,
        _postgresql_fault,
        servers.postgres,
        stack,
    )


def redis(stack: ExitStack) -> Source:
    """Choose or start the Redis server; a started one ends with the stack."""
    return _choose("CELERY_LEASE_TEST_REDIS_URL", MACHINE_REDIS, _redis_fault, servers.redis, stack)


def _choose(
    variable: str,
    machine: str,
    fault_of: Callable[[str], str],
    start: Callable[[], servers.Server],
    stack: ExitStack,
) -> Source:
    given = os.environ.get(variable)
    if given:
        fault = fault_of(given)
        if fault:
            raise RuntimeError(f"{variable} names a server that cannot be used: {fault}")
        return Source(given)
    if not embedded_only() and not fault_of(machine):
        return Source(machine)
    server = stack.enter_context(start())
    return Source(server.url, server)


def _postgresql_fault(url: str) -> str:
    address = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    try:
        with psycopg.connect(address, connect_timeout=3) as connection:
            row = connection.execute(
                "select rolcreatedb or rolsuper from pg_roles where rolname = current_user"
            ).fetchone()
    except psycopg.OperationalError as error:
        return str(error)
    return "" if row and row[0] else "its user may not create databases"


def _redis_fault(url: str) -> str:
    try:
        with redis_client.Redis.from_url(url, socket_connect_timeout=3) as client:
            client.ping()
    except redis_client.RedisError as error:
        return str(error)
    return ""
