"""SIGSTOP past the lease, another worker finishes, SIGCONT: what the stale run brings is refused.

With `lease_interrupt=False` the stale body reaches its commit, so it is the database's fence that
refuses; with True the body is broken off before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import celery
import pytest
import sqlalchemy
from harness.journal import Journal
from harness.length import by_length
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew, WorkerProcess

LEASE = 2.0
CONF = {
    "lease_duration": LEASE,
    "lease_heartbeat_interval": 0.5,
    "lease_margin": 0.5,
    "lease_reaper_interval": 0.4,
    "broker_transport_options": {"visibility_timeout": 3600},
}
#: Tasks that are stopped at once; each is one round.
TASKS = 2


def is_locked(rows: Rows) -> bool:
    """Tell whether somebody holds SQLite's one lock for writers."""
    if rows.engine.dialect.name != "sqlite":
        return False
    try:
        with rows.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA busy_timeout = 50")
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            connection.exec_driver_sql("ROLLBACK")
    except sqlalchemy.exc.OperationalError:
        return True
    return False


def stop(worker: WorkerProcess, rows: Rows, pids: list[int] | None = None) -> None:
    """Stop children, or the whole worker, but not while they keep SQLite locked for everybody."""
    while True:
        if pids is None:
            worker.sigstop_group()
        for pid in pids or ():
            worker.sigstop_child(pid)
        if not is_locked(rows):
            return
        for pid in pids or (None,):
            worker.cont(pid)
        time.sleep(0.05)


def everything(queue: RedisQueue) -> str:
    """Return all that Redis holds: messages, results, chords."""
    client: Any = queue.client
    read = {
        "string": client.get,
        "list": lambda key: client.lrange(key, 0, -1),
        "hash": client.hgetall,
        "set": client.smembers,
        "zset": lambda key: client.zrange(key, 0, -1),
    }
    return "\n".join(f"{key} {read[client.type(key)](key)}" for key in client.scan_iter())


class Rounds:
    """Two workers, and tasks with a chain link and a callback each, begun by the first.

    Args:
        crew, journal, rows, queue: The fixtures.
        body: Seconds that a body takes, in which it does not notice that it was stopped.
    """

    def __init__(
        self, crew: Crew, journal: Journal, rows: Rows, queue: RedisQueue, *, body: float = 1.5
    ) -> None:
        self.crew, self.journal, self.rows, self.queue = crew, journal, rows, queue
        self.body = body
        self.stale: WorkerProcess
        self.sent: dict[str, Any] = {}

    def begin(self, **conf: Any) -> None:
        """Send the tasks to a worker, and wait until it has begun them."""
        sleeper, collector = self.crew.task("sleeper"), self.crew.task("collector")
        self.stale = self.crew.start("stale", concurrency=TASKS, conf={**CONF, **conf})
        for number in range(TASKS):
            label = f"{number} of {time.time()}"
            first = sleeper.s(self.body, label).set(link=collector.s(label=f"link {label}"))
            chain = celery.chain(first, collector.s(label=f"next {label}"))
            result = chain.delay()
            self.sent[result.parent.id] = (label, result)
        for task_id in self.sent:
            self.journal.wait("start", task_id=task_id)
        self.conf = {**CONF, **conf}

    def start_heir(self) -> None:
        """Start another worker."""
        self.crew.start("heir", concurrency=TASKS, conf=self.conf)

    def wait_taken_over(self) -> None:
        """Wait until the heir has finished all, and everybody was told."""
        for task_id, (label, result) in self.sent.items():
            assert 2 == result.get(timeout=LEASE + self.body + 15)["token"]
            assert 2 == self.rows.wait(task_id, state="succeeded")["fencing_token"]
            self.journal.wait("collected", label=f"link {label}")

    def wait_refused(self) -> None:
        """Wait until the stale worker has ended its runs, and let what it might do happen."""
        until(
            lambda: all(self._is_ended(task_id) for task_id in self.sent),
            timeout=15,
            what=self.stale.log,
        )
        # Were anything under way, it would be in the queue before this task's message.
        assert "after" == self.crew.task("plain").delay("after").get(timeout=10)

    def _is_ended(self, task_id: str) -> bool:
        # Celery's own line about a run that ends as an `Ignore`.
        return f"Task sleeper[{task_id}] ignored" in self.stale.log()

    def check(self) -> None:
        """The stale value is nowhere, and the history has both tokens."""
        for task_id, (label, result) in self.sent.items():
            value = result.get(timeout=5)
            first, second = self.journal.entries("start", task_id=task_id)
            assert (1, 2) == (first.token, second.token)
            assert (2, second.pid) == (value["token"], value["pid"])
            seen = [e.facts for e in self.journal.entries("collected") if label in str(e.facts)]
            assert {f"link {label}", f"next {label}"} == {facts["label"] for facts in seen}
            assert [value, value] == [facts["seen"] for facts in seen]
            assert {1, 2} == {entry["fencing_token"] for entry in self.rows.history(task_id)}
            row = self.rows.get(task_id)
            assert row is not None
            assert b'"token": 1' not in bytes(row["result"])
        assert '"token": 1' not in everything(self.queue).replace("\\", "")
        self.queue.wait_empty()


def stop_past_lease(rounds: Rounds, *, group: bool, until_taken_over: Callable[[], None]) -> None:
    """Stop who runs the tasks, for twice the lease and until a condition, then continue it."""
    starts = [rounds.journal.entries("start", task_id=task_id)[0] for task_id in rounds.sent]
    children = None if group else [start.pid for start in starts]
    stop(rounds.stale, rounds.rows, children)
    stopped = time.monotonic()
    rounds.start_heir()
    until_taken_over()
    until(lambda: time.monotonic() > stopped + 2 * LEASE, timeout=3 * LEASE)
    for pid in children or (None,):
        rounds.stale.cont(pid)


@pytest.mark.timeout(by_length(short=120, long=1200))
@pytest.mark.parametrize("interrupt", [False, True], ids=["fence", "interrupt"])
def test_a_stopped_child_s_value_reaches_nobody(
    crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue, *, interrupt: bool
) -> None:
    """Children stopped for twice the lease, their tasks done elsewhere, then continued."""
    for _ in range(by_length(short=1, long=20 // TASKS)):
        rounds = Rounds(crew, journal, rows, redis_queue)
        rounds.begin(lease_interrupt=interrupt)
        stop_past_lease(rounds, group=False, until_taken_over=rounds.wait_taken_over)
        rounds.wait_refused()
        rounds.check()
        if not interrupt:
            for task_id in rounds.sent:
                assert 1 == len(rows.history(task_id, "result_rejected"))
        crew.close_workers()


@pytest.mark.timeout(by_length(short=120, long=1200))
def test_a_stale_value_is_refused_while_its_heir_still_works(
    crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue
) -> None:
    """The stale run commits while the row is running, under a live lease that is another's."""
    for _ in range(by_length(short=1, long=20 // TASKS)):
        rounds = Rounds(crew, journal, rows, redis_queue, body=4.5)
        rounds.begin(lease_interrupt=False)

        def wait_begun(rounds: Rounds = rounds) -> None:
            for task_id in rounds.sent:
                journal.wait("start", task_id=task_id, token=2)

        stop_past_lease(rounds, group=False, until_taken_over=wait_begun)
        rounds.wait_refused()
        for task_id in rounds.sent:
            (refusal,) = rows.history(task_id, "result_rejected")
            assert 1 == refusal["fencing_token"]
            assert [] == journal.entries("end", task_id=task_id, token=2)
        rounds.wait_taken_over()
        rounds.check()
        crew.close_workers()


@pytest.mark.timeout(by_length(short=120, long=600))
def test_a_stopped_worker_s_value_reaches_nobody(
    crew: Crew, journal: Journal, rows: Rows, redis_queue: RedisQueue
) -> None:
    """Main process and children stopped, as a suspended host, then continued."""
    for _ in range(by_length(short=1, long=5)):
        rounds = Rounds(crew, journal, rows, redis_queue)
        rounds.begin(lease_interrupt=False)
        stop_past_lease(rounds, group=True, until_taken_over=rounds.wait_taken_over)
        rounds.wait_refused()
        rounds.check()
        crew.close_workers()
