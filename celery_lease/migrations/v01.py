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
        "state": "{prefix}celery_lease_state",
        "check": "",
    },
    "sqlite": {
        "instant": "TEXT",
        "binary": "BLOB",
        "float": "FLOAT",
        "serial": "INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT",
        "with": "",
        "state": "VARCHAR(16)",
        "check": ",\n    CONSTRAINT celery_lease_state CHECK (state IN ({states}))",
    },
}

_STATES = "'queued', 'running', 'succeeded', 'failed', 'cancelled'"

_UP = (
    """CREATE TABLE {prefix}celery_lease (
    task_id VARCHAR(255) NOT NULL PRIMARY KEY,
    namespace VARCHAR(128) NOT NULL,
    task_name VARCHAR(255) NOT NULL,
    created_at {instant} NOT NULL,
    lease_duration {float} NOT NULL,
    max_attempts INTEGER NOT NULL,
    fencing_token BIGINT DEFAULT 0 NOT NULL,
    attempt INTEGER DEFAULT 0 NOT NULL,
    crashes INTEGER DEFAULT 0 NOT NULL,
    retries INTEGER DEFAULT 0 NOT NULL,
    dispatch INTEGER DEFAULT 0 NOT NULL,
    dispatches INTEGER DEFAULT 0 NOT NULL,
    keep_payload BOOLEAN DEFAULT false NOT NULL,
    claimed_at {instant},
    deadline_at {instant},
    idempotency_key VARCHAR(255),
    labels TEXT,
    delivery_tag VARCHAR(1024),
    payload {binary},
    message TEXT,
    state {state} NOT NULL,
    owner_id VARCHAR(255),
    lease_until {instant},
    heartbeat_at {instant},
    dispatch_at {instant},
    announce_until {instant},
    announced_at {instant},
    finished_at {instant},
    cancel_requested_at {instant},
    cancel_reason TEXT,
    result_type VARCHAR(100),
    result_encoding VARCHAR(50),
    result {binary},
    error TEXT,
    details TEXT{check}
){with}""",
    "CREATE INDEX celery_lease_running ON {prefix}celery_lease (namespace) WHERE state = 'running'",
    "CREATE INDEX celery_lease_due ON {prefix}celery_lease (namespace, dispatch_at)"
    " WHERE dispatch_at IS NOT NULL",
    "CREATE INDEX celery_lease_finished ON {prefix}celery_lease (namespace, finished_at)"
    " WHERE announced_at IS NOT NULL",
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
    tables = _formatted(_UP, dialect_name, prefix)
    if dialect_name == "postgresql":
        # A type, not a constraint, which PostgreSQL would parse anew with every statement.
        return (f"CREATE TYPE {prefix}celery_lease_state AS ENUM ({_STATES})", *tables)
    return tables


def down(dialect_name: str, prefix: str) -> tuple[str, ...]:
    """Return the statements that drop the tables."""
    tables = _formatted(_DOWN, dialect_name, prefix)
    if dialect_name == "postgresql":
        return (*tables, f"DROP TYPE {prefix}celery_lease_state")
    return tables


def _formatted(texts: tuple[str, ...], dialect_name: str, prefix: str) -> tuple[str, ...]:
    types = {
        name: text.format(prefix=prefix, states=_STATES)
        for name, text in _TYPES[dialect_name].items()
    }
    return tuple(text.format(prefix=prefix, **types) for text in texts)
