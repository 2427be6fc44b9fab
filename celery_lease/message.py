"""The message of a task as the lease row keeps it, and how it is sent again.

Captures a delivered message so that a reaper can send it again byte for byte,
without the task's code and without ever unpickling it. Beside the raw body the
row keeps an *envelope*: a JSON object with the headers, the properties, the
routing and, as far as they are JSON, the callbacks, errbacks, chain and chord
(what a reaper needs to give the task up without a worker).

Headers that a sender may not choose are overwritten here: ``lease_dispatch``
is the row's number on every message that a reaper sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kombu.serialization import dumps as serialize
from kombu.serialization import registry  # type: ignore[attr-defined]
from kombu.utils.encoding import str_to_bytes
from kombu.utils.json import JSONEncoder
from kombu.utils.json import loads as json_loads

from celery_lease.lease import Message

if TYPE_CHECKING:
    from celery.app.task import Context

    from celery_lease.lease import LeaseRow

__all__ = (
    "DISPATCH_HEADER",
    "Envelope",
    "capture",
    "dispatch_number",
    "envelope_of",
    "successor",
)

#: Header with the number of the dispatch; absent on the first one.
DISPATCH_HEADER = "lease_dispatch"

_CANVAS = ("callbacks", "errbacks", "chain", "chord")
#: Made once: kombu's own `dumps` makes an encoder for every call.
_json_dumps = JSONEncoder().encode
#: Set by the transport or by the worker on delivery, meaningless on the next one.
_DELIVERY_PROPERTIES = frozenset(
    {"delivery_tag", "delivery_info", "body_encoding", "application_headers", "lease"}
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the row knows of a message beside its body."""

    content_type: str
    content_encoding: str
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    exchange: str
    routing_key: str
    #: ``callbacks``, ``errbacks``, ``chain`` and ``chord``, or None if they are not JSON.
    canvas: Mapping[str, Any] | None


def dispatch_number(headers: Mapping[str, Any] | None) -> int:
    """The number of the dispatch a message belongs to; 0 for a sender's own message."""
    value = (headers or {}).get(DISPATCH_HEADER, 0)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def capture(request: Context, delivered: Mapping[str, Any], serializer: str) -> Message | None:
    """Make the row's copy of the message that started this execution.

    Args:
        request: The task's request, with the decoded arguments and canvas.
        delivered: What the main process handed over: ``body``,
            ``content_type``, ``content_encoding`` and ``headers``.
        serializer: Used only if the raw body is not at hand (protocol 1).

    Returns:
        The message, or None if it cannot be kept: recovery is then the
        broker's alone.
    """
    body = delivered.get("body")
    if not isinstance(body, (bytes, bytearray, memoryview, str)):
        return successor(request, delivered, serializer, args=request.args, kwargs=request.kwargs)
    return _message(
        request,
        delivered,
        body,
        str(delivered.get("content_type") or "application/json"),
        str(delivered.get("content_encoding") or "utf-8"),
        {},
    )


def successor(
    request: Context,
    delivered: Mapping[str, Any],
    serializer: str,
    *,
    args: Any,
    kwargs: Any,
    headers: Mapping[str, Any] | None = None,
) -> Message | None:
    """Make the row's copy of a message like this one, with other arguments and headers."""
    name = registry.type_to_name.get(delivered.get("content_type"), serializer)
    payload = (tuple(args or ()), dict(kwargs or {}), _canvas(request))
    content_type, content_encoding, data = serialize(payload, serializer=name)
    return _message(request, delivered, data, content_type, content_encoding, headers or {})


def _canvas(request: Context) -> dict[str, Any]:
    return {key: getattr(request, key, None) for key in _CANVAS}


def _message(
    request: Context,
    delivered: Mapping[str, Any],
    body: bytes | bytearray | memoryview | str,
    content_type: str,
    content_encoding: str,
    headers: Mapping[str, Any],
) -> Message | None:
    canvas = _canvas(request)
    info = request.delivery_info or {}
    envelope = {
        "content_type": content_type,
        "content_encoding": content_encoding,
        "headers": {**(delivered.get("headers") or {}), **headers},
        "properties": {
            key: value
            for key, value in (request.properties or {}).items()
            if key not in _DELIVERY_PROPERTIES and value is not None
        },
        "exchange": info.get("exchange") or "",
        "routing_key": info.get("routing_key") or "",
        "canvas": canvas if any(canvas.values()) else {},
    }
    text = _json(envelope)
    if text is None:
        # A pickled signature in the canvas; the body has it, a reaper has no use for it.
        text = _json({**envelope, "canvas": None})
    raw = str_to_bytes(body) if isinstance(body, str) else bytes(body)
    return None if text is None else Message(body=raw, envelope=text)


def _json(value: Any) -> str | None:
    try:
        return _json_dumps(value)
    except (TypeError, ValueError):
        return None


def envelope_of(row: LeaseRow) -> Envelope | None:
    """Read a row's envelope; None if the row keeps no message.

    Raises:
        ValueError: The row's ``message`` is not what this release writes.
    """
    if row.message is None:
        return None
    found = json_loads(row.message)
    try:
        return Envelope(
            content_type=found["content_type"],
            content_encoding=found["content_encoding"],
            headers=found["headers"],
            properties=found["properties"],
            exchange=found["exchange"],
            routing_key=found["routing_key"],
            canvas=found["canvas"],
        )
    except (KeyError, TypeError) as exc:
        raise ValueError(
            f"row {row.task_id}: column message is not an envelope:"
            f" expected a JSON object with {exc}"
        ) from exc
