"""Many at once: one winner, nobody disturbed, nothing done twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import sqlalchemy
from harness.claimers import Answer, compete
from harness.leases import RESULT, held, move, open_store, request
from harness.rows import Rows
from harness.waiting import until
from sqlalchemy import Connection, text

from celery_lease.lease import Renewal, State, Verdict
from celery_lease.store import LeaseStore


@contextmanager
def _open_transaction(url: str) -> Iterator[Connection]:
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    connection = engine.connect()
    try:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        yield connection
    finally:
        connection.close()
        engine.dispose()


def _finish(connection: Connection, task_id: str = "task") -> None:
    connection.execute(
        text("UPDATE celery_lease SET state = 'succeeded', lease_until = NULL WHERE task_id = :id"),
        {"id": task_id},
    )


@pytest.mark.timeout(300)
def test_one_winner_per_round(lease_database: str, rows: Rows) -> None:
    """Eight processes claim one task 200 times: one wins, the others are told why not."""
    store = open_store(lease_database)

    def between(number: int, _: list[Answer]) -> None:
        row = store.find("task")
        assert row is not None
        if number % 2:
            rows.expire("task")
        else:
            row_ref = held(store, owner=str(row.owner_id))
            assert store.release(row_ref, cause="retry", charge=False, dispatch=False) == 0

    found = compete(lease_database, processes=8, rounds=200, between=between)
    winners = [[answer.token for answer in told if answer.verdict == "granted"] for told in found]
    assert [[number] for number in range(1, 201)] == winners
    losers = Counter(a.verdict for told in found for a in told if a.verdict != "granted")
    assert {"held": 7 * 200} == losers
    store.database.dispose()


def test_two_reapers_share_the_work(
    store: LeaseStore, other: LeaseStore, rows: Rows, lease_database: str
) -> None:
    """Each expired row is reclaimed once, and each due row sent once."""
    count = 120
    for number in range(count):
        held(store, f"task-{number}")
    rows.execute("UPDATE celery_lease SET lease_until = claimed_at")
    start = threading.Barrier(2)

    def reap(reaper: LeaseStore) -> tuple[list[str], list[str]]:
        start.wait()
        reclaimed: list[str] = []
        while batch := reaper.reclaim(limit=7):
            reclaimed += [row.task_id for row in batch]
        start.wait()
        due: list[str] = []
        while taken := reaper.take_due(limit=7, retry_in=30):
            due += [item.row.task_id for item in taken]
        return reclaimed, due

    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(reap, [store, other]))
    everything = {f"task-{number}": 1 for number in range(count)}
    assert everything == Counter(task_id for reclaimed, _ in answers for task_id in reclaimed)
    assert everything == Counter(task_id for _, due in answers for task_id in due)
    assert count == len(rows.query("SELECT 1 FROM celery_lease_history WHERE event = 'reclaimed'"))


def test_a_reaper_passes_over_who_is_finishing(
    postgresql_database: str,
) -> None:
    """A row locked by a transaction that finishes it is neither waited for nor changed."""
    store, rows = open_store(postgresql_database), Rows(postgresql_database)
    held(store)
    rows.expire("task")
    with _open_transaction(postgresql_database) as connection:
        _finish(connection)
        assert [] == store.reclaim(limit=10, timeout=5)
        connection.commit()
    before = rows.all()
    assert [] == store.reclaim(limit=10)
    assert ("succeeded", before) == (before[0]["state"], rows.all())
    store.database.dispose()
    rows.close()


def test_a_finished_row_never_changes_under_a_reaper(
    store: LeaseStore, rows: Rows, lease_database: str
) -> None:
    """Whenever the finishing transaction ends: the reaper leaves the row as it was made."""
    held(store)
    rows.expire("task")
    answers: list[object] = []
    reaper = threading.Thread(target=lambda: answers.extend(store.reclaim(limit=10)))
    with _open_transaction(lease_database) as connection:
        _finish(connection)
        reaper.start()
        if lease_database.startswith("postgresql"):
            reaper.join(10)
        connection.commit()
    reaper.join(10)
    assert ([], "succeeded") == (answers, (rows.get("task") or {})["state"])


def test_locked_rows_hide_no_others(postgresql_database: str) -> None:
    """Rows that a reaper must leave alone do not use up its batch."""
    store, rows = open_store(postgresql_database), Rows(postgresql_database)
    for number in range(6):
        held(store, f"task-{number}")
        move(rows, "lease_until", number - 20, task_id=f"task-{number}")
    with _open_transaction(postgresql_database) as connection:
        connection.execute(
            text("SELECT 1 FROM celery_lease WHERE task_id < 'task-3' FOR UPDATE")
        ).all()
        assert ["task-3", "task-4"] == [row.task_id for row in store.reclaim(limit=2)]
        assert ["task-5"] == [row.task_id for row in store.reclaim(limit=2)]
    assert 3 == len(store.reclaim(limit=10))
    store.database.dispose()
    rows.close()


def test_a_claim_waits_for_who_is_finishing(
    store: LeaseStore, rows: Rows, lease_database: str
) -> None:
    """A copy that comes while the task is being finished learns that it is finished."""
    held(store)
    rows.expire("task")
    with ThreadPoolExecutor() as threads, _open_transaction(lease_database) as connection:
        _finish(connection)
        claim = threads.submit(store.claim, request(owner="owner-2"), timeout=20)
        _until_blocked(rows)
        connection.commit()
        answer = claim.result(20)
    assert (Verdict.SUCCEEDED, True) == (answer.verdict, answer.replay)


def test_a_commit_waits_for_a_reader_with_a_lock(postgresql_database: str) -> None:
    """A lock that changes nothing, such as a fence's, delays a commit and does not refuse it."""
    store, rows = open_store(postgresql_database), Rows(postgresql_database)
    ref = held(store)
    with ThreadPoolExecutor() as threads, _open_transaction(postgresql_database) as connection:
        connection.execute(text("SELECT 1 FROM celery_lease FOR UPDATE")).all()
        commit = threads.submit(store.commit, ref, RESULT, announce_in=30, timeout=20)
        _until_blocked(rows)
        connection.commit()
        assert commit.result(20)
    store.database.dispose()
    rows.close()


@pytest.mark.parametrize("dispatch", [0, 1], ids=["new copy", "later dispatch"])
def test_a_row_born_meanwhile_is_not_taken(postgresql_database: str, dispatch: int) -> None:
    """A claim that saw no row, and finds one when it inserts its own, takes nothing."""
    store, rows = open_store(postgresql_database), Rows(postgresql_database)
    held(store, "model", dispatch=dispatch)
    columns = "namespace, task_name, state, owner_id, lease_until, fencing_token, attempt, dispatch"
    columns += ", max_attempts, lease_duration, created_at"
    with ThreadPoolExecutor() as threads, _open_transaction(postgresql_database) as connection:
        connection.execute(
            text(
                f"INSERT INTO celery_lease (task_id, {columns})"
                f" SELECT 'task', {columns} FROM celery_lease WHERE task_id = 'model'"
            )
        )
        claim = threads.submit(store.claim, request(owner="owner-2", dispatch=dispatch), timeout=20)
        _until_blocked(rows)
        connection.commit()
        assert Verdict.HELD is claim.result(20).verdict
    assert "owner-1" == (rows.get("task") or {})["owner_id"]
    store.database.dispose()
    rows.close()


@pytest.mark.parametrize("dispatch", [0, 1], ids=["new copy", "later dispatch"])
def test_concurrent_first_claims_of_many_tasks(
    store: LeaseStore, other: LeaseStore, rows: Rows, dispatch: int
) -> None:
    """Two processes that insert the same rows at the same time: each row has one owner."""
    start = threading.Barrier(2)

    def claim(number: int) -> list[bool]:
        start.wait()
        mine = (store, other)[number]
        return [
            mine.claim(request(f"task-{count}", owner=f"owner-{number}", dispatch=dispatch)).ref
            is not None
            for count in range(100)
        ]

    with ThreadPoolExecutor() as threads:
        first, second = threads.map(claim, [0, 1])
    assert [True] * 100 == [one != two for one, two in zip(first, second, strict=True)]
    assert [1] * 100 == [row["fencing_token"] for row in rows.all()]


def test_renewals_and_reapers_do_not_deadlock(
    store: LeaseStore, other: LeaseStore, rows: Rows
) -> None:
    """Beats in opposite orders beside a reaper: all end, and no lease is lost."""
    refs = [held(store, f"task-{number}") for number in range(100)]
    renewals = [Renewal(ref, 30) for ref in refs]

    def beat(number: int) -> list[int]:
        mine = (store, other)[number]
        return [len(mine.renew(renewals[:: 1 if number else -1])) for _ in range(10)]

    with ThreadPoolExecutor() as threads:
        beats = [threads.submit(beat, number) for number in (0, 1)]
        for _ in range(10):
            assert [] == store.reclaim(limit=100)
        assert [[100] * 10] * 2 == [answer.result(60) for answer in beats]
    assert {State.RUNNING.value} == {row["state"] for row in rows.all()}


def _until_blocked(rows: Rows) -> None:
    """Wait until a statement waits for a lock; SQLite does not tell, so there it may."""
    if rows.engine.dialect.name == "postgresql":
        until(
            lambda: rows.query("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"),
            what="a statement that waits for a lock",
        )
