"""Bodies to break off, the errors that break them off, and races between the two."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from celery_lease.exceptions import LeaseLost
from celery_lease.interrupt import Armed, Interrupter

LOST = LeaseLost("t", 7, "deadline")


def in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a thread and return what it returned or raised."""
    ends: list[Any] = []

    def run() -> None:
        try:
            ends.append(function())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            ends.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return ends[0]


def spin(seconds: float = 20) -> None:
    """Compute, in pure Python, until broken off."""
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        count += 1
    raise AssertionError("nobody broke it off")


def soon(armed: Armed, error: BaseException = LOST, after: float = 0.05) -> None:
    """Break the body off from another thread, once it runs."""
    timer = threading.Timer(after, armed.interrupt, [error])
    timer.daemon = True
    timer.start()


def silent_spin() -> None:
    """Compute where errors are swallowed until the block is left."""
    try:
        spin()
    finally:
        time.sleep(0.01)


class Aim:
    """How long a body runs, so that about half of them end before the error strikes."""

    def __init__(self) -> None:
        self.length = 2000.0

    def linger(self) -> None:
        """Run about so long."""
        for _ in range(int(self.length * random.uniform(0.5, 1.5))):
            pass

    def was(self, *, broken_off: bool) -> None:
        """Learn from the last body."""
        self.length = max(self.length * (0.95 if broken_off else 1.05), 10)


class Kicker:
    """A thread that interrupts each body it is given, after so many turns of a loop at most."""

    def __init__(self, turns: int = 400) -> None:
        self.turns = turns
        self.bodies: queue.SimpleQueue[Armed | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        """Interrupt them after a random moment, until told to end."""
        while (body := self.bodies.get()) is not None:
            for _ in range(random.randrange(self.turns)):
                pass
            body.interrupt(LeaseLost(str(body.token)))

    def end(self) -> None:
        """Wait for the thread."""
        self.bodies.put(None)
        self.thread.join()


def race(rounds: int) -> dict[str, int]:
    """Interrupt bodies at about the moment they end, and count what the caller sees."""
    kicker, aim, counts = Kicker(), Aim(), {"broken off": 0, "ended": 0, "escaped": 0}
    for _ in range(rounds):
        armed = Interrupter().armed()
        kicker.bodies.put(armed)
        end = "broken off"
        try:
            with armed:
                aim.linger()
            end = "ended"
        except LeaseLost:
            pass
        counts[end] += 1
        aim.was(broken_off=end == "broken off")
        try:
            for _ in range(400):
                pass
        except LeaseLost:
            counts["escaped"] += 1
    kicker.end()
    return counts


def nested_race(rounds: int) -> dict[str, int]:
    """Interrupt an inner and its outer body at any moments; the outer one waits for its own."""
    kickers, aim = [Kicker(2000), Kicker(200)], Aim()
    counts = {"inner": 0, "outer": 0, "escaped": 0, "missed": 0}
    for _ in range(rounds):
        outer, inner = Interrupter().armed("outer"), Interrupter().armed("inner")
        for kicker, body in zip(kickers, (outer, inner), strict=True):
            kicker.bodies.put(body)
        try:
            nest(outer, inner, aim, counts)
        except LeaseLost as error:
            counts[error.task_id] += 1
        except AssertionError:
            counts["missed"] += 1
        try:
            for _ in range(400):
                pass
        except LeaseLost:
            counts["escaped"] += 1
    for kicker in kickers:
        kicker.end()
    return counts


def nest(outer: Armed, inner: Armed, aim: Aim, counts: dict[str, int]) -> None:
    """Run the inner body in the outer one, which goes on until it is broken off itself."""
    with outer:
        try:
            with inner:
                aim.linger()
            aim.was(broken_off=False)
        except LeaseLost as error:
            aim.was(broken_off=True)
            if error.task_id == "outer":
                raise
            counts["inner"] += 1
        spin(5)
