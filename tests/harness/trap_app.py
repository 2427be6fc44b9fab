"""The harness's app with further tasks, for the tests of the protocol's traps.

Worker processes import it: `crew.start(app="harness.trap_app")`; the test sends by name.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from celery import Task, chord, group
from celery.exceptions import Retry
from celery.signals import before_task_publish

from celery_lease import LeasedTask, current_lease
from harness.apps import AppSettings, build
from harness.journal import Journal

app = build(AppSettings.from_environment())
journal = Journal(app.conf.harness_journal)


def wait_for_gate(gate: str) -> None:
    """Wait until the test makes the file."""
    while not Path(gate).exists():
        time.sleep(0.02)


@app.task(base=LeasedTask, bind=True, name="held_up", max_retries=None)
def held_up(self: Any, gate: str, then: str = "return", value: Any = "stale") -> Any:
    """Wait at a gate, then end in the way that is asked for; the journal gets `start`, `passed`."""
    journal.write("start", self.request.id, self.lease.fencing_token)
    wait_for_gate(gate)
    journal.write("passed", self.request.id, self.lease.fencing_token, status=self.lease.status)
    if then == "raise":
        raise ValueError(value)
    if then == "retry":
        again = {"gate": gate, "then": "return", "value": "retried"}
        raise self.retry(countdown=0, args=(), kwargs=again)
    return value


@app.task(base=LeasedTask, bind=True, name="unserializable")
def unserializable(self: Any) -> Any:
    """Return what no serializer takes."""
    return object()


@app.task(base=LeasedTask, bind=True, name="retrier", max_retries=None, lease_max_attempts=2)
def retrier(self: Any, times: int) -> int:
    """Retry so often, then return how often."""
    journal.write("start", self.request.id, self.lease.fencing_token, attempt=self.lease.attempt)
    if self.request.retries < times:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@app.task(base=LeasedTask, bind=True, name="spoiled", max_retries=None)
def spoiled(self: Any, how: str) -> int:
    """Hand the lease on, then fail: what a context manager does that fails on the way out."""
    if self.request.retries:
        return int(self.request.retries)
    if how == "swallow":
        with contextlib.suppress(Retry):
            self.retry(countdown=0.5)
        return -1
    try:
        if how == "replace":
            self.replace(app.tasks["sum_up_plainly"].s([1]))
        self.retry(countdown=0.5)
    finally:
        raise ValueError("too late")


@app.task(name="threads_here")
def threads_here() -> list[str]:
    """Return the names of this process's threads: an ordinary task."""
    return [thread.name for thread in threading.enumerate()]


@app.task(base=LeasedTask, bind=True, name="leased_threads_here")
def leased_threads_here(self: Any) -> list[str]:
    """Return the names of this process's threads while a lease is held."""
    return [thread.name for thread in threading.enumerate()]


class ContextTask(Task):  # type: ignore[type-arg]
    """What Flask's documentation gives its users: the body runs in a context."""

    abstract = True
    inside: list[str] = []  # noqa: RUF012 - one list for the process

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Enter the context around the body."""
        ContextTask.inside.append(self.name)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            ContextTask.inside.pop()


class RunningTask(Task):  # type: ignore[type-arg]
    """The other form of the same: it calls `run` itself."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Enter the context around the body."""
        ContextTask.inside.append(self.name)
        try:
            return self.run(*args, **kwargs)
        finally:
            ContextTask.inside.pop()


class LeaseFirst(LeasedTask, ContextTask):
    """The lease's class before the user's."""

    abstract = True


class ContextFirst(ContextTask, LeasedTask):
    """The user's class before the lease's."""

    abstract = True


class LeaseFirstRun(LeasedTask, RunningTask):
    """As `LeaseFirst`, with a class that calls `run`."""

    abstract = True


class RunFirst(RunningTask, LeasedTask):
    """As `ContextFirst`, with a class that calls `run`."""

    abstract = True


def tell_surroundings(self: Any, depth: int = 1) -> dict[str, Any]:
    """Say what the body sees; call the own task once as a plain function."""
    inner = self(depth - 1) if depth else None
    return {
        "id": self.request.id,
        "inside": list(ContextTask.inside),
        "token": current_lease().fencing_token,
        "attempt": current_lease().attempt,
        "owner": current_lease().owner_id,
        "inner": inner,
    }


for kind in (LeasedTask, LeaseFirst, ContextFirst, LeaseFirstRun, RunFirst):
    app.task(base=kind, bind=True, name=f"surroundings_{kind.__name__}")(tell_surroundings)


@app.task(base=LeasedTask, bind=True, name="holds_interpreter")
def holds_interpreter(self: Any, seconds: float) -> int:
    """Hold the interpreter, so that no other thread of the process runs."""
    import ctypes

    token = int(self.lease.fencing_token)
    journal.write("start", self.request.id, token)
    if token == 1:
        ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
    journal.write("end", self.request.id, token)
    return token


@app.task(base=LeasedTask, bind=True, name="secretive")
def secretive(self: Any, secret: str, *, fail: bool = False) -> str:
    """Handle a secret: argument, checkpoint, request and result or error hold it."""
    self.lease.heartbeat({"checkpoint": secret})
    journal.write("start", self.request.id, self.lease.fencing_token)
    time.sleep(1.2)
    if fail:
        raise ValueError(secret)
    return secret


@app.task(base=LeasedTask, bind=True, name="whole")
def whole(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Note everything the body can see of its message; the first run waits to be killed."""
    request = self.request
    seen = {
        "args": repr(args),
        "kwargs": repr(kwargs),
        "headers": dict(request.headers or {}),
        "routing": {
            key: (request.delivery_info or {}).get(key)
            for key in ("exchange", "routing_key", "priority")
        },
        **{name: getattr(request, name, None) for name in _REQUEST},
        **{
            name: (request.properties or {}).get(name)
            for name in ("content_type", "reply_to", "correlation_id", "delivery_mode", "priority")
        },
    }
    journal.write("whole", request.id, self.lease.fencing_token, seen=seen)
    while self.lease.fencing_token == 1:
        time.sleep(0.05)
    return {"token": self.lease.fencing_token}


_REQUEST = (
    "eta",
    "expires",
    "group",
    "group_index",
    "chord",
    "chain",
    "callbacks",
    "errbacks",
    "root_id",
    "parent_id",
    "timelimit",
    "stamped_headers",
    "stamps",
    "origin",
    "shadow",
    "lang",
    "argsrepr",
    "kwargsrepr",
    "ignore_result",
    "replaced_task_nesting",
    "retries",
)


@app.task(base=LeasedTask, bind=True, name="replacer", lease_max_attempts=3)
def replacer(self: Any, kind: str, gate: str = "", retries: int = 0) -> Any:
    """Put another task, or a canvas, in place of this one; a gate or retries come before."""
    journal.write("start", self.request.id, self.lease.fencing_token, kind=kind)
    if self.request.retries < retries:
        raise self.retry(countdown=0)
    if gate:
        wait_for_gate(gate)
    leased, plain = app.tasks["sum_up"], app.tasks["sum_up_plainly"]
    raise self.replace(
        {
            "leased": leased.s([1, 2]),
            "plain": plain.s([1, 2]),
            "chain": leased.s([1, 1]) | plain.s(0) | leased.s(1),
            "plain chain": leased.s([1, 1]) | plain.s(1),
            "group": group(leased.s([1, 2]), leased.s([3, 4])),
            "chord": chord([leased.s([1]), leased.s([2])], leased.s()),
            "itself": self.s("leased"),
        }[kind]
    )


def _sum_up(self: Any, numbers: Any, more: int = 0) -> int:
    journal.write("summed", self.request.id)
    return (sum(numbers) if isinstance(numbers, list) else numbers) + more


app.task(base=LeasedTask, bind=True, name="sum_up")(_sum_up)
app.task(bind=True, name="sum_up_plainly")(_sum_up)


@before_task_publish.connect
def die_at_the_gate(**_: Any) -> None:
    """Die, once, where the test says so: after the lease was released, before the message is sent."""
    trap = Path(f"{app.conf.harness_journal}.die-before-publishing")
    if trap.exists():
        trap.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
