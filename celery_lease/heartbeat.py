"""Keeps the leases of this process alive, and tells each holder the truth about its own.

What a stale owner must never do is act in the belief that it still owns. So a
holder believes its own clock before it believes the database. With L = 90 s,
a beat every H = 30 s and a safety of 2 s::

    database      W1 (holder)                                        W2
    ────────      ────────────                                       ──
      0  claim ── request starts at 0: trusted until 0 + 90 − 2 = 88
     30  renew ── request starts at 30: trusted until 118
     60  ✗ ────── cut off: status "unknown", no irreversible step begins
    61 … ✗ ────── retries, one or more seconds apart; still "unknown"
    118           the watcher's clock: "lost", the body is broken off
    120  lease_until, by the database's clock
    121  claim ──────────────────────────────────────────────────── token 2
    130  renew ── the network is back: no row. Lost stays lost.
    140  commit ─ with token 1: no row. Refused.

The same holds when the process was stopped (SIGSTOP), or the whole machine was
suspended: the clock goes on, so the first thing that is true after waking up
is that the lease is lost.

Invariants:

* Trust counts from the *start* of the request that confirmed it, never from
  its answer, so a slow round trip does not lengthen it.
* ``Hold.status`` is computed: nobody has to run for it to become "lost".
* Lost stays lost. An answer that comes for a lease lost or released meanwhile
  changes nothing.
* Two threads: the *talker* waits for the database, the *watcher* for nothing
  but the clock, so a connection into a black hole keeps no holder from being
  told. Each finds out when the other has died, and starts it again.
* One request per beat and process, however many leases.
* Nothing crosses a fork: the child begins with no leases and no threads.

Knows callables, threads and clocks. Must not know SQL, Celery or brokers; the
callbacks come from above and must not wait for anything, since both threads
call them.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

from celery_lease.hold import Clock, Hold, Status, now
from celery_lease.lease import LeaseRef, Renewal, Renewed
from celery_lease.logbook import line
from celery_lease.loop import Loop

__all__ = ("Heartbeat", "Hold", "Status", "now")


_TICK = 1.0
_IDLE_TICK = 5.0
_FLUSH_DELAY = 1.0
_FLUSH_RETRY_MAX = 30.0
_LEAST_TIMEOUT = 0.5


class Heartbeat:
    """Renews the leases of this process; one instance serves all of them.

    Its threads start with the first lease and are daemons: they go on in a warm
    shutdown until the last body has ended.

    Args:
        renew: Takes the renewals and a timeout in seconds, returns those still
            held (who is missing is lost), raises when it cannot tell.
        on_renewed: Told of each confirmed renewal.
        on_unknown: Told once when ownership has become uncertain, with the
            error, or None when a renewal is only overdue.
        on_lost: Told once when a lease is lost.
        on_cancel: Told once when somebody asked for the task's cancellation.
        flush: Sends, within the seconds given, what waited for a beat; called
            about a second after :meth:`wake_soon`, and again if it raises.
        idle: Called every few seconds, to close what is not used.
        clock: Seconds that never jump.
        threads: False for callers that call :meth:`talk` and :meth:`watch` themselves.
    """

    def __init__(  # noqa: PLR0913 - one callback per thing that can happen, all by keyword
        self,
        renew: Callable[[list[Renewal], float], Iterable[Renewed]],
        *,
        on_renewed: Callable[[Hold], object],
        on_unknown: Callable[[Hold, BaseException | None], object],
        on_lost: Callable[[Hold], object],
        on_cancel: Callable[[Hold], object],
        flush: Callable[[float], object] | None = None,
        idle: Callable[[], object] | None = None,
        clock: Clock = now,
        threads: bool = True,
    ) -> None:
        self.clock = clock
        self._renew = renew
        self._on_renewed = on_renewed
        self._on_unknown = on_unknown
        self._on_lost = on_lost
        self._on_cancel = on_cancel
        self._flush = flush
        self._idle = idle
        self._threads = threads
        self.reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=functools.partial(_forget, weakref.ref(self)))

    def reset(self) -> None:
        """Forget everything without touching it: in a forked child the locks may be held."""
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._holds: dict[LeaseRef, Hold] = {}
        self._talker = Loop("talker", self.talk)
        self._watcher = Loop("watcher", self.watch)
        self._failures = 0
        self._flush_at = math.inf
        self._flush_pause = _FLUSH_DELAY
        self._idle_at = self.clock() + _IDLE_TICK

    def holds(self) -> list[Hold]:
        """The leases that are being renewed."""
        with self._lock:
            return [hold for hold in self._holds.values() if not hold.released]

    def add(self, hold: Hold) -> None:
        """Renew the lease from now on."""
        with self._lock:
            self._holds[hold.ref] = hold
        self._keep_threads()
        self._wake(self._talker, hold.due_at)
        self._wake(self._watcher, hold.trusted_until)

    def discard(self, hold: Hold) -> None:
        """Renew it no more, and forget it."""
        hold.release()
        with self._lock:
            if self._holds.get(hold.ref) is hold:
                del self._holds[hold.ref]

    def wake_soon(self) -> None:
        """Ask for a flush in about a second, unless one is due already."""
        if self._flush is None or self._flush_at != math.inf:
            return
        self._flush_at = instant = self.clock() + _FLUSH_DELAY
        self._keep_threads()
        self._wake(self._talker, instant)

    def shutdown(self, *, flush: bool = True, timeout: float = 5.0) -> None:
        """Stop both threads and forget every lease; a later :meth:`add` starts anew.

        Args:
            flush: Whether to flush first what still waits.
            timeout: Seconds to wait for each thread.
        """
        loops = (self._talker, self._watcher)
        with self._starting:  # each would start the other again
            for loop in loops:
                loop.stop()
        for loop in loops:
            loop.join(timeout)
        if flush and self._flush is not None and self._flush_at != math.inf:
            self._tell(self._flush, timeout)
        self.reset()

    def talk(self) -> float:
        """Do what is due and needs the database; return seconds until the next such thing."""
        self.judge()
        self._beat()
        instant = self.clock()
        if self._flush is not None and instant >= self._flush_at:
            self._do_flush(self._flush, instant)
        if instant >= self._idle_at:
            self._idle_at = instant + _IDLE_TICK
            if self._idle is not None:
                self._tell(self._idle)
        also = min(self._flush_at, self._idle_at)
        return self._pause(self._talker, lambda hold: hold.due_at, also)

    def watch(self) -> float:
        """Look at the clock for every holder; return seconds until the next deadline."""
        self.judge()
        return self._pause(self._watcher, lambda hold: hold.trusted_until)

    def judge(self) -> None:
        """Find, without asking anybody, the leases that are lost or unknown, and tell."""
        self._keep_threads()
        instant = self.clock()
        holds = self.holds()
        self._lose([(hold, reason) for hold in holds if (reason := hold.find_loss(instant))])
        for hold in holds:
            if not hold.is_lost and hold.is_news(instant):
                self._tell(self._on_unknown, hold, None)

    def _beat(self) -> None:
        instant = self.clock()
        holds = self.holds()
        if not any(hold.due_at <= instant for hold in holds):
            return
        # Whoever is half through its interval comes along, so that leases claimed
        # at any moments soon share their beats.
        batch = [
            hold
            for hold in holds
            if hold.due_at <= instant or instant - hold.confirmed_at >= hold.interval / 2
        ]
        # Every second try leaves the checkpoints out: one that the database
        # refuses must not cost everybody's lease.
        sent = [hold.unsaved if self._failures % 2 == 0 else None for hold in batch]
        renewals = [
            Renewal(hold.ref, hold.lease_duration, details[0] if details else None)
            for hold, details in zip(batch, sent, strict=True)
        ]
        patience = min(0.8 * min(hold.interval for hold in batch), max(h.remaining for h in batch))
        started = self.clock()
        try:
            answer = self._renew(renewals, max(_LEAST_TIMEOUT, patience))
            renewed = {one.ref: one for one in answer}
        except BaseException as error:  # noqa: BLE001 - whatever it was, beating goes on
            self._note_failure(batch, error)
        else:
            self._failures = 0
            self._note_answer(batch, sent, renewed, started)

    def _note_failure(self, batch: Sequence[Hold], error: BaseException) -> None:
        self._failures += 1
        instant = self.clock()
        # The error's text may hold a statement's parameters.
        name = type(error).__name__
        facts = {"leases": len(batch), "failures": self._failures, "error": name}
        line(logging.WARNING, "heartbeat_failed", **facts)
        line(logging.DEBUG, "heartbeat_failed", exc_info=error, **facts)
        for hold in batch:
            hold.fail(instant)
            if not hold.released and not hold.is_lost and hold.is_news(instant):
                self._tell(self._on_unknown, hold, error)

    def _note_answer(
        self,
        batch: Sequence[Hold],
        sent: Sequence[list[str] | None],
        renewed: dict[LeaseRef, Renewed],
        started: float,
    ) -> None:
        self._lose([(hold, "zero_rows") for hold in batch if hold.ref not in renewed])
        for hold, details in zip(batch, sent, strict=True):
            one = renewed.get(hold.ref)
            if one is None or not hold.confirm(started, one, details):
                continue
            self._tell(self._on_renewed, hold)
            if one.cancel_reason is not None and hold.cancel_reason is None:
                hold.cancel_reason = one.cancel_reason
                self._tell(self._on_cancel, hold)

    def _lose(self, losses: Iterable[tuple[Hold, str]]) -> None:
        """Mark all first, and only then call anybody: a callback may take its time."""
        lost = [hold for hold, reason in losses if not hold.released and hold.lose(reason)]
        with self._lock:
            for hold in lost:
                if self._holds.get(hold.ref) is hold:
                    del self._holds[hold.ref]
        for hold in lost:
            self._tell(self._on_lost, hold)

    def _do_flush(self, flush: Callable[[float], object], instant: float) -> None:
        self._flush_at = math.inf
        next_beat = min((hold.due_at for hold in self.holds()), default=math.inf)
        timeout = max(_LEAST_TIMEOUT, min(_IDLE_TICK, next_beat - instant))
        if self._tell(flush, timeout):
            self._flush_pause = _FLUSH_DELAY
        else:
            self._flush_pause = min(2 * self._flush_pause, _FLUSH_RETRY_MAX)
            self._flush_at = self.clock() + self._flush_pause

    def _tell(self, callback: Callable[..., object], *args: object) -> bool:
        try:
            callback(*args)
        except BaseException:  # noqa: BLE001 - whatever it was, beating goes on
            name = getattr(callback, "__name__", callback)
            line(logging.ERROR, "heartbeat_callback_failed", exc_info=True, callback=name)
            return False
        return True

    def _pause(self, loop: Loop, due: Callable[[Hold], float], also: float = math.inf) -> float:
        # Under the lock, so that a lease added meanwhile is either seen here or wakes the loop.
        with self._lock:
            instant = self.clock()
            tick = _TICK if self._holds else _IDLE_TICK
            instants = [due(hold) for hold in self._holds.values() if not hold.released]
            loop.wakes_at = min([instant + tick, also, *instants])
            return loop.wakes_at - instant

    def _wake(self, loop: Loop, instant: float) -> None:
        with self._lock:
            sleeps_too_long = instant < loop.wakes_at
        if sleeps_too_long:
            loop.wake()

    def _keep_threads(self) -> None:
        """Start whichever thread does not run; without both nobody may trust a lease."""
        if not self._threads or (self._talker.is_alive() and self._watcher.is_alive()):
            return
        try:
            with self._starting:
                for loop in (self._talker, self._watcher):
                    if not loop.is_alive():
                        loop.start()
        except Exception:  # noqa: BLE001 - no thread, no memory, an interpreter that ends
            line(logging.CRITICAL, "heartbeat_not_started", exc_info=True)
            self._lose([(hold, "no_heartbeat") for hold in self.holds()])


def _forget(reference: weakref.ref[Heartbeat]) -> None:
    heartbeat = reference()
    if heartbeat is not None:
        heartbeat.reset()
