"""A heartbeat with its real threads: what hangs, dies or forks is found out."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.beats import Diary, Renewals, heartbeat, hold
from harness.waiting import until

from celery_lease.heartbeat import now
from celery_lease.lease import Renewal, Renewed
from celery_lease.loop import Loop

ROOT = Path(__file__).resolve().parents[2]


class Room:
    """A heartbeat that beats by itself."""

    def __init__(self) -> None:
        self.renewals = Renewals(now)
        self.diary = Diary()
        self.heart = heartbeat(self.renewals, self.diary)

    def threads(self) -> list[threading.Thread]:
        """The heartbeat's threads, talker first."""
        return [one._thread for one in (self.heart._talker, self.heart._watcher) if one._thread]


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    yield room
    room.heart.shutdown()


def test_no_thread_before_the_first_lease(room: Room) -> None:
    """A process that never claims pays nothing; the threads that come are daemons."""
    assert room.threads() == []
    room.heart.add(hold("t", now))
    assert [True, True] == [thread.daemon and thread.is_alive() for thread in room.threads()]


def test_beats_go_on_by_themselves(room: Room) -> None:
    """The lease is renewed while the test only waits."""
    held = hold("t", now, duration=2, interval=0.05)
    room.heart.add(held)
    until(lambda: len(room.renewals.calls) >= 5)
    assert held.status == "held"


def test_a_lease_due_earlier_wakes_the_talker(room: Room) -> None:
    """A talker that sleeps for a slow lease still serves a fast one in time."""
    room.heart.add(hold("slow", now))
    until(lambda: now() + 0.9 < room.heart._talker.wakes_at < math.inf, interval=0.005)
    begin = now()
    room.heart.add(hold("fast", now, duration=2, interval=0.1))
    until(lambda: room.renewals.calls, interval=0.005)
    assert room.renewals.calls[0][0] - begin < 0.8


def test_a_deadline_that_comes_earlier_wakes_the_watcher(room: Room) -> None:
    """A watcher that sleeps through an idle time still tells the next holder in time."""
    idle = hold("idle", now)
    room.heart.add(idle)
    room.heart.discard(idle)
    until(lambda: now() + 2 < room.heart._watcher.wakes_at < math.inf)
    room.renewals.script += [OSError()] * 1000
    held = hold("t", now, duration=0.2, interval=0.1)
    room.heart._talker.stop()
    room.heart.add(held)
    assert held.lost_event.wait(5)
    assert now() - held.trusted_until < 0.8


def test_holder_is_told_at_the_deadline_while_the_talker_hangs(room: Room) -> None:
    """A connection into a black hole keeps nobody from being told."""
    gate = threading.Event()

    def hang(renewals: list[Renewal]) -> list[Renewed]:
        gate.wait(20)
        return room.renewals.grant(renewals)

    room.renewals.script.append(hang)
    held = hold("t", now, duration=0.8, interval=0.1)
    room.heart.add(held)
    assert held.lost_event.wait(5)
    told_at = now()
    assert 0 <= told_at - held.trusted_until < 0.8
    until(lambda: ("lost:deadline", "t") in room.diary.lines)
    gate.set()
    fresh = hold("u", now, duration=2, interval=0.1)
    room.heart.add(fresh)
    until(lambda: ("renewed", "u") in room.diary.lines)
    assert held.status == "lost"
    assert ("renewed", "t") not in room.diary.lines


def test_recovers_after_a_hundred_failures(room: Room) -> None:
    """Exceptions are never the end of beating."""
    room.renewals.script += [OSError()] * 100
    held = hold("t", now, duration=60, interval=0.01)
    room.heart.add(held)
    until(lambda: ("renewed", "t") in room.diary.lines)
    assert held.status == "held"
    assert len(room.renewals.calls) > 100


@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt(), GeneratorExit()])
def test_errors_that_end_threads_do_not_end_beating(room: Room, error: BaseException) -> None:
    """What a hook raises to end its process must not end the beat."""
    room.renewals.script.append(error)
    room.heart.add(hold("t", now, duration=5, interval=0.1))
    until(lambda: ("renewed", "t") in room.diary.lines)
    assert [True, True] == [thread.is_alive() for thread in room.threads()]


def test_error_in_a_step_does_not_end_the_thread() -> None:
    """Even an error of our own is logged, and the next step follows."""
    done = threading.Event()
    steps: list[int] = []

    def step() -> float:
        steps.append(1)
        if len(steps) == 1:
            raise SystemExit
        done.set()
        return 60

    loop = Loop("test", step)
    loop.start()
    assert done.wait(5)
    loop.stop()
    loop.join(5)
    assert not loop.is_alive()


@pytest.mark.parametrize("name", ["_talker", "_watcher"])
def test_a_dead_thread_is_noticed_by_the_other(room: Room, name: str) -> None:
    """Whatever ended it, it is started again without anybody claiming."""
    room.heart.add(hold("t", now, duration=60, interval=0.2))
    loop = getattr(room.heart, name)
    _kill(loop)
    until(loop.is_alive)
    count = len(room.renewals.calls)
    until(lambda: len(room.renewals.calls) > count + 1)


def test_dead_threads_are_noticed_at_the_next_claim(room: Room) -> None:
    """If both have died, the next lease starts both."""
    room.heart.add(hold("t", now))
    for loop in (room.heart._talker, room.heart._watcher):
        _kill(loop)
    room.heart.add(hold("u", now))
    assert [True, True] == [thread.is_alive() for thread in room.threads()]


def _kill(loop: Loop) -> None:
    """End the thread as if something had killed it."""
    thread = loop._thread
    assert thread is not None
    loop._thread = threading.Thread()
    loop.wake()
    thread.join(5)
    assert not thread.is_alive()


def test_leases_are_lost_loudly_when_no_thread_can_start(
    room: Room, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a heartbeat nobody may trust a lease."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    held = hold("t", now)
    room.heart.add(held)
    assert (held.status, held.lost_reason) == ("lost", "no_heartbeat")
    assert [("lost:no_heartbeat", "t")] == room.diary.lines
    assert "CRITICAL" in caplog.text


def test_shutdown_ends_both_threads_and_a_later_claim_starts_new_ones(room: Room) -> None:
    """Neither thread starts the other again while both end."""
    for _ in range(20):
        room.heart.add(hold("t", now))
        threads = room.threads()
        room.heart.shutdown()
        assert [False, False] == [thread.is_alive() for thread in threads]
        assert room.threads() == []


def test_thousand_leases_are_one_request_per_beat(room: Room) -> None:
    """Nobody's renewal is late by more than a beat, and requests do not grow with leases."""
    begin = now()
    holds = [hold(str(number), now, duration=3, interval=0.5) for number in range(1000)]
    for one in holds:
        room.heart.add(one)
    # On a busy machine the first ones are due before the last ones are added.
    early = sum(len(renewals) < 1000 for _, renewals, _ in room.renewals.calls)
    gap = 0.0
    while now() < begin + 2.2:
        gap = max(gap, now() - min(one.confirmed_at for one in holds))
    assert gap < 1.5
    assert len(room.renewals.calls) <= 5 + early
    assert {1000} == {len(renewals) for _, renewals, _ in room.renewals.calls[early:]}


def run(script: str) -> str:
    """Run a script in a process of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FORK = """
import os, threading
from harness.beats import Diary, Renewals, heartbeat, hold
from harness.waiting import until
from celery_lease.heartbeat import now

renewals, diary = Renewals(now), Diary()
heart = heartbeat(renewals, diary)
held = hold("parent", now, duration=30, interval=0.05)
heart.add(held)
until(lambda: renewals.calls)
taken, go = threading.Event(), threading.Event()

def keep_locks():
    with heart._lock, heart._starting, held._lock:
        taken.set()
        go.wait(20)

threading.Thread(target=keep_locks).start()
taken.wait(5)
pid = os.fork()
if pid == 0:
    code = 1
    try:
        assert heart.holds() == []
        assert held.status == "held" and held.details is None
        mine = hold("child", now, duration=30, interval=0.05)
        renewals.calls.clear()
        heart.add(mine)
        until(lambda: len(renewals.calls) > 2)
        assert {("child",)} == {tuple(ids) for ids in renewals.ids()}
        heart.shutdown()
        code = 0
    finally:
        os._exit(code)
_, status = os.waitpid(pid, 0)
go.set()
count = len(renewals.calls)
until(lambda: len(renewals.calls) > count + 2)
print(status, renewals.ids()[-1])
"""


@pytest.mark.skipif(not hasattr(threading, "_after_fork"), reason="no fork on this platform")
@pytest.mark.may_skip
def test_a_forked_child_starts_with_nothing_and_can_begin() -> None:
    """A fork while another thread holds every lock leaves the child free, the parent beating."""
    assert run(FORK) == "0 ['parent']\n"


ORPHAN = """
import os, sys, time
from harness.beats import Diary, Renewals, heartbeat, hold
from harness.waiting import until
from celery_lease.heartbeat import now

read, write = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.close(read)
        renewals, diary = Renewals(now), Diary()
        heart = heartbeat(renewals, diary)
        held = hold("t", now, duration=30, interval=0.1, watch_parent=True)
        heart.add(held)
        until(lambda: renewals.calls)
        os.write(write, b"beats ")
        held.lost_event.wait(10)
        count = len(renewals.calls)
        time.sleep(0.5)
        os.write(write, f"{held.lost_reason} {len(renewals.calls) - count}".encode())
        os._exit(0)
    os.close(write)
    assert os.read(read, 100) == b"beats "
    os._exit(0)
os.close(write)
os.wait()
print(os.read(read, 100).decode())
"""


def test_an_orphan_stops_beating() -> None:
    """A pool child whose parent was killed must not keep its lease for ever."""
    assert run(ORPHAN) == "parent_gone 0\n"
