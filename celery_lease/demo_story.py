"""What happens in the demo: two tasks, and the faults that their workers meet.

What it is: it sends tasks and signals, waits for what the log, the journal and the rows say, and
returns the evidence. It changes nothing that it shows: who claims, loses and finishes is up to
the workers.

What it knows: the app and its tasks, the crew, the store, the screen.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from celery import Celery

from celery_lease.demo_app import LEASE, Receiver, read_journal
from celery_lease.demo_checks import Case, Evidence
from celery_lease.demo_processes import Crew, Worker
from celery_lease.demo_screen import Screen
from celery_lease.demo_timeline import Event, Sources
from celery_lease.lease import LeaseRef, LeaseRow, Renewal, Renewed
from celery_lease.outcome import decode
from celery_lease.store import LeaseStore

__all__ = ("Stage", "StoryStopped", "tell")

T = TypeVar("T")
_LOOK = 0.05
_START_TIMEOUT = 40.0
_TIMEOUT = 30.0
_DURATION = LEASE["lease_duration"]
#: Seconds in which a stale result would have to turn up somewhere.
_AFTERMATH = 1.0
#: Seconds that the second task thinks between its two effects.
_THINKING = 3.0
#: Lines of each log that are shown when the story stops.
_TAIL = 15


class StoryStopped(Exception):  # noqa: N818 - an end of the story, not a fault of the interface
    """Something did not come about; the message says what, and what the workers logged last."""


@dataclass(frozen=True)
class Stage:
    """What the story is played with.

    Attributes:
        app: The sender's app.
        store: The lease rows.
        crew: The workers.
        journal: The journal of the tasks.
        sources: Of the timeline.
        screen: Where it is shown.
        receiver: Of the second task's effects.
    """

    app: Celery
    store: LeaseStore
    crew: Crew
    journal: Path
    sources: Sources
    screen: Screen
    receiver: Receiver

    def until(
        self, condition: Callable[[], T], what: str, *, task_id: str = "", timeout: float = _TIMEOUT
    ) -> T:
        """Show the timeline until the condition is true, and return its value.

        Raises:
            StoryStopped: It stayed false, or a worker ended by itself.
        """
        deadline = time.monotonic() + timeout
        while True:
            self._show(task_id)
            answer = condition()
            if answer:
                return answer
            if time.monotonic() > deadline:
                raise StoryStopped(f"not within {timeout:g} s: {what}\n{self._tails()}")
            self._check_workers()
            time.sleep(_LOOK)

    def during(self, seconds: float, task_id: str = "") -> None:
        """Show the timeline for some seconds."""
        deadline = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > deadline, "time goes on", task_id=task_id)

    def act(self, source: str, text: str) -> None:
        """Tell what the demo itself is about to do."""
        self.screen.add([Event(time.time(), "demo", source, text)])

    def noted(self, task_id: str, event: str) -> list[dict[str, Any]]:
        """Return the journal's entries of a task, and of its callback."""
        return [
            entry
            for entry in read_journal(self.journal)
            if event == entry["event"] and task_id in (entry["task_id"], entry.get("source"))
        ]

    def worker_of(self, node: str) -> Worker:
        """Return the worker with a node name."""
        return next(worker for worker in self.crew.workers if worker.node == node)

    def _show(self, task_id: str) -> None:
        self.screen.add(self.sources.news())
        row = self.store.find(task_id) if task_id else None
        if row is not None:
            text = f"{row.task_name}: {row.state.value}, token {row.fencing_token}, "
            text += self.crew.named(row.owner_id)
            until = row.lease_until
            remaining = (until - row.read_at).total_seconds() if until is not None else None
            self.screen.status(text, remaining, _DURATION)

    def _check_workers(self) -> None:
        for worker in self.crew.workers:
            if not worker.running and not worker.killed:
                raise StoryStopped(f"{worker.name} ended by itself\n{self._tails()}")

    def _tails(self) -> str:
        tails = []
        for worker in self.crew.workers:
            lines = worker.log.read_text(errors="replace").splitlines()[-_TAIL:]
            tails += [f"--- log of {worker.name}", *lines]
        return "\n".join(tails)


def tell(stage: Stage) -> Evidence:
    """Play the story and return what it left behind.

    Raises:
        StoryStopped: It did not come to its end.
    """
    for name in ("worker 1", "worker 2"):
        stage.crew.start(name)
    _wait_ready(stage)
    killed = _kill_a_worker(stage)
    stale, renewed = _stop_a_worker(stage)
    stage.during(_AFTERMATH)
    stage.screen.flush()
    stage.screen.quiet()
    return Evidence(
        killed=_case(stage, killed),
        stale=_case(stage, stale),
        renewed=renewed,
        ledger=stage.receiver.ledger(),
    )


def _wait_ready(stage: Stage) -> None:
    living = [worker for worker in stage.crew.workers if worker.running]
    stage.until(
        lambda: all(worker.ready for worker in living),
        "all workers consume",
        timeout=_START_TIMEOUT,
    )


def _kill_a_worker(stage: Stage) -> LeaseRef:
    """Act one: a long tool call whose worker is killed in the middle."""
    stage.screen.heading(
        "1. A long tool call, and its worker is killed",
        "An agent asks a streaming model. Each word is a heartbeat that brings a checkpoint along.",
    )
    task_id = _send(stage, "answer")
    # Two renewals: the second has certainly taken a checkpoint along.
    first = _after_beats(stage, task_id, beats=2)
    _wait_ready(stage)
    worker = stage.worker_of(first.owner_id.partition(":")[0])
    stage.act("signal", f"SIGKILL to {worker.name} and its pool process: no goodbye, no clean-up")
    stage.crew.kill(worker)
    _until_token(stage, task_id, 2)
    stage.crew.start("worker 3")
    _until_delivered(stage, task_id)
    return first


def _stop_a_worker(stage: Stage) -> tuple[LeaseRef, list[Renewed]]:
    """Act two: a pool process is stopped past its lease, and continued too late."""
    _wait_ready(stage)
    stage.screen.heading(
        "2. The unpleasant test: a worker sleeps past its lease, and wakes up",
        "An order is reserved, then charged, in a receiver that checks fencing tokens. Its code is",
        "not broken off and goes on regardless: only the database and the receiver can refuse it.",
    )
    task_id = _send(stage, "order", _THINKING)
    # Right after a beat: the process is not in the middle of a transaction when it stops.
    first = _after_beats(stage, task_id, beats=1)
    pid = stage.noted(task_id, "start")[0]["pid"]
    name = stage.crew.named(first.owner_id)
    stage.act("signal", f"SIGSTOP to the pool process of {name}: it neither works nor beats")
    os.kill(pid, signal.SIGSTOP)
    _until_token(stage, task_id, 2)
    # What the stopped process would ask if it woke now. The row is running, under another token.
    renewed = stage.store.renew([Renewal(first, _DURATION)])
    _until_delivered(stage, task_id)
    stage.act("signal", f"SIGCONT to the pool process of {name}: it goes on where it stopped")
    os.kill(pid, signal.SIGCONT)
    stage.until(
        lambda: len(stage.noted(task_id, "end")) > 1, "the stale body ends", task_id=task_id
    )
    return first, renewed


def _send(stage: Stage, name: str, *args: Any) -> str:
    task_id = str(uuid.uuid4())
    callback = stage.app.tasks["deliver"].s(source=task_id)
    stage.act("send", f"sends the task “{name}”")
    stage.app.tasks[name].apply_async(args, task_id=task_id, link=callback)
    stage.sources.followed[task_id] = 0
    return task_id


def _after_beats(stage: Stage, task_id: str, *, beats: int) -> LeaseRef:
    """Wait until the row was renewed so often, and return who renewed it."""
    seen: set[Any] = set()

    def enough() -> LeaseRow | None:
        row = stage.store.find(task_id)
        if row is None or row.owner_id is None:
            return None
        seen.add(row.heartbeat_at)
        return row if len(seen) > beats and stage.noted(task_id, "start") else None

    row = stage.until(enough, f"{beats} heartbeats of {task_id}", task_id=task_id)
    assert row is not None  # noqa: S101 - `until` returns what is true
    return LeaseRef(task_id, row.owner_id or "", row.fencing_token)


def _until_token(stage: Stage, task_id: str, token: int) -> None:
    def taken() -> bool:
        row = stage.store.find(task_id)
        return row is not None and row.fencing_token >= token

    stage.until(taken, f"token {token} of {task_id} is claimed", task_id=task_id)


def _until_delivered(stage: Stage, task_id: str) -> None:
    stage.until(
        lambda: stage.noted(task_id, "delivered"), f"the callback of {task_id}", task_id=task_id
    )


def _case(stage: Stage, first: LeaseRef) -> Case:
    row = stage.store.find(first.task_id)
    if row is None:
        raise StoryStopped(f"the row of {first.task_id} is gone")
    entries = read_journal(stage.journal)
    return Case(
        first=first,
        row=row,
        row_result=decode(stage.app.tasks[row.task_name], row),
        history=stage.store.history(first.task_id),
        journal=[e for e in entries if first.task_id in (e["task_id"], e.get("source"))],
        result=stage.app.AsyncResult(first.task_id).result,
    )
