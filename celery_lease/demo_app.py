"""The demo's Celery app: two leased tasks, a callback, and a receiver that checks fencing tokens.

What it is: what a user would write, with a journal added. `-A celery_lease.demo_app` builds `app`
from a `Place` in the environment; the demo builds the same app to send with. A generator stands
in for a streaming model; everything else is real.

What it knows: public names of celery_lease. It must not know the story: who is killed and when.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy
from celery import Celery

from celery_lease import (
    LeasedTask,
    LeaseLost,
    StaleFence,
    demo_folder,  # noqa: F401 - makes `folder://` known
)
from celery_lease.receiver import FenceGuard

__all__ = ("LEASE", "Place", "Receiver", "build", "read_journal")

ENVIRONMENT_VARIABLE = "CELERY_LEASE_DEMO"

#: Short, so that nobody has to wait; the defaults are 90, 30, 20 and 5 seconds.
LEASE = {
    "lease_duration": 4.0,
    "lease_heartbeat_interval": 1.0,
    "lease_missed_heartbeats": 1,
    "lease_margin": 1.0,
    "lease_reaper_interval": 0.5,
}
#: Seconds between two words of the model.
PACE = 0.2
ANSWER = (
    "A lease gives a task one owner at a time. The owner renews it while the model is still"
    " talking, and when the owner dies the next one goes on from the last checkpoint."
)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the app works; all of it is JSON.

    Attributes:
        broker_url: kombu URL.
        result_backend: Celery result backend URL.
        lease_url: SQLAlchemy URL of the lease database, which is the receiver's as well.
        journal: Path of the journal.
        transport_options: `broker_transport_options`.
    """

    broker_url: str
    result_backend: str
    lease_url: str
    journal: str
    transport_options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """Return the variables that `from_environment` reads."""
        return {ENVIRONMENT_VARIABLE: json.dumps(dataclasses.asdict(self))}

    @classmethod
    def from_environment(cls) -> Place:
        """Read what the demo has put into this worker's environment."""
        return cls(**json.loads(os.environ[ENVIRONMENT_VARIABLE]))


def build(place: Place) -> Celery:
    """Build the app with its tasks."""
    app = Celery("demo", set_as_current=False)
    app.conf.update(
        broker_url=place.broker_url,
        broker_connection_retry_on_startup=True,
        broker_transport_options=place.transport_options,
        result_backend=place.result_backend,
        worker_prefetch_multiplier=1,
        lease_url=place.lease_url,
        demo_journal=place.journal,
        **LEASE,
    )
    app.task(base=LeasedTask, bind=True, name="answer")(answer)
    # Not broken off when its lease is lost: what refuses its result is the database alone.
    app.task(base=LeasedTask, bind=True, name="order", lease_interrupt=False)(order)
    app.task(bind=True, name="deliver")(deliver)
    return app


def __getattr__(name: str) -> Any:
    """Build `app` where a worker asks for it."""
    if name != "app":
        raise AttributeError(name)
    return globals().setdefault("app", build(Place.from_environment()))


def model(skip: int = 0) -> Iterator[str]:
    """Stand in for a model that streams an answer word by word."""
    for word in ANSWER.split()[skip:]:
        time.sleep(PACE)
        yield word


def answer(self: Any) -> dict[str, Any]:
    """Ask the model; each word is a heartbeat, and each heartbeat brings the checkpoint along."""
    words: list[str] = list((self.lease.details or {}).get("words", []))
    note(self, "start", words=len(words))
    for word in model(skip=len(words)):
        words.append(word)
        self.lease.heartbeat(details={"words": words})  # raises LeaseLost if it is another's
        note(self, "word", words=len(words), said=word)
    note(self, "end", words=len(words))
    return {"token": self.lease.fencing_token, "pid": os.getpid(), "words": len(words)}


def order(self: Any, seconds: float) -> dict[str, Any]:
    """Reserve, think, charge: two effects in a receiver, with a long call between them.

    When it is told that the lease is lost, it goes on regardless, as code would that asked a
    moment before or never asked. What is left then is what the receiver and the database check.
    """
    note(self, "start")
    resource = f"order:{self.request.id}"
    with self.lease.effect("reserve") as effect:
        call_receiver(self, resource, effect.name, effect.headers)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        with self.lease.effect("charge") as effect:
            call_receiver(self, resource, effect.name, effect.headers)
    except LeaseLost as lost:
        note(self, "told", reason=lost.reason)
        call_receiver(self, resource, "charge", self.lease.headers("charge"))
    note(self, "end")
    return {"token": self.lease.fencing_token, "pid": os.getpid()}


def deliver(self: Any, result: dict[str, Any], source: str) -> None:
    """Note what the callback of a task was given: an ordinary task in the same queue."""
    note(self, "delivered", source=source, result=result)


class Receiver:
    """A service with a ledger that does an action once, and for the newest owner only.

    Args:
        url: SQLAlchemy URL of its database.
    """

    def __init__(self, url: str) -> None:
        self.engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
        self._guard = FenceGuard(self.engine)
        self._ledger = sqlalchemy.Table(
            "demo_ledger",
            sqlalchemy.MetaData(),
            sqlalchemy.Column("idempotency_key", sqlalchemy.String(255), primary_key=True),
            sqlalchemy.Column("resource", sqlalchemy.String(255)),
            sqlalchemy.Column("action", sqlalchemy.String(64)),
            sqlalchemy.Column("fencing_token", sqlalchemy.BigInteger),
        )

    def prepare(self) -> None:
        """Create the ledger."""
        self._ledger.create(self.engine)

    def act(self, resource: str, action: str, headers: dict[str, str]) -> str:
        """Do the action, in one transaction with the check of its token.

        Returns:
            "done", or "done before" for a key that is in the ledger.

        Raises:
            StaleFence: A newer owner was here.
        """
        token, key = int(headers["X-Execution-Fence"]), headers["Idempotency-Key"]
        known = sqlalchemy.select(self._ledger).where(self._ledger.c.idempotency_key == key)
        with self.engine.begin() as connection:
            self._guard.accept(resource, token, connection=connection)
            if connection.execute(known).first() is not None:
                return "done before"
            entry = {"resource": resource, "action": action, "fencing_token": token}
            connection.execute(self._ledger.insert().values(idempotency_key=key, **entry))
            return "done"

    def ledger(self) -> list[tuple[str, str, int]]:
        """Return resource, action and token of everything that was done."""
        columns = self._ledger.c
        wanted = sqlalchemy.select(columns.resource, columns.action, columns.fencing_token)
        with self.engine.connect() as connection:
            return [(row[0], row[1], row[2]) for row in connection.execute(wanted)]


def call_receiver(task: Any, resource: str, action: str, headers: dict[str, str]) -> None:
    """Send one request; the journal gets the answer."""
    receiver = Receiver(task.app.conf.lease_url)
    try:
        answered = receiver.act(resource, action, headers)
    except StaleFence as refused:
        note(task, "refused", action=action, highest=refused.highest)
    else:
        note(task, "effect", action=action, answer=answered)


def note(task: Any, event: str, **facts: Any) -> None:
    """Append one line to the journal, by a single write, so that lines never mix."""
    token = task.lease.fencing_token if isinstance(task, LeasedTask) else None
    entry = {"event": event, "task_id": task.request.id, "token": token, "at": time.time()}
    entry |= {"node": task.request.hostname, "pid": os.getpid(), **facts}
    file = os.open(task.app.conf.demo_journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(entry).encode() + b"\n")
    finally:
        os.close(file)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return all whole entries, oldest first."""
    with contextlib.suppress(FileNotFoundError):
        text = path.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return []
