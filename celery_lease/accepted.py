"""Spares a result backend a question that the fence has answered.

Celery's key-value backends (Redis, Memcached, …) read a result before they
write one, so that a lost worker does not overwrite a success. That is a read
followed by a write, so it cannot keep a stale result out for certain, and it
costs a round trip. Of an outcome that the row has accepted, the row has said
already that it is the only one.

Knows one method of Celery's backends. It is not public: where a release no
longer has it, the question is asked as before.
"""

from __future__ import annotations

from typing import Any

from celery import states
from celery.backends.base import BaseKeyValueStoreBackend

__all__ = ("ask_as_usual", "store_unasked")

_QUESTION = "_get_task_meta_for"


class _Unasked:
    """Stands in for the question once."""

    def __init__(self, backend: Any, task_id: str) -> None:
        self._backend = backend
        self._task_id = task_id

    def __call__(self, task_id: str) -> Any:
        ask_as_usual(self._backend)
        if task_id == self._task_id:
            return {"status": states.PENDING, "result": None}
        # Another thread shares the backend.
        return getattr(self._backend, _QUESTION)(task_id)


def store_unasked(backend: Any, task_id: str) -> None:
    """Let the backend store the next result of a task without reading the last one.

    Args:
        backend: The one that Celery is about to store in.
        task_id: A task whose outcome the row has accepted.
    """
    if isinstance(backend, BaseKeyValueStoreBackend) and hasattr(backend, _QUESTION):
        backend.__dict__[_QUESTION] = _Unasked(backend, task_id)


def ask_as_usual(backend: Any) -> None:
    """Take that back, if the backend has not stored yet."""
    if isinstance(backend, BaseKeyValueStoreBackend):
        backend.__dict__.pop(_QUESTION, None)
