"""Redis and Valkey: messages under way stand in an index scored by time.

kombu keeps every unacknowledged message in a hash and its delivery tag in a
sorted set, scored by the time of delivery; whoever sweeps the set puts back
what is older than *his own* visibility timeout. Extending means to score the
tag anew, and only if it is still there: a tag that was swept is a message in
the queue again, and scoring it would make it appear twice.

All copies of one message carry one delivery tag. So a copy that was turned
away must not be acknowledged: that would remove the live copy's entry.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kombu.transport import virtual

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("RedisBroker",)

#: kombu's default visibility timeout.
_DEFAULT_TIMEOUT = 3600.0
#: Never touch the index more often than this.
_SHORTEST = 0.5


class RedisBroker:
    """Uses a kombu channel of its own, so that prefix, custom keys, TLS and Sentinel hold."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self._connection: Any = None

    def period(self, longest: float) -> float | None:
        """A third of the visibility timeout, so that one extension may fail."""
        return max(min(longest, self.returns_after() / 3), _SHORTEST)

    def returns_after(self) -> float:
        """The visibility timeout, in seconds."""
        options = self.app.conf.broker_transport_options or {}
        return float(options.get("visibility_timeout", _DEFAULT_TIMEOUT))

    def extend(self, tags: Sequence[str]) -> None:
        """Score the tags anew, in one round trip, where they are still present."""
        now = time.time()
        channel = self._channel()
        try:
            with channel.conn_or_acquire() as client:
                client.zadd(channel.unacked_index_key, dict.fromkeys(tags, now), xx=True)
        except BaseException:
            self.close()
            raise

    def discard(self, tag: str) -> None:
        """Remove hash entry and index entry of one tag."""
        try:
            self.acknowledge_all(self._channel(), [tag])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.release()

    def _channel(self) -> Any:
        if self._connection is None:
            self._connection = self.app.connection_for_write()
        return self._connection.default_channel

    @staticmethod
    def acknowledge_all(channel: Any, tags: Sequence[str]) -> None:
        """Remove hash entries and index entries, in one round trip."""
        with channel.conn_or_acquire() as client, client.pipeline() as pipe:
            pipe.zrem(channel.unacked_index_key, *tags)
            pipe.hdel(channel.unacked_key, *tags)
            pipe.execute()

    @staticmethod
    def forget(message: Any) -> bool:
        """Free the prefetch slot and leave hash and index alone."""
        channel = getattr(message, "channel", None)
        qos = getattr(channel, "qos", None)
        if not hasattr(channel, "unacked_index_key") or not isinstance(qos, virtual.QoS):
            return False
        virtual.QoS.ack(qos, message.delivery_tag)
        message._state = "ACK"  # noqa: SLF001 - kombu has no "settled elsewhere"
        return True
