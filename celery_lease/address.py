"""Reads and checks ``lease_url``: which database, which driver.

Connects to nothing. Every refusal names the key, the URL without its password
and what is legal.
"""

from __future__ import annotations

import re
import sqlite3
from importlib.util import find_spec

from celery.exceptions import ImproperlyConfigured
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

__all__ = ("checked_url",)

_LEGAL = "postgresql+psycopg://user:password@host/database or sqlite:///path/to/file"
#: Whatever stands before an @ and after a colon, in a text that is no URL.
_PASSWORD = re.compile(r"^([^:/?#]*:?//[^:/?#]*|[^:/?#]*):.*@")
#: RETURNING and UPDATE … FROM.
_OLDEST_SQLITE = (3, 35, 0)


def checked_url(url: str | URL) -> URL:
    """Return the URL with the driver to use.

    Raises:
        celery.exceptions.ImproperlyConfigured: The URL cannot be read, or names
            a database or driver that celery_lease does not know or that is not
            installed.
    """
    parsed = _parsed(url)
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        return _checked_sqlite(parsed)
    if backend == "postgresql":
        return _checked_postgresql(parsed)
    raise _illegal(parsed, f"there is no support for {backend}")


def _parsed(url: str | URL) -> URL:
    if not url:
        raise ImproperlyConfigured(f"lease_url is not set: expected {_LEGAL}")
    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        shown = _PASSWORD.sub(r"\1:***@", str(url))
        # No cause: the driver's message may repeat the password.
        raise ImproperlyConfigured(
            f"lease_url={shown!r} is not legal: it cannot be read as a URL; expected {_LEGAL}"
        ) from None


def _checked_sqlite(url: URL) -> URL:
    if url.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise _illegal(url, "the driver for SQLite is pysqlite, Python's own")
    if url.database in (None, "", ":memory:") or url.query.get("mode") == "memory":
        raise _illegal(url, "a database in memory belongs to one process, leases to all of them")
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        needed = ".".join(map(str, _OLDEST_SQLITE))
        raise _illegal(url, f"SQLite is {sqlite3.sqlite_version} here, {needed} is needed")
    return url


def _checked_postgresql(url: URL) -> URL:
    if url.drivername not in ("postgresql", "postgresql+psycopg"):
        raise _illegal(url, "the driver for PostgreSQL is psycopg (version 3)")
    if find_spec("psycopg") is None:
        raise _illegal(
            url, "the driver psycopg is not installed: pip install 'celery-lease[postgresql]'"
        )
    return url.set(drivername="postgresql+psycopg")


def _illegal(url: URL, why: str) -> ImproperlyConfigured:
    shown = url.render_as_string(hide_password=True)
    return ImproperlyConfigured(f"lease_url={shown!r} is not legal: {why}; expected {_LEGAL}")
