"""Instants as SQLite keeps them, and the tables' own description."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.dialects import postgresql, sqlite

from celery_lease.schema import Instant, instant_from_text, instant_to_text, tables

_INSTANTS = st.datetimes(
    min_value=datetime(1970, 1, 2),  # noqa: DTZ001 - the zone is drawn below
    max_value=datetime(9999, 12, 30),  # noqa: DTZ001 - as above
    timezones=st.sampled_from([timezone(timedelta(hours=hours)) for hours in (-11, 0, 5, 14)]),
)


@given(_INSTANTS)
def test_an_instant_comes_back(instant: datetime) -> None:
    """Written as text and read again it is the same instant, in UTC."""
    found = instant_from_text(instant_to_text(instant))
    assert instant == found
    assert timezone.utc is found.tzinfo


@given(_INSTANTS, _INSTANTS)
def test_text_sorts_as_time_does(first: datetime, second: datetime) -> None:
    """The statements on SQLite compare text."""
    assert (first < second) == (instant_to_text(first) < instant_to_text(second))


def test_the_type_speaks_each_databases_language() -> None:
    """Text for SQLite, an aware timestamp elsewhere, UTC in Python."""
    kind, at = Instant(), datetime(2026, 11, 30, 13, tzinfo=timezone(timedelta(hours=1)))
    assert "2026-11-30 12:00:00.000000" == kind.process_bind_param(at, sqlite.dialect())
    assert at == kind.process_bind_param(at, postgresql.dialect())
    for value in (at, "2026-11-30 12:00:00.000000"):
        assert datetime(2026, 11, 30, 12, tzinfo=timezone.utc) == kind.process_result_value(
            value, sqlite.dialect()
        )
    assert kind.process_result_value(None, sqlite.dialect()) is None


def test_tables_are_made_once_per_schema() -> None:
    """Whoever asks for the same schema gets the same tables."""
    assert tables("leases") is tables("leases")
    assert "leases.celery_lease" == str(tables("leases").lease)
    assert "celery_lease" == str(tables().lease)
