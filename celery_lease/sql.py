"""All statements of one database, ready for its driver, by name."""

from __future__ import annotations

from functools import lru_cache

from celery_lease.dialects import Dialect, Names, Script
from celery_lease.sql_phrases import Phrases
from celery_lease.sql_postgresql import postgresql_scripts
from celery_lease.sql_shared import shared_scripts
from celery_lease.sql_sqlite import sqlite_scripts

__all__ = ("scripts",)


@lru_cache(maxsize=8)
def scripts(dialect: Dialect, schema: str | None) -> dict[str, Script]:
    """Return the statements by name, with the driver's placeholders."""
    phrases = Phrases(dialect, Names.of(schema))
    own = postgresql_scripts if dialect.name == "postgresql" else sqlite_scripts
    found = {**shared_scripts(phrases), **own(phrases)}
    return {name: dialect.placed(script) for name, script in found.items()}
