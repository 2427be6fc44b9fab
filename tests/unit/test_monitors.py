"""What monitors make of a lease's events."""

from __future__ import annotations

import pickle

from celery import states
from celery.events.state import State

from celery_lease import monitors


def received(*events: tuple[str, dict[str, object]]):
    state = State()
    for clock, (kind, fields) in enumerate(events, 1):
        state.event(
            {
                "type": kind,
                "uuid": "t1",
                "hostname": "w@h",
                "timestamp": float(clock),
                "local_received": float(clock),
                "clock": clock,
                "pid": 1,
                "utcoffset": 0,
                "freq": 60,
                **fields,
            }
        )
    return state.tasks["t1"]


def test_a_leased_task_stays_started_and_shows_its_lease() -> None:
    """The event never hides STARTED, and so never a monitor's terminate button."""
    task = received(("task-started", {}), ("task-leased", {"lease_token": 42, "lease_attempt": 2}))
    assert states.STARTED == task.state
    assert (42, 2) == (task.lease_token, task.lease_attempt)
    assert task.info()["lease_token"] == 42


def test_a_finished_task_stays_finished() -> None:
    """A late event of a stale run does not change the state of a finished task."""
    task = received(("task-succeeded", {"result": "1"}), ("task-leased", {"lease_token": 41}))
    assert states.SUCCESS == task.state


def test_a_monitor_can_save_what_it_knows() -> None:
    """Flower keeps its state by pickling it."""
    task = received(("task-leased", {"lease_token": 42}))
    assert pickle.loads(pickle.dumps(task)).lease_token == 42  # noqa: S301 - our own bytes


def test_installing_twice_changes_nothing() -> None:
    """A second import of the package wraps nothing again."""
    before = State.Task
    monitors.install()
    assert before is State.Task
