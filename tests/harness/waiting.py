"""Waiting on a condition, never for a span of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    condition: Callable[[], T],
    *,
    timeout: float = 10.0,
    interval: float = 0.02,
    what: str | Callable[[], str] = "the condition",
) -> T:
    """Ask until the answer is true, and return it.

    Args:
        condition: Asked again and again; errors pass through.
        timeout: Seconds until the test fails.
        interval: Seconds between two questions.
        what: Named in the failure; a callable may show the state that was met instead.

    Raises:
        AssertionError: The answer stayed false.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            told = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {timeout:g} s: {told}")
        time.sleep(interval)
