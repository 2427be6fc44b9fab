"""Breaking off a body from another thread, and never anything but the body.

A body is armed while it runs. Where it runs decides how it is broken off:

``signal``
    In the main thread, by a signal to that very thread, so that a blocking
    call (sleep, socket, subprocess) ends as well. The handler raises the error.
``async``
    In another thread, by an asynchronous exception. It arrives between two
    byte codes; a blocking call first has to end by itself.
``event``
    In a greenlet, or where the signal belongs to somebody else: not at all.
    The body learns it when it asks.

The promise that matters most: once the ``with`` block is left, no late error
can fire in the code after it, which is the code that commits.

Knows threads and signals, standard library only. Must not know leases.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

try:
    import ctypes
except ImportError:  # pragma: no cover - a Python built without it can still run tasks
    _set_async_exc: Any = None
else:
    # Without argtypes None becomes NULL, which is how an error is withdrawn.
    _set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc

__all__ = ("Armed", "Interrupter")

#: Urgent data on a socket: ignored by default, and used by next to nobody.
_SIGNAL: signal.Signals | None = getattr(signal, "SIGURG", None)
#: Asked before every body; `signal`'s own wrapper looks for an enum's member each time.
_getsignal: Any = getattr(sys.modules.get("_signal"), "getsignal", signal.getsignal)
_FIRST_NUDGE = 0.02
_LAST_NUDGE = 1.0

_NEW, _ARMED, _LEAVING, _LEFT = range(4)


class _Shared:
    """The lock that orders arming, interrupting and leaving in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class _Bodies(threading.local):
    """The armed bodies of the current thread, outermost first."""

    def __init__(self) -> None:
        self.stack: list[Armed] = []


_shared = _Shared()
_bodies = _Bodies()
if hasattr(os, "register_at_fork"):
    # Another thread may hold the lock while this one forks.
    os.register_at_fork(after_in_child=_shared.__init__)  # type: ignore[misc]


class Armed:
    """One body that can be broken off while its ``with`` block runs.

    Args:
        token: Whatever tells the caller which body this is.
        strategy: ``signal``, ``async`` or ``event``.
    """

    def __init__(self, token: object, strategy: str) -> None:
        self.token = token
        self.strategy = strategy
        self._state = _NEW
        self._ident = 0
        self._depth = 0
        self._stack: list[Armed] = []
        self._error: BaseException | None = None
        self._carrier: type[BaseException] | None = None
        #: Whether the error has struck.
        self.delivered = False

    @property
    def error(self) -> BaseException | None:
        """What the body was told to end with, whether it did or not."""
        return self._error

    def interrupt(self, error: BaseException) -> bool:
        """Raise the error in the body; from any thread, once, without waiting.

        Before the block is entered, entering raises it.

        Args:
            error: An exception whose class can be subclassed.

        Returns:
            Whether the error is on its way: False for a body that has ended,
            was interrupted before, or cannot be broken off where it runs.
        """
        with _shared.lock:
            if self._error is not None or self._state > _ARMED:
                return False
            self._error = error
            if self._state == _NEW:
                return True
            if self.strategy == "async":
                self._carrier = _carrier(self, error)
                # A body around it ends this one too, and of two errors at once one could get lost.
                if all(outer.error is None for outer in self._stack[: self._depth]):
                    _send(self._ident, self._carrier)
        if self.strategy == "signal":
            self._kill()
            # A signal that comes just before a blocking call does not end it.
            with contextlib.suppress(RuntimeError):
                threading.Thread(
                    target=self._nudge, name="celery-lease-interrupt", daemon=True
                ).start()
        return self.strategy != "event"

    @property
    def is_sent(self) -> bool:
        """Whether an asynchronous error may be waiting for its thread."""
        return self._carrier is not None and not self.delivered

    def resend(self) -> bool:
        """Send the error again if it may have been withdrawn; False if there is none."""
        if self.is_sent:
            _send(self._ident, self._carrier)
        return self.is_sent

    def forget(self) -> None:
        """Take it that the body was left: a body around it was."""
        self._state = _LEFT

    def strike(self) -> None:
        """Raise the error if one is due; called by the signal handler in the body's thread."""
        if self._state == _ARMED and self._error is not None and not self.delivered:
            self.delivered = True
            raise self._error

    def _kill(self) -> None:
        if _SIGNAL is not None:
            with contextlib.suppress(OSError):
                signal.pthread_kill(self._ident, _SIGNAL)

    def _nudge(self) -> None:
        pause = _FIRST_NUDGE
        while self._state == _ARMED and not self.delivered:
            time.sleep(pause)
            pause = min(2 * pause, _LAST_NUDGE)
            self._kill()

    def __enter__(self) -> Self:
        try:
            self._enter()
        except BaseException:
            self._leave()
            raise
        return self

    def _enter(self) -> None:
        stack = _bodies.stack
        with _shared.lock:
            # An error that hit the first byte code of __exit__ left its body here.
            while stack and stack[-1].delivered:
                stack.pop()
            self._ident = threading.get_ident()
            self._stack = stack
            self._depth = len(stack)
            if self._error is not None:
                raise self._error
            stack.append(self)
            self._state = _ARMED

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        late: BaseException | None = None
        while self._state != _LEFT:
            try:
                self._leave()
            except BaseException as caught:  # noqa: BLE001, PERF203 - what strikes here is judged below
                # Its own error comes too late for a body that has ended; others must go on.
                if not self._owns(caught):
                    late = caught
        if late is not None:
            raise late
        if error is not None and type(error) is self._carrier and self._error is not None:
            raise self._error.with_traceback(traceback) from None

    def _leave(self) -> None:
        with _shared.lock:
            if self._state == _ARMED:
                self._state = _LEAVING
            if self._carrier is not None:
                _send(self._ident, None)
            if self._state == _LEAVING:
                for inner in self._stack[self._depth + 1 :]:
                    inner.forget()
                del self._stack[self._depth :]
                # Withdrawing took an outer body's error with it: a thread has one place for both.
                if self._carrier is not None:
                    next(filter(Armed.resend, self._stack), None)
            self._state = _LEFT

    def _owns(self, error: BaseException) -> bool:
        return error is self._error or type(error) is self._carrier


def _send(ident: int, kind: type[BaseException] | None) -> None:
    """Put an error class in the thread's place for one, or empty that place."""
    _set_async_exc(ctypes.c_ulong(ident), None if kind is None else ctypes.py_object(kind))


def _carrier(body: Armed, error: BaseException) -> type[BaseException]:
    """Make the class that turns into the error: only classes can be sent to a thread.

    The interpreter calls it without arguments, in the body's thread, at the
    moment the error strikes.
    """
    kind = type(error)

    def begin(self: BaseException) -> None:
        body.delivered = True
        kind.__init__(self, *error.args)

    def reduce(_: BaseException) -> Any:
        return error.__reduce__()

    names = {"__init__": begin, "__reduce__": reduce, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), names)


class _Handler:
    """The signal handler, one per process; forked children inherit it."""

    def __init__(self) -> None:
        self.previous: Any = None
        self.installed = False

    def install(self) -> bool:
        """Install it, once, from the main thread; False if the signal is somebody else's."""
        if _SIGNAL is None:
            return False
        current = _getsignal(_SIGNAL)
        if current is self:
            return True
        # None: set by C code, which Python cannot chain to.
        if self.installed or current is None:
            return False
        self.previous = current if callable(current) else None
        try:
            signal.signal(_SIGNAL, self)
        except ValueError:  # not the main interpreter
            return False
        self.installed = True
        return True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _is_protected(frame):
            return  # the next nudge finds the body left, or running again
        if callable(self.previous) and not isinstance(self.previous, signal.Handlers):
            self.previous(number, frame)
        for body in _bodies.stack:
            body.strike()
            if body.delivered:
                return  # it ends the bodies inside as well, see Armed.interrupt


def _is_protected(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _PROTECTED:
            return True
        frame = frame.f_back
    return False


#: Code in which no signal raises: it arms and disarms.
_PROTECTED = frozenset(
    function.__code__ for function in (Armed.__enter__, Armed.__exit__, _Handler.__call__)
)
_handler = _Handler()


def _is_greenlet() -> bool:
    greenlet: Any = sys.modules.get("greenlet")
    return greenlet is not None and greenlet.getcurrent().parent is not None


class Interrupter:
    """Arms bodies, each in the way that fits where it runs."""

    def armed(self, token: object = None) -> Armed:
        """Prepare the body that the current thread is about to run.

        Args:
            token: Whatever tells the caller which body this is.

        Returns:
            A context manager; another thread may call its ``interrupt``.
        """
        return Armed(token, self.strategy())

    def strategy(self) -> str:
        """How a body of the current thread is broken off: ``signal``, ``async`` or ``event``."""
        # A signal or an asynchronous exception would hit whichever greenlet runs then.
        if _is_greenlet():
            return "event"
        if threading.current_thread() is threading.main_thread():
            return "signal" if _handler.install() else "event"
        return "async" if _set_async_exc is not None else "event"
