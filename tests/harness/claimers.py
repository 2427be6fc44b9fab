"""Processes that all claim one task at once, round after round."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.leases import open_store, request

_TIMEOUT = 60


@dataclass(frozen=True)
class Answer:
    """What one process was told in one round."""

    round: int
    owner: str
    verdict: str
    token: int


def compete(
    url: str, *, processes: int, rounds: int, between: Callable[[int, list[Answer]], None]
) -> list[list[Answer]]:
    """Let processes claim the task "task" at the same moment, in each round.

    Args:
        url: The database.
        processes: How many.
        rounds: How often.
        between: Called after each round, with its number and answers, while nobody claims.

    Returns:
        The answers of each round.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes + 1)
    answers = context.Queue()
    crew = [
        context.Process(target=_claimer, args=(url, number, rounds, barrier, answers), daemon=True)
        for number in range(processes)
    ]
    for process in crew:
        process.start()
    found = []
    try:
        for number in range(rounds):
            barrier.wait(_TIMEOUT)
            told = [answers.get(timeout=_TIMEOUT) for _ in crew]
            between(number, told)
            found.append(told)
        for process in crew:
            process.join(_TIMEOUT)
    finally:
        for process in crew:
            process.kill()
            process.join()
    return found


def _claimer(url: str, number: int, rounds: int, barrier: threading.Barrier, answers: Any) -> None:
    store = open_store(url)
    for count in range(rounds):
        owner = f"process-{number}-{count}"
        wanted = request(owner=owner, max_attempts=10_000)
        barrier.wait(_TIMEOUT)
        claim = store.claim(wanted, timeout=30)
        token = claim.ref.fencing_token if claim.ref else 0
        answers.put(Answer(count, owner, claim.verdict.value, token))
    store.database.dispose()
