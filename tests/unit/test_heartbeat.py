"""What a heartbeat renews, when, and what it tells; no threads, a clock that is set."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from harness.beats import Room, hold

from celery_lease.lease import Renewal, Renewed


@pytest.fixture
def room() -> Room:
    return Room()


def test_nothing_is_renewed_before_the_first_beat(room: Room) -> None:
    """A task shorter than one interval costs no renewal."""
    held = hold("t", room.clock)
    room.heart.add(held)
    room.run(29.9)
    room.heart.discard(held)
    room.run(100)
    assert room.renewals.calls == []


def test_each_beat_is_one_request_an_interval_after_the_last(room: Room) -> None:
    """The distance counts from start to start."""
    start = room.clock.at
    room.heart.add(hold("t", room.clock))
    room.run(121)
    assert [start + 30, start + 60, start + 90, start + 120] == pytest.approx(
        [at for at, _, _ in room.renewals.calls], abs=0.01
    )
    assert room.diary.lines == [("renewed", "t")] * 4


def test_a_slow_answer_does_not_lengthen_trust(room: Room) -> None:
    """Trust counts from the start of the request, and the next beat too."""
    held = hold("t", room.clock)
    room.heart.add(held)

    def crawl(renewals: list[Renewal]) -> list[Renewed]:
        room.clock.at += 20
        return room.renewals.grant(renewals)

    room.renewals.script.append(crawl)
    room.run(30)
    ((started, _, _),) = room.renewals.calls
    assert started + 88 == held.trusted_until
    assert started + 30 == held.due_at


def test_leases_half_through_their_interval_come_along(room: Room) -> None:
    """Thousand leases claimed at different moments end in one request per beat."""
    for number in range(1000):
        room.heart.add(hold(str(number), room.clock))
        room.run(0.06)
    room.run(30)
    room.renewals.calls.clear()
    room.run(90)
    assert [1000] * 3 == [len(renewals) for _, renewals, _ in room.renewals.calls]


def test_leases_below_half_of_their_interval_wait(room: Room) -> None:
    """A lease that was just claimed is not renewed with the others."""
    room.heart.add(hold("old", room.clock))
    room.run(20)
    room.heart.add(hold("new", room.clock))
    room.run(11)
    assert [["old"]] == room.renewals.ids()
    room.run(20)
    assert [["old"], ["old", "new"]] == room.renewals.ids()


def test_a_steady_stream_of_claims_costs_two_requests_per_interval_at_most(room: Room) -> None:
    """However claims are spread, requests are half an interval apart."""
    for number in range(600):
        room.heart.add(hold(str(number), room.clock))
        room.run(0.5)
    times = [at for at, _, _ in room.renewals.calls]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert min(gaps) >= 15
    worst = max(room.clock.at - one.confirmed_at for one in room.heart.holds())
    assert worst <= 30.1


def test_each_lease_keeps_its_own_interval(room: Room) -> None:
    """A batch beats as often as its most impatient lease, and spares the others."""
    room.heart.add(hold("slow", room.clock, duration=90, interval=30))
    room.heart.add(hold("fast", room.clock, duration=9, interval=3))
    room.run(31)
    assert sum("fast" in ids for ids in room.renewals.ids()) == 10
    assert sum("slow" in ids for ids in room.renewals.ids()) <= 2


def test_missing_in_the_answer_is_lost(room: Room) -> None:
    """The database's no is final: told once, asked no more."""
    held = hold("t", room.clock)
    room.heart.add(held)
    room.renewals.script.append(lambda _: [])
    room.run(100)
    assert room.diary.lines == [("lost:zero_rows", "t")]
    assert held.lost_event.is_set()
    assert len(room.renewals.calls) == 1
    assert room.heart.holds() == []


def test_loss_of_one_leaves_the_others(room: Room) -> None:
    """One request, one verdict per lease."""
    for name in ("a", "b", "c"):
        room.heart.add(hold(name, room.clock))
    room.renewals.script.append(
        lambda renewals: room.renewals.grant([one for one in renewals if one.ref.task_id != "b"])
    )
    room.run(31)
    assert [("lost:zero_rows", "b"), ("renewed", "a"), ("renewed", "c")] == room.diary.lines


def test_failure_is_unknown_told_once_and_retried_soon(room: Room) -> None:
    """Trouble is no verdict: the next try follows within a second, told once."""
    held = hold("t", room.clock)
    room.heart.add(held)
    error = OSError("no route")
    room.renewals.script += [error, OSError(), OSError()]
    room.run(30.5)
    assert held.status == "unknown"
    room.run(10)
    assert [("unknown", "t"), ("renewed", "t")] == room.diary.lines
    assert [error] == room.diary.errors
    first, second = room.renewals.calls[:2]
    assert second[0] - first[0] <= 1
    assert held.status == "held"


@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt(), MemoryError()])
def test_whatever_a_renewal_raises_is_trouble(room: Room, error: BaseException) -> None:
    """Nothing that comes out of it ends the talker, or goes untold."""
    room.heart.add(hold("t", room.clock))
    room.renewals.script.append(error)
    room.run(35)
    assert [("unknown", "t"), ("renewed", "t")] == room.diary.lines
    assert [error] == room.diary.errors


def test_a_second_outage_is_told_again(room: Room) -> None:
    """Each change to unknown is an event of its own."""
    room.heart.add(hold("t", room.clock))
    room.renewals.script += [OSError(), room.renewals.grant, OSError()]
    room.run(65)
    assert [("unknown", "t"), ("renewed", "t")] * 2 == room.diary.lines


def test_outage_ends_in_loss_at_the_deadline(room: Room) -> None:
    """Without an answer the lease is lost at the end of trust, and no later answer revives it."""
    held = hold("t", room.clock)
    room.heart.add(held)
    room.renewals.script += [OSError()] * 1000
    room.run(87.9)
    assert held.status == "unknown"
    room.run(2)
    room.renewals.script.clear()
    room.run(60)
    assert [("unknown", "t"), ("lost:deadline", "t")] == room.diary.lines
    assert held.status == "lost"


def test_requests_end_within_the_interval(room: Room) -> None:
    """A request may take four fifths of the interval, and not longer than trust lasts."""
    room.heart.add(hold("t", room.clock))
    room.renewals.script += [OSError()] * 1000
    room.run(88)
    timeouts = [timeout for _, _, timeout in room.renewals.calls]
    assert max(timeouts) == 24
    for at, _, timeout in room.renewals.calls:
        assert timeout == pytest.approx(max(0.5, min(24, 1088 - at)))


def test_one_lease_near_its_end_does_not_hurry_the_others(room: Room) -> None:
    """A batch may take as long as its most patient member can wait."""
    tired = hold("tired", room.clock, requested_at=room.clock.at - 87)
    fresh = hold("fresh", room.clock, requested_at=room.clock.at - 30)
    room.heart.add(tired)
    room.heart.add(fresh)
    room.heart.talk()
    assert [24] == [timeout for _, _, timeout in room.renewals.calls]


def test_late_answer_for_a_lost_lease_changes_nothing(room: Room) -> None:
    """The watcher tells while the talker hangs; what the database says later does not count."""
    held = hold("t", room.clock)
    room.heart.add(held)

    def hang(renewals: list[Renewal]) -> list[Renewed]:
        room.clock.at = held.trusted_until
        room.heart.watch()
        return room.renewals.grant(renewals)

    room.renewals.script.append(hang)
    room.clock.at += 30
    room.heart.talk()
    assert [("lost:deadline", "t")] == room.diary.lines
    assert held.status == "lost"


@pytest.mark.parametrize("answer", ["held", "missing", "failed"])
def test_answer_for_a_lease_released_meanwhile_changes_nothing(room: Room, answer: str) -> None:
    """The renewal that meets a committed row is no loss."""
    held = hold("t", room.clock)
    room.heart.add(held)

    def end(renewals: list[Renewal]) -> list[Renewed]:
        room.heart.discard(held)
        if answer == "failed":
            raise OSError
        return room.renewals.grant(renewals) if answer == "held" else []

    room.renewals.script.append(end)
    room.run(40)
    assert room.diary.lines == []
    assert not held.lost_event.is_set()


def test_a_renewal_overdue_is_told_by_the_watcher(room: Room) -> None:
    """A talker that hangs makes ownership unknown before it makes it lost."""
    held = hold("t", room.clock)
    room.heart.add(held)
    room.clock.at += 60.1
    room.heart.watch()
    room.heart.watch()
    assert [("unknown", "t")] == room.diary.lines
    assert [None] == room.diary.errors


def test_watcher_wakes_at_the_deadline(room: Room) -> None:
    """It sleeps a second at most while there are leases, and not past a deadline."""
    held = hold("t", room.clock)
    assert room.heart.watch() == 5
    room.heart.add(held)
    assert room.heart.watch() == 1
    room.clock.at = held.trusted_until - 0.25
    assert room.heart.watch() == pytest.approx(0.25)


def test_all_are_marked_before_anybody_is_told(room: Room) -> None:
    """A callback that takes its time keeps no other holder in error."""
    holds = [hold(name, room.clock) for name in "abc"]
    seen: list[list[bool]] = []
    room.heart = room.make(
        on_lost=lambda _: seen.append([one.lost_event.is_set() for one in holds])
    )
    for one in holds:
        room.heart.add(one)
    room.clock.at += 88
    room.heart.watch()
    assert [[True] * 3] * 3 == seen


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(), KeyboardInterrupt()])
def test_error_in_a_callback_stops_nothing(room: Room, error: BaseException) -> None:
    """Whatever a callback raises, the other leases are told and beating goes on."""

    def fail(*_: object) -> None:
        raise error

    room.heart = room.make(on_renewed=fail, on_unknown=fail, on_cancel=fail, idle=fail)
    first, second = hold("a", room.clock), hold("b", room.clock)
    room.heart.add(first)
    room.heart.add(second)
    room.renewals.cancelled["a"] = "x"
    room.renewals.script.append(OSError())
    room.run(100)
    assert (first.status, second.status) == ("held", "held")


@pytest.mark.parametrize("answer", [None, [None], 3])
def test_senseless_answer_is_trouble_not_loss(room: Room, answer: object) -> None:
    """What cannot be understood leaves ownership unknown."""
    held = hold("t", room.clock)
    room.heart.add(held)
    room.renewals.script.append(lambda _: answer)  # type: ignore[arg-type,return-value]
    room.run(30.1)
    assert held.status == "unknown"
    room.run(5)
    assert held.status == "held"


def test_lease_of_an_ended_thread_is_not_renewed(room: Room) -> None:
    """The beat must not keep alive what nobody executes."""
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    room.heart.add(hold("t", room.clock, executor=thread))
    room.run(31)
    assert room.renewals.calls == []
    assert [("lost:executor_gone", "t")] == room.diary.lines


def test_discard_leaves_a_later_hold_of_the_same_grant(room: Room) -> None:
    """Who leaves removes itself and nobody else."""
    first, second = hold("t", room.clock), hold("t", room.clock)
    room.heart.add(first)
    room.heart.add(second)
    room.heart.discard(first)
    assert [second] == room.heart.holds()


def test_error_text_stays_out_of_the_log(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    """An error's text may hold a statement's parameters, which are the user's."""
    caplog.set_level("INFO")
    room.heart.add(hold("t", room.clock))
    room.renewals.script.append(OSError("secret"))
    room.run(31)
    assert "OSError" in caplog.text
    assert "secret" not in caplog.text
