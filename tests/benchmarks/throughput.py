"""Runs real workers on a queue that is full before they start, and compares them round by round.

Rate and processor time are taken between the 5 % mark and the last job, so that a start counts for
nothing. Rounds are interleaved (a b c, c b a, …) within one test, and only ratios of the same round
are judged, so that a machine that becomes slower makes all of them slower. A round in which
processes of others took much of the processors is measured again, as far as the limit allows, and
no round begins while others are at work, as far as patience allows.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import redis
from harness.workers import WorkerProcess

from benchmarks.processor_time import Spent, postmaster, spent
from benchmarks.settings import BenchmarkSettings, make_app, noop

KINDS = ("plain", "leased", "handwritten")
WORKER_ARGUMENTS = ("-l", "WARNING", "--without-heartbeat")
_START_TIMEOUT = 60.0
_TIMEOUT = 300.0
#: Processors taken by others, on average over a run, from which on a round counts as disturbed.
_QUIET = 0.1
#: Standard error of a median ratio that is good enough.
_PRECISION = 0.015


@dataclass(frozen=True)
class Run:
    """One worker's work on one full queue."""

    jobs: int
    seconds: float
    spent: Spent

    @property
    def rate(self) -> float:
        """Jobs per second."""
        return self.jobs / self.seconds

    @property
    def disturbance(self) -> float:
        """Processors that others used, on average."""
        return self.spent.others / self.seconds

    def milliseconds(self, of: str) -> float | None:
        """Return processor time per job, of the worker, of postgresql or of redis."""
        seconds: float | None = getattr(self.spent, of)
        return None if seconds is None else seconds / self.jobs * 1000


Round = dict[str, Run]


class Bench:
    """A queue, its database, and workers of the three kinds.

    Args:
        settings: Of the apps.
        directory: For logs.
        jobs: Messages in a full queue.
        concurrency: Pool children.
    """

    def __init__(
        self, settings: BenchmarkSettings, directory: Path, *, jobs: int, concurrency: int = 2
    ) -> None:
        self.settings = settings
        self.directory = directory
        self.concurrency = concurrency
        self._redis: Any = redis.Redis.from_url(settings.redis_url)
        address = settings.database_url.replace("postgresql+psycopg:", "postgresql:")
        self._database = psycopg.connect(address, autocommit=True)
        self._postmaster = postmaster(self._database.info.backend_pid)
        self.messages = self._written(jobs)

    def close(self) -> None:
        """Disconnect, and leave Redis empty."""
        self._redis.flushdb()
        self._redis.close()
        self._database.close()

    def run(self, kind: str) -> Run:
        """Let a new worker empty a full queue."""
        self._clear()
        self._redis.rpush(self.settings.queue, *self.messages)
        worker = WorkerProcess(
            kind,
            self.directory,
            env=self.settings.environment(),
            app=f"benchmarks.{kind}_app",
            argv=WORKER_ARGUMENTS,
            concurrency=self.concurrency,
        )
        try:
            self._wait(worker, len(self.messages) * 95 // 100, _START_TIMEOUT)
            before, begun, jobs = self._spent(worker), time.perf_counter(), self._left()
            self._wait(worker, 0, _TIMEOUT)
            seconds = time.perf_counter() - begun
            done = Run(jobs, seconds, self._spent(worker) - before)
        finally:
            worker.kill_group()
        self._check(kind)
        return done

    def _written(self, jobs: int) -> list[bytes]:
        """Return messages as Celery writes them; all runs get the very same ones."""
        self._redis.flushdb()
        app, _ = make_app(self.settings)
        task = app.task(name="noop")(noop)
        for _ in range(jobs):
            task.delay()
        app.close()
        return list(reversed(self._redis.lrange(self.settings.queue, 0, -1)))

    def _clear(self) -> None:
        self._redis.flushdb()
        self._database.execute(
            "TRUNCATE handwritten_lease, celery_lease, celery_lease_history, celery_lease_reaper"
        )
        # Else the writes of one run are flushed during the next.
        self._database.execute("CHECKPOINT")

    def _check(self, kind: str) -> None:
        """Make sure that what was measured is what was meant."""
        results = len(self._redis.keys("celery-task-meta-*"))
        assert len(self.messages) == results
        counted = {"leased": "celery_lease", "handwritten": "handwritten_lease"}
        for table in counted.values():
            query = f"SELECT count(*) FROM {table} WHERE state = 'succeeded'"
            row = self._database.execute(query).fetchone()
            assert row is not None
            assert (len(self.messages) if counted.get(kind) == table else 0) == row[0]

    def _left(self) -> int:
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.llen(self.settings.queue).hlen("unacked")
            return int(sum(pipe.execute()))

    def _spent(self, worker: WorkerProcess) -> Spent:
        return spent(worker.pid, self._postmaster, self._redis)

    def _wait(self, worker: WorkerProcess, goal: int, timeout: float) -> None:
        """Wait until so few jobs are left; look seldom at first, and often near the goal."""
        begun = time.perf_counter()
        first = left = self._left()
        while left > goal:
            passed = time.perf_counter() - begun
            if passed > timeout or not worker.running:
                raise AssertionError(f"{left} jobs are left after {passed:.0f} s\n{worker.log()}")
            speed = (first - left) / passed if passed else 0.0
            expected = (left - goal) / speed if speed else 0.08
            time.sleep(min(max(expected / 4, 0.002), 0.1))
            left = self._left()


def measure(
    run: Callable[[str], Run],
    *,
    least: int,
    most: int,
    calm: Callable[[], object],
    tell: Callable[[int, Round], object],
) -> list[Round]:
    """Measure rounds until there are enough quiet ones that agree, and return those to judge.

    Args:
        run: Measures one kind.
        least: Rounds to judge, at least.
        most: Rounds to measure, at most.
        calm: Called before each round, to wait for a better moment.
        tell: Told of each round.
    """
    done: list[Round] = []
    for number in itertools.count():
        calm()
        order = KINDS if number % 2 == 0 else KINDS[::-1]
        measured = {kind: run(kind) for kind in order}
        done.append(measured)
        tell(number, measured)
        quiet = [each for each in done if disturbance(each) <= _QUIET]
        if len(quiet) >= least and all(
            _error(ratios(quiet, *pair)) <= _PRECISION
            for pair in (("leased", "plain"), ("leased", "handwritten"))
        ):
            return quiet
        if len(done) >= most:
            return quiet if len(quiet) >= least else sorted(done, key=disturbance)[:least]
    raise AssertionError("unreachable")


def ratios(rounds: Sequence[Round], kind: str, to: str) -> list[float]:
    """Return the ratio of two kinds' rates, round by round."""
    return [each[kind].rate / each[to].rate for each in rounds]


def disturbance(measured: Round) -> float:
    """Return how many processors others used in the worst run of a round."""
    return max(run.disturbance for run in measured.values())


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the median."""
    return 1.25 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 1.0
