"""How long the tests are to run: short by default, long where CELERY_LEASE_TEST_LENGTH says so."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")


def by_length(short: T, long: T) -> T:
    """Return a number of rounds, or of seconds, for this run.

    Raises:
        RuntimeError: The variable is neither `short` nor `long`.
    """
    length = os.environ.get("CELERY_LEASE_TEST_LENGTH", "short")
    if length not in ("short", "long"):
        raise RuntimeError(f"CELERY_LEASE_TEST_LENGTH is {length!r}: expected short or long")
    return long if length == "long" else short
