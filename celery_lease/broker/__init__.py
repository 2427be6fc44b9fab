"""What the broker can do for a lease, one module per kind of transport.

The database is the authority and the broker is the fast path: everything here
may fail without costing a task. Three questions are asked of a transport:

* keep a message invisible for a while longer (``extend``),
* give a delivered copy up *without* acknowledging it (``forget``), since all
  copies of a message may share one entry in the broker,
* remove the entry of a message that has been sent anew (``discard``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from celery_lease.broker.plain import PlainBroker
from celery_lease.broker.redis import RedisBroker

if TYPE_CHECKING:
    from celery import Celery

    from celery_lease.broker.plain import Broker

__all__ = ("acknowledge_all", "broker_of", "forget")

_REDIS = frozenset({"redis", "rediss", "sentinel", "valkey", "valkeys"})


def broker_of(app: Celery) -> Broker:
    """The broker of an app, by the transport of its connection. No I/O."""
    connection: Any = app.connection_for_read()
    transport = connection.transport_cls
    name = transport if isinstance(transport, str) else getattr(transport, "driver_type", "")
    if name in _REDIS or getattr(connection.transport, "driver_type", "") == "redis":
        return RedisBroker(app)
    return PlainBroker(app)


def acknowledge_all(channel: Any, tags: Sequence[str]) -> None:
    """Acknowledge copies that were given up by :func:`forget`, which returned True for them."""
    RedisBroker.acknowledge_all(channel, tags)


def forget(message: Any) -> bool:
    """Give a delivered copy up so that it neither blocks the prefetch nor is acknowledged.

    Returns:
        False if this transport cannot: the caller acknowledges instead, and
        the row carries the task on.
    """
    return RedisBroker.forget(message)
