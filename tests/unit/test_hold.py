"""What a holder may believe about its lease."""

from __future__ import annotations

import threading
import time

import pytest
from harness.beats import EPOCH, Clock, hold

from celery_lease import hold as module
from celery_lease.lease import LeaseRef, Renewed

ANSWER = Renewed(LeaseRef("t", "owner", 1), EPOCH)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_trust_counts_from_the_start_of_the_claim(clock: Clock) -> None:
    """A slow claim does not lengthen trust: it counts from the request, less the safety."""
    held = hold("t", clock, requested_at=clock.at - 10)
    assert clock.at - 10 + 90 - 2 == held.trusted_until


@pytest.mark.parametrize(("duration", "safety"), [(90, 2), (40, 2), (10, 0.5), (1, 0.05)])
def test_safety_is_a_twentieth_but_at_most_two_seconds(
    clock: Clock, duration: float, safety: float
) -> None:
    """Trust ends before the lease does, by 5 % of it or two seconds."""
    assert duration - safety == pytest.approx(hold("t", clock, duration=duration).remaining)


def test_status_becomes_lost_by_the_clock_alone(clock: Clock) -> None:
    """Past the deadline the lease is lost although no thread ever ran."""
    held = hold("t", clock)
    clock.at = held.trusted_until - 0.001
    assert held.status != "lost"
    clock.at = held.trusted_until
    assert held.status == "lost"
    assert held.lost_reason == "deadline"


def test_status_is_unknown_when_a_renewal_is_overdue(clock: Clock) -> None:
    """Held for two intervals after the last confirmation, unknown from then on."""
    held = hold("t", clock)
    clock.at += 60
    assert held.status == "held"
    clock.at += 0.001
    assert held.status == "unknown"


def test_failed_renewal_makes_it_unknown_until_the_next_confirmation(clock: Clock) -> None:
    """One failure suffices for unknown, one confirmation for held."""
    held = hold("t", clock)
    held.fail(clock.at)
    assert held.status == "unknown"
    assert held.confirm(clock.at, ANSWER, None)
    assert held.status == "held"
    assert held.failures == 0


def test_confirmation_extends_trust_from_the_start_of_the_request(clock: Clock) -> None:
    """The answer's time of arrival plays no part."""
    held = hold("t", clock)
    started = clock.at + 30
    clock.at += 50
    assert held.confirm(started, ANSWER, None)
    assert started + 88 == held.trusted_until
    assert started == held.confirmed_at
    assert started + 30 == held.due_at
    assert ANSWER.lease_until == held.lease_until


@pytest.mark.parametrize("reason", ["zero_rows", "executor_gone"])
def test_lost_stays_lost(clock: Clock, reason: str) -> None:
    """A late answer that says held changes nothing about a lost lease."""
    held = hold("t", clock)
    assert held.lose(reason)
    before = held.trusted_until
    assert not held.confirm(clock.at + 1, ANSWER, None)
    assert (held.status, held.lost_reason, held.trusted_until) == ("lost", reason, before)
    assert held.lost_event.is_set()
    assert held.remaining == 0


def test_answer_after_the_deadline_does_not_revive(clock: Clock) -> None:
    """Nobody may have noticed the deadline, yet the holder may have been told lost."""
    held = hold("t", clock)
    clock.at = held.trusted_until
    assert not held.confirm(clock.at - 40, ANSWER, None)
    assert held.status == "lost"


def test_only_the_first_reason_counts(clock: Clock) -> None:
    """Whoever finds the loss first tells; the others do not tell again."""
    held = hold("t", clock)
    assert held.lose("zero_rows")
    assert not held.lose("deadline")
    assert held.lost_reason == "zero_rows"


def test_answer_for_a_released_lease_changes_nothing(clock: Clock) -> None:
    """After the end of the execution no answer moves its instants."""
    held = hold("t", clock)
    held.release()
    before = held.trusted_until
    assert not held.confirm(clock.at + 1, ANSWER, None)
    assert held.trusted_until == before


def test_details_are_pending_until_confirmed(clock: Clock) -> None:
    """A checkpoint that a renewal has saved is not sent again."""
    held = hold("t", clock)
    assert held.details is None
    held.details = "1"
    sent = held.unsaved
    assert sent == ["1"]
    held.confirm(clock.at, ANSWER, sent)
    assert held.details is None
    assert held.unsaved is None


def test_details_set_during_the_request_are_not_lost(clock: Clock) -> None:
    """A confirmation covers only the checkpoint that was sent, even if the next one is equal."""
    held = hold("t", clock)
    held.details = "1"
    sent = held.unsaved
    held.details = "1"
    held.confirm(clock.at, ANSWER, sent)
    assert held.details == "1"


def test_details_survive_a_renewal_that_left_them_out(clock: Clock) -> None:
    """What was not sent was not saved."""
    held = hold("t", clock)
    held.details = "1"
    held.confirm(clock.at, ANSWER, None)
    assert held.details == "1"


def test_retries_come_soon_then_less_often_and_always_before_the_deadline(clock: Clock) -> None:
    """Pauses grow from a second to half an interval, and halve what is left near the deadline."""
    held = hold("t", clock)
    pauses = []
    while clock.at < held.trusted_until:
        held.fail(clock.at)
        pauses.append(held.due_at - clock.at)
        clock.at = held.due_at
    assert pauses[0] <= 1
    assert max(pauses) <= 15
    assert min(pauses) >= 0.2
    assert 8 <= len(pauses) <= 30
    assert pauses[-1] < 1


def test_many_failures_do_not_overflow(clock: Clock) -> None:
    """The pause stays finite after thousands of failures."""
    held = hold("t", clock, duration=1e6)
    for _ in range(3000):
        held.fail(clock.at)
    assert held.due_at <= clock.at + 15


def test_end_of_the_executor_shows(clock: Clock) -> None:
    """A lease whose thread has ended without releasing it is lost."""
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    assert hold("t", clock, executor=ended).find_loss(clock.at) == "executor_gone"
    assert hold("t", clock, executor=threading.current_thread()).find_loss(clock.at) is None


def test_end_of_the_parent_shows(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """An orphan must not keep its lease alive for ever, if it was asked to look."""
    watching = hold("t", clock, watch_parent=True)
    ignoring = hold("t", clock)
    assert watching.find_loss(clock.at) is None
    monkeypatch.setattr(module.os, "getppid", lambda: 1)
    assert watching.find_loss(clock.at) == "parent_gone"
    assert ignoring.find_loss(clock.at) is None


def test_status_takes_no_lock(clock: Clock) -> None:
    """Code that was broken off or forked anywhere can still ask, and report progress."""
    held = hold("t", clock)
    with held._lock:
        held.details = "1"
        assert (held.status, held.lost_reason, held.details) == ("held", None, "1")
        held.release()


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="no such clock on this platform")
@pytest.mark.may_skip
def test_clock_counts_suspension() -> None:
    """The default clock is the one that goes on while the machine sleeps."""
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= module.now() <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_clock_falls_back_to_monotonic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without such a clock the monotonic one serves."""
    monkeypatch.setattr(module, "_CLOCK_ID", None)
    before = time.monotonic()
    assert before <= module.now() <= time.monotonic()


def test_status_reads_the_clock_before_the_deadline() -> None:
    """A confirmation that comes between the two reads never looks like a loss."""
    clock = Clock()
    held = hold("t", clock)
    clock.at += 87

    def slow() -> float:
        held._clock = clock
        instant = clock()
        assert held.confirm(instant, ANSWER, None)
        clock.at += 2
        return instant

    held._clock = slow
    assert held.status == "held"
