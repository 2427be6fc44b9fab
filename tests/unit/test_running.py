"""The lease as the body sees it: no I/O, the truth by the local clock."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import datetime, timezone

import pytest

from celery_lease.exceptions import LeaseLost, OwnershipUnknown, TaskCancelled
from celery_lease.hold import Hold
from celery_lease.lease import LeaseRef
from celery_lease.running import RunningLease, StandInLease, current_lease, running

UNTIL = datetime(2026, 7, 23, 21, 14, 30, tzinfo=timezone.utc)


class Clock:
    """Time as the test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock) -> Callable[..., tuple[RunningLease, Hold]]:
    def lease(*, margin: float = 20.0) -> tuple[RunningLease, Hold]:
        hold = Hold(
            LeaseRef("t1", "w@h:1:ab", 42),
            task_name="shop.export",
            lease_duration=90.0,
            interval=30.0,
            lease_until=UNTIL,
            requested_at=clock.now,
            clock=clock,
        )
        return RunningLease(hold, attempt=2, details={"page": 7}, margin=margin), hold

    return lease


def test_it_tells_who_holds_what(make) -> None:
    """Every documented attribute is there, without asking anybody."""
    lease, _ = make()
    assert ("t1", "shop.export", "w@h:1:ab", 42, 2, UNTIL, "held") == (
        lease.task_id,
        lease.task_name,
        lease.owner_id,
        lease.fencing_token,
        lease.attempt,
        lease.lease_until,
        lease.status,
    )
    assert lease.details == {"page": 7}


def test_trust_ends_before_the_lease_does(make, clock: Clock) -> None:
    """The local deadline lies before the database's, counted from the request's start."""
    lease, _ = make()
    assert clock.now + 80 < lease.trusted_until < clock.now + 90


def test_past_its_deadline_the_body_is_told_although_nobody_noticed(make, clock: Clock) -> None:
    """A suspended process learns the truth from its first call after waking up."""
    lease, _ = make()
    clock.now += 90
    with pytest.raises(LeaseLost) as caught:
        lease.heartbeat()
    assert ("t1", 42, "deadline") == caught.value.args


def test_a_cancelled_task_is_told_with_the_reason(make) -> None:
    """The only channel to the running code carries why it should stop."""
    lease, hold = make()
    hold.cancel_reason = "customer left"
    with pytest.raises(TaskCancelled, match="customer left"):
        lease.heartbeat()


def test_the_latest_details_wait_for_the_next_renewal(make) -> None:
    """Reporting progress leaves word and asks nobody; the latest wins."""
    lease, hold = make()
    lease.heartbeat({"page": 8})
    lease.heartbeat({"page": 9})
    assert hold.details == '{"page": 9}'


def test_details_that_are_not_json_are_refused_at_once(make) -> None:
    """A checkpoint that could not be saved fails where it is made."""
    lease, _ = make()
    with pytest.raises(TypeError):
        lease.heartbeat(object())


def test_ensure_looks_ahead(make, clock: Clock) -> None:
    """A step that may outlast the trusted time does not start."""
    lease, _ = make()
    lease.ensure(60)
    clock.now += 29
    with pytest.raises(OwnershipUnknown):
        lease.ensure(60)


def test_nothing_irreversible_starts_while_ownership_is_unknown(make, clock: Clock) -> None:
    """An overdue renewal makes ownership unknown long before it is lost."""
    lease, _ = make()
    clock.now += 61
    assert lease.status == "unknown"
    lease.heartbeat()
    with pytest.raises(OwnershipUnknown), lease.effect("pay"):
        pytest.fail("the effect has started")


def test_no_effect_starts_in_the_last_margin_of_a_lease(make, clock: Clock) -> None:
    """The margin at the end of a lease is for finishing, not for starting."""
    lease, _ = make(margin=40.0)
    clock.now += 49
    with lease.effect("pay"):
        pass
    clock.now += 2
    assert lease.status == "held"
    with pytest.raises(OwnershipUnknown), lease.effect("pay"):
        pytest.fail("the effect has started")


def test_an_effect_brings_what_its_receiver_checks(make, caplog) -> None:
    """Token and key go along as headers; start and end are logged with the request's id."""
    lease, hold = make()
    with (
        caplog.at_level(logging.INFO, "celery_lease"),
        lease.effect("pay", request_id="ext-791") as effect,
    ):
        assert hold.request_id == "ext-791"
    assert {
        "X-Execution-Fence": "42",
        "Idempotency-Key": "celery-lease:t1:pay",
    } == effect.headers
    assert hold.request_id is None
    said = [record.getMessage().split()[0] for record in caplog.records]
    assert ["tool_request_started", "tool_request_finished"] == said
    assert all("request=ext-791" in record.getMessage() for record in caplog.records)


def test_an_effect_that_raised_is_told_as_unknown(make, caplog) -> None:
    """Nobody knows what became of a request that did not answer; the log says so."""
    lease, _ = make()
    with pytest.raises(TimeoutError), lease.effect("pay", request_id="ext-791"):
        raise TimeoutError("secret text")
    assert "tool_request_unknown" in caplog.text
    assert "error=TimeoutError" in caplog.text
    assert "secret text" not in caplog.text


def test_the_key_of_an_effect_is_the_same_in_every_attempt(make) -> None:
    """A repeated command must look like the same command."""
    lease, _ = make()
    assert lease.idempotency_key("pay") == "celery-lease:t1:pay"


def test_outside_a_worker_a_lease_is_always_held() -> None:
    """A task called as a plain function runs with a stand-in."""
    lease = current_lease()
    assert isinstance(lease, StandInLease)
    lease.heartbeat({"page": 1})
    lease.ensure(10**9)
    with lease.effect("pay") as effect:
        assert effect.idempotency_key == "celery-lease:local:pay"
    assert lease.status == "held"


def test_the_current_lease_is_found_below_the_body_and_in_its_threads(make) -> None:
    """Code far below the task, and a thread that it started, get its lease."""
    lease, _ = make()
    found: list[object] = []
    with running(lease):
        assert current_lease() is lease
        thread = threading.Thread(target=lambda: found.append(current_lease()))
        thread.start()
        thread.join()
    assert [lease] == found
    assert isinstance(current_lease(), StandInLease)
