"""An accepted outcome is stored without asking for the last one; everything else asks as before."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery, states
from celery.backends.database import DatabaseBackend

from celery_lease.accepted import ask_as_usual, store_unasked


class _Counted:
    """A memory backend that counts its questions."""

    def __init__(self) -> None:
        self.app = Celery("accepted", backend="cache+memory://", set_as_current=False)
        self.backend: Any = self.app.backend
        self.questions = 0
        get = self.backend.get

        def counted(key: Any) -> Any:
            self.questions += 1
            return get(key)

        self.backend.get = counted


@pytest.fixture
def counted() -> _Counted:
    return _Counted()


def test_one_store_asks_nothing(counted: _Counted) -> None:
    """And the next asks again."""
    store_unasked(counted.backend, "task")
    counted.backend.store_result("task", 1, states.SUCCESS)
    assert 0 == counted.questions
    counted.backend.store_result("task", 2, states.SUCCESS)
    assert 1 == counted.questions
    assert 1 == counted.app.AsyncResult("task").get()


def test_the_outcome_replaces_what_a_stale_worker_has_stored(counted: _Counted) -> None:
    """The row has said which one it is; Celery alone would keep the first success."""
    counted.backend.store_result("task", "stale", states.SUCCESS)
    store_unasked(counted.backend, "task")
    counted.backend.store_result("task", "accepted", states.SUCCESS)
    assert "accepted" == counted.app.AsyncResult("task").get()


def test_another_task_is_asked_for(counted: _Counted) -> None:
    """Threads may share a backend: what is not this task's own store is no concern of it."""
    counted.backend.store_result("other", 1, states.SUCCESS)
    store_unasked(counted.backend, "task")
    assert states.SUCCESS == counted.app.AsyncResult("other").state
    assert 2 == counted.questions


def test_taken_back_it_asks(counted: _Counted) -> None:
    """Where nothing was stored after all, nobody is told that a task is pending."""
    counted.backend.store_result("task", 1, states.SUCCESS)
    store_unasked(counted.backend, "task")
    ask_as_usual(counted.backend)
    ask_as_usual(counted.backend)
    assert states.SUCCESS == counted.app.AsyncResult("task").state


def test_other_kinds_of_backends_are_left_alone() -> None:
    """A database backend asks nothing to begin with."""
    backend: Any = DatabaseBackend("sqlite://", app=Celery(set_as_current=False))
    store_unasked(backend, "task")
    assert "_get_task_meta_for" not in backend.__dict__
    ask_as_usual(backend)
