"""Why a claim was refused, for every kind of row."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_lease.lease import ClaimRequest, LeaseRow, State, Verdict
from celery_lease.verdicts import AGAIN, refusal

NOW = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)
SOON, PAST = NOW + timedelta(seconds=1), NOW - timedelta(seconds=1)
REQUEST = ClaimRequest("task", "app.export", "owner-2", 30, 3, dispatch=2, retries=2)


def _row(state: State, **values: Any) -> LeaseRow:
    given = {
        **dict.fromkeys(LeaseRow.__dataclass_fields__),
        "task_id": "task",
        "state": state,
        "crashes": 0,
        "max_attempts": 3,
        "dispatch": 2,
        "retries": 2,
        "read_at": NOW,
    }
    return LeaseRow(**{**given, **values})


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (None, AGAIN),
        (_row(State.QUEUED), AGAIN),
        (_row(State.QUEUED, dispatch=1, retries=1), AGAIN),
        (_row(State.QUEUED, dispatch=3), Verdict.SUPERSEDED),
        (_row(State.QUEUED, retries=3), Verdict.SUPERSEDED),
        (_row(State.QUEUED, cancel_requested_at=PAST), Verdict.CANCELLED),
        (_row(State.RUNNING, lease_until=SOON), Verdict.HELD),
        (_row(State.RUNNING, lease_until=SOON, crashes=3), Verdict.HELD),
        (_row(State.RUNNING, lease_until=SOON, cancel_requested_at=PAST), Verdict.HELD),
        (_row(State.RUNNING, lease_until=SOON, dispatch=3), Verdict.SUPERSEDED),
        (_row(State.RUNNING, lease_until=PAST), AGAIN),
        (_row(State.RUNNING, lease_until=PAST, retries=3), Verdict.SUPERSEDED),
        (_row(State.RUNNING, lease_until=PAST, crashes=1), AGAIN),
        (_row(State.RUNNING, lease_until=PAST, crashes=2), Verdict.EXHAUSTED),
        (_row(State.RUNNING, lease_until=PAST, cancel_requested_at=PAST), Verdict.CANCELLED),
        (_row(State.SUCCEEDED), Verdict.SUCCEEDED),
        (_row(State.SUCCEEDED, dispatch=9, retries=9), Verdict.SUCCEEDED),
        (_row(State.SUCCEEDED, announce_until=SOON), Verdict.HELD),
        (_row(State.SUCCEEDED, announce_until=PAST), Verdict.SUCCEEDED),
        (_row(State.SUCCEEDED, announce_until=SOON, announced_at=PAST), Verdict.SUCCEEDED),
        (_row(State.FAILED, announced_at=PAST), Verdict.FAILED),
        (_row(State.FAILED, announce_until=SOON), Verdict.HELD),
        (_row(State.CANCELLED, announced_at=PAST), Verdict.CANCELLED),
    ],
)
def test_each_row_has_its_verdict(row: LeaseRow | None, verdict: Verdict) -> None:
    """The row as read decides, by the clock that was read with it."""
    assert verdict is refusal(row, REQUEST)


def test_a_lease_that_ends_now_is_over() -> None:
    """The last instant belongs to nobody: the statements compare in the same way."""
    row = _row(State.RUNNING, lease_until=NOW)
    assert row.expired
    assert not replace(row, lease_until=SOON).expired
