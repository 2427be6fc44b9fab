"""Results and errors in the form the lease row keeps them.

A result is encoded with the task's own result serializer *before* the fenced
commit, so that one that cannot be serialized fails the task while nothing has
been accepted yet. Knows Celery's backends; knows nothing of leases.
"""

from __future__ import annotations

import functools
import hashlib
import json
from typing import TYPE_CHECKING, Any

from kombu.serialization import dumps, loads, prepare_accept_content
from kombu.utils.encoding import str_to_bytes

from celery_lease.lease import Encoded

if TYPE_CHECKING:
    from celery_lease.lease import LeaseRow

__all__ = ("decode", "digest", "encode", "encode_error", "rebuild_error")


def encode(task: Any, value: Any) -> Encoded:
    """Serialize a result as the task's result backend would.

    Raises:
        kombu.exceptions.EncodeError: The value cannot be serialized.
    """
    if value is None:
        return _encoded_none(_serializer(task))
    return _encoded(task.backend.prepare_value(value), _serializer(task))


def decode(task: Any, row: LeaseRow) -> Any:
    """Load the result a row keeps.

    Raises:
        kombu.exceptions.ContentDisallowed: The app no longer accepts that serializer.
    """
    if row.result is None:
        return None
    accept = prepare_accept_content([_serializer(task), *(task.app.conf.accept_content or ())])
    return loads(row.result, row.result_type or "", row.result_encoding or "", accept=accept)


def encode_error(task: Any, exc: BaseException) -> str:
    """An exception in Celery's JSON form (type, module, arguments)."""
    return json.dumps(task.backend.prepare_exception(exc, serializer="json"), default=str)


def rebuild_error(task: Any, row: LeaseRow) -> Exception:
    """The exception a row keeps, or a plain one if its class is not importable here."""
    error = json.loads(row.error) if row.error else {"exc_type": "Exception", "exc_message": ()}
    rebuilt = task.backend.exception_to_python(error)
    return rebuilt if isinstance(rebuilt, Exception) else Exception(str(rebuilt))


def digest(value: Encoded | str | None) -> tuple[str, int]:
    """Hash and size of a refused outcome: all that may be logged of it."""
    data = value.data if isinstance(value, Encoded) else str_to_bytes(value or "")
    return hashlib.sha256(data).hexdigest()[:16], len(data)


def _encoded(prepared: Any, serializer: str) -> Encoded:
    content_type, content_encoding, data = dumps(prepared, serializer=serializer)
    return Encoded(str_to_bytes(data), content_type, content_encoding)


@functools.cache
def _encoded_none(serializer: str) -> Encoded:
    return _encoded(None, serializer)


def _serializer(task: Any) -> str:
    return str(getattr(task.backend, "serializer", None) or task.app.conf.result_serializer)
