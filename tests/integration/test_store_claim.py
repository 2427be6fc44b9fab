"""What can be claimed, what cannot, and why not: every verdict, on each database."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from harness.leases import MESSAGE, RESULT, claimed, finished, held, move, request
from harness.rows import Rows

from celery_lease.lease import ClaimRequest, LeaseRef, Renewal, State, Verdict
from celery_lease.store import LeaseStore


def test_a_missing_row_is_taken(store: LeaseStore) -> None:
    """The first claim of a task makes its row, with token 1 and attempt 1."""
    claim = store.claim(request(labels='{"tool": "pdf"}', delivery_tag="tag-1"))
    row = store.find("task")
    assert (Verdict.GRANTED, LeaseRef("task", "owner-1", 1), 1, 0) == (
        claim.verdict,
        claim.ref,
        claim.attempt,
        claim.crashes,
    )
    assert row is not None
    assert (State.RUNNING, "owner-1", 1, 1) == (
        row.state,
        row.owner_id,
        row.fencing_token,
        row.attempt,
    )
    assert ("app", "app.export", 30.0, 3) == (
        row.namespace,
        row.task_name,
        row.lease_duration,
        row.max_attempts,
    )
    assert (MESSAGE.body, MESSAGE.envelope) == (row.payload, row.message)
    assert ('{"tool": "pdf"}', "tag-1") == (row.labels, row.delivery_tag)
    assert claim.lease_until == row.lease_until


def test_the_lease_lasts_as_long_as_asked(store: LeaseStore) -> None:
    """The lease ends one duration after the database's clock, in UTC."""
    claimed(store, lease_duration=45.5)
    row = store.find("task")
    assert row is not None
    assert row.lease_until is not None
    assert timedelta(0) == row.lease_until.utcoffset()
    left = (row.lease_until - row.read_at).total_seconds()
    assert 45.5 >= left > 30


def test_the_first_claim_writes_no_history(store: LeaseStore) -> None:
    """The happy path costs no history row."""
    claimed(store)
    assert [] == store.history("task")


def test_the_same_owner_gets_its_own_token_again(store: LeaseStore) -> None:
    """Whoever lost the answer to its claim asks again, and holds one lease, not two."""
    first = claimed(store)
    again = claimed(store)
    assert (first.ref, 1) == (again.ref, again.attempt)
    assert [] == store.history("task")


def test_the_same_owner_asks_after_expiry(store: LeaseStore, rows: Rows) -> None:
    """An expired lease that nobody took is still its owner's to ask for, uncharged."""
    first = claimed(store)
    rows.expire("task")
    again = claimed(store)
    assert (first.ref, 1, 0) == (again.ref, again.attempt, again.crashes)
    row = store.find("task")
    assert row is not None
    assert not row.expired


def test_the_same_owner_is_asked_no_conditions(store: LeaseStore) -> None:
    """Its copy's numbers cannot be too old: it is the copy that was granted."""
    first = held(store, dispatch=3, retries=2)
    assert first == held(store, dispatch=0, retries=0)


def test_a_live_lease_is_held(store: LeaseStore) -> None:
    """While the owner lives nobody else gets the task, whatever the broker redelivers."""
    held(store)
    refused = store.claim(request(owner="owner-2"))
    assert Verdict.HELD is refused.verdict
    assert refused.row is not None
    assert ("owner-1", None, False) == (refused.row.owner_id, refused.ref, refused.replay)


def test_an_expired_lease_is_taken_over(store: LeaseStore, rows: Rows) -> None:
    """A new owner gets a higher token; the expiry counts as a crash and is in the history."""
    held(store)
    rows.expire("task")
    claim = claimed(store, owner="owner-2")
    assert (LeaseRef("task", "owner-2", 2), 2, 1) == (claim.ref, claim.attempt, claim.crashes)
    expired, taken = store.history("task")
    assert ("expired", 1, "owner-1", 1, "expired") == (
        expired.event,
        expired.fencing_token,
        expired.owner_id,
        expired.attempt,
        expired.cause,
    )
    facts = json.loads(expired.facts or "")
    assert facts["charged"] is True
    assert facts["lease_until"].startswith("20")
    assert facts["lease_until"].endswith("+00:00")
    assert ("claimed", 2, "owner-2", 2) == (
        taken.event,
        taken.fencing_token,
        taken.owner_id,
        taken.attempt,
    )


def test_a_waiting_row_is_taken(store: LeaseStore) -> None:
    """After a release the next claim takes the row, with the next token, uncharged."""
    ref = held(store)
    store.release(ref, cause="retry", charge=False, dispatch=True, retries=1)
    claim = claimed(store, owner="owner-2", dispatch=1, retries=1)
    assert (2, 2, 0) == (claim.ref and claim.ref.fencing_token, claim.attempt, claim.crashes)
    assert ["released", "claimed"] == [entry.event for entry in store.history("task")]


@pytest.mark.parametrize(
    ("dispatch", "retries"), [(0, 1), (1, 0)], ids=["older dispatch", "fewer retries"]
)
@pytest.mark.parametrize("state", ["waiting", "expired", "live"])
def test_an_older_copy_is_superseded(
    store: LeaseStore, rows: Rows, state: str, dispatch: int, retries: int
) -> None:
    """A copy that a later message has replaced gets nothing, whatever the row's state."""
    ref = held(store)
    store.release(ref, cause="retry", charge=False, dispatch=True, retries=1)
    if state != "waiting":
        held(store, owner="owner-2", dispatch=1, retries=1)
    if state == "expired":
        rows.expire("task")
    refused = store.claim(request(owner="owner-3", dispatch=dispatch, retries=retries))
    assert Verdict.SUPERSEDED is refused.verdict


def test_numbers_of_a_message_grant_nothing(store: LeaseStore) -> None:
    """Forged numbers neither take a live lease nor overflow the row."""
    held(store)
    forged = request(owner="owner-2", dispatch=2**70, retries=2**70)
    assert Verdict.HELD is store.claim(forged).verdict
    assert store.claim(request("new", dispatch=2**70, retries=-5)).ref is not None


def test_a_claim_keeps_what_the_row_has(store: LeaseStore, rows: Rows) -> None:
    """Message, labels and checkpoint of the row outlive the claim of another copy."""
    ref = held(store, labels='{"a": "1"}')
    store.renew([Renewal(ref, 30, '{"page": 7}')])
    rows.expire("task")
    claim = store.claim(ClaimRequest("task", "app.export", "owner-2", 30, 3, labels='{"b": "2"}'))
    row = store.find("task")
    assert row is not None
    assert '{"page": 7}' == claim.details == row.details
    assert (MESSAGE.body, MESSAGE.envelope, '{"a": "1"}') == (row.payload, row.message, row.labels)


def test_a_claim_fills_in_what_the_row_lacks(store: LeaseStore, rows: Rows) -> None:
    """A row that knew no message gets it from the copy that is claimed."""
    held(store, message=None)
    rows.expire("task")
    held(store, owner="owner-2")
    row = store.find("task")
    assert row is not None
    assert (MESSAGE.body, MESSAGE.envelope) == (row.payload, row.message)


def test_a_claim_ends_what_reapers_had_planned(store: LeaseStore) -> None:
    """A claimed row is not due for dispatch any more."""
    ref = held(store)
    store.release(ref, cause="handover", charge=False, dispatch=True)
    store.take_due(limit=10, retry_in=30)
    held(store, owner="owner-2", dispatch=1)
    row = store.find("task")
    assert row is not None
    assert (None, 0) == (row.dispatch_at, row.dispatches)


def test_the_last_crash_exhausts(store: LeaseStore, rows: Rows) -> None:
    """Expired with no crash left to have: exhausted, and nothing is changed by asking."""
    for number in range(3):
        held(store, owner=f"owner-{number}")
        rows.expire("task")
    refused = store.claim(request(owner="owner-4"))
    row = store.find("task")
    assert Verdict.EXHAUSTED is refused.verdict
    assert row is not None
    assert (State.RUNNING, 3, 2) == (row.state, row.fencing_token, row.crashes)


def test_a_cancelled_expired_row_is_not_taken(store: LeaseStore, rows: Rows) -> None:
    """Who claims a task that somebody cancelled is told so."""
    held(store)
    store.cancel("task", "not needed")
    assert Verdict.HELD is store.claim(request(owner="owner-2")).verdict
    rows.expire("task")
    refused = store.claim(request(owner="owner-2"))
    assert (Verdict.CANCELLED, False) == (refused.verdict, refused.replay)


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_a_terminal_announced_row_says_how_it_ended(store: LeaseStore, state: str) -> None:
    """After the announcement a copy learns the outcome, and has nothing to do."""
    ref = _ended(store, state)
    store.announce([ref])
    refused = store.claim(request(owner="owner-2"))
    assert (Verdict(state), False) == (refused.verdict, refused.replay)


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_one_copy_replays_an_unannounced_outcome(store: LeaseStore, rows: Rows, state: str) -> None:
    """When the announcer is overdue exactly one later copy takes its place."""
    _ended(store, state)
    if state != "cancelled":
        assert Verdict.HELD is store.claim(request(owner="owner-2")).verdict
        move(rows, "announce_until", -1, task_id="task")
    replaying = store.claim(request(owner="owner-2"))
    waiting = store.claim(request(owner="owner-3"))
    assert (Verdict(state), True) == (replaying.verdict, replaying.replay)
    assert (Verdict.HELD, False) == (waiting.verdict, waiting.replay)


def test_a_replay_sees_the_stored_result(store: LeaseStore, rows: Rows) -> None:
    """The row that comes with the verdict holds the result to be announced."""
    finished(store)
    move(rows, "announce_until", -1, task_id="task")
    row = store.claim(request(owner="owner-2")).row
    assert row is not None
    assert (RESULT.data, RESULT.content_type, RESULT.content_encoding) == (
        row.result,
        row.result_type,
        row.result_encoding,
    )


def test_a_superseded_copy_may_replay(store: LeaseStore, rows: Rows) -> None:
    """The outcome is the task's: even an old copy may have to announce it."""
    ref = held(store, dispatch=4)
    store.commit(ref, RESULT, announce_in=30)
    move(rows, "announce_until", -1, task_id="task")
    assert store.claim(request(owner="owner-2", dispatch=0)).replay


def test_announcements_ride_on_a_claim(store: LeaseStore) -> None:
    """Outcomes of earlier tasks are marked by the statement that claims the next."""
    first, second = finished(store, "first"), finished(store, "second")
    claim = store.claim(request("third"), announced=[first, second])
    assert Verdict.GRANTED is claim.verdict
    for task_id in ("first", "second"):
        row = store.find(task_id)
        assert row is not None
        assert row.announced_at is not None
        assert (None, None, None, None) == (
            row.announce_until,
            row.dispatch_at,
            row.payload,
            row.message,
        )


@pytest.mark.parametrize("number", [0, 1], ids=["new copy", "later dispatch"])
def test_announcements_ride_on_a_refused_claim(store: LeaseStore, number: int) -> None:
    """They are marked whatever becomes of the claim."""
    held(store)
    done = finished(store, "done")
    refused = store.claim(request(owner="owner-2", dispatch=number), announced=[done])
    row = store.find("done")
    assert Verdict.HELD is refused.verdict
    assert row is not None
    assert row.announced_at is not None


def test_the_announcement_of_the_claimed_task_comes_first(store: LeaseStore) -> None:
    """A copy of the task that was just announced is told that all is done."""
    ref = finished(store)
    refused = store.claim(request(owner="owner-2"), announced=[ref])
    assert (Verdict.SUCCEEDED, False) == (refused.verdict, refused.replay)


def test_the_token_never_falls(store: LeaseStore, rows: Rows) -> None:
    """Release, expiry and reclaim leave the token; only a claim moves it, by one."""
    tokens = []
    for number in range(6):
        ref = held(store, owner=f"owner-{number}", dispatch=50 * min(number, 1), max_attempts=50)
        tokens.append(ref.fencing_token)
        if number % 3 == 0:
            store.release(ref, cause="retry", charge=False, dispatch=True)
        else:
            rows.expire("task")
        if number % 3 == 1:
            store.reclaim(limit=10)
        row = store.find("task")
        assert row is not None
        assert tokens[-1] == row.fencing_token
    assert [1, 2, 3, 4, 5, 6] == tokens


def test_a_purged_row_is_forgotten(store: LeaseStore) -> None:
    """As documented: after the retention a copy of the message begins at token 1."""
    finished(store, announced=True)
    assert 1 == store.purge(older_than=0, limit=10)
    assert 1 == held(store, owner="owner-2").fencing_token


def _ended(store: LeaseStore, state: str) -> LeaseRef:
    ref = held(store)
    if state == "succeeded":
        assert store.commit(ref, RESULT, announce_in=30)
    elif state == "failed":
        assert store.fail(ref, '{"exc_type": "ValueError"}', announce_in=30)
    else:
        store.release(ref, cause="handover", charge=False, dispatch=True)
        assert State.CANCELLED is store.cancel("task", "not needed")
    return ref
