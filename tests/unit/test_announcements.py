"""When the marks of announced outcomes ride on a claim, and with how many others."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_lease import LeasedTask, runtime
from celery_lease.execution import _has_handlers
from celery_lease.lease import LeaseRef
from celery_lease.runtime import Runtime


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a runtime without threads, whose clock stands still at `room.heartbeat.at`."""
    app = Celery("announcements", broker="memory://", set_as_current=False)
    app.conf.lease_url = "sqlite:////nowhere/leases.db"
    made: Any = Runtime.of(app)
    made.heartbeat.at = 100.0
    made.heartbeat.clock = lambda: made.heartbeat.at
    monkeypatch.setattr(made.heartbeat, "wake_soon", lambda: None)
    return made


def refs(number: int) -> list[LeaseRef]:
    return [LeaseRef(f"task-{n}", "owner", 1) for n in range(number)]


def announce(room: Any, number: int, *, harmless: bool) -> list[LeaseRef]:
    for ref in refs(number):
        room.announce_later(ref, harmless=harmless)
    return refs(number)


def test_a_mark_that_protects_messages_rides_on_the_next_claim(room: Any) -> None:
    """Nothing is sent twice because a mark waited for company."""
    announced = announce(room, 1, harmless=False)
    assert announced == room.riders("next")
    assert [] == room.riders("next")


def test_harmless_marks_ride_together(room: Any) -> None:
    """One claim in sixteen carries what sixteen outcomes have left."""
    announce(room, runtime._RIDERS - 1, harmless=True)
    assert [] == room.riders("next")
    room.announce_later(LeaseRef("last", "owner", 1), harmless=True)
    assert runtime._RIDERS == len(room.riders("next"))


def test_harmless_marks_wait_half_a_second_at_most(room: Any) -> None:
    """The first one's age counts, not the last one's."""
    announce(room, 1, harmless=True)
    room.heartbeat.at += 0.4
    announce(room, 1, harmless=True)
    assert [] == room.riders("next")
    room.heartbeat.at += 0.11
    assert 2 == len(room.riders("next"))


def test_a_mark_in_need_takes_those_that_wait_along(room: Any) -> None:
    """A harmless one before it, and a harmless one behind it."""
    announce(room, 1, harmless=True)
    announce(room, 1, harmless=False)
    announce(room, 1, harmless=True)
    assert 3 == len(room.riders("next"))


def test_marks_of_a_claim_that_failed_ride_on_the_next_one(room: Any) -> None:
    """They come back in front, and wait for nobody."""
    announce(room, runtime._RIDERS, harmless=True)
    taken = room.riders("next")
    room.give_back(taken)
    assert taken == room.riders("next")


def test_the_claimed_task_s_own_mark_does_not_ride(room: Any) -> None:
    """One statement cannot change a row twice."""
    announced = announce(room, 2, harmless=False)
    assert announced[1:] == room.riders("task-0")
    assert announced[:1] == room.riders("next")


def test_a_beat_and_a_flush_take_what_waits(room: Any) -> None:
    """Only claims leave harmless marks waiting."""
    announced = announce(room, 1, harmless=True)
    assert announced == room.take_announced()


@pytest.mark.parametrize("name", ["on_success", "on_failure", "after_return"])
def test_handlers_of_the_user_s_make_a_second_telling_harmful(name: str) -> None:
    """They would run a second time."""
    own = type("Own", (LeasedTask,), {name: lambda *_, **__: None, "abstract": True})
    assert _has_handlers(own)
    assert not _has_handlers(LeasedTask)
