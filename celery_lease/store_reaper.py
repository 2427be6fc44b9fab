"""The store's second half: what everybody but an owner asks of it.

A reaper touches rows of its own namespace only, in bounded batches, and passes
over what somebody else has locked: an owner who is just finishing a task is
neither waited for nor disturbed. Parents of dead processes, operators and those
who announce an outcome come here too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from celery_lease.database import Database
from celery_lease.lease import (
    Dispatch,
    HistoryEntry,
    LeaseRef,
    LeaseRow,
    ReaperTurn,
    Reclaimed,
    State,
)
from celery_lease.rows import history_entry, lease_row, reclaimed, ref_params

__all__ = ("ReaperStore",)

_TIMEOUT = 10.0


class ReaperStore:
    """Reclaims, dispatches, announces, cancels, purges and reads.

    Args:
        database: Where the rows are.
        namespace: Which app and broker they belong to.
    """

    def __init__(self, database: Database, namespace: str) -> None:
        self.database = database
        self.namespace = namespace

    def reclaim(self, *, limit: int, timeout: float = _TIMEOUT) -> list[Reclaimed]:
        """Take expired leases away, those that ended first before the others.

        Each row waits then, with a new dispatch number; or it is failed, if it
        may not crash again, or cancelled, if somebody asked for that. An expiry
        that an outage of the database explains is not charged.

        Args:
            limit: How many rows at most.
            timeout: Seconds for the statement.
        """
        params = {"namespace": self.namespace, "limit": limit}
        return [reclaimed(row) for row in self.database.run("reclaim", params, timeout=timeout)]

    def take_due(self, *, limit: int, retry_in: float, timeout: float = _TIMEOUT) -> list[Dispatch]:
        """Take rows whose message, or whose outcome, has to be sent now.

        One reaper gets a row. If it dies before it reports, the row is due again.

        Args:
            limit: How many rows at most.
            retry_in: Seconds after which somebody else may take the row.
            timeout: Seconds for the statement.
        """
        params = {"namespace": self.namespace, "limit": limit, "retry_in": float(retry_in)}
        rows = self.database.run("take_due", params, timeout=timeout)
        return [Dispatch(lease_row(row, self.database.dialect)) for row in rows]

    def take_one(
        self, task_id: str, *, retry_in: float, timeout: float = _TIMEOUT
    ) -> LeaseRow | None:
        """Take one row if it is due, as :meth:`take_due` would; None if it is not, or not any more.

        Args:
            task_id: Its id.
            retry_in: Seconds after which somebody else may take the row.
            timeout: Seconds for the statement.
        """
        params = {"namespace": self.namespace, "task_id": task_id, "retry_in": float(retry_in)}
        rows = self.database.run("take_one", params, timeout=timeout)
        return lease_row(rows[0], self.database.dialect) if rows else None

    def dispatched(
        self, sent: Sequence[tuple[str, int, float]], *, timeout: float = _TIMEOUT
    ) -> None:
        """Report messages that were sent.

        Args:
            sent: Task id, dispatch number, and seconds after which the message
                is to be sent again if nobody has claimed it.
            timeout: Seconds for the statement.
        """
        if sent:
            rows = [(task_id, number, float(again)) for task_id, number, again in sent]
            params = self.database.dialect.batch("sent", rows)
            self.database.run("dispatched", params, timeout=timeout)

    def reaper_turn(
        self, owner: str, *, interval: float, saw_outage: bool, timeout: float = _TIMEOUT
    ) -> ReaperTurn:
        """Ask for the namespace's next pass; all reapers together make one per interval.

        Args:
            owner: Who asks.
            interval: Seconds between two passes.
            saw_outage: The caller could not reach the database since it last did.
                What expired since the last pass is then not charged, nor is what
                expires in the next lease duration.
            timeout: Seconds for the statement.
        """
        params = {
            "namespace": self.namespace,
            "owner": owner,
            "interval": float(interval),
            "saw_outage": saw_outage,
        }
        granted, grace, next_in = self.database.run("reaper_turn", params, timeout=timeout)[0]
        if not granted:
            return ReaperTurn(granted=False, next_in=min(max(float(next_in), 0.0), interval))
        return ReaperTurn(granted=True, next_in=interval, grace=bool(grace))

    def give_up(
        self, task_id: str, *, announce_in: float | None = None, timeout: float = _TIMEOUT
    ) -> LeaseRow | None:
        """End a task whose lease is over and that may not be tried again.

        Args:
            task_id: Its id.
            announce_in: Seconds in which the caller announces the failure; None:
                as long as the task's lease lasts.
            timeout: Seconds for the statement.

        Returns:
            The failed row, which the caller announces; None if the row is not
            so, or no longer.
        """
        params = {
            "task_id": task_id,
            "announce_in": None if announce_in is None else float(announce_in),
        }
        if not self.database.run("give_up", params, timeout=timeout):
            return None
        return self.find(task_id, timeout=timeout)

    def cancel(self, task_id: str, reason: str = "", *, timeout: float = _TIMEOUT) -> State | None:
        """Cancel a waiting task; ask the owner of a running one to stop.

        Returns:
            The state now: CANCELLED, RUNNING, or the terminal state that it had
            before; None if there is no row.
        """
        params = {"task_id": task_id, "reason": reason}
        rows = self.database.run("cancel", params, timeout=timeout)
        return State(rows[0][0]) if rows else None

    def purge(self, *, older_than: float, limit: int, timeout: float = _TIMEOUT) -> int:
        """Forget finished, announced tasks and their history.

        Args:
            older_than: Seconds since they were finished.
            limit: How many at most.
            timeout: Seconds for the statement.

        Returns:
            How many were forgotten.
        """
        params = {
            "namespace": self.namespace,
            "older_than": float(older_than),
            "limit": limit,
        }
        return len(self.database.run("purge", params, timeout=timeout))

    def rows(
        self,
        *,
        state: State | None = None,
        task_name: str | None = None,
        owner: str | None = None,
        expired: bool = False,
        limit: int = 100,
        timeout: float = _TIMEOUT,
    ) -> list[LeaseRow]:
        """Return rows of the namespace, the newest first.

        Args:
            state: Only these.
            task_name: Only this task's.
            owner: Only those whose owner id begins so.
            expired: Only running ones whose lease is over.
            limit: How many at most.
            timeout: Seconds for the statement.
        """
        params: dict[str, Any] = {
            "namespace": self.namespace,
            "state": state.value if state else None,
            "task_name": task_name,
            "owner": owner,
            "expired": expired,
            "limit": limit,
        }
        found = self.database.run("rows", params, timeout=timeout)
        return [lease_row(row, self.database.dialect) for row in found]

    def crashed(self, task_id: str, owner_id: str, *, timeout: float = _TIMEOUT) -> LeaseRow | None:
        """Release, charged, what a dead process held; its parent knows no token.

        If the process ended the task and died before it announced the outcome,
        somebody else may announce it from now on.

        Returns:
            The row, or None if this owner has nothing to do with it.
        """
        params = {
            "task_id": task_id,
            "owner_id": owner_id,
            "cause": "crash",
            "charge": True,
            "redispatch": True,
            "due_in": 0.0,
            **dict.fromkeys(("payload", "message", "retries", "details")),
        }
        for script in ("crash", "announce_now"):
            if self.database.run(script, params, timeout=timeout):
                return self.find(task_id, timeout=timeout)
        return None

    def announce(self, refs: Sequence[LeaseRef], *, timeout: float = _TIMEOUT) -> None:
        """Mark outcomes as announced: what follows from them has been sent.

        Owners are not compared: who announces may not be who finished.
        """
        if refs:
            params = self._announcements(refs)
            self.database.run("announce", params, timeout=timeout)

    def find(self, task_id: str, *, timeout: float = _TIMEOUT) -> LeaseRow | None:
        """Return the row of a task, of whatever namespace."""
        rows = self.database.run("find", {"task_id": task_id}, timeout=timeout)
        return lease_row(rows[0], self.database.dialect) if rows else None

    def history(self, task_id: str, *, timeout: float = _TIMEOUT) -> list[HistoryEntry]:
        """Return what happened to a task, oldest first."""
        rows = self.database.run("history", {"task_id": task_id}, timeout=timeout)
        return [history_entry(row, self.database.dialect) for row in rows]

    def note(
        self,
        ref: LeaseRef,
        event: str,
        cause: str | None = None,
        facts: Mapping[str, object] | None = None,
        *,
        timeout: float = _TIMEOUT,
    ) -> None:
        """Add one line to a task's history.

        Args:
            ref: The grant it is about.
            event: What happened, one word.
            cause: Why, one word.
            facts: More of it, for JSON; never arguments or results.
            timeout: Seconds for the statement.
        """
        params = {
            **ref_params(ref),
            "event": event,
            "cause": cause,
            "facts": json.dumps(facts) if facts is not None else None,
        }
        self.database.run("note", params, timeout=timeout)

    def _announcements(self, refs: Sequence[LeaseRef]) -> dict[str, Any]:
        done = [(ref.task_id, ref.fencing_token) for ref in refs]
        return self.database.dialect.batch("done", done)
