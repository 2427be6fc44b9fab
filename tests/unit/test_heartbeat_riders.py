"""What rides on a beat or waits for one: checkpoints, cancellations, flushes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from harness.beats import Room, hold

from celery_lease.lease import Renewal, Renewed


@pytest.fixture
def room() -> Room:
    return Room()


def test_details_ride_along_once(room: Room) -> None:
    """A checkpoint goes with the next renewal and is not sent twice."""
    held = hold("t", room.clock)
    room.heart.add(held)
    held.details = '{"page": 1}'
    held.details = '{"page": 2}'
    room.run(61)
    assert ['{"page": 2}', None] == [one[0].details for _, one, _ in room.renewals.calls]


def test_details_of_a_failed_renewal_are_sent_again(room: Room) -> None:
    """Nothing is taken for saved without an answer."""
    held = hold("t", room.clock)
    room.heart.add(held)
    held.details = "1"
    room.renewals.script += [OSError(), OSError()]
    room.run(40)
    assert ["1", None, "1"] == [one[0].details for _, one, _ in room.renewals.calls]
    assert held.details is None


def test_details_the_database_refuses_cost_no_lease(room: Room) -> None:
    """One bad checkpoint in a batch costs a failed request, not everybody's lease."""
    bad, good = hold("bad", room.clock), hold("good", room.clock)
    room.heart.add(bad)
    room.heart.add(good)
    bad.details = "refused"

    def refuse(renewals: list[Renewal]) -> list[Renewed]:
        room.renewals.script.append(refuse)
        if any(one.details for one in renewals):
            raise ValueError
        return room.renewals.grant(renewals)

    room.renewals.script.append(refuse)
    room.run(600)
    assert (bad.status, good.status) == ("held", "held")


def test_cancellation_is_told_once_and_renewal_goes_on(room: Room) -> None:
    """The body needs its lease while it cleans up."""
    held = hold("t", room.clock)
    room.heart.add(held)
    room.renewals.cancelled["t"] = "no longer wanted"
    room.run(61)
    assert [
        ("renewed", "t"),
        ("cancel:no longer wanted", "t"),
        ("renewed", "t"),
    ] == room.diary.lines
    assert held.cancel_reason == "no longer wanted"


def test_flush_comes_about_a_second_after_it_was_asked_for(room: Room) -> None:
    """However often it was asked for, one flush follows."""
    room.heart.wake_soon()
    room.heart.wake_soon()
    room.run(0.9)
    assert room.flushes == []
    room.run(5)
    assert len(room.flushes) == 1


def test_flush_never_comes_unasked(room: Room) -> None:
    """Idle means no statements."""
    room.run(60)
    assert room.flushes == []


def test_flushes_are_a_second_apart(room: Room) -> None:
    """A busy process flushes once a second at most."""
    for _ in range(100):
        room.heart.wake_soon()
        room.run(0.1)
    assert 8 <= len(room.flushes) <= 10


def test_failed_flush_is_tried_again_less_and_less_often(room: Room) -> None:
    """A database that is away is asked again, not forgotten, and not hammered."""
    asked: list[float] = []

    def fail(_: float) -> None:
        asked.append(room.clock.at)
        if len(asked) < 8:
            raise OSError

    room.heart = room.make(flush=fail)
    room.heart.wake_soon()
    room.run(300)
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert [2, 4, 8, 16, 30, 30, 30] == pytest.approx(gaps, abs=0.01)


def test_flush_is_given_no_more_time_than_the_next_beat_leaves(room: Room) -> None:
    """What waits must not cost a lease."""
    room.heart.add(hold("t", room.clock, duration=9, interval=3))
    room.heart.wake_soon()
    room.run(1.1)
    assert [pytest.approx(2, abs=0.1)] == room.flushes


def test_idle_is_called_every_few_seconds(room: Room) -> None:
    """Unused connections are closed also in a process without leases."""
    room.run(21)
    assert len(room.idles) == 4


def test_shutdown_flushes_what_waits(room: Room) -> None:
    """A process that ends leaves nothing unsaid, if it can."""
    room.heart.wake_soon()
    room.heart.shutdown()
    room.heart.shutdown()
    assert [5] == room.flushes


def test_shutdown_without_flush(room: Room) -> None:
    """A caller may leave it to others."""
    room.heart.wake_soon()
    room.heart.shutdown(flush=False)
    assert room.flushes == []
