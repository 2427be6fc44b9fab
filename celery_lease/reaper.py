"""The reaper: takes expired leases away and sends what is due.

It may run in every worker at once and as a process of its own; it needs
neither the queue's workers nor the task's code. What it may do to a row is
decided by single statements in the store, which repeat state, token and
expiry, so a reaper that is late, stopped or killed at any line does no harm:

* killed before the reclaim: the next pass, of any reaper, does it;
* killed between reclaim and publish: the row stays due and is sent again;
* killed between publish and the mark: the message is sent twice, and the
  claim turns one of the two away.

The fleet's reapers share one pass per interval (the store grants the turn).
After a gap the first pass only looks, so that owners are heard again first,
and an outage that this reaper has seen is recorded, so that leases which
expired in it are not counted as crashes.

Knows the store and a ``publish`` callable; knows nothing of Celery.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_lease.exceptions import DatabaseUnavailable
from celery_lease.lease import LeaseRef
from celery_lease.logbook import line

if TYPE_CHECKING:
    from celery_lease.lease import LeaseRow, ReaperTurn, Reclaimed
    from celery_lease.store import LeaseStore

__all__ = ("Pass", "Reaper", "resend_in")


_BATCH = 100
#: Rows to send are taken in smaller numbers: whoever takes them has to send them in time.
_SEND_BATCH = 20
#: Longest time between two sends of a message that nobody claims.
_LONGEST_RESEND = 3600.0


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass did."""

    granted: bool = False
    reclaimed: int = 0
    sent: int = 0
    announced: int = 0
    failed: int = 0
    #: Seconds until another pass makes sense.
    next_in: float = 0.0
    #: It only looked: the first pass after a gap takes no lease away.
    grace: bool = False


def resend_in(row: LeaseRow) -> float:
    """Seconds until an unclaimed message is sent again: doubled each time, an hour at most."""
    exponent = min(max(row.dispatches - 1, 0), 12)
    return float(min(max(row.lease_duration, 30.0) * 2**exponent, _LONGEST_RESEND))


class Reaper:
    """One reaper, run by one thread.

    Args:
        store: The leases of one namespace.
        publish: Sends one row; returns ``sent``, ``announced`` or ``kept``.
        owner: Who this reaper is, for the record.
        interval: Seconds between two passes of the whole fleet.
        retention: Seconds after which finished rows are purged.
        on_reclaimed: Told of each lease that was taken away.
    """

    def __init__(
        self,
        store: LeaseStore,
        *,
        publish: Callable[[LeaseRow], str],
        owner: str,
        interval: float,
        retention: float,
        on_reclaimed: Callable[[Reclaimed], None] = lambda _: None,
    ) -> None:
        self.store = store
        self.publish = publish
        self.owner = owner
        self.interval = interval
        self.retention = retention
        self.on_reclaimed = on_reclaimed
        self.saw_outage = False
        self._passes = 0

    def run(self, stop: threading.Event) -> None:
        """Make passes until told to stop; no error ends it."""
        while not stop.is_set():
            try:
                wait = self.pass_once().next_in
            except Exception:  # noqa: BLE001 - told, and the next pass is made
                line(logging.ERROR, "reaper_pass_failed", exc_info=True, owner=self.owner)
                wait = self.interval
            stop.wait(wait * random.uniform(1.0, 1.1))  # noqa: S311 - spreads the fleet

    def pass_once(self) -> Pass:
        """Make one pass if it is this reaper's turn.

        Returns:
            What was done. A database that cannot be reached is remembered as
            an outage and told by ``granted=False``.
        """
        timeout = max(self.interval, 1.0)
        try:
            turn = self.store.reaper_turn(
                self.owner, interval=self.interval, saw_outage=self.saw_outage, timeout=timeout
            )
            self.saw_outage = False
            if not turn.granted:
                return Pass(next_in=max(turn.next_in, 0.05))
            return self._granted(turn, timeout)
        except DatabaseUnavailable as exc:
            self.saw_outage = True
            reason = "database_unavailable"
            line(logging.WARNING, "reaper_waits", reason=reason, detail=exc.detail)
            return Pass(next_in=min(self.interval, 1.0))

    def _granted(self, turn: ReaperTurn, timeout: float) -> Pass:
        reclaimed = 0 if turn.grace else self._reclaim(timeout)
        sent, announced, failed = self._send_due(timeout)
        self._passes += 1
        if self._passes % 100 == 1:
            self.store.purge(older_than=self.retention, limit=1000, timeout=timeout)
        next_in = max(turn.next_in, 0.05)
        return Pass(True, reclaimed, sent, announced, failed, next_in, turn.grace)

    def _reclaim(self, timeout: float) -> int:
        total = 0
        while True:
            batch = self.store.reclaim(limit=_BATCH, timeout=timeout)
            total += len(batch)
            for entry in batch:
                self._tell(entry)
            if len(batch) < _BATCH:
                return total

    def _tell(self, entry: Reclaimed) -> None:
        try:
            self.on_reclaimed(entry)
        except Exception:  # noqa: BLE001 - told; the lease is taken back in any case
            line(logging.ERROR, "reclaim_not_told", exc_info=True, job=entry.task_id)

    def _send_due(self, timeout: float) -> tuple[int, int, int]:
        sent = announced = failed = 0
        retry_in = max(2 * self.interval, 2.0)
        while True:
            taken = time.monotonic()
            batch = self.store.take_due(limit=_SEND_BATCH, retry_in=retry_in, timeout=timeout)
            for due in batch:
                if time.monotonic() > taken + retry_in / 2:
                    # A slow broker: what is left is soon another reaper's, or this one's again.
                    return sent, announced, failed
                outcome = self.send(due.row, timeout=timeout)
                sent += outcome == "sent"
                announced += outcome == "announced"
                failed += outcome == "failed"
            if len(batch) < _SEND_BATCH or (batch and failed == len(batch)):
                return sent, announced, failed

    def send(self, row: LeaseRow, *, timeout: float) -> str:
        """Publish one due row and record that it was sent.

        Returns:
            What ``publish`` said, or ``failed`` if it raised: the row stays due.
        """
        try:
            outcome = self.publish(row)
        except Exception:  # noqa: BLE001 - told, and the row stays due
            facts = {"job": row.task_id, "dispatch": row.dispatch}
            line(logging.ERROR, "dispatch_failed", exc_info=True, **facts)
            return "failed"
        if outcome == "announced":
            ref = LeaseRef(row.task_id, row.owner_id or "", row.fencing_token)
            self.store.announce([ref], timeout=timeout)
        else:
            self.store.dispatched([(row.task_id, row.dispatch, resend_in(row))], timeout=timeout)
        facts = {"job": row.task_id, "dispatch": row.dispatch, "outcome": outcome}
        line(logging.INFO, "job_dispatched", **facts)
        return outcome
