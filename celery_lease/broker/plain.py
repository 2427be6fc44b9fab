"""A transport without a visibility timeout: the reaper alone brings tasks back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("Broker", "PlainBroker")


class Broker(Protocol):
    """What is asked of a transport."""

    def period(self, longest: float) -> float | None:
        """Seconds between two extensions, at most ``longest``; None: no extension exists."""

    def returns_after(self) -> float | None:
        """Seconds until the broker brings a dead worker's messages back; None: it does at once.

        Or never, where nothing is known of the transport.
        """

    def extend(self, tags: Sequence[str]) -> None:
        """Keep these delivered messages invisible for one more visibility timeout."""

    def discard(self, tag: str) -> None:
        """Remove the entry of a message that was sent anew."""

    def close(self) -> None:
        """Close what was opened."""


class PlainBroker:
    """Claims and the reaper do all the work."""

    def __init__(self, app: Celery) -> None:
        self.app = app

    def period(self, longest: float) -> float | None:  # noqa: ARG002 - see Broker
        """No extension exists."""
        return None

    def returns_after(self) -> float | None:
        """Nothing is known of it."""
        return None

    def extend(self, tags: Sequence[str]) -> None:
        """Nothing to extend."""

    def discard(self, tag: str) -> None:
        """Nothing to remove."""

    def close(self) -> None:
        """Nothing to close."""
