"""A heartbeat without a database: a clock that is set, renewals that answer as told, a diary."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_lease.heartbeat import Heartbeat, Hold
from celery_lease.lease import LeaseRef, Renewal, Renewed

EPOCH = datetime(2026, 1, 1, tzinfo=timezone.utc)


class Clock:
    """A clock that stands still until moved."""

    def __init__(self, at: float = 1000.0) -> None:
        self.at = at

    def __call__(self) -> float:
        """Tell the time."""
        return self.at


class Renewals:
    """Stands in for the database: notes each request, and answers that all are held.

    `script` holds what the next requests do instead: an exception is raised, a callable is
    called with the renewals and returns the answer.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.calls: list[tuple[float, list[Renewal], float]] = []
        self.script: list[BaseException | Callable[[list[Renewal]], list[Renewed]]] = []
        self.cancelled: dict[str, str] = {}

    def __call__(self, renewals: list[Renewal], timeout: float) -> list[Renewed]:
        """Note the request and answer it."""
        self.calls.append((self.clock(), renewals, timeout))
        action = self.script.pop(0) if self.script else self.grant
        if isinstance(action, BaseException):
            raise action
        return action(renewals)

    def grant(self, renewals: list[Renewal]) -> list[Renewed]:
        """Answer that all are held."""
        until = EPOCH + timedelta(seconds=self.clock())
        return [
            Renewed(
                one.ref,
                until + timedelta(seconds=one.lease_duration),
                self.cancelled.get(one.ref.task_id),
            )
            for one in renewals
        ]

    def ids(self) -> list[list[str]]:
        """Task ids of each request."""
        return [[one.ref.task_id for one in renewals] for _, renewals, _ in self.calls]


class Diary:
    """Notes what a heartbeat tells, in order, as (what, task id)."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.errors: list[BaseException | None] = []

    def renewed(self, hold: Hold) -> None:
        """Note a confirmed renewal."""
        self.lines.append(("renewed", hold.ref.task_id))

    def unknown(self, hold: Hold, error: BaseException | None) -> None:
        """Note uncertain ownership."""
        self.errors.append(error)
        self.lines.append(("unknown", hold.ref.task_id))

    def lost(self, hold: Hold) -> None:
        """Note a loss with its reason."""
        self.lines.append((f"lost:{hold.lost_reason}", hold.ref.task_id))

    def cancelled(self, hold: Hold) -> None:
        """Note a cancellation with its reason."""
        self.lines.append((f"cancel:{hold.cancel_reason}", hold.ref.task_id))


def heartbeat(renew: Any, diary: Diary, **options: Any) -> Heartbeat:
    """Make a heartbeat that writes into a diary."""
    callbacks = {
        "on_renewed": diary.renewed,
        "on_unknown": diary.unknown,
        "on_lost": diary.lost,
        "on_cancel": diary.cancelled,
    }
    return Heartbeat(renew, **{**callbacks, **options})


def hold(
    task_id: str,
    clock: Callable[[], float],
    *,
    duration: float = 90,
    interval: float = 30,
    **more: Any,
) -> Hold:
    """Make a hold that was claimed just now."""
    return Hold(
        LeaseRef(task_id, "owner", 1),
        lease_duration=duration,
        interval=interval,
        lease_until=EPOCH + timedelta(seconds=clock() + duration),
        requested_at=more.pop("requested_at", clock()),
        clock=clock,
        **more,
    )


class Room:
    """A heartbeat whose threads are the test."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.renewals = Renewals(self.clock)
        self.diary = Diary()
        self.flushes: list[float] = []
        self.idles: list[float] = []
        self.heart = self.make()

    def make(self, **options: object) -> Heartbeat:
        """Make a heartbeat with other callbacks."""
        settings = {
            "clock": self.clock,
            "threads": False,
            "flush": self.flushes.append,
            "idle": lambda: self.idles.append(self.clock.at),
        }
        return heartbeat(self.renewals, self.diary, **{**settings, **options})

    def run(self, seconds: float) -> None:
        """Let time pass, stepping whenever the talker asked to be woken."""
        end = self.clock.at + seconds
        for _ in range(10_000):
            pause = self.heart.talk()
            if self.clock.at + pause > end:
                self.clock.at = end
                return
            self.clock.at += max(pause, 1e-6)
        raise AssertionError("it does not sleep")
