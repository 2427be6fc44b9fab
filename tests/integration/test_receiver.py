"""A receiver that remembers the highest fencing token, on each database."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import sqlalchemy
from sqlalchemy import Engine

from celery_lease import StaleFence
from celery_lease.receiver import FenceGuard


@pytest.fixture
def engine(lease_database: str) -> Iterator[Engine]:
    made = sqlalchemy.create_engine(lease_database, poolclass=sqlalchemy.NullPool)
    yield made
    made.dispose()


def test_a_lower_token_is_refused(engine: Engine) -> None:
    """The overtaken owner is refused, and told which token overtook it."""
    guard = FenceGuard(engine)
    guard.accept("ledger", 41)
    guard.accept("ledger", 42)
    with pytest.raises(StaleFence) as refused:
        guard.accept("ledger", 41)
    assert ("ledger", 41, 42) == refused.value.args


def test_the_owner_may_come_again(engine: Engine) -> None:
    """One owner sends many requests with one token."""
    guard = FenceGuard(engine)
    guard.accept("ledger", 42)
    guard.accept("ledger", 42)


def test_resources_are_apart(engine: Engine) -> None:
    """A high token for one resource says nothing about another."""
    guard = FenceGuard(engine)
    guard.accept("ledger", 42)
    guard.accept("bucket", 1)


def test_what_is_rolled_back_was_not_accepted(engine: Engine) -> None:
    """In the receiver's own transaction, the token counts if the change does."""
    guard = FenceGuard(engine)
    with engine.connect() as connection:
        guard.accept("ledger", 42, connection=connection)
        connection.rollback()
    guard.accept("ledger", 41)


def test_nobody_overtakes_between_check_and_change(engine: Engine) -> None:
    """A stale request waits for the newer one's transaction, and is refused after it."""
    guard = FenceGuard(engine)
    guard.accept("ledger", 41)
    refused: list[StaleFence] = []
    started = threading.Event()

    def stale() -> None:
        started.set()
        try:
            guard.accept("ledger", 41)
        except StaleFence as error:
            refused.append(error)

    with engine.begin() as connection:
        guard.accept("ledger", 42, connection=connection)
        thread = threading.Thread(target=stale)
        thread.start()
        started.wait(5)
        thread.join(0.2)
        assert thread.is_alive()
    thread.join(5)
    assert 1 == len(refused)
