"""A lease as one would write it by hand for one project: a claim and a guarded commit.

The measure of what celery_lease costs beyond its statements. It has no heartbeat, no recovery, no
replay of a lost announcement, and keeps no result: each would cost it something. psycopg with its
defaults, one autocommit connection per process.
"""

from __future__ import annotations

import json
import os
import uuid
from typing import Any

import psycopg
from celery import Task
from celery.exceptions import Ignore

TABLE = """
    CREATE TABLE IF NOT EXISTS handwritten_lease (
        task_id text PRIMARY KEY, state text NOT NULL, owner_id text NOT NULL,
        token bigint NOT NULL, lease_until timestamptz NOT NULL, body bytea, finished_at timestamptz
    )
"""
CLAIM = """
    INSERT INTO handwritten_lease AS lease (task_id, state, owner_id, token, lease_until, body)
    VALUES (%s, 'running', %s, 1, clock_timestamp() + interval '90 seconds', %s)
    ON CONFLICT (task_id) DO UPDATE SET state = 'running', owner_id = excluded.owner_id,
        token = lease.token + 1, lease_until = excluded.lease_until
    WHERE lease.state = 'running' AND lease.lease_until <= clock_timestamp()
    RETURNING token
"""
COMMIT = """
    UPDATE handwritten_lease SET state = 'succeeded', finished_at = clock_timestamp()
    WHERE task_id = %s AND owner_id = %s AND token = %s
        AND state = 'running' AND lease_until > clock_timestamp()
"""


class HandwrittenLease:
    """The two statements on one connection, which is opened at the first claim.

    Args:
        address: libpq connection string.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._connection: psycopg.Connection[Any] | None = None

    def claim(self, task_id: str, body: bytes) -> tuple[str, int] | None:
        """Return owner and token, or None if somebody else has the task."""
        if self._connection is None:
            self._connection = psycopg.connect(self._address, autocommit=True)
        owner = f"{os.getpid()}:{uuid.uuid4()}"
        row = self._connection.execute(CLAIM, (task_id, owner, body)).fetchone()
        return None if row is None else (owner, row[0])

    def commit(self, task_id: str, owner: str, token: int) -> bool:
        """Return whether the grant still held."""
        if self._connection is None:
            raise RuntimeError("nothing was claimed")
        return self._connection.execute(COMMIT, (task_id, owner, token)).rowcount == 1

    def close(self) -> None:
        """Disconnect."""
        if self._connection is not None:
            self._connection.close()


_CANVAS = ("callbacks", "errbacks", "chain", "chord")


class HandwrittenTask(Task):  # type: ignore[type-arg]
    """The task base class; a subclass has `claims`."""

    abstract = True
    claims: HandwrittenLease

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        task_id = str(self.request.id)
        canvas = {key: getattr(self.request, key) for key in _CANVAS}
        body = json.dumps([args, kwargs, canvas]).encode()
        grant = self.claims.claim(task_id, body)
        if grant is None:
            raise Ignore
        result = super().__call__(*args, **kwargs)
        if not self.claims.commit(task_id, *grant):
            raise Ignore
        return result
