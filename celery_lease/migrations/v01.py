"""Step 1: the tables of the first release.

Frozen: a released step never changes, a later step alters what it made.
"""

from __future__ import annotations

__all__ = ("down", "up")

_TYPES = {
    "postgresql": {
        "instant": "TIMESTAMP WITH TIME ZONE",
        "binary": "BYTEA",
        "float": "DOUBLE PRECISION",
        "serial": "BIGSERIAL PRIMARY KEY",
        "with": " WITH (fillfactor = 50)",
    },
    "sqlite": {
        "instant": "TEXT",
        "binary": "BLOB",
        "float": "FLOAT",
        "serial": "INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT",
        "with": "",
    },
}

_UP = (
    """CREATE TABLE {prefix}celery_lease (
    task_id VARCHAR(255) NOT NULL PRIMARY KEY,
    namespace VARCHAR(128) NOT NULL,
    task_name VARCHAR(255) NOT NULL,
    state VARCHAR(16) NOT NULL,
    owner_id VARCHAR(255),
    lease_until {instant},
    fencing_token BIGINT DEFAULT 0 NOT NULL,
    heartbeat_at {instant},
    attempt INTEGER DEFAULT 0 NOT NULL,
    crashes INTEGER DEFAULT 0 NOT NULL,
    retries INTEGER DEFAULT 0 NOT NULL,
    max_attempts INTEGER NOT NULL,
    lease_duration {float} NOT NULL,
    idempotency_key VARCHAR(255),
    dispatch INTEGER DEFAULT 0 NOT NULL,
    dispatch_at {instant},
    dispatches INTEGER DEFAULT 0 NOT NULL,
    payload {binary},
    message TEXT,
    delivery_tag VARCHAR(1024),
    result {binary},
    result_type VARCHAR(100),
    result_encoding VARCHAR(50),
    error TEXT,
    details TEXT,
    labels TEXT,
    cancel_requested_at {instant},
    cancel_reason TEXT,
    deadline_at {instant},
    announce_until {instant},
    announced_at {instant},
    keep_payload BOOLEAN DEFAULT false NOT NULL,
    created_at {instant} NOT NULL,
    claimed_at {instant},
    finished_at {instant},
    CONSTRAINT celery_lease_state
        CHECK (state IN ('queued', 'running', 'succeeded', 'failed', 'cancelled'))
){with}""",
    "CREATE INDEX celery_lease_running ON {prefix}celery_lease (namespace) WHERE state = 'running'",
    "CREATE INDEX celery_lease_due ON {prefix}celery_lease (namespace, dispatch_at)"
    " WHERE dispatch_at IS NOT NULL",
    "CREATE INDEX celery_lease_finished ON {prefix}celery_lease (namespace, finished_at)"
    " WHERE finished_at IS NOT NULL",
    "CREATE UNIQUE INDEX celery_lease_key ON {prefix}celery_lease (idempotency_key)"
    " WHERE idempotency_key IS NOT NULL",
    """CREATE TABLE {prefix}celery_lease_history (
    id {serial},
    task_id VARCHAR(255) NOT NULL,
    namespace VARCHAR(128) NOT NULL,
    event VARCHAR(32) NOT NULL,
    fencing_token BIGINT DEFAULT 0 NOT NULL,
    owner_id VARCHAR(255),
    attempt INTEGER DEFAULT 0 NOT NULL,
    cause VARCHAR(64),
    at {instant} NOT NULL,
    facts TEXT
)""",
    "CREATE INDEX celery_lease_history_task ON {prefix}celery_lease_history (task_id, id)",
    "CREATE INDEX celery_lease_history_at ON {prefix}celery_lease_history (at)",
    """CREATE TABLE {prefix}celery_lease_reaper (
    namespace VARCHAR(128) NOT NULL PRIMARY KEY,
    pass_at {instant},
    next_pass_at {instant},
    owner VARCHAR(255),
    outage_from {instant},
    outage_until {instant}
)""",
    """CREATE TABLE {prefix}celery_lease_fence (
    resource VARCHAR(255) NOT NULL PRIMARY KEY,
    fencing_token BIGINT NOT NULL,
    accepted_at {instant} NOT NULL
)""",
)

_DOWN = (
    "DROP TABLE {prefix}celery_lease_fence",
    "DROP TABLE {prefix}celery_lease_reaper",
    "DROP TABLE {prefix}celery_lease_history",
    "DROP TABLE {prefix}celery_lease",
)


def up(dialect_name: str, prefix: str) -> tuple[str, ...]:
    """Return the statements that make the tables.

    Args:
        dialect_name: ``postgresql`` or ``sqlite``.
        prefix: The quoted database schema and a dot, or nothing.
    """
    return tuple(text.format(prefix=prefix, **_TYPES[dialect_name]) for text in _UP)


def down(dialect_name: str, prefix: str) -> tuple[str, ...]:
    """Return the statements that drop the tables."""
    del dialect_name
    return tuple(text.format(prefix=prefix) for text in _DOWN)
