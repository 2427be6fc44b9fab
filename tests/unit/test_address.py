"""A lease_url that cannot work is refused before anything connects."""

from __future__ import annotations

import importlib.util
import sqlite3

import pytest
from celery.exceptions import ImproperlyConfigured

from celery_lease import address
from celery_lease.address import checked_url
from celery_lease.database import Database


@pytest.mark.parametrize(
    ("given", "driver"),
    [
        ("postgresql+psycopg://user:pw@host:5432/leases", "postgresql+psycopg"),
        ("postgresql://user:pw@host/leases", "postgresql+psycopg"),
        ("sqlite:////tmp/lease.db", "sqlite"),
        ("sqlite+pysqlite:///lease.db", "sqlite+pysqlite"),
    ],
)
def test_legal_urls(given: str, driver: str) -> None:
    """A URL without a driver gets the one that celery_lease uses; the rest stays."""
    url = checked_url(given)
    assert driver == url.drivername
    assert ("pw" in given) == (url.password == "pw")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("", "not set"),
        ("no url at all", "cannot be read"),
        ("postgresql://user:s3cret@host:port/leases", "cannot be read"),
        ("postgresql+psycopg2://user:s3cret@host/leases", "psycopg"),
        ("mysql+pymysql://user:s3cret@host/leases", "mysql"),
        ("redis://:s3cret@host/0", "redis"),
        ("sqlite://", "memory"),
        ("sqlite:///:memory:", "memory"),
        ("sqlite:///file:leases?mode=memory&uri=true", "memory"),
        ("sqlite+aiosqlite:///lease.db", "pysqlite"),
    ],
)
def test_illegal_urls(given: str, why: str) -> None:
    """The error names the key, the URL without its password, the reason and what is legal."""
    with pytest.raises(ImproperlyConfigured, match=why) as refused:
        checked_url(given)
    told = str(refused.value)
    assert "lease_url" in told
    assert "postgresql+psycopg://" in told
    assert "sqlite:///" in told
    assert "s3cret" not in told


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install."""
    monkeypatch.setattr(address, "find_spec", lambda name: None)
    assert importlib.util.find_spec("psycopg") is not None
    with pytest.raises(ImproperlyConfigured, match=r"celery-lease\[postgresql\]"):
        checked_url("postgresql://host/leases")


def test_an_old_sqlite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The statements need RETURNING; without it they would fail one by one."""
    monkeypatch.setattr(sqlite3, "sqlite_version_info", (3, 34, 1))
    monkeypatch.setattr(sqlite3, "sqlite_version", "3.34.1")
    with pytest.raises(ImproperlyConfigured, match=r"3\.34\.1 here, 3\.35\.0 is needed"):
        checked_url("sqlite:///lease.db")


@pytest.mark.parametrize("url", ["postgresql://host/leases", "sqlite:///lease.db"])
def test_unknown_engine_options_are_named(url: str) -> None:
    """A typing error in the options is told before a worker takes a message."""
    database = Database(url, {"pool_sise": 3})
    with pytest.raises(ImproperlyConfigured, match=r"lease_engine_options.*pool_sise"):
        database.load_driver()
