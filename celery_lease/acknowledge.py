"""Acknowledges what leased tasks leave behind, several messages in one round trip.

An event loop that acknowledges each message by itself waits for Redis once per
task, and the child that has just become free waits with it. Under a lease an
acknowledgement has time: a copy that is delivered again meanwhile is turned
away by the row. So it is put off for a few milliseconds, until there are
others to share the way; the place in the prefetch window is free at once.

Lost with the process, such an acknowledgement costs one more delivery, which
runs nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from celery_lease.broker import acknowledge_all, forget
from celery_lease.logbook import line

__all__ = ("Acknowledgements",)


#: Seconds that an acknowledgement waits for others.
_WINDOW = 0.01
#: So many do not wait.
_MOST = 64
#: Tries, and seconds between them: a connection may have been cut, and another is there at once.
_TRIES = 3
_PAUSE = 1.0


class Acknowledgements:
    """Those of one event loop, and called by nobody else."""

    def __init__(self) -> None:
        self._channel: Any = None
        self._hub: Any = None
        self._tags: list[str] = []
        self._failures = 0

    def add(self, message: Any, hub: Any) -> bool:
        """Acknowledge a message soon.

        Args:
            message: As delivered.
            hub: The event loop.

        Returns:
            False if its transport has nothing to gain: acknowledge it yourself.
        """
        channel, tag = message.channel, message.delivery_tag
        if getattr(channel, "no_ack_consumers", None) or not forget(message):
            return False
        if channel is not self._channel:
            self.flush()
            self._channel = channel
        self._hub = hub
        self._tags.append(tag)
        if len(self._tags) == 1:
            hub.call_later(_WINDOW, self.flush)
        elif len(self._tags) >= _MOST:
            self.flush()
        return True

    def flush(self) -> None:
        """Acknowledge what waits; what fails for good is delivered again, and turned away."""
        tags, self._tags = self._tags, []
        if not tags:
            return
        try:
            acknowledge_all(self._channel, tags)
            self._failures = 0
        except Exception as exc:  # noqa: BLE001 - the loop finds out by itself that the broker is gone
            self._failures += 1
            error = type(exc).__name__
            line(logging.WARNING, "not_acknowledged", messages=len(tags), error=error)
            if self._failures < _TRIES:
                self._tags[:0] = tags
                self._hub.call_later(_PAUSE, self.flush)
            else:
                self._failures = 0

    def leave(self) -> None:
        """The connection is going: what cannot be acknowledged now never will be."""
        self._failures = _TRIES
        self.flush()
        self._failures = 0
