"""Renew, commit, fail, release and announce: the whole grant, or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from harness.leases import MESSAGE, RESULT, finished, held, move, open_store, request
from harness.rows import Rows
from harness.statements import StatementCounter

from celery_lease.lease import LeaseRef, Message, Renewal, State
from celery_lease.store import LeaseStore

ERROR = '{"exc_type": "ValueError"}'


def _commit(store: LeaseStore, ref: LeaseRef) -> Any:
    return store.commit(ref, RESULT, announce_in=30) or None


def _fail(store: LeaseStore, ref: LeaseRef) -> Any:
    return store.fail(ref, ERROR, announce_in=30) or None


def _release(store: LeaseStore, ref: LeaseRef) -> Any:
    return store.release(ref, cause="retry", charge=False, dispatch=True)


def _renew(store: LeaseStore, ref: LeaseRef) -> Any:
    return store.renew([Renewal(ref, 30, '{"stale": true}')]) or None


END = pytest.mark.parametrize("end", [_commit, _fail, _release, _renew])


def _stale_token(ref: LeaseRef) -> LeaseRef:
    return replace(ref, fencing_token=ref.fencing_token - 1)


def _future_token(ref: LeaseRef) -> LeaseRef:
    return replace(ref, fencing_token=ref.fencing_token + 1)


def _another_owner(ref: LeaseRef) -> LeaseRef:
    return replace(ref, owner_id="owner-2")


def _another_task(ref: LeaseRef) -> LeaseRef:
    return replace(ref, task_id="no such task")


@END
@pytest.mark.parametrize("forge", [_stale_token, _future_token, _another_owner, _another_task])
def test_only_the_whole_grant_counts(
    store: LeaseStore,
    rows: Rows,
    end: Callable[[LeaseStore, LeaseRef], Any],
    forge: Callable[[LeaseRef], LeaseRef],
) -> None:
    """Task, owner and token must all be those of the row; else nothing changes."""
    ref = held(store)
    before = rows.get("task")
    assert end(store, forge(ref)) is None
    assert before == rows.get("task")
    assert [] == store.history("task")


@END
def test_an_expired_lease_ends_nothing(
    store: LeaseStore, rows: Rows, end: Callable[[LeaseStore, LeaseRef], Any]
) -> None:
    """Past its end a lease gives no right, though nobody has taken it yet."""
    ref = held(store)
    rows.expire("task")
    before = rows.get("task")
    assert end(store, ref) is None
    assert before == rows.get("task")


@END
def test_an_owner_who_was_overtaken_ends_nothing(
    store: LeaseStore, rows: Rows, end: Callable[[LeaseStore, LeaseRef], Any]
) -> None:
    """The new owner's row is untouched by anything that the old one does."""
    ref = held(store)
    rows.expire("task")
    held(store, owner="owner-2")
    before = rows.get("task")
    assert end(store, ref) is None
    assert before == rows.get("task")


@END
@pytest.mark.parametrize("first", [_commit, _fail])
def test_a_finished_row_never_changes(
    store: LeaseStore,
    rows: Rows,
    first: Callable[[LeaseStore, LeaseRef], Any],
    end: Callable[[LeaseStore, LeaseRef], Any],
) -> None:
    """Terminal is terminal, also for the owner who made it so."""
    ref = held(store)
    assert first(store, ref)
    before = rows.get("task")
    repeated = end(store, ref)
    assert (repeated is not None) == (first is end)
    assert before == rows.get("task")


def test_a_renewal_moves_the_end(store: LeaseStore, rows: Rows) -> None:
    """A renewed lease ends one duration from now, by the database's clock."""
    ref = held(store)
    move(rows, "lease_until", 3, task_id="task")
    (renewed,) = store.renew([Renewal(ref, 60)])
    row = store.find("task")
    assert row is not None
    assert (ref, None) == (renewed.ref, renewed.cancel_reason)
    assert renewed.lease_until == row.lease_until
    assert row.lease_until is not None
    assert 60 >= (row.lease_until - row.read_at).total_seconds() > 50


def test_a_renewal_carries_the_checkpoint_when_it_changed(store: LeaseStore) -> None:
    """Details are written when they are given, and left alone otherwise."""
    first, second = held(store, "first"), held(store, "second")
    store.renew([Renewal(first, 30, '{"page": 1}'), Renewal(second, 30)])
    store.renew([Renewal(first, 30), Renewal(second, 30, '{"page": 2}')])
    found = [store.find("first"), store.find("second")]
    assert ['{"page": 1}', '{"page": 2}'] == [row.details for row in found if row]


@pytest.mark.parametrize(("reason", "told"), [("too slow", "too slow"), ("", "")])
def test_a_renewal_tells_of_a_cancellation(store: LeaseStore, reason: str, told: str) -> None:
    """The owner learns at its next beat that it should stop, with or without a reason."""
    ref, unaffected = held(store), held(store, "unaffected")
    assert State.RUNNING is store.cancel("task", reason)
    answers = store.renew([Renewal(ref, 30), Renewal(unaffected, 30)])
    assert {"task": told, "unaffected": None} == {
        answer.ref.task_id: answer.cancel_reason for answer in answers
    }


def test_who_is_missing_in_the_answer_is_lost(store: LeaseStore, rows: Rows) -> None:
    """Among many renewals only those still held are in the answer."""
    refs = [held(store, f"task-{number}") for number in range(10)]
    rows.expire("task-3")
    store.commit(refs[5], RESULT, announce_in=30)
    stale = replace(refs[7], fencing_token=9)
    asked = [*refs[:7], stale, *refs[8:]]
    answer = store.renew([Renewal(ref, 30) for ref in asked])
    assert {0, 1, 2, 4, 6, 8, 9} == {int(item.ref.task_id[5:]) for item in answer}


def test_announcements_ride_on_a_renewal(store: LeaseStore) -> None:
    """The beat marks outcomes that no later claim has taken along."""
    ref, done = held(store), finished(store, "done")
    assert 1 == len(store.renew([Renewal(ref, 30)], announced=[done]))
    row = store.find("done")
    assert row is not None
    assert row.announced_at is not None


def test_announcements_need_no_lease_to_ride_on(store: LeaseStore) -> None:
    """The last outcome of a process is marked although it holds nothing any more."""
    done = finished(store, "done")
    assert [] == store.renew([], announced=[done])
    row = store.find("done")
    assert row is not None
    assert row.announced_at is not None


def test_a_thousand_renewals_are_one_statement(statement_counter: StatementCounter) -> None:
    """One beat of a process is one statement, however many leases it has."""
    store = open_store(statement_counter.url)
    refs = [held(store, f"task-{number}") for number in range(1000)]
    done = finished(store, "done")
    statement_counter.reset()
    answer = store.renew([Renewal(ref, 30) for ref in refs], announced=[done])
    assert (1000, 1) == (len(answer), statement_counter.total())
    store.database.dispose()


def test_a_task_is_two_statements(statement_counter: StatementCounter) -> None:
    """Claim and commit, with the previous task's announcement riding on the claim."""
    store = open_store(statement_counter.url)
    done = finished(store, "task-0")
    statement_counter.reset()
    for number in range(1, 11):
        claim = store.claim(request(f"task-{number}"), announced=[done])
        assert claim.ref is not None
        assert store.commit(claim.ref, RESULT, announce_in=30)
        done = claim.ref
    assert 20 == statement_counter.total()
    assert 0 == statement_counter.total("BEGIN") + statement_counter.total("COMMIT")
    store.database.dispose()


def test_a_commit_stores_the_result(store: LeaseStore) -> None:
    """The result, the end of the lease and the right to announce are one change."""
    ref = held(store)
    assert store.commit(ref, RESULT, announce_in=20)
    row = store.find("task")
    assert row is not None
    assert (State.SUCCEEDED, "owner-1", 1, None) == (
        row.state,
        row.owner_id,
        row.fencing_token,
        row.lease_until,
    )
    assert (RESULT.data, RESULT.content_type, RESULT.content_encoding) == (
        row.result,
        row.result_type,
        row.result_encoding,
    )
    assert row.finished_at is not None
    assert row.announced_at is None
    assert row.announce_until is not None
    assert row.dispatch_at is not None
    # Two readings of the clock, in one statement.
    assert 0 == pytest.approx((row.announce_until - row.dispatch_at).total_seconds(), abs=0.01)
    assert 20 == pytest.approx((row.announce_until - row.finished_at).total_seconds(), abs=1)
    # The message is kept until the outcome is announced: a replay may need it.
    assert MESSAGE.body == row.payload


def test_a_commit_may_keep_no_result(store: LeaseStore) -> None:
    """A task whose result nobody wants leaves none in the row."""
    assert store.commit(held(store), None, announce_in=30)
    row = store.find("task")
    assert row is not None
    assert (None, None, None) == (row.result, row.result_type, row.result_encoding)


@pytest.mark.parametrize("keep", [False, True], ids=["erase", "keep"])
@pytest.mark.parametrize("end", ["commit", "fail"])
def test_an_end_may_be_announced_at_once(store: LeaseStore, end: str, *, keep: bool) -> None:
    """Where nothing follows from the outcome the row is done; the message goes if it may."""
    ref = held(store, keep_payload=keep)
    if end == "commit":
        assert store.commit(ref, RESULT, announced=True, announce_in=30)
    else:
        assert store.fail(ref, ERROR, announced=True, announce_in=30)
    row = store.find("task")
    assert row is not None
    assert row.announced_at is not None
    assert (None, None) == (row.announce_until, row.dispatch_at)
    assert ((MESSAGE.body, MESSAGE.envelope) if keep else (None, None)) == (
        row.payload,
        row.message,
    )


def test_a_failure_stores_the_error(store: LeaseStore) -> None:
    """A failed task keeps its error, as text that was JSON already."""
    assert store.fail(held(store), ERROR, announce_in=30)
    row = store.find("task")
    assert row is not None
    assert (State.FAILED, ERROR) == (row.state, row.error)


def test_a_commit_repeated_is_recognised(store: LeaseStore) -> None:
    """The answer was lost, the commit was not: asked again, it is still true."""
    ref = held(store)
    assert store.commit(ref, RESULT, announce_in=30)
    assert store.commit(ref, RESULT, announce_in=30)
    assert not store.fail(ref, ERROR, announce_in=30)


def test_a_commit_is_recognised_after_its_announcement(store: LeaseStore) -> None:
    """Even when somebody else has announced the outcome meanwhile."""
    ref = finished(store)
    store.announce([ref])
    assert store.commit(ref, RESULT, announce_in=30)


def test_a_commit_after_reclaim_is_refused(store: LeaseStore, rows: Rows) -> None:
    """The reaper fences the old owner at once, before anybody has claimed again."""
    ref = held(store)
    rows.expire("task")
    store.reclaim(limit=10)
    assert not store.commit(ref, RESULT, announce_in=30)
    assert "queued" == (rows.get("task") or {})["state"]


def test_a_commit_does_not_look_at_cancellation(store: LeaseStore) -> None:
    """What was finished before the cancellation was noticed is finished."""
    ref = held(store)
    store.cancel("task", "late")
    assert store.commit(ref, RESULT, announce_in=30)


def test_a_release_writes_the_next_message(store: LeaseStore) -> None:
    """Retry: the next message, its count, its due time and the checkpoint are in the row."""
    ref = held(store)
    later = Message(b"next", '{"headers": {"retries": 1}}')
    number = store.release(
        ref,
        cause="retry",
        charge=False,
        dispatch=True,
        due_in=60,
        message=later,
        retries=1,
        details='{"page": 3}',
    )
    row = store.find("task")
    assert row is not None
    assert (1, State.QUEUED, None, None, 1) == (
        number,
        row.state,
        row.owner_id,
        row.lease_until,
        row.fencing_token,
    )
    assert (b"next", later.envelope, 1, '{"page": 3}') == (
        row.payload,
        row.message,
        row.retries,
        row.details,
    )
    assert row.dispatch_at is not None
    assert 60 == pytest.approx((row.dispatch_at - row.read_at).total_seconds(), abs=5)
    (entry,) = store.history("task")
    assert ("released", "retry", "owner-1", 1) == (
        entry.event,
        entry.cause,
        entry.owner_id,
        entry.fencing_token,
    )
    assert {"state": "queued", "charged": False, "dispatch": 1} == json.loads(entry.facts or "")


def test_a_release_keeps_what_is_not_given(store: LeaseStore) -> None:
    """Without a new message the old one stays; the copy in the broker stays valid."""
    ref = held(store, retries=2)
    number = store.release(ref, cause="handover", charge=False, dispatch=False)
    row = store.find("task")
    assert row is not None
    assert (0, 0, 2, MESSAGE.body, MESSAGE.envelope) == (
        number,
        row.dispatch,
        row.retries,
        row.payload,
        row.message,
    )
    # Only in case the copy gets lost: a reaper sends it after a lease's time.
    assert row.dispatch_at is not None
    assert 30 == pytest.approx((row.dispatch_at - row.read_at).total_seconds(), abs=5)


def test_a_release_repeated_gives_the_same_number(store: LeaseStore) -> None:
    """The answer was lost: asked again, it is the same message that has to be sent."""
    ref = held(store)
    numbers = [store.release(ref, cause="retry", charge=False, dispatch=True) for _ in range(3)]
    assert [1, 1, 1] == numbers
    assert 1 == len(store.history("task"))
    assert store.release(ref, cause="stall", charge=False, dispatch=True) is None


def test_a_charged_release_counts(store: LeaseStore) -> None:
    """A crash costs one of the attempts that the task has; a hand-over none."""
    for number, charge in enumerate([True, False, True]):
        ref = held(store, owner=f"owner-{number}", dispatch=number)
        store.release(ref, cause="crash", charge=charge, dispatch=True)
    row = store.find("task")
    assert row is not None
    assert (State.QUEUED, 2) == (row.state, row.crashes)


def test_the_last_charged_release_fails(store: LeaseStore) -> None:
    """With no crash left the row fails, with a reason that Celery can rebuild."""
    ref = held(store, max_attempts=1)
    number = store.release(ref, cause="stall", charge=True, dispatch=True)
    row = store.find("task")
    assert row is not None
    assert (0, State.FAILED, 1, 0) == (number, row.state, row.crashes, row.dispatch)
    assert {
        "exc_type": "AttemptsExhausted",
        "exc_module": "celery_lease.exceptions",
        "exc_message": ["task", 1, 1],
    } == json.loads(row.error or "")
    assert ["task"] == [due.row.task_id for due in store.take_due(limit=10, retry_in=30)]


def test_a_release_of_a_cancelled_task_cancels(store: LeaseStore) -> None:
    """A retry of a task that somebody cancelled does not wait for a worker."""
    ref = held(store)
    store.cancel("task", "not needed")
    assert 0 == store.release(ref, cause="retry", charge=False, dispatch=True)
    row = store.find("task")
    assert row is not None
    assert (State.CANCELLED, "not needed") == (row.state, row.cancel_reason)
    assert row.finished_at is not None


def test_a_parent_releases_a_dead_child(store: LeaseStore) -> None:
    """The owner id is enough; the crash is charged and the message is to be sent again."""
    ref = held(store)
    row = store.crashed("task", "owner-1")
    assert row is not None
    assert (State.QUEUED, 1, 1, None) == (row.state, row.crashes, row.dispatch, row.owner_id)
    assert not store.commit(ref, RESULT, announce_in=30)
    assert ["crash"] == [entry.cause for entry in store.history("task")]


@pytest.mark.parametrize("owner", ["owner-2", "owner-"])
def test_a_parent_touches_no_other_owner(store: LeaseStore, rows: Rows, owner: str) -> None:
    """A child that was overtaken before it died is not its parent's to release."""
    held(store)
    before = rows.get("task")
    assert store.crashed("task", owner) is None
    assert store.crashed("no such task", owner) is None
    assert before == rows.get("task")


def test_a_parent_hands_on_an_unannounced_outcome(store: LeaseStore) -> None:
    """A child that died between commit and announcement leaves the outcome to others at once."""
    finished(store)
    row = store.crashed("task", "owner-1")
    assert row is not None
    assert State.SUCCEEDED is row.state
    assert ["task"] == [due.row.task_id for due in store.take_due(limit=10, retry_in=30)]


def test_a_parent_leaves_an_announced_outcome(store: LeaseStore) -> None:
    """A child that had announced before it died leaves nothing to do."""
    finished(store, announced=True)
    assert store.crashed("task", "owner-1") is None


def test_only_terminal_rows_of_that_token_are_announced(store: LeaseStore, rows: Rows) -> None:
    """An announcement that comes late marks nothing that it was not about."""
    running = held(store, "running")
    done = finished(store, "done")
    again = replace(done, fencing_token=2)
    before = rows.all()
    store.announce([running, again, LeaseRef("no such task", "owner-1", 1)])
    assert before == rows.all()


def test_tokens_belong_to_their_tasks(store: LeaseStore, rows: Rows) -> None:
    """In a batch each token counts for its own task only."""
    finished(store, "first")
    held(store, "second")
    rows.expire("second")
    second = held(store, "second", owner="owner-2")
    assert store.commit(second, RESULT, announce_in=30)
    swapped = [LeaseRef("first", "", 2), LeaseRef("second", "", 1)]
    store.announce(swapped)
    assert [None, None] == [row["announced_at"] for row in rows.all()]


def test_an_announcement_compares_no_owner(store: LeaseStore) -> None:
    """A replayer or a reaper announces what somebody else has finished."""
    ref = finished(store)
    store.announce([replace(ref, owner_id="reaper")])
    row = store.find("task")
    assert row is not None
    assert row.announced_at is not None


def test_a_note_is_kept(store: LeaseStore) -> None:
    """A refused result leaves a line in the history of the task."""
    ref = held(store)
    store.note(ref, "result_rejected", "zero_rows", {"bytes": 12})
    (entry,) = store.history("task")
    assert ("result_rejected", 1, "owner-1", "zero_rows", '{"bytes": 12}') == (
        entry.event,
        entry.fencing_token,
        entry.owner_id,
        entry.cause,
        entry.facts,
    )


def test_large_and_odd_values_survive(store: LeaseStore) -> None:
    """Bytes, percent signs, colons and quotes pass through unchanged."""
    odd = "%s :task_id ::text 'quoted' \"double\" \\ %% {} é 🦊"
    body = bytes(range(256)) * 4096
    ref = held(store, odd, message=Message(body, odd), labels=odd)
    store.renew([Renewal(ref, 30, odd)])
    assert store.commit(ref, replace(RESULT, data=body), announce_in=30)
    row = store.find(odd)
    assert row is not None
    assert (body, odd, odd, odd, body) == (
        row.payload,
        row.message,
        row.labels,
        row.details,
        row.result,
    )
