"""Breaking off a body: it ends, and the code after it is never hit."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
import traceback
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from harness import bodies
from harness.bodies import LOST, in_thread, soon, spin

from celery_lease import interrupt as module
from celery_lease.exceptions import LeaseLost
from celery_lease.interrupt import Armed, Interrupter

needs_signal = pytest.mark.skipif(module._SIGNAL is None, reason="no such signal on this platform")


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Let threads alternate every few byte codes."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_a_python_loop_in_a_thread_is_broken_off() -> None:
    """The very error that was given comes out, with the place where it struck."""

    def body() -> None:
        with Interrupter().armed() as armed:
            assert armed.strategy == "async"
            soon(armed)
            spin()

    error = in_thread(body)
    assert error is LOST
    assert "spin" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_the_body_sees_the_whole_error() -> None:
    """A thread can only be sent a class; the body still finds the arguments, and can pickle it."""
    seen: list[LeaseLost] = []

    def body() -> str:
        with Interrupter().armed() as armed:
            soon(armed)
            try:
                spin()
            except LeaseLost as error:
                seen.append(error)
        return "swallowed"

    assert in_thread(body) == "swallowed"
    (error,) = seen
    assert LOST.args == error.args
    assert (error.task_id, error.fencing_token, str(error)) == ("t", 7, str(LOST))
    assert type(pickle.loads(pickle.dumps(error))) is LeaseLost  # noqa: S301
    assert type(copy.copy(error)) is LeaseLost


def test_a_second_interruption_does_nothing() -> None:
    """A body that swallowed the first error is left in peace."""

    def body() -> list[object]:
        with Interrupter().armed() as armed:
            soon(armed)
            with contextlib.suppress(LeaseLost):
                spin()
            second = in_thread(lambda: armed.interrupt(LeaseLost("u")))
            for _ in range(10_000):
                pass
            return [second, armed.error]

    assert [False, LOST] == in_thread(body)


@pytest.mark.parametrize("strategy", ["async", "event"])
def test_interrupted_before_it_begins(strategy: str) -> None:
    """Between claim and body there is no gap: entering raises."""

    def body() -> None:
        armed = Armed(None, strategy)
        assert armed.interrupt(LOST)
        with armed:
            raise AssertionError("entered")

    assert in_thread(body) is LOST


def test_interrupted_after_it_ended() -> None:
    """Nothing is sent to code that left its block."""

    def body() -> list[object]:
        with Interrupter().armed("x") as armed:
            pass
        return [armed.token, armed.interrupt(LOST), armed.error]

    assert ["x", False, None] == in_thread(body)


def test_the_bodys_own_error_wins_over_a_late_interruption() -> None:
    """What the body raised is its outcome."""

    def body() -> None:
        armed = Armed(None, "event")
        with armed:
            armed.interrupt(LOST)
            raise ValueError

    assert isinstance(in_thread(body), ValueError)


def test_without_a_way_only_the_error_is_noted() -> None:
    """Where nothing can be broken off, interrupting says so and harms nobody."""
    armed = Armed(None, "event")
    with armed:
        assert not in_thread(lambda: armed.interrupt(LOST))
    assert armed.error is LOST


def test_a_foreign_error_while_leaving_is_passed_on_after_leaving() -> None:
    """A time limit that strikes during the leaving neither gets lost nor leaves the body armed."""
    armed = Interrupter().armed()
    leave = armed._leave

    def strike() -> None:
        armed._leave = leave  # type: ignore[method-assign]
        raise TimeoutError

    armed._leave = strike  # type: ignore[method-assign]
    with pytest.raises(TimeoutError), armed:
        pass
    assert not armed.interrupt(LOST)
    assert module._bodies.stack == []


def test_own_error_while_leaving_is_absorbed() -> None:
    """The body had ended: it is too late, and the caller goes on to commit."""
    armed = Interrupter().armed()
    leave = armed._leave

    def strike() -> None:
        armed._leave = leave  # type: ignore[method-assign]
        armed._error = LOST
        raise LOST

    armed._leave = strike  # type: ignore[method-assign]
    with armed:
        pass
    assert armed.error is LOST


def test_a_foreign_error_outlives_an_own_one_that_follows() -> None:
    """Two errors may strike while a body is left; only its own is absorbed."""
    armed = Interrupter().armed()
    leave, errors = armed._leave, [TimeoutError(), LOST]

    def strike() -> None:
        if not errors:
            leave()
            return
        armed._error = LOST
        raise errors.pop(0)

    armed._leave = strike  # type: ignore[method-assign]
    with pytest.raises(TimeoutError), armed:
        pass


@needs_signal
@pytest.mark.may_skip
def test_no_signal_raises_while_a_body_is_being_left() -> None:
    """The handler knows the code that disarms, and waits for the next signal."""
    armed = Interrupter().armed()
    leave, struck = armed._leave, []

    def strike() -> None:
        armed._error = LOST
        module._handler(0, sys._getframe())
        struck.append(armed.delivered)
        leave()

    armed._leave = strike  # type: ignore[method-assign]
    with armed:
        pass
    assert [False] == struck
    module._handler(0, sys._getframe())


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Names of the bodies whose error is put into the thread's one place for it, None: emptied."""
    names: list[str | None] = []

    def send(_: int, kind: type[BaseException] | None) -> None:
        names.append(None if kind is None else kind().args[0])
        for body in module._bodies.stack:
            body.delivered = False

    monkeypatch.setattr(module, "_send", send)
    return names


def test_an_error_that_did_not_strike_is_withdrawn(sent: list[str | None]) -> None:
    """Leaving empties the place, so that the error cannot wait there for later code."""
    armed = Armed(None, "async")
    with armed:
        armed.interrupt(LeaseLost("body"))
    assert ["body", None] == sent


def test_leaving_without_an_interruption_withdraws_nothing(sent: list[str | None]) -> None:
    """Somebody else may use the thread's one place."""
    with Armed(None, "async"):
        pass
    assert sent == []


def test_withdrawing_an_inner_error_puts_the_outer_one_back(sent: list[str | None]) -> None:
    """A thread has one place for all of its bodies."""
    outer, inner = Armed(None, "async"), Armed(None, "async")
    with outer:
        with inner:
            inner.interrupt(LeaseLost("inner"))
            outer.interrupt(LeaseLost("outer"))
        assert ["inner", "outer", None, "outer"] == sent
    assert sent[-1] is None


def test_an_inner_error_does_not_push_out_the_outer_one(sent: list[str | None]) -> None:
    """The outer body's end ends the inner one as well."""
    outer, inner = Armed(None, "async"), Armed(None, "async")
    with outer, inner:
        outer.interrupt(LeaseLost("outer"))
        inner.interrupt(LeaseLost("inner"))
        assert ["outer"] == sent


@needs_signal
@pytest.mark.may_skip
def test_a_signal_does_not_strike_inside_a_body_that_was_struck() -> None:
    """The second error would take the place of the first, which is still on its way out."""
    outer, inner = Armed(None, "signal"), Armed(None, "signal")
    with outer, inner:
        outer._error, inner._error = LeaseLost("outer"), LeaseLost("inner")
        with pytest.raises(LeaseLost, match="outer"):
            module._handler(0, sys._getframe())
        module._handler(0, sys._getframe())
    assert not inner.delivered


def test_a_body_left_behind_is_left_with_the_one_around_it() -> None:
    """Even if leaving it was cut off, nobody can reach it once its outer body has ended."""
    outer, inner = Armed(None, "async"), Armed(None, "async")
    with outer:
        inner.__enter__()
    assert not inner.interrupt(LOST)
    assert module._bodies.stack == []


def test_greenlets_are_never_sent_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal or an asynchronous error would hit whichever greenlet runs then."""
    current = SimpleNamespace(parent=object())
    monkeypatch.setitem(sys.modules, "greenlet", SimpleNamespace(getcurrent=lambda: current))
    assert Interrupter().strategy() == "event"
    current.parent = None
    assert Interrupter().strategy() != "event"


def test_without_ctypes_threads_get_the_event_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python built without it still runs tasks."""
    monkeypatch.setattr(module, "_set_async_exc", None)
    assert in_thread(Interrupter().strategy) == "event"


def test_no_error_escapes_a_body_in_a_thread(quick_switches: None) -> None:
    """In 2,000 races between interrupting and leaving, the code after the block is never hit."""
    counts = in_thread(lambda: bodies.race(2000))
    assert counts["escaped"] == 0
    assert min(counts["broken off"], counts["ended"]) > 20, counts
    assert module._bodies.stack == []


def test_nested_bodies_in_a_thread_each_get_their_own_error(quick_switches: None) -> None:
    """Leaving the inner body never withdraws the outer one's error, and nothing escapes."""
    counts = in_thread(lambda: bodies.nested_race(500))
    assert (counts["escaped"], counts["missed"]) == (0, 0)
    assert counts["outer"] == 500
