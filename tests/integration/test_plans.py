"""Plans that were made for few rows are right for many: the server keeps them with the connection.

A worker starts when the table is empty, and the statistics may say so for another minute. What is
prepared then must not read the table, or all running rows, once there are thousands.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.leases import RESULT, held, open_store
from harness.rows import Rows
from harness.waiting import until

from celery_lease.lease import LeaseRef, Renewal
from celery_lease.store import LeaseStore

_ROWS = 1500
#: Entries that statements may read for each row they name: versions of it that are gone, mostly.
_ENOUGH = 12


def _one_by_one(act: Callable[[LeaseStore, LeaseRef], object]) -> Callable[..., None]:
    def all_of_them(store: LeaseStore, refs: list[LeaseRef]) -> None:
        for ref in refs:
            assert act(store, ref)

    return all_of_them


_STATEMENTS: dict[str, Callable[[LeaseStore, list[LeaseRef]], None]] = {
    "commit": _one_by_one(lambda store, ref: store.commit(ref, RESULT, announce_in=30)),
    "fail": _one_by_one(lambda store, ref: store.fail(ref, "{}", announce_in=30)),
    "renew": _one_by_one(lambda store, ref: store.renew([Renewal(ref, 30)])),
    "crash": _one_by_one(lambda store, ref: store.crashed(ref.task_id, ref.owner_id)),
    "release": _one_by_one(
        lambda store, ref: store.release(ref, cause="test", charge=False, dispatch=True)
    ),
    "find": _one_by_one(lambda store, ref: store.find(ref.task_id)),
    "give up": _one_by_one(lambda store, ref: store.give_up(ref.task_id) is None),
    "cancel": _one_by_one(lambda store, ref: store.cancel(ref.task_id)),
}


@pytest.mark.parametrize("known", ["never looked at", "known to be empty"])
@pytest.mark.parametrize("name", _STATEMENTS)
def test_a_statement_about_one_row_reads_that_row(
    name: str, known: str, postgresql_database: str
) -> None:
    """Reads grow with the rows that are named, not with their square."""
    store, rows = open_store(postgresql_database), Rows(postgresql_database)
    if known == "known to be empty":
        with rows.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE celery_lease")
    act = _STATEMENTS[name]
    # Enough for the server to settle on a plan for good.
    act(store, [held(store, f"early-{number}") for number in range(12)])
    refs = [held(store, f"task-{number}") for number in range(_ROWS)]
    before = _read(rows)
    act(store, refs)
    store.database.dispose()
    until(lambda: _read(rows) > before, what="the server's count")
    assert _read(rows) - before < _ENOUGH * _ROWS
    rows.close()


@pytest.mark.parametrize("known", ["never looked at", "known to be empty"])
def test_a_batch_of_a_reaper_reads_what_it_takes(known: str, postgresql_database: str) -> None:
    """Taking a hundred rows looks at the running ones once, and not a hundred times."""
    store, rows = open_store(postgresql_database), Rows(postgresql_database)
    if known == "known to be empty":
        with rows.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE celery_lease")
    for _ in range(12):
        store.reclaim(limit=100)
        store.take_due(limit=100, retry_in=5)
        store.purge(older_than=0, limit=100)
    for number in range(_ROWS):
        held(store, f"task-{number}")
    assert 100 == rows.execute(
        "UPDATE celery_lease SET lease_until = now() - interval '1 minute'"
        " WHERE task_id IN (SELECT task_id FROM celery_lease ORDER BY task_id LIMIT 100)"
    )
    before = _read(rows)
    assert 100 == len(store.reclaim(limit=100))
    assert 100 == len(store.take_due(limit=100, retry_in=5))
    for number in range(100):
        store.cancel(f"task-{number}")
        store.announce([LeaseRef(f"task-{number}", "", 1)])
    assert store.purge(older_than=0, limit=100)
    store.database.dispose()
    until(lambda: _read(rows) > before, what="the server's count")
    assert _read(rows) - before < _ENOUGH * _ROWS
    rows.close()


def _read(rows: Rows) -> int:
    """Return how many rows and index entries have been read of the leases so far."""
    (found,) = rows.query(
        "SELECT (SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE relname = 'celery_lease')"
        " + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname = 'celery_lease')"
        " AS read"
    )
    return int(found["read"])


def test_a_reaper_finds_what_is_due_by_an_index(postgresql_database: str) -> None:
    """Finished rows are not read, however many there are."""
    store, rows = open_store(postgresql_database), Rows(postgresql_database)
    for number in range(_ROWS):
        ref = held(store, f"done-{number}")
        assert store.commit(ref, RESULT, announced=True, announce_in=30)
    # Index entries of rows that have ended meanwhile go when they are first met.
    for _ in range(3):
        _look(store)
    store.database.dispose()
    until(lambda: _read(rows) >= _ROWS, what="the server's count")
    before = _read(rows)
    for _ in range(10):
        _look(store)
    store.database.dispose()
    assert _read(rows) - before < _ROWS
    rows.close()


def _look(store: LeaseStore) -> None:
    assert [] == store.reclaim(limit=100)
    assert [] == store.take_due(limit=100, retry_in=5)
    store.reaper_turn("reaper", interval=1, saw_outage=False)
