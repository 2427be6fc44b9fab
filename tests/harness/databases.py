"""A database of its own for each test, with the tables in it.

PostgreSQL copies a template database that is migrated once, SQLite a template file.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from pathlib import Path

import psutil
import sqlalchemy
from sqlalchemy.engine import make_url

_PREFIX = "celery_lease_test_"


def migrate(url: str) -> None:
    """Create the tables."""
    from celery_lease import migrations

    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    try:
        migrations.upgrade(engine)
    finally:
        engine.dispose()


class PostgreSQLDatabases:
    """Creates and drops databases on one server; names hold this process's id."""

    def __init__(self, url: str) -> None:
        self._url = make_url(url)
        self._engine = sqlalchemy.create_engine(
            url, isolation_level="AUTOCOMMIT", pool_size=1, max_overflow=0
        )
        self._numbers = itertools.count()
        self._template: str | None = None
        self._made: set[str] = set()
        self._drop_abandoned()

    def create(self) -> str:
        """Return the URL of a new empty database."""
        return self._create("")

    def migrated(self) -> str:
        """Return the URL of a new database with the tables."""
        if self._template is None:
            url = self._create("")
            migrate(url)
            self._template = make_url(url).database
        return self._create(f" TEMPLATE {self._template}")

    def drop(self, url: str) -> None:
        """Drop a database, whoever is still connected to it."""
        self._drop(str(make_url(url).database))

    def close(self) -> None:
        """Drop what is left, and disconnect."""
        with contextlib.suppress(sqlalchemy.exc.OperationalError):  # a test may have ended it
            for name in sorted(self._made):
                self._drop(name)
        self._engine.dispose()

    def _create(self, suffix: str) -> str:
        name = f"{_PREFIX}{os.getpid()}_{next(self._numbers)}"
        self._execute(f"CREATE DATABASE {name}{suffix}")
        self._made.add(name)
        return self._url.set(database=name).render_as_string(hide_password=False)

    def _drop(self, name: str) -> None:
        self._execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        self._made.discard(name)

    def _drop_abandoned(self) -> None:
        """Drop what test processes that were killed have left on a lasting server."""
        query = sqlalchemy.text("SELECT datname FROM pg_database WHERE datname LIKE :pattern")
        with self._engine.connect() as connection:
            names = connection.scalars(query, {"pattern": f"{_PREFIX}%"}).all()
        for name in names:
            pid = int(name.removeprefix(_PREFIX).partition("_")[0])
            if pid == os.getpid() or not psutil.pid_exists(pid):
                self._drop(name)

    def _execute(self, statement: str) -> None:
        with self._engine.connect() as connection:
            connection.execute(sqlalchemy.text(statement))


class SQLiteDatabases:
    """Copies a migrated file; `folder` holds the template."""

    def __init__(self, folder: Path) -> None:
        self._template = folder / "template.db"

    def migrated(self, path: Path) -> str:
        """Return the URL of a new database with the tables, in the file `path`."""
        if not self._template.exists():
            migrate(f"sqlite:///{self._template}")
        shutil.copy(self._template, path)
        return f"sqlite:///{path}"
