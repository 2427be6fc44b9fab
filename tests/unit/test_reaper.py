"""The reaper's passes, without a database: what it asks for, and what it survives."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from celery_lease.exceptions import DatabaseUnavailable
from celery_lease.lease import Dispatch, LeaseRef, ReaperTurn, Reclaimed, State
from celery_lease.reaper import Reaper, resend_in


class Store:
    """Answers as told, and remembers what was asked."""

    namespace = "ns"

    def __init__(self) -> None:
        self.turns: list[Any] = []
        self.expired: list[list[Reclaimed]] = []
        self.due: list[list[Any]] = []
        self.calls: list[tuple[str, Any]] = []

    def reaper_turn(self, owner: str, *, interval: float, saw_outage: bool, timeout: float) -> Any:
        self.calls.append(("turn", saw_outage))
        turn = self.turns.pop(0) if self.turns else ReaperTurn(granted=True, next_in=interval)
        if isinstance(turn, Exception):
            raise turn
        return turn

    def reclaim(self, *, limit: int, timeout: float) -> list[Reclaimed]:
        self.calls.append(("reclaim", limit))
        return self.expired.pop(0) if self.expired else []

    def take_due(self, *, limit: int, retry_in: float, timeout: float) -> list[Dispatch]:
        self.calls.append(("take_due", retry_in))
        return [Dispatch(row) for row in self.due.pop(0)] if self.due else []

    def dispatched(self, sent: Any, *, timeout: float) -> None:
        self.calls.append(("dispatched", sent))

    def announce(self, refs: Any, *, timeout: float) -> None:
        self.calls.append(("announce", refs))

    def purge(self, *, older_than: float, limit: int, timeout: float) -> int:
        self.calls.append(("purge", older_than))
        return 0

    def said(self, name: str) -> list[Any]:
        return [what for call, what in self.calls if call == name]


def row(task_id: str = "t1", **changes: Any) -> Any:
    facts = {
        "task_id": task_id,
        "dispatch": 1,
        "dispatches": 1,
        "lease_duration": 90.0,
        "owner_id": None,
        "fencing_token": 41,
        "state": State.QUEUED,
    }
    return SimpleNamespace(**{**facts, **changes})


def reaper(store: Store, publish: Any = lambda _: "sent", **options: Any) -> Reaper:
    return Reaper(
        store,  # type: ignore[arg-type]
        publish=publish,
        owner="w@h",
        interval=5.0,
        retention=3600.0,
        **options,
    )


def test_a_due_message_is_published_and_then_recorded() -> None:
    """Killed before the record, the row is due again; so publishing comes first."""
    store = Store()
    store.due = [[row()]]
    published: list[str] = []

    def publish(due: Any) -> str:
        assert not store.said("dispatched")
        published.append(due.task_id)
        return "sent"

    done = reaper(store, publish).pass_once()
    assert (1, ["t1"]) == (done.sent, published)
    assert [[("t1", 1, 90.0)]] == store.said("dispatched")


def test_a_task_that_was_given_up_is_announced_and_marked_with_its_token() -> None:
    """The mark names the token, so that it cannot mark a later generation."""
    store = Store()
    store.due = [[row(state=State.FAILED)]]
    assert reaper(store, lambda _: "announced").pass_once().announced == 1
    assert [[LeaseRef("t1", "", 41)]] == store.said("announce")


def test_a_broker_that_is_away_loses_nothing() -> None:
    """A message that could not be sent stays due, and the others are still tried."""
    store = Store()
    store.due = [[row("t1"), row("t2")]]

    def publish(due: Any) -> str:
        if due.task_id == "t1":
            raise ConnectionError("broker away")
        return "sent"

    done = reaper(store, publish).pass_once()
    assert (1, 1) == (done.sent, done.failed)
    assert [[("t2", 1, 90.0)]] == store.said("dispatched")


def test_without_a_turn_nothing_is_asked() -> None:
    """A thousand reapers make one pass per interval together."""
    store = Store()
    store.turns = [ReaperTurn(granted=False, next_in=3.0)]
    done = reaper(store).pass_once()
    assert (False, 3.0) == (done.granted, done.next_in)
    assert ["turn"] == [name for name, _ in store.calls]


def test_the_first_pass_after_a_gap_condemns_nobody() -> None:
    """Owners are heard again first; what is due is sent all the same."""
    store = Store()
    store.turns = [ReaperTurn(granted=True, next_in=5.0, grace=True)]
    store.due = [[row()]]
    assert reaper(store).pass_once().sent == 1
    assert not store.said("reclaim")


def test_an_outage_that_was_seen_is_told_once_the_database_is_back() -> None:
    """Leases that expired in an outage are not charged; somebody has to tell of it."""
    store = Store()
    store.turns = [DatabaseUnavailable("away"), DatabaseUnavailable("away")]
    one = reaper(store)
    for _ in range(4):
        one.pass_once()
    assert [False, True, True, False] == store.said("turn")


def test_passes_go_on_while_batches_are_full() -> None:
    """More expired leases than one batch holds are all reclaimed in one pass."""
    store = Store()
    told: list[str] = []
    entry = Reclaimed("t1", "task", State.QUEUED, "w", 41, 1, 1, 0.5)
    store.expired = [[entry] * 100, [entry] * 3]
    done = reaper(store, on_reclaimed=lambda one: told.append(one.task_id)).pass_once()
    assert (103, 103) == (done.reclaimed, len(told))


def test_an_observer_that_raises_does_not_stop_the_pass() -> None:
    """What is told to others never decides what happens to a task."""
    store = Store()
    store.expired = [[Reclaimed("t1", "task", State.QUEUED, "w", 41, 1, 1, 0.5)]]
    store.due = [[row()]]

    def observer(_: Reclaimed) -> None:
        raise RuntimeError("observer")

    assert reaper(store, on_reclaimed=observer).pass_once().sent == 1


def test_an_error_in_a_pass_is_not_the_end_of_reaping(caplog) -> None:
    """The thread goes on after any error, loudly."""
    store = Store()
    store.turns = [ValueError("unexpected")]
    stop = threading.Event()
    one = reaper(store)
    one.interval = 0.01

    def publish(_: Any) -> str:
        stop.set()
        return "sent"

    one.publish = publish
    store.due = [[row()]]
    one.run(stop)
    assert "reaper_pass_failed" in caplog.text


@pytest.mark.parametrize(
    ("dispatches", "duration", "seconds"),
    [(1, 90, 90), (2, 90, 180), (3, 90, 360), (1, 2, 30), (30, 90, 3600)],
)
def test_a_message_that_nobody_claims_is_sent_ever_more_rarely(
    dispatches: int, duration: float, seconds: float
) -> None:
    """A queue without consumers gets one more copy at doubled intervals, an hour at most."""
    assert resend_in(row(dispatches=dispatches, lease_duration=duration)) == seconds
