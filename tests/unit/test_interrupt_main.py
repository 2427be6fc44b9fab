"""Breaking off bodies of a main thread: in processes of their own, by real signals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from celery_lease import interrupt

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.may_skip,
    pytest.mark.skipif(interrupt._SIGNAL is None, reason="no such signal on this platform"),
]


def run(script: str, timeout: float = 60) -> str:
    """Run a script in a process of its own, with `harness.bodies` at hand as `b`."""
    begin = (
        "import os, signal, socket, subprocess, sys, threading, time\n"
        "import harness.bodies as b\n"
        "from celery_lease import interrupt\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", begin + script],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
            "PATH": "/usr/bin:/bin",
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BLOCKING = """
pair = socket.socketpair()
before = time.monotonic()
try:
    with b.Interrupter().armed() as armed:
        b.soon(armed, after=0.2)
        {call}
except b.LeaseLost as error:
    assert error is b.LOST
    assert time.monotonic() - before < 5
    print(armed.strategy)
"""


@pytest.mark.parametrize(
    "call",
    [
        "time.sleep(30)",
        "b.spin()",
        "pair[0].recv(1)",
        "subprocess.run(['sleep', '30'])",
        "threading.Event().wait(30)",
        "b.silent_spin()",
    ],
)
def test_blocking_calls_in_the_main_thread_are_broken_off(call: str) -> None:
    """A signal ends what an asynchronous exception would have to wait for."""
    assert run(BLOCKING.format(call=call)) == "signal"


def test_a_signal_that_comes_too_early_is_repeated() -> None:
    """One that arrives just before the blocking call would not end it."""
    script = """
kill, kills = b.Armed._kill, []
def late(body):
    kills.append(1)
    if len(kills) > 2:
        kill(body)
b.Armed._kill = late
"""
    assert run(script + BLOCKING.format(call="time.sleep(30)")) == "signal"


def test_no_error_escapes_a_body_in_the_main_thread() -> None:
    """In 2,000 races between the signal and leaving, the code after the block is never hit."""
    script = """
sys.setswitchinterval(1e-5)
counts = b.race(2000)
assert min(counts["broken off"], counts["ended"]) > 20, counts
print(counts["escaped"], interrupt._bodies.stack)
"""
    assert run(script) == "0 []"


def test_nested_bodies_in_the_main_thread_each_get_their_own_error() -> None:
    """The outer body's error never gets lost, and nothing escapes."""
    script = """
sys.setswitchinterval(1e-5)
counts = b.nested_race(500)
print(counts["escaped"], counts["missed"], counts["outer"])
"""
    assert run(script) == "0 0 500"


def test_an_earlier_handler_is_still_called() -> None:
    """Whoever used the signal before goes on getting it."""
    script = """
got = []
signal.signal(signal.SIGURG, lambda *_: got.append(1))
assert b.Interrupter().strategy() == "signal"
os.kill(os.getpid(), signal.SIGURG)
assert b.Interrupter().strategy() == "signal"
print(got)
"""
    assert run(script) == "[1]"


def test_a_later_handler_is_respected() -> None:
    """Who takes the signal over keeps it; the body then learns by asking."""
    script = """
assert b.Interrupter().strategy() == "signal"
signal.signal(signal.SIGURG, lambda *_: None)
with b.Interrupter().armed() as armed:
    print(armed.strategy, armed.interrupt(b.LOST))
"""
    assert run(script) == "event False"


def test_the_signal_alone_does_nothing() -> None:
    """Urgent data on some socket is nobody's interruption."""
    script = """
with b.Interrupter().armed() as armed:
    os.kill(os.getpid(), signal.SIGURG)
os.kill(os.getpid(), signal.SIGURG)
print("alive")
"""
    assert run(script) == "alive"


def test_a_forked_child_can_arm_and_leave() -> None:
    """The lock may be held by another thread at the fork, and the handler is inherited."""
    script = """
taken, go = threading.Event(), threading.Event()
def keep():
    with interrupt._shared.lock:
        taken.set()
        go.wait(20)
b.Interrupter().strategy()
threading.Thread(target=keep).start()
taken.wait()
pid = os.fork()
if pid == 0:
    code = 1
    try:
        try:
            with b.Interrupter().armed() as armed:
                b.soon(armed)
                time.sleep(20)
        except b.LeaseLost:
            code = 0
    finally:
        os._exit(code)
_, status = os.waitpid(pid, 0)
go.set()
print(status)
"""
    assert run(script) == "0"
