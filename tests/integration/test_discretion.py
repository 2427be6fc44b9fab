"""Neither log, nor signals, nor events, nor history carry what a task was given or gives back."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from harness.journal import Journal
from harness.length import by_length
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew

SECRET = "s3cr3t-needle"

#: What no database can change is tested on one of them in a short run.
ONE_DATABASE = pytest.mark.parametrize(
    "lease_database", by_length(["sqlite"], ["postgresql", "sqlite"]), indirect=True
)


#: Whatever the package tells through its signals goes to the journal, as text.
TELLING = """
from celery_lease import signals
from harness.trap_app import app, journal

def tell(sender=None, signal=None, **facts):
    journal.write("signal", facts.get("task_id"), facts.get("fencing_token"), all=repr(facts))

for name in signals.__all__:
    getattr(signals, name).connect(tell, weak=False)
"""


@contextmanager
def _events(crew: Crew) -> Iterator[list[dict[str, Any]]]:
    caught: list[dict[str, Any]] = []
    stop = threading.Event()

    def receive() -> None:
        with crew.app.connection_for_read() as connection:
            receiver = crew.app.events.Receiver(connection, handlers={"*": caught.append})
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    receiver.capture(limit=None, timeout=0.3, wakeup=False)

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        yield caught
    finally:
        stop.set()
        thread.join()


@ONE_DATABASE
@pytest.mark.parametrize("fail", [False, True], ids=["succeeds", "fails"])
@pytest.mark.parametrize("stolen", [False, True], ids=["own", "stolen"])
def test_secrets_stay_in_the_task(
    *, fail: bool, stolen: bool, crew: Crew, rows: Rows, journal: Journal
) -> None:
    """Arguments, results, errors and checkpoints are in no line, signal, event or history row."""
    worker = crew.start(source=TELLING, argv=["-E"])
    with _events(crew) as events:
        sent = crew.app.send_task("secretive", [SECRET], {"fail": fail}, argsrepr="(…)")
        journal.wait("start")
        worker.wait_for_log("heartbeat_ok")
        if stolen:
            rows.execute("UPDATE celery_lease SET owner_id = 'thief', fencing_token = 2")
            worker.wait_for_log("heartbeat_lost")
        else:
            sent.get(timeout=10, propagate=False)
            rows.wait(sent.id, dispatch_at=None)
        until(lambda: _lease_events(events), what=lambda: str(events))
    lines = [line for line in worker.log().splitlines() if _ours(line)]
    assert 3 <= len(lines)
    assert [] == [line for line in lines if SECRET in line]
    signals = journal.entries("signal")
    assert signals
    assert SECRET not in str(signals)
    assert SECRET not in json.dumps(_lease_events(events))
    assert SECRET not in str(rows.history(sent.id))


def _ours(line: str) -> bool:
    """Celery's own lines on received tasks and their outcome are its own affair."""
    return any(word in line for word in ("job_", "heartbeat_", "ownership_", "result_rejected"))


def _lease_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["type"].startswith("task-lease")]


def test_errors_of_the_database_show_no_parameters(
    crews: Callable[..., Crew], postgresql_database: str, journal: Journal
) -> None:
    """A commit that the database refuses is told without the result that was in it."""
    rows = Rows(postgresql_database)
    rows.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'no'; END $$"
    )
    rows.execute(
        "CREATE TRIGGER refuse BEFORE UPDATE ON celery_lease FOR EACH ROW"
        " WHEN (NEW.state = 'succeeded') EXECUTE FUNCTION refuse()"
    )
    crew = crews(postgresql_database)
    worker = crew.start(app="harness.trap_app")
    sent = crew.app.send_task("secretive", [SECRET], argsrepr="(…)")
    journal.wait("start")
    worker.wait_for_log("no", timeout=10)
    sent.get(timeout=15, propagate=False)
    assert SECRET not in worker.log()
    rows.close()
