"""The lease rows as the database has them, read and aged behind the package's back."""

from __future__ import annotations

from typing import Any

import sqlalchemy
from sqlalchemy import text

from harness.waiting import until

_TERMINAL = ("succeeded", "failed", "cancelled")
_EXPIRE = {
    "postgresql": "clock_timestamp() - interval '1 second'",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', 'now', '-1 second') || '000'",
}


class Rows:
    """Plain SQL on the lease tables.

    Instants come as the driver gives them: aware datetimes from PostgreSQL, text from SQLite.
    """

    def __init__(self, url: str) -> None:
        self.engine = sqlalchemy.create_engine(
            url, isolation_level="AUTOCOMMIT", poolclass=sqlalchemy.NullPool
        )

    def get(self, task_id: str) -> dict[str, Any] | None:
        """Return the row of a task, or None."""
        found = self.query("SELECT * FROM celery_lease WHERE task_id = :id", id=task_id)
        return found[0] if found else None

    def all(self) -> list[dict[str, Any]]:
        """Return all rows, ordered by task id."""
        return self.query("SELECT * FROM celery_lease ORDER BY task_id")

    def history(self, task_id: str, event: str | None = None) -> list[dict[str, Any]]:
        """Return a task's history, oldest first; of one event only, if it is named."""
        found = self.query(
            "SELECT * FROM celery_lease_history WHERE task_id = :id ORDER BY id", id=task_id
        )
        return [entry for entry in found if event in (None, entry["event"])]

    def wait(
        self, task_id: str, *, state: str | None = None, timeout: float = 15.0, **match: Any
    ) -> dict[str, Any]:
        """Wait until the row has the state (or any terminal one) and values, and return it."""

        def matching() -> dict[str, Any] | None:
            row = self.get(task_id)
            if row is None or not all(row[name] == value for name, value in match.items()):
                return None
            return row if row["state"] in ((state,) if state else _TERMINAL) else None

        found = until(
            matching,
            timeout=timeout,
            what=lambda: (
                f"{task_id} {state or 'terminal'} {match or ''};"
                f" row {self.get(task_id)}, history {self.history(task_id)}"
            ),
        )
        if found is None:
            raise AssertionError
        return found

    def expire(self, task_id: str) -> None:
        """Move a lease's end into the past, which is how tests let time go by."""
        self.execute(
            f"UPDATE celery_lease SET lease_until = {_EXPIRE[self.engine.dialect.name]}"
            " WHERE task_id = :id",
            id=task_id,
        )

    def query(self, statement: str, **values: Any) -> list[dict[str, Any]]:
        """Run a SELECT and return its rows."""
        with self.engine.connect() as connection:
            return [dict(row) for row in connection.execute(text(statement), values).mappings()]

    def execute(self, statement: str, **values: Any) -> int:
        """Run any other statement and return the number of rows it met."""
        with self.engine.connect() as connection:
            return connection.execute(text(statement), values).rowcount

    def close(self) -> None:
        """Disconnect."""
        self.engine.dispose()
