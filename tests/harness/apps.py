"""The Celery app of the chaos tests: the same in the test, which sends, and in workers, which run.

`AppSettings` travels to workers as JSON in one environment variable; `harness.worker_app` builds
the app from it there. Tasks have short names of their own, whatever module builds them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from typing import Any

from celery import Celery

from celery_lease import LeasedTask, current_lease
from harness.journal import Journal

ENVIRONMENT_VARIABLE = "CELERY_LEASE_TEST_APP"

#: Short, so that a lost lease is a matter of seconds; still L > R × H + J.
SHORT_LEASE = {
    "lease_duration": 3.0,
    "lease_heartbeat_interval": 0.5,
    "lease_missed_heartbeats": 1,
    "lease_margin": 1.0,
    "lease_reaper_interval": 0.5,
}


@dataclasses.dataclass(frozen=True)
class AppSettings:
    """Where the app works and how it is configured; all of it is JSON.

    Attributes:
        broker_url: kombu URL.
        result_backend: Celery result backend URL.
        lease_url: SQLAlchemy URL of the lease database.
        receiver_url: SQLAlchemy URL of the database of the receiver that `guarded` calls.
        journal: Path of the journal.
        queue: Name of the one queue.
        transport_options: `broker_transport_options`.
        conf: Any further settings of the app, `lease_*` among them; they go before the defaults.
    """

    broker_url: str
    result_backend: str
    lease_url: str
    journal: str
    queue: str = "celery"
    receiver_url: str = ""
    transport_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    conf: dict[str, Any] = dataclasses.field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return the variables that `from_environment` reads."""
        return {ENVIRONMENT_VARIABLE: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def from_environment(cls) -> AppSettings:
        """Read the settings that the test has put into this process's environment."""
        return cls(**json.loads(os.environ[ENVIRONMENT_VARIABLE]))


def build(settings: AppSettings) -> Celery:
    """Build the app with all its tasks."""
    app = Celery("harness", set_as_current=False)
    app.conf.update(
        {
            "broker_url": settings.broker_url,
            "broker_connection_retry_on_startup": True,
            "broker_transport_options": settings.transport_options,
            "result_backend": settings.result_backend,
            "task_default_queue": settings.queue,
            "worker_prefetch_multiplier": 1,
            "worker_hijack_root_logger": True,
            "lease_url": settings.lease_url,
            **SHORT_LEASE,
            "harness_journal": settings.journal,
            "harness_receiver_url": settings.receiver_url or settings.lease_url,
            **settings.conf,
        }
    )
    for leased in (sleeper, guarded, adder, suicide, fragile):
        app.task(base=LeasedTask, bind=True, name=leased.__name__)(leased)
    for ordinary in (plain, collector, errback):
        app.task(bind=True, name=ordinary.__name__)(ordinary)
    return app


def _note(task: Any, event: str, **facts: Any) -> None:
    lease = current_lease() if isinstance(task, LeasedTask) else None
    token = lease.fencing_token if lease is not None else None
    Journal(task.app.conf.harness_journal).write(event, task.request.id, token, **facts)


def sleeper(
    self: Any, seconds: float, value: Any = None, *, pause: float = 0.05, beat: bool = False
) -> dict[str, Any]:
    """Work for some seconds; the journal gets `start` and `end`.

    Args:
        self: The task.
        seconds: How long the work takes, on the monotonic clock (it goes on while stopped).
        value: Comes back in the result, with the token and the process that ran it.
        pause: Seconds of one blocking call.
        beat: Whether to call `self.lease.heartbeat()` between them.
    """
    _note(self, "start", value=value)
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if beat:
            self.lease.heartbeat()
        time.sleep(min(pause, left))
    _note(self, "end", value=value)
    return {"value": value, "token": self.lease.fencing_token, "pid": os.getpid()}


def guarded(self: Any, resource: str, seconds: float, *, stubborn: bool = True) -> dict[str, Any]:
    """Do two side effects in a receiver that checks the fence, with some seconds between.

    The journal gets `effect` or `refused` for each, with `part` 1 or 2. A stubborn body swallows
    its interruption and tries the second effect even though it was told that the lease is lost.
    """
    _effect(self, resource, 1)
    try:
        time.sleep(seconds)
    except BaseException as error:
        _note(self, "interrupted", error=type(error).__name__)
        if not stubborn:
            raise
    _effect(self, resource, 2)
    return {"token": self.lease.fencing_token, "pid": os.getpid()}


def _effect(task: Any, resource: str, part: int) -> None:
    import sqlalchemy

    from celery_lease.exceptions import StaleFence
    from celery_lease.receiver import FenceGuard

    engine = sqlalchemy.create_engine(
        task.app.conf.harness_receiver_url, poolclass=sqlalchemy.NullPool
    )
    try:
        FenceGuard(engine).accept(resource, task.lease.fencing_token)
    except StaleFence:
        _note(task, "refused", resource=resource, part=part)
    else:
        _note(task, "effect", resource=resource, part=part)
    finally:
        engine.dispose()


def adder(self: Any, a: int, b: int) -> int:
    """Add two numbers: a short leased task that touches nothing else."""
    return a + b


def suicide(self: Any, *, group: bool = False) -> None:
    """End this process as the kernel's out-of-memory killer would; the journal gets `start`.

    Args:
        self: The task.
        group: Whether the whole worker ends, as a host that runs out of memory.
    """
    _note(self, "start")
    if group:
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def fragile(self: Any, message: str = "broken") -> None:
    """Fail with ValueError; the journal gets `start`."""
    _note(self, "start")
    raise ValueError(message)


def plain(self: Any, value: Any = None) -> Any:
    """Return the value: an ordinary task; the journal gets `plain`."""
    _note(self, "plain", value=value)
    return value


def collector(self: Any, seen: Any, *, label: str = "") -> Any:
    """Note what a callback, chain link or chord body was given (`collected`), and pass it on."""
    _note(self, "collected", seen=seen, label=label)
    return seen


def errback(self: Any, task_id: str) -> None:
    """Note the failed task's id (`errback`, fact `failed`).

    One argument, so that Celery sends it as a message of its own with the failed task's id.
    """
    _note(self, "errback", failed=task_id)
