"""Counts the statements of one PostgreSQL database, by the server's own statistics.

`pg_stat_statements` counts each statement as it ends, exactly and visible at once; utility
statements (BEGIN, COMMIT, SET) too. It has to be loaded at the server's start, so the tests that
count have an embedded server of their own. The counter's connection is to another database, so
it does not count itself.
"""

from __future__ import annotations

import psycopg
from sqlalchemy.engine import make_url

from celery_lease import servers

_COUNTS = """
    SELECT s.query, sum(s.calls)::bigint FROM pg_stat_statements AS s
    JOIN pg_database AS d ON d.oid = s.dbid WHERE d.datname = %s GROUP BY s.query
"""
_RESET = "SELECT pg_stat_statements_reset(0, oid, 0) FROM pg_database WHERE datname = %s"


def counting_server() -> servers.Server:
    """Start a server that counts statements."""
    return servers.postgres({"shared_preload_libraries": "pg_stat_statements"})


class StatementCounter:
    """Counts from its creation, or from the last `reset`.

    Args:
        url: SQLAlchemy URL of the database, on a `counting_server`.
    """

    def __init__(self, url: str) -> None:
        parts = make_url(url)
        self.url = url
        self._database = parts.database
        admin = parts.set(drivername="postgresql", database="postgres")
        self._connection = psycopg.connect(
            admin.render_as_string(hide_password=False), autocommit=True
        )
        self._connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        self.reset()

    def reset(self) -> None:
        """Start from nought."""
        self._connection.execute(_RESET, [self._database])

    def calls(self) -> dict[str, int]:
        """Return how often each statement was run, by its text with parameters left out."""
        return dict(self._connection.execute(_COUNTS, [self._database]).fetchall())

    def total(self, *containing: str) -> int:
        """Return how many statements were run, of those that hold all the given texts."""
        calls = self.calls().items()
        return sum(count for query, count in calls if all(text in query for text in containing))

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()
