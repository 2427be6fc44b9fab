"""What kombu keeps in Redis for a queue: waiting messages and unacknowledged ones."""

from __future__ import annotations

from typing import Any

import redis

from harness.waiting import until

#: kombu's keys: one list per priority step, a hash of unacknowledged messages by delivery tag,
#: and a sorted set of the same tags scored by the time of delivery.
_PRIORITIES = ("", "\x06\x163", "\x06\x166", "\x06\x169")


class RedisQueue:
    """Reads the broker's state behind Celery's back.

    Args:
        url: Redis URL of the broker.
        queue: Name of the queue.
        prefix: `global_keyprefix` of the transport.
    """

    def __init__(self, url: str, queue: str, prefix: str = "") -> None:
        self.client = redis.Redis.from_url(url, decode_responses=True)
        self.queue = queue
        self.prefix = prefix

    def waiting(self) -> int:
        """Return how many messages wait in the queue."""
        return sum(int(self.client.llen(f"{self.prefix}{self.queue}{p}")) for p in _PRIORITIES)

    def unacked(self) -> dict[str, str]:
        """Return the unacknowledged messages, as JSON, by delivery tag."""
        found: Any = self.client.hgetall(f"{self.prefix}unacked")
        return dict(found)

    def unacked_index(self) -> dict[str, float]:
        """Return the time of delivery (or of the last extension) by delivery tag."""
        found: Any = self.client.zrange(f"{self.prefix}unacked_index", 0, -1, withscores=True)
        return dict(found)

    def wait_empty(self, timeout: float = 15.0) -> None:
        """Wait until nothing waits and nothing is unacknowledged."""
        until(
            lambda: not (self.waiting() or self.unacked() or self.unacked_index()),
            timeout=timeout,
            what=lambda: (
                f"an empty broker; waiting {self.waiting()}, unacked {sorted(self.unacked())},"
                f" index {self.unacked_index()}"
            ),
        )

    def close(self) -> None:
        """Disconnect."""
        self.client.close()
