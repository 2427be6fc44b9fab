"""`replace()`: the lease goes to the task that takes over the id, and only the owner replaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.journal import Journal
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew

_RESULTS: dict[str, Any] = {
    "leased": 3,
    "plain": 3,
    "chain": 3,
    "plain chain": 3,
    "group": [3, 7],
    "chord": 3,
    "itself": 3,
}


def _send(crew: Crew, *args: Any, **options: Any) -> Any:
    queue = crew.settings.queue
    return crew.app.send_task("replacer", args, queue=queue, ignore_result=False, **options)


@pytest.mark.parametrize("kind", _RESULTS)
def test_a_replacement_runs_once_and_has_the_result(
    kind: str, crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue
) -> None:
    """Whatever replaces the task, with a lease or without, its outcome is that of the id."""
    crew.start_many(2, app="harness.trap_app")
    sent = _send(crew, kind)
    assert _RESULTS[kind] == sent.get(timeout=20)
    row = rows.wait(sent.id, state="succeeded")
    assert (0, 0) == (row["crashes"], row["retries"])
    until(lambda: rows.wait(sent.id)["announced_at"], what="the mark")
    redis_queue.wait_empty()
    starts = journal.entries("start", task_id=sent.id)
    assert (2 if kind == "itself" else 1) == len(starts)
    assert 1 <= len(journal.entries("summed")) <= 3
    released = [event for event in rows.history(sent.id) if event["event"] == "released"]
    assert ["replaced"] * len(starts) == [event["cause"] for event in released]


def test_a_replaced_task_keeps_its_place_in_a_chain(crew: Crew, rows: Rows) -> None:
    """What comes after the task comes after its replacement."""
    crew.start(concurrency=2, app="harness.trap_app")
    sig = crew.app.signature("replacer", ("leased",)) | crew.app.signature("sum_up", (10,))
    sent = sig.set(queue=crew.settings.queue).apply_async()
    assert 13 == sent.get(timeout=20)
    assert "succeeded" == rows.wait(sent.parent.id)["state"]


@pytest.mark.parametrize("kind", ["leased", "plain", "chain"])
def test_killed_before_the_replacement_is_sent_the_task_runs_again(
    kind: str, crew: Crew, journal: Journal, rows: Rows
) -> None:
    """The row has its own message still, and it is due after the length of a lease."""
    Path(f"{journal.path}.die-before-publishing").touch()
    crew.start_many(2, app="harness.trap_app")
    sent = _send(crew, kind)
    assert _RESULTS[kind] == sent.get(timeout=30)
    assert 2 == len(journal.entries("start", task_id=sent.id))
    rows.wait(sent.id, state="succeeded")


def test_a_stale_worker_replaces_nothing(crew: Crew, journal: Journal, tmp_path: Path) -> None:
    """Stopped past its lease while another replaced the task, it publishes no second one."""
    gate = tmp_path / "gate"
    first = crew.start("first", app="harness.trap_app")
    sent = _send(crew, "leased", str(gate))
    journal.wait("start")
    first.sigstop_group()
    crew.start("second", app="harness.trap_app")
    until(lambda: 2 == len(journal.entries("start", task_id=sent.id)), what="the second start")
    gate.touch()
    assert 3 == sent.get(timeout=20)
    first.cont()
    first.wait_for_log(f"Task replacer[{sent.id}] ignored")
    assert 1 == len(journal.entries("summed"))


def test_a_replacement_that_dies_is_sent_again_itself(
    crew: Crew, journal: Journal, rows: Rows
) -> None:
    """Not the task that it replaced: the row keeps the message of what has claimed it last."""
    crew.start(app="harness.trap_app", concurrency=2)
    sent = _send(crew, "leased")
    assert 3 == sent.get(timeout=20)
    assert "sum_up" == rows.wait(sent.id)["task_name"]
    assert 1 == len(journal.entries("start", task_id=sent.id))


@pytest.mark.parametrize("kind", _RESULTS)
def test_a_task_that_was_retried_is_replaced(
    kind: str, crew: Crew, rows: Rows, redis_queue: RedisQueue
) -> None:
    """The replacement is not taken for a copy from before the retries."""
    crew.start(app="harness.trap_app", concurrency=2)
    sent = _send(crew, kind, "", 2)
    assert _RESULTS[kind] == sent.get(timeout=20)
    rows.wait(sent.id, state="succeeded")
    redis_queue.wait_empty()


@pytest.mark.parametrize("how", ["retry", "replace", "swallow"])
def test_failing_after_the_lease_was_handed_on_is_no_failure(
    how: str, crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue
) -> None:
    """The next message decides alone: no FAILURE is stored, and no errback called."""
    worker = crew.start(app="harness.trap_app")
    sig = crew.app.signature("spoiled", (how,)).on_error(crew.task("errback").s())
    sent = sig.set(queue=crew.settings.queue).apply_async()
    assert 1 == sent.get(timeout=20)
    rows.wait(sent.id, state="succeeded")
    redis_queue.wait_empty()
    worker.wait_for_log("ended_too_late")
    assert not journal.entries("errback")
