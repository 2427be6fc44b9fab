"""Fixtures of the store's conformance suite: one store, on a database of each kind in turn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.leases import open_store

from celery_lease.store import LeaseStore


@pytest.fixture
def store(lease_database: str) -> Iterator[LeaseStore]:
    """Give a store on a database with tables and no rows."""
    opened = open_store(lease_database)
    yield opened
    opened.database.dispose()


@pytest.fixture
def other(lease_database: str) -> Iterator[LeaseStore]:
    """Give a second store on the same database, with connections of its own."""
    opened = open_store(lease_database)
    yield opened
    opened.database.dispose()
