"""Lines of the log: text and record say the same, and no key is one of a record's own."""

from __future__ import annotations

import logging
import re
from datetime import datetime, timezone
from pathlib import Path

import pytest

import celery_lease
from celery_lease.logbook import line


def test_a_line_and_its_record_say_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """Facts that are None are left out; instants are UTC."""
    at = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone.utc)
    with caplog.at_level(logging.INFO, logger="celery_lease"):
        line(logging.INFO, "job_claimed", job="a", token=1, lease_until=at, owner=None)
    (record,) = caplog.records
    text = "job_claimed job=a token=1 lease_until=2026-01-02T03:04:05.000006Z"
    assert text == record.getMessage()
    assert ("job_claimed", "a", 1) == (record.lease_event, record.job, record.token)
    assert not hasattr(record, "owner")


def test_no_key_is_a_records_own() -> None:
    """`logging` refuses such a key, in the moment in which something has to be told."""
    own = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}
    sources = "\n".join(
        path.read_text() for path in Path(celery_lease.__file__).parent.rglob("*.py")
    )
    calls = re.findall(r"\bline\(\s*(?:logging\.|level)[^()]*(?:\([^()]*\)[^()]*)*\)", sources)
    keys = {key for call in calls for key in re.findall(r"\b(\w+)=", call)} - {"exc_info"}
    assert len(calls) > 20
    assert {"job", "error"} <= keys
    assert set() == keys & own
