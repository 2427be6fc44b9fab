"""Processor time: of a tree of processes, of Redis, and of everybody who is not part of it."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Any

import psutil


def tree_seconds(pid: int) -> float:
    """Return user and system time of a process and its descendants, reaped ones included."""
    process = psutil.Process(pid)
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def busy_seconds() -> float:
    """Return the time that the machine's processors were not idle, whoever used them."""
    times = psutil.cpu_times()
    fields = ("user", "nice", "system", "irq", "softirq", "steal")
    return float(sum(getattr(times, name, 0.0) for name in fields))


class Calm:
    """Waits until the machine has nothing else to do, as long as its patience lasts.

    Args:
        patience: Seconds to wait, all calls together.
        busy: Processors in use, on average over a second, from which on it is not calm.
    """

    def __init__(self, patience: float, busy: float = 0.15) -> None:
        self.patience = patience
        self.busy = busy

    def __call__(self) -> None:
        """Wait."""
        while self.patience > 0:
            before = busy_seconds()
            time.sleep(1.0)
            if busy_seconds() - before < self.busy:
                return
            self.patience -= 1.0


def postmaster(backend_pid: int) -> int | None:
    """Return the process id of the server that a backend belongs to, if it runs on this machine."""
    try:
        parent = psutil.Process(backend_pid).parent()
    except psutil.Error:
        return None
    return parent.pid if parent is not None and "postgres" in parent.name() else None


@dataclass(frozen=True)
class Spent:
    """Processor seconds so far, or between two moments.

    Attributes:
        worker: The worker's process tree.
        postgresql: The whole server with all its backends; None where it is not on this machine.
        redis: The server, by its own account.
        others: What all others have used, this process excepted.
    """

    worker: float
    postgresql: float | None
    redis: float
    others: float

    def __sub__(self, earlier: Spent) -> Spent:
        known = self.postgresql is not None and earlier.postgresql is not None
        return Spent(
            self.worker - earlier.worker,
            (self.postgresql or 0.0) - (earlier.postgresql or 0.0) if known else None,
            self.redis - earlier.redis,
            self.others - earlier.others,
        )


def spent(worker: int, postgresql: int | None, redis: Any) -> Spent:
    """Read all of it now.

    Args:
        worker: Process id of the worker.
        postgresql: Process id of the postmaster.
        redis: A client.
    """
    busy = busy_seconds()
    used = redis.info("cpu")
    of_redis = used["used_cpu_user"] + used["used_cpu_sys"]
    of_worker = tree_seconds(worker)
    of_postgresql = tree_seconds(postgresql) if postgresql is not None else None
    own = sum(os.times()[:2])
    others = busy - of_worker - (of_postgresql or 0.0) - of_redis - own
    return Spent(of_worker, of_postgresql, of_redis, others)
