"""Sends what a reaper found due: a task's message again, or the end of a task.

Uses connections of its own, away from the worker's event loop. Sends stored
bytes as they are. The end of a failed or cancelled task is told through
Celery's result backend with a request rebuilt from the row, which stores the
state, fails the chord, fails the rest of the chain and calls the errbacks.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from celery.app.task import Context
from celery.exceptions import TaskRevokedError

from celery_lease.broker import broker_of
from celery_lease.lease import State
from celery_lease.message import DISPATCH_HEADER, Envelope, envelope_of
from celery_lease.report import line

if TYPE_CHECKING:
    from celery import Celery

    from celery_lease.lease import LeaseRow

__all__ = ("Publisher",)


class Publisher:
    """Not thread-safe: one per thread that publishes.

    Args:
        app: The app whose broker and result backend are used.
    """

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.broker = broker_of(app)
        self._connection: Any = None

    def __call__(self, row: LeaseRow) -> str:
        """Do what is due for one row.

        Returns:
            ``sent`` (a copy of the message is under way), ``announced`` (the
            end of the task was told) or ``kept`` (the row keeps no message, so
            only the broker can bring the task back).

        Raises:
            Exception: Whatever the broker or the result backend raised;
                nothing is lost, the row stays due.
        """
        envelope = envelope_of(row)
        if row.state in (State.FAILED, State.CANCELLED) and (
            envelope is None or envelope.canvas is not None
        ):
            self._announce(row, envelope)
            self._discard(row)
            return "announced"
        if envelope is None or row.payload is None:
            return "kept"
        try:
            self._send(row, envelope)
        except BaseException:
            self.close()
            raise
        return "sent"

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()
        self.broker.close()

    def _send(self, row: LeaseRow, envelope: Envelope) -> None:
        if self._connection is None:
            self._connection = self.app.connection_for_write()
        headers = {**envelope.headers, DISPATCH_HEADER: row.dispatch}
        compression = headers.pop("compression", None)
        properties = dict(envelope.properties)
        if "expiration" in properties:
            properties["expiration"] = float(properties["expiration"]) / 1000  # stored as sent: ms
        with self._connection.channel() as channel:
            self._declare(channel, envelope)
            self.app.amqp.Producer(channel, auto_declare=False).publish(
                row.payload,
                exchange=envelope.exchange,
                routing_key=envelope.routing_key,
                content_type=envelope.content_type,
                content_encoding=envelope.content_encoding,
                compression=compression,
                headers=headers,
                retry=False,
                **properties,
            )
        self._discard(row)

    def _declare(self, channel: Any, envelope: Envelope) -> None:
        """Declare the queue past kombu's cache: a broker that lost its data lost its bindings."""
        for queue in self.app.amqp.queues.values():
            exchange = getattr(queue.exchange, "name", "")
            by_name = not envelope.exchange and queue.name == envelope.routing_key
            by_binding = (exchange, queue.routing_key) == (envelope.exchange, envelope.routing_key)
            if by_name or by_binding:
                queue(channel).declare()

    def _discard(self, row: LeaseRow) -> None:
        """Remove the entry of the copy that was claimed last: nobody needs it any more."""
        if not row.delivery_tag:
            return
        try:
            self.broker.discard(row.delivery_tag)
        except Exception as exc:  # noqa: BLE001 - the old entry only costs a turned-away copy
            line(logging.DEBUG, "old_copy_stays", error=type(exc).__name__)

    def _announce(self, row: LeaseRow, envelope: Envelope | None) -> None:
        request = _request(row, envelope)
        backend: Any = self.app.backend
        task: Any = self.app.tasks.get(row.task_name)
        keep = not request.ignore_result or bool(
            getattr(task, "store_errors_even_if_ignored", False)
        )
        if row.state is State.CANCELLED:
            reason = row.cancel_reason or "cancelled"
            backend.mark_as_revoked(row.task_id, reason, request=request, store_result=keep)
            return
        error = json.loads(row.error) if row.error else {}
        exc = backend.exception_to_python(error) or TaskRevokedError("failed, cause unknown")
        backend.mark_as_failure(row.task_id, exc, request=request, store_result=keep)


def _request(row: LeaseRow, envelope: Envelope | None) -> Any:
    """The request as Celery's backends want it, without the arguments."""
    headers = dict(envelope.headers) if envelope else {}
    properties = dict(envelope.properties) if envelope else {}
    canvas = dict(envelope.canvas or {}) if envelope else {}
    known = {
        "id": row.task_id,
        "task": row.task_name,
        "args": (),
        "kwargs": {},
        "called_directly": False,
        "reply_to": properties.get("reply_to"),
        "correlation_id": properties.get("correlation_id") or row.task_id,
        "delivery_info": {
            "exchange": envelope.exchange if envelope else "",
            "routing_key": envelope.routing_key if envelope else "",
        },
    }
    return Context({**headers, **canvas, **known})
