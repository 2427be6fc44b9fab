"""Errors survive the ways that Celery sends them: pickle and the JSON result backends."""

from __future__ import annotations

import pickle

import pytest
from celery import Celery
from celery.exceptions import Ignore

from celery_lease import exceptions
from celery_lease.exceptions import LeaseError, LeaseLost, LeaseNotGranted, SchemaOutdated

ERRORS = [
    exceptions.LeaseLost("t1", 41, "zero_rows"),
    exceptions.LeaseNotGranted("t1", "w@h:1:ab", "2026-07-23T21:14:30Z", "held", False),
    exceptions.OwnershipUnknown("t1", 41),
    exceptions.TaskCancelled("t1", "customer left"),
    exceptions.AttemptsExhausted("t1", 3, 3),
    exceptions.DatabaseUnavailable("connection refused"),
    exceptions.StaleFence("invoice:7", 41, 42),
    exceptions.SchemaOutdated(0, 1),
]


def test_every_error_is_covered_here() -> None:
    """No error of the tree is missing in this file."""
    assert {getattr(exceptions, name) for name in exceptions.__all__} - {LeaseError} == {
        type(error) for error in ERRORS
    }


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickle(error: LeaseError) -> None:
    """The way from a pool child to its worker keeps type, arguments and attributes."""
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(error) is type(again)
    assert vars(error) == vars(again)
    assert str(error) == str(again)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_survives_a_json_result_backend(error: LeaseError) -> None:
    """A JSON backend rebuilds the same error from what it stored."""
    app = Celery("errors", backend="cache+memory://", set_as_current=False)
    app.conf.result_serializer = "json"
    stored = app.backend.decode(app.backend.encode(app.backend.prepare_exception(error)))
    again = app.backend.exception_to_python(stored)
    assert type(error) is type(again)
    assert vars(error) == vars(again)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_can_be_made_without_arguments(error: LeaseError) -> None:
    """An asynchronous exception is made by the interpreter, which passes nothing."""
    assert isinstance(type(error)(), LeaseError)


def test_the_two_refusals_are_ignores() -> None:
    """Celery stores nothing and calls nobody for an execution that has no right to its task."""
    assert issubclass(LeaseLost, Ignore)
    assert issubclass(LeaseNotGranted, Ignore)


@pytest.mark.parametrize(
    ("found", "needed", "said"),
    [(0, 1, "are missing"), (1, 2, "have schema version 1"), (3, 2, "upgrade celery_lease")],
)
def test_outdated_tables_say_what_to_do(found: int, needed: int, said: str) -> None:
    """Missing, old and too new tables each name their remedy."""
    text = str(SchemaOutdated(found, needed))
    assert said in text
    assert ("lease migrate" in text) == (found < needed)
