"""The row's copy of a message: byte for byte, whole, and nothing a sender could choose with."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery.app.task import Context

from celery_lease.message import DISPATCH_HEADER, capture, dispatch_number, envelope_of, successor

BODY = b'[["a"], {"k": 1}, {"callbacks": null}]'
HEADERS = {"id": "t1", "task": "shop.export", "retries": 0, "x-tenant": "7", "compression": "gzip"}


def request(**changes: Any) -> Context:
    return Context(
        {
            "id": "t1",
            "args": ["a"],
            "kwargs": {"k": 1},
            "properties": {"priority": 5, "delivery_tag": "tag-1", "lease": {"owner": "w"}},
            "delivery_info": {"exchange": "ex", "routing_key": "rk"},
            **changes,
        }
    )


def delivered(**changes: Any) -> dict[str, Any]:
    return {
        "body": BODY,
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "headers": HEADERS,
        **changes,
    }


def row(message: Any) -> Any:
    return SimpleNamespace(task_id="t1", message=message)


def test_the_body_is_kept_byte_for_byte() -> None:
    """A reaper sends what was delivered, not what somebody made of it."""
    message = capture(request(), delivered(), "json")
    assert message is not None
    assert message.body == BODY


def test_the_envelope_has_headers_properties_and_routing() -> None:
    """Everything that rebuilds the message is kept, but for what belonged to one delivery."""
    envelope = envelope_of(row(capture(request(), delivered(), "json").envelope))
    assert envelope is not None
    assert HEADERS == envelope.headers
    assert {"priority": 5} == envelope.properties
    assert ("ex", "rk") == (envelope.exchange, envelope.routing_key)


def test_a_canvas_that_is_json_is_kept_for_the_reaper() -> None:
    """Callbacks, errbacks, chain and chord can be served without a worker."""
    chain = [{"task": "next", "args": [], "kwargs": {}, "options": {}}]
    envelope = envelope_of(row(capture(request(chain=chain), delivered(), "json").envelope))
    assert chain == envelope.canvas["chain"]


def test_a_canvas_that_is_not_json_is_left_to_the_body() -> None:
    """A pickled signature cannot be in the envelope: the message itself must be sent again."""
    callbacks = [{"task": "next", "args": [object()]}]
    message = capture(request(callbacks=callbacks), delivered(body=b"\x80..."), "pickle")
    assert message is not None
    assert envelope_of(row(message.envelope)).canvas is None


def test_headers_that_are_not_json_cannot_be_kept() -> None:
    """Rather no copy than a wrong one: recovery is then the broker's alone."""
    assert capture(request(), delivered(headers={"x": object()}), "json") is None


def test_a_message_of_protocol_1_is_serialized_anew() -> None:
    """Without a raw body the copy is made from the decoded arguments."""
    message = capture(request(), delivered(body=None, content_type=None), "json")
    assert message is not None
    assert [["a"], {"k": 1}] == json.loads(message.body)[:2]


def test_the_next_message_of_a_retry_has_its_own_arguments_and_headers() -> None:
    """What a reaper sends for a retry that was never published is that retry."""
    eta = datetime(2026, 7, 23, tzinfo=timezone.utc).isoformat()
    message = successor(
        request(),
        delivered(),
        "json",
        args=["b"],
        kwargs={},
        headers={"retries": 1, "eta": eta},
    )
    assert message is not None
    assert [["b"], {}] == json.loads(message.body)[:2]
    headers = envelope_of(row(message.envelope)).headers
    assert {**HEADERS, "retries": 1, "eta": eta} == headers


@pytest.mark.parametrize("value", [None, "5", -1, True, 2.5, [], {}])
def test_a_dispatch_number_that_is_none_counts_as_the_first(value: object) -> None:
    """A header that a sender made up makes its copy the oldest, never the newest."""
    assert dispatch_number({DISPATCH_HEADER: value}) == 0


def test_a_dispatch_number_is_read() -> None:
    """The number that a reaper has put into the headers comes back."""
    assert dispatch_number({DISPATCH_HEADER: 3}) == 3
    assert dispatch_number(None) == 0


def test_a_row_that_is_not_ours_is_named_without_its_content() -> None:
    """A damaged envelope names row and column, and shows none of the payload."""
    with pytest.raises(ValueError, match=r"row t1: column message") as caught:
        envelope_of(row('{"headers": {"secret": "s3cr3t"}}'))
    assert "s3cr3t" not in str(caught.value)
