"""Reclaim, dispatch, turns of reapers, cancellation and purge, on each database."""

from __future__ import annotations

import json

import pytest
from harness.leases import RESULT, finished, held, move, open_store, request
from harness.rows import Rows

from celery_lease import migrations
from celery_lease.lease import LeaseRef, State, Verdict
from celery_lease.store import LeaseStore, check_schema


def _ids(store: LeaseStore, limit: int = 10) -> list[str]:
    return [due.row.task_id for due in store.take_due(limit=limit, retry_in=30)]


def test_an_expired_row_waits_again(store: LeaseStore, rows: Rows) -> None:
    """The old owner is fenced at once; token and attempt stay; a new dispatch is due."""
    held(store)
    move(rows, "lease_until", -4, task_id="task")
    (reclaimed,) = store.reclaim(limit=10)
    row = store.find("task")
    assert row is not None
    assert ("task", "app.export", State.QUEUED, "owner-1", 1, 1, 1) == (
        reclaimed.task_id,
        reclaimed.task_name,
        reclaimed.state,
        reclaimed.owner_id,
        reclaimed.fencing_token,
        reclaimed.attempt,
        reclaimed.crashes,
    )
    assert 4 == pytest.approx(reclaimed.late, abs=2)
    assert (State.QUEUED, None, None, 1, 1, 1, 1, 0) == (
        row.state,
        row.owner_id,
        row.lease_until,
        row.fencing_token,
        row.attempt,
        row.crashes,
        row.dispatch,
        row.dispatches,
    )
    (entry,) = store.history("task")
    assert ("reclaimed", "expired", "owner-1", 1) == (
        entry.event,
        entry.cause,
        entry.owner_id,
        entry.fencing_token,
    )
    assert json.loads(entry.facts or "")["charged"] is True


def test_live_rows_and_other_namespaces_are_left_alone(
    store: LeaseStore, rows: Rows, lease_database: str
) -> None:
    """A reaper takes nothing from an owner who is in time, nor from another app."""
    held(store, "live")
    finished(store, "finished")
    foreign = LeaseStore(store.database, "another app")
    foreign.claim(request("foreign"))
    rows.expire("foreign")
    before = rows.all()
    assert [] == store.reclaim(limit=10)
    assert [] == _ids(store)
    assert before == rows.all()
    assert ["foreign"] == [row.task_id for row in foreign.reclaim(limit=10)]


def test_the_longest_expired_comes_first(store: LeaseStore, rows: Rows) -> None:
    """A bounded batch takes those who have waited longest; the next batch the others."""
    for number in range(5):
        held(store, f"task-{number}")
        move(rows, "lease_until", -10 * number - 1, task_id=f"task-{number}")
    batches = [[row.task_id for row in store.reclaim(limit=2)] for _ in range(4)]
    assert [["task-4", "task-3"], ["task-2", "task-1"], ["task-0"], []] == batches


def test_attempts_spent_end_the_task(store: LeaseStore, rows: Rows) -> None:
    """The last allowed expiry fails the row, with a reason that Celery can rebuild."""
    held(store, max_attempts=1)
    rows.expire("task")
    (reclaimed,) = store.reclaim(limit=10)
    row = store.find("task")
    assert row is not None
    assert (State.FAILED, State.FAILED, 1, 0) == (
        reclaimed.state,
        row.state,
        row.crashes,
        row.dispatch,
    )
    assert {
        "exc_type": "AttemptsExhausted",
        "exc_module": "celery_lease.exceptions",
        "exc_message": ["task", 1, 1],
    } == json.loads(row.error or "")
    assert row.finished_at is not None
    assert ["task"] == _ids(store)


def test_exactly_max_attempts_expiries(store: LeaseStore, rows: Rows) -> None:
    """Three attempts are three expiries: not one more, not one less."""
    states = []
    for number in range(3):
        held(store, owner=f"owner-{number}", dispatch=number)
        rows.expire("task")
        states.append(store.reclaim(limit=10)[0].state)
    assert [State.QUEUED, State.QUEUED, State.FAILED] == states


def test_a_cancelled_row_is_cancelled_when_it_expires(store: LeaseStore, rows: Rows) -> None:
    """An owner who never noticed the cancellation does not get a successor."""
    held(store)
    store.cancel("task", "not needed")
    rows.expire("task")
    (reclaimed,) = store.reclaim(limit=10)
    assert State.CANCELLED is reclaimed.state
    assert ["task"] == _ids(store)


def test_an_outage_is_not_charged(store: LeaseStore, rows: Rows) -> None:
    """What expired since the last pass, or within a lease of the return, costs nothing."""
    store.reaper_turn("reaper", interval=5, saw_outage=False)
    for task_id in ("before", "during", "soon after"):
        held(store, task_id, max_attempts=1)
    move(rows, "pass_at", -100, table="_reaper", namespace="app")
    move(rows, "lease_until", -120, task_id="before")
    move(rows, "lease_until", -50, task_id="during")
    store.reaper_turn("reaper", interval=5, saw_outage=True)
    move(rows, "outage_until", -20, table="_reaper", namespace="app")
    rows.expire("soon after")
    found = {row.task_id: (row.state, row.crashes) for row in store.reclaim(limit=10)}
    assert {
        "before": (State.FAILED, 1),
        "during": (State.QUEUED, 0),
        "soon after": (State.QUEUED, 0),
    } == found
    facts = json.loads(store.history("during")[0].facts or "")
    assert facts["charged"] is False


def test_an_outage_long_ago_excuses_nothing(store: LeaseStore, rows: Rows) -> None:
    """One lease duration after the database's return expiries are charged again."""
    store.reaper_turn("reaper", interval=5, saw_outage=False)
    store.reaper_turn("reaper", interval=5, saw_outage=True)
    move(rows, "outage_from", -200, table="_reaper", namespace="app")
    move(rows, "outage_until", -100, table="_reaper", namespace="app")
    held(store, max_attempts=1)
    rows.expire("task")
    assert State.FAILED is store.reclaim(limit=10)[0].state


def test_a_claim_charges_no_outage_either(store: LeaseStore, rows: Rows) -> None:
    """A copy that takes over before the reaper comes finds the same rule."""
    held(store, max_attempts=1)
    store.reaper_turn("reaper", interval=5, saw_outage=False)
    move(rows, "pass_at", -100, table="_reaper", namespace="app")
    store.reaper_turn("reaper", interval=5, saw_outage=True)
    rows.expire("task")
    claim = store.claim(request(owner="owner-2"))
    assert (Verdict.GRANTED, 0) == (claim.verdict, claim.crashes)
    assert json.loads(store.history("task")[0].facts or "")["charged"] is False


def test_a_due_row_is_taken_once(store: LeaseStore, other: LeaseStore, rows: Rows) -> None:
    """One reaper sends; if it dies before it reports, the row is due again."""
    held(store)
    rows.expire("task")
    store.reclaim(limit=10)
    (due,) = store.take_due(limit=10, retry_in=30)
    assert ("task", State.QUEUED, 1, 1) == (
        due.row.task_id,
        due.row.state,
        due.row.dispatch,
        due.row.dispatches,
    )
    assert [] == _ids(other)
    move(rows, "dispatch_at", -1, task_id="task")
    assert ["task"] == _ids(other)


def test_one_row_is_taken_like_many(store: LeaseStore, other: LeaseStore, rows: Rows) -> None:
    """Who knows which task it is competes with the reapers, and one of them sends."""
    held(store)
    assert store.take_one("task", retry_in=30) is None
    rows.expire("task")
    store.reclaim(limit=10)
    row = store.take_one("task", retry_in=30)
    assert row is not None
    assert (State.QUEUED, 1, 1) == (row.state, row.dispatch, row.dispatches)
    assert (None, []) == (store.take_one("task", retry_in=30), _ids(other))


def test_a_reported_dispatch_is_repeated_later(store: LeaseStore, rows: Rows) -> None:
    """A message that nobody claims is sent again, after the time that was given."""
    ref = held(store)
    store.release(ref, cause="retry", charge=False, dispatch=True)
    store.take_due(limit=10, retry_in=30)
    store.dispatched([("task", 1, 300.0), ("no such task", 1, 300.0)])
    row = store.find("task")
    assert row is not None
    assert row.dispatch_at is not None
    assert 300 == pytest.approx((row.dispatch_at - row.read_at).total_seconds(), abs=5)


def test_a_late_report_changes_nothing(store: LeaseStore, rows: Rows) -> None:
    """A dispatch that was claimed, or replaced by a later one, is not put off."""
    ref = held(store, "claimed")
    store.release(ref, cause="retry", charge=False, dispatch=True)
    held(store, "claimed", owner="owner-2", dispatch=1)
    held(store, "replaced", dispatch=3)
    store.release(LeaseRef("replaced", "owner-1", 1), cause="retry", charge=False, dispatch=True)
    before = rows.all()
    store.dispatched([("claimed", 1, 300.0), ("replaced", 3, 300.0)])
    assert before == rows.all()


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_an_outcome_is_taken_with_the_right_to_announce(
    store: LeaseStore, rows: Rows, state: str
) -> None:
    """While a reaper announces a failure or a cancellation no copy does."""
    ref = held(store)
    if state == "failed":
        store.fail(ref, "{}", announce_in=0)
    else:
        store.release(ref, cause="retry", charge=False, dispatch=True)
        store.cancel("task", "")
    assert ["task"] == _ids(store)
    assert Verdict.HELD is store.claim(request(owner="owner-2", dispatch=1)).verdict


def test_a_success_is_taken_without_that_right(store: LeaseStore) -> None:
    """A success is announced by a worker: the copy that a reaper sends may replay it."""
    ref = held(store)
    store.commit(ref, RESULT, announce_in=0)
    assert ["task"] == _ids(store)
    assert store.claim(request(owner="owner-2")).replay


def test_an_outcome_that_somebody_announces_is_not_due(store: LeaseStore, rows: Rows) -> None:
    """A reaper does not send what a worker is just announcing."""
    finished(store)
    move(rows, "dispatch_at", -1, task_id="task")
    assert [] == _ids(store)
    move(rows, "announce_until", -1, task_id="task")
    assert ["task"] == _ids(store)


def test_an_announced_outcome_is_never_due(store: LeaseStore) -> None:
    """After the announcement nobody is asked to do anything."""
    ref = held(store)
    store.commit(ref, RESULT, announce_in=0)
    store.announce([ref])
    assert [] == _ids(store)


def test_a_row_without_a_message_is_due_too(store: LeaseStore, rows: Rows) -> None:
    """Whether a row can be sent is for the reaper to say."""
    held(store, message=None)
    rows.expire("task")
    store.reclaim(limit=10)
    (due,) = store.take_due(limit=10, retry_in=30)
    assert due.row.payload is None


def test_all_reapers_make_one_pass_per_interval(store: LeaseStore, other: LeaseStore) -> None:
    """A refused reaper learns when to ask again."""
    first = store.reaper_turn("reaper-1", interval=5, saw_outage=False)
    second = other.reaper_turn("reaper-2", interval=5, saw_outage=False)
    again = store.reaper_turn("reaper-1", interval=5, saw_outage=False)
    assert (True, 5, True) == (first.granted, first.next_in, first.grace)
    assert [False, False] == [second.granted, again.granted]
    assert 5 >= second.next_in >= again.next_in > 0
    assert not second.grace


def test_the_turn_goes_round(store: LeaseStore, rows: Rows) -> None:
    """When the interval is over the next who asks gets the pass, without grace."""
    store.reaper_turn("reaper-1", interval=5, saw_outage=False)
    move(rows, "pass_at", -6, table="_reaper", namespace="app")
    move(rows, "next_pass_at", -1, table="_reaper", namespace="app")
    turn = store.reaper_turn("reaper-2", interval=5, saw_outage=False)
    assert (True, False) == (turn.granted, turn.grace)
    (row,) = rows.query("SELECT owner FROM celery_lease_reaper")
    assert "reaper-2" == row["owner"]


def test_the_first_pass_after_a_gap_is_of_grace(store: LeaseStore, rows: Rows) -> None:
    """Owners get the time to be heard again before anybody is condemned."""
    store.reaper_turn("reaper-1", interval=5, saw_outage=False)
    move(rows, "pass_at", -16, table="_reaper", namespace="app")
    move(rows, "next_pass_at", -11, table="_reaper", namespace="app")
    assert store.reaper_turn("reaper-1", interval=5, saw_outage=False).grace


def test_namespaces_have_turns_of_their_own(store: LeaseStore) -> None:
    """Another app's reapers do not use up this one's passes."""
    foreign = LeaseStore(store.database, "another app")
    assert foreign.reaper_turn("reaper", interval=5, saw_outage=False).granted
    assert store.reaper_turn("reaper", interval=5, saw_outage=False).granted


def test_an_outage_is_recorded_from_the_last_pass(store: LeaseStore, rows: Rows) -> None:
    """Also by a reaper that is refused the turn, and several make one record."""
    store.reaper_turn("reaper-1", interval=5, saw_outage=False)
    move(rows, "pass_at", -60, table="_reaper", namespace="app")
    (before,) = rows.query("SELECT pass_at FROM celery_lease_reaper")
    refused = store.reaper_turn("reaper-2", interval=5, saw_outage=True)
    move(rows, "next_pass_at", -1, table="_reaper", namespace="app")
    granted = store.reaper_turn("reaper-1", interval=5, saw_outage=True)
    store.reaper_turn("reaper-3", interval=5, saw_outage=True)
    (after,) = rows.query("SELECT * FROM celery_lease_reaper")
    assert [False, True] == [refused.granted, granted.granted]
    assert before["pass_at"] == after["outage_from"]
    assert after["outage_until"] >= after["pass_at"]


def test_an_outage_before_any_pass_excuses_nothing(store: LeaseStore, rows: Rows) -> None:
    """Without a pass to count from there is no window."""
    store.reaper_turn("reaper-1", interval=5, saw_outage=True)
    held(store, max_attempts=1)
    rows.expire("task")
    assert State.FAILED is store.reclaim(limit=10)[0].state


def test_an_exhausted_row_is_given_up_once(store: LeaseStore, rows: Rows) -> None:
    """The claimant who was told "exhausted" may end the task, and announces it."""
    held(store, max_attempts=1)
    rows.expire("task")
    row = store.give_up("task")
    assert row is not None
    assert (State.FAILED, 1, None) == (row.state, row.crashes, row.owner_id)
    assert row.announce_until is not None
    assert 30 == pytest.approx((row.announce_until - row.read_at).total_seconds(), abs=5)
    assert store.give_up("task") is None
    assert Verdict.HELD is store.claim(request(owner="owner-2")).verdict
    assert ["reclaimed"] == [entry.event for entry in store.history("task")]


@pytest.mark.parametrize("case", ["live", "attempts left", "cancelled", "finished", "missing"])
def test_only_an_exhausted_row_is_given_up(store: LeaseStore, rows: Rows, case: str) -> None:
    """Whatever else the row is by now, it stays as it is."""
    if case != "missing":
        ref = held(store, max_attempts=2 if case == "attempts left" else 1)
        if case == "finished":
            store.commit(ref, RESULT, announce_in=30)
        elif case == "cancelled":
            store.cancel("task", "")
        if case not in ("live", "finished"):
            rows.expire("task")
    before = rows.all()
    assert store.give_up("task", announce_in=30) is None
    assert before == rows.all()


def test_a_waiting_task_is_cancelled_at_once(store: LeaseStore) -> None:
    """No worker is needed for it, and its outcome is due to be announced."""
    ref = held(store)
    store.release(ref, cause="retry", charge=False, dispatch=True, due_in=600)
    assert State.CANCELLED is store.cancel("task", "not needed")
    row = store.find("task")
    assert row is not None
    assert (State.CANCELLED, "not needed") == (row.state, row.cancel_reason)
    assert row.finished_at is not None
    assert ["task"] == _ids(store)
    assert ["released", "cancel_requested"] == [entry.event for entry in store.history("task")]


def test_a_running_task_is_asked_to_stop(store: LeaseStore) -> None:
    """Asked twice, the first reason counts, and is in the history once."""
    held(store)
    assert State.RUNNING is store.cancel("task", "first")
    assert State.RUNNING is store.cancel("task", "second")
    row = store.find("task")
    assert row is not None
    assert (State.RUNNING, "first", "owner-1") == (row.state, row.cancel_reason, row.owner_id)
    assert 1 == len(store.history("task"))


def test_a_finished_task_cannot_be_cancelled(store: LeaseStore, rows: Rows) -> None:
    """The canceller learns how it ended; nothing changes."""
    finished(store)
    before = rows.all()
    assert State.SUCCEEDED is store.cancel("task", "too late")
    assert store.cancel("no such task", "") is None
    assert before == rows.all()


def test_purge_forgets_what_is_done(store: LeaseStore, rows: Rows) -> None:
    """Old, terminal and announced: then the row goes, with its history."""
    ids = ("old", "young", "unannounced", "running")
    for task_id in ids[:3]:
        ref = finished(store, task_id, announced=task_id != "unannounced")
        store.note(ref, "result_rejected")
    held(store, "running")
    for task_id in ("old", "unannounced"):
        move(rows, "finished_at", -1000, task_id=task_id)
    assert 1 == store.purge(older_than=900, limit=10)
    assert ["running", "unannounced", "young"] == [row["task_id"] for row in rows.all()]
    assert ([], 1) == (store.history("old"), len(store.history("young")))


def test_purge_is_bounded(store: LeaseStore) -> None:
    """One call forgets no more than its limit."""
    for number in range(5):
        finished(store, f"task-{number}", announced=True)
    assert [2, 2, 1, 0] == [store.purge(older_than=0, limit=2) for _ in range(4)]


def test_rows_can_be_filtered(store: LeaseStore, rows: Rows) -> None:
    """By state, task, owner's beginning and expiry, newest first, in this namespace."""
    held(store, "a", owner="host-1;77;x")
    held(store, "b", owner="host-1;78;y")
    finished(store, "c")
    rows.expire("b")
    LeaseStore(store.database, "another app").claim(request("foreign"))

    def ids(**filters: object) -> list[str]:
        return [row.task_id for row in store.rows(**filters)]  # type: ignore[arg-type]

    assert ["c", "b", "a"] == ids()
    assert ["c"] == ids(limit=1)
    assert ["b", "a"] == ids(state=State.RUNNING)
    assert ["b"] == ids(expired=True)
    assert ["b", "a"] == ids(owner="host-1;")
    assert [] == ids(owner="host_1")
    assert [] == ids(task_name="app.other")
    assert ["c", "b", "a"] == ids(task_name="app.export")


def test_an_unknown_task_has_no_row(store: LeaseStore) -> None:
    """There is nothing to find, and nothing to tell."""
    assert (None, []) == (store.find("no such task"), store.history("no such task"))


def test_tables_in_a_schema_of_their_own(empty_postgresql: str) -> None:
    """Everything works in a database schema that is not the connection's default."""
    store = open_store(empty_postgresql, schema='le"ases')
    migrations.upgrade(store.database.engine, schema='le"ases')
    check_schema(store.database)
    done = finished(store, "first")
    store.claim(request(), announced=[done])
    store.cancel("task", "")
    store.reaper_turn("reaper", interval=5, saw_outage=False)
    assert ([], []) == (store.reclaim(limit=1), store.take_due(limit=1, retry_in=1))
    assert 1 == store.purge(older_than=0, limit=5)
    store.database.dispose()
