"""Adoption is incremental: only tasks with `base=LeasedTask` change."""

from __future__ import annotations

import pytest
from celery import Celery
from harness.journal import Journal
from harness.rows import Rows
from harness.workers import Crew, disconnect


@pytest.mark.parametrize("protocol", [1, 2])
def test_producers_without_the_package_and_ordinary_tasks_go_on(
    protocol: int, crew: Crew, rows: Rows, journal: Journal
) -> None:
    """A plain producer's messages, of either protocol, run in one queue with leased tasks.

    The leased one has a row and its result; the ordinary one leaves no trace in the database.
    """
    crew.start()
    producer = Celery(
        "elsewhere",
        broker=crew.settings.broker_url,
        backend=crew.settings.result_backend,
        set_as_current=False,
    )
    try:
        producer.conf.task_protocol = protocol
        producer.conf.task_default_queue = crew.settings.queue
        leased = producer.send_task("adder", (2, 3))
        ordinary = producer.send_task("plain", ("x",))
        assert leased.get(timeout=15) == 5
        assert ordinary.get(timeout=15) == "x"
    finally:
        disconnect(producer)
    assert rows.wait(leased.id, state="succeeded")["fencing_token"] == 1
    assert [leased.id] == [row["task_id"] for row in rows.all()]
    assert [ordinary.id] == [entry.task_id for entry in journal.wait("plain")]


def test_a_worker_without_the_package_runs_what_a_leased_app_sends(crew: Crew, rows: Rows) -> None:
    """In a rolling deployment old workers still take the new senders' messages, as plain tasks."""
    source = (
        "from celery import Celery\n"
        f"app = Celery('old', broker={crew.settings.broker_url!r},"
        f" backend={crew.settings.result_backend!r})\n"
        f"app.conf.task_default_queue = {crew.settings.queue!r}\n"
        "@app.task(name='adder')\n"
        "def adder(a, b):\n"
        "    return a + b\n"
    )
    crew.start("old", source=source)
    assert crew.task("adder").delay(2, 3).get(timeout=15) == 5
    assert [] == rows.all()
