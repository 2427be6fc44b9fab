"""The Celery settings that the three measured apps share, and their way into worker processes."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from celery import Celery, signals

ENVIRONMENT_VARIABLE = "CELERY_LEASE_BENCHMARK_APP"


@dataclass(frozen=True)
class BenchmarkSettings:
    """Where an app works; all of it is JSON.

    Attributes:
        redis_url: Broker and result backend.
        database_url: SQLAlchemy URL of the lease database, which is the hand-written claims' too.
        queue: Name of the one queue.
        conf: Further settings of the app.
    """

    redis_url: str
    database_url: str
    queue: str = "benchmark"
    conf: dict[str, Any] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return the variables that `make_app` reads."""
        return {ENVIRONMENT_VARIABLE: json.dumps(asdict(self))}


def make_app(settings: BenchmarkSettings | None = None) -> tuple[Celery, BenchmarkSettings]:
    """Make an app without tasks, of the given settings or of those in the environment."""
    if settings is None:
        settings = BenchmarkSettings(**json.loads(os.environ[ENVIRONMENT_VARIABLE]))
    app = Celery("benchmark", set_as_current=False)
    app.conf.update(
        {
            "broker_url": settings.redis_url,
            "broker_connection_retry_on_startup": True,
            "result_backend": settings.redis_url,
            "task_acks_late": True,
            "task_default_queue": settings.queue,
            "worker_prefetch_multiplier": 16,
            **settings.conf,
        }
    )
    return app, settings


def noop() -> None:
    """Do nothing: what is measured is everything around it."""


_received = 0.0


def _on_prerun(**_: Any) -> None:
    global _received  # noqa: PLW0603 - one process, one task at a time
    _received = time.perf_counter()


def time_to_start() -> float:
    """Return the milliseconds between Celery's own last step before a task and its body."""
    return (time.perf_counter() - _received) * 1000


signals.task_prerun.connect(_on_prerun, dispatch_uid="benchmark")
