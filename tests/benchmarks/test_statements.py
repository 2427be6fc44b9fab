"""What the statements cost: a batched renewal, and claim and commit beside hand-written ones."""

from __future__ import annotations

import json
import statistics
import time
import uuid
from collections.abc import Callable, Iterator

import psycopg
import pytest
from harness.length import by_length

from benchmarks.findings import Figure, Findings
from benchmarks.handwritten import HandwrittenLease
from benchmarks.settings import BenchmarkSettings
from celery_lease.database import Database
from celery_lease.lease import ClaimRequest, Encoded, LeaseRef, Message, Renewal
from celery_lease.store import LeaseStore

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

LEASES = 1000
_RENEWAL_AIM = 25.0
#: As in a busy machine: see `test_child`.
_PATIENCE = 3
_BODY = b'[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'
_ENVELOPE = json.dumps(
    {
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "headers": {"lang": "py", "task": "noop", "argsrepr": "()", "kwargsrepr": "{}", "fill": 20},
        "properties": {"correlation_id": "c" * 36, "reply_to": "r" * 36, "delivery_mode": 2},
        "exchange": "",
        "routing_key": "benchmark",
        "canvas": {},
    }
)


@pytest.fixture
def store(bench_settings: BenchmarkSettings) -> Iterator[LeaseStore]:
    """Give a store on the durable database."""
    database = Database(bench_settings.database_url)
    yield LeaseStore(database, "benchmark")
    database.dispose()


@pytest.fixture
def address(bench_settings: BenchmarkSettings) -> str:
    """Give the database's address for psycopg."""
    return bench_settings.database_url.replace("postgresql+psycopg:", "postgresql:")


def test_a_thousand_leases_are_renewed_in_one_quick_statement(
    store: LeaseStore, address: str, findings: Findings
) -> None:
    """One process renews all its leases in a small fraction of a beat."""
    refs = [_claim(store) for _ in range(LEASES)]
    renewals = [Renewal(ref, 90.0) for ref in refs]
    took = []
    with psycopg.connect(address, autocommit=True) as connection:
        begun = _wal(connection)
        for _ in range(by_length(20, 100)):
            started = time.perf_counter()
            assert LEASES == len(store.renew(renewals))
            took.append((time.perf_counter() - started) * 1000)
        written = (_wal(connection) - begun) / LEASES / len(took)
    median = statistics.median(took)
    aim = f"aim < {_RENEWAL_AIM:g} ms"
    name = f"renewal of {LEASES:,} leases"
    findings.add(Figure(name, median, "ms", min(took), max(took), aim))
    findings.add(Figure("write-ahead log per renewed lease", written, "bytes"))
    assert median < _PATIENCE * _RENEWAL_AIM


def test_claim_and_commit_beside_hand_written_ones(
    store: LeaseStore, address: str, findings: Findings
) -> None:
    """Both statements of a task, in one process; the best block of each is the least disturbed."""
    by_hand = HandwrittenLease(address)
    kinds = {"leased": lambda: _pair(store), "handwritten": lambda: _pair_by_hand(by_hand)}
    blocks = {kind: [_block(pair)] for kind, pair in kinds.items()}
    for _ in range(by_length(20, 100)):
        for kind, pair in kinds.items():
            blocks[kind].append(_block(pair))
    by_hand.close()
    compared = [
        leased[0] / handwritten[0]
        for leased, handwritten in zip(blocks["leased"], blocks["handwritten"], strict=True)
    ]
    for kind, measured in blocks.items():
        for which, index in (("time", 0), ("client's CPU", 1)):
            values = [one[index] for one in measured[1:]]
            name = f"claim and commit, {kind}: {which}"
            median = statistics.median(values)
            findings.add(Figure(name, median, "ms", min(values), max(values)))
    median = statistics.median(compared[1:])
    findings.add(
        Figure("time of leased ÷ handwritten", median, "", min(compared[1:]), max(compared[1:]))
    )


def _claim(store: LeaseStore) -> LeaseRef:
    task_id = str(uuid.uuid4())
    claim = store.claim(
        ClaimRequest(
            task_id=task_id,
            task_name="noop",
            owner_id=f"benchmark:{uuid.uuid4()}",
            lease_duration=90.0,
            max_attempts=3,
            message=Message(_BODY, _ENVELOPE),
            delivery_tag=task_id,
        )
    )
    assert claim.ref is not None
    return claim.ref


def _pair(store: LeaseStore) -> None:
    result = Encoded(b"null", "application/json", "utf-8")
    assert store.commit(_claim(store), result, announce_in=90.0)


def _pair_by_hand(leases: HandwrittenLease) -> None:
    task_id = str(uuid.uuid4())
    grant = leases.claim(task_id, _BODY)
    assert grant is not None
    assert leases.commit(task_id, *grant)


def _block(pair: Callable[[], None], number: int = 100) -> tuple[float, float]:
    """Return the milliseconds per pair of a block of them: elapsed, and this process's CPU."""
    started, used = time.perf_counter(), time.process_time()
    for _ in range(number):
        pair()
    elapsed, spent = time.perf_counter() - started, time.process_time() - used
    return elapsed / number * 1000, spent / number * 1000


def _wal(connection: psycopg.Connection) -> int:
    row = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
    assert row is not None
    return int(row[0])
