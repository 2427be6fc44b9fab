"""The lease store: one method, one statement, one verdict.

The life of a stale owner, and where each statement stops it:

.. code-block:: text

    time ──────────────────────────────────────────────────────────────▶
    W1  claim (token 1) ── renew ── renew ── × paused, cut off …
                                             │ lease_until passes
    reaper                                   └─ reclaim: queued, owner gone
    W2                                            claim (token 2) ── commit
    W1                                      … wakes: renew   → not in the answer
                                                     commit  → False
                                                     release → None

Each statement of an owner names the task, the owner *and* the token, and wants
the row running and its lease not over, by the database's clock. Zero rows is a
verdict, not an error, and asking again does not change it.

Every statement may be repeated, because a connection may break after the
database has done what was asked and before it could say so:

- a claim by the same owner id returns the grant it got before;
- a commit, a failure or a release of the same grant is recognised as done;
- the others find the row as the first run left it, and change nothing.

The token only grows while the row exists. A row that was purged is forgotten,
token and all: a copy of its message that comes later begins at 1 again. So the
retention must be longer than any copy lives.

Knows values and statements, nothing of Celery, threads or clocks of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from celery_lease.database import Database
from celery_lease.exceptions import SchemaOutdated
from celery_lease.lease import (
    Claim,
    ClaimRequest,
    Encoded,
    LeaseRef,
    LeaseRow,
    Message,
    Renewal,
    Renewed,
    State,
    Verdict,
)
from celery_lease.rows import claim_params, ref_params, renewed
from celery_lease.schema import SCHEMA_VERSION
from celery_lease.store_reaper import ReaperStore
from celery_lease.verdicts import AGAIN, refusal

__all__ = ("LeaseStore", "check_schema")

_TIMEOUT = 10.0
_CLAIM_RETRIES = 5


def check_schema(database: Database, *, timeout: float = _TIMEOUT) -> None:
    """Refuse to work with tables of another version.

    Raises:
        SchemaOutdated: The tables are missing, older or newer.
        DatabaseUnavailable: The database did not answer.
    """
    found = database.version(timeout=timeout)
    if found != SCHEMA_VERSION:
        raise SchemaOutdated(found, SCHEMA_VERSION)


class LeaseStore(ReaperStore):
    """Leases in one namespace of a database.

    Args:
        database: Where the rows are.
        namespace: Which app and broker they belong to.
    """

    def claim(
        self,
        request: ClaimRequest,
        *,
        announced: Sequence[LeaseRef] = (),
        timeout: float = _TIMEOUT,
    ) -> Claim:
        """Take the lease of a task, or learn why not.

        Taken is what does not exist, waits, or has an expired lease; and what
        this very owner holds already (it asks again), which changes no token.

        Args:
            request: Who asks, for what.
            announced: Outcomes that have been announced; marked on the way.
            timeout: Seconds for each statement.
        """
        params = claim_params(request, self.namespace)
        own = [ref for ref in announced if ref.task_id == request.task_id]
        if own:
            # One statement cannot change a row twice, and the claim has to see the mark.
            self.announce(own, timeout=timeout)
        script = self._announcing(self._first_claim(request), params, announced, without=own)
        rows = self.database.run(script, params, timeout=timeout)
        for asked in range(_CLAIM_RETRIES):
            if not rows and (asked or script.startswith("claim_new")):
                rows = self.database.run("claim", params, timeout=timeout)
            if rows:
                return self._granted(request, rows[0])
            row = self.find(request.task_id, timeout=timeout)
            verdict = refusal(row, request)
            if verdict is not AGAIN:
                return self._refused(row, verdict, request, timeout)
        return Claim(Verdict.HELD, row=row)

    def renew(
        self,
        renewals: Sequence[Renewal],
        *,
        announced: Sequence[LeaseRef] = (),
        timeout: float = _TIMEOUT,
    ) -> list[Renewed]:
        """Renew leases, all in one statement; who is missing in the answer is lost.

        Args:
            renewals: Leases of this process.
            announced: Outcomes that have been announced; marked on the way.
            timeout: Seconds for the statement.
        """
        if not renewals:
            self.announce(announced, timeout=timeout)
            return []
        beats = [
            (
                renewal.ref.task_id,
                renewal.ref.owner_id,
                renewal.ref.fencing_token,
                float(renewal.lease_duration),
                renewal.details,
            )
            for renewal in renewals
        ]
        params = self.database.dialect.batch("beat", beats)
        held = {renewal.ref.task_id for renewal in renewals}
        own = [ref for ref in announced if ref.task_id in held]
        if own:
            self.announce(own, timeout=timeout)
        script = self._announcing("renew", params, announced, without=own)
        rows = self.database.run(script, params, timeout=timeout)
        return [renewed(row, self.database.dialect) for row in rows]

    def commit(
        self,
        ref: LeaseRef,
        result: Encoded | None,
        *,
        announced: bool = False,
        announce_in: float,
        timeout: float = _TIMEOUT,
    ) -> bool:
        """Store the result and end the task, if this grant still holds it.

        Args:
            ref: The grant.
            result: What the task returned; None keeps no result in the row.
            announced: Nothing needs to be sent after this.
            announce_in: Seconds in which the caller announces the outcome;
                after them somebody else may.
            timeout: Seconds for the statement.

        Returns:
            False if the result was refused.
        """
        params = {
            **ref_params(ref),
            "announce_in": float(announce_in),
            "result": result.data if result else None,
            "result_type": result.content_type if result else None,
            "result_encoding": result.content_encoding if result else None,
        }
        script = "commit_announced" if announced else "commit"
        return self._end(script, params, State.SUCCEEDED, timeout)

    def fail(
        self,
        ref: LeaseRef,
        error: str,
        *,
        announced: bool = False,
        announce_in: float,
        timeout: float = _TIMEOUT,
    ) -> bool:
        """Store the error and end the task, if this grant still holds it; see :meth:`commit`."""
        params = {**ref_params(ref), "announce_in": float(announce_in), "error": error}
        script = "fail_announced" if announced else "fail"
        return self._end(script, params, State.FAILED, timeout)

    def release(  # noqa: PLR0913 - each is one fact of the row, none belongs to another
        self,
        ref: LeaseRef,
        *,
        cause: str,
        charge: bool,
        dispatch: bool,
        due_in: float = 0.0,
        message: Message | None = None,
        retries: int | None = None,
        details: str | None = None,
        timeout: float = _TIMEOUT,
    ) -> int | None:
        """Give the lease back before the task is done.

        The row waits then; or it is cancelled, if somebody asked for that; or
        failed, if this was the last crash that it may have.

        Args:
            ref: The grant.
            cause: Why, for the history.
            charge: Whether it counts as a crash.
            dispatch: Whether a new message is to be sent, which makes all
                copies so far superseded.
            due_in: Seconds until a reaper sends it, if nobody else has.
            message: The message to send from now on; None: as before.
            retries: Celery's count in that message; None: as before.
            details: The checkpoint; None: as before.
            timeout: Seconds for the statement.

        Returns:
            The dispatch number that a message has to carry now, or None if
            this grant does not hold the task.
        """
        params = {
            **ref_params(ref),
            "cause": cause,
            "charge": charge,
            "redispatch": dispatch,
            "due_in": float(due_in),
            "payload": message.body if message else None,
            "message": message.envelope if message else None,
            "retries": retries,
            "details": details,
        }
        rows = self.database.run("release", params, timeout=timeout)
        if rows:
            return int(rows[0][0])
        before = self.database.run("released_before", params, timeout=timeout)
        return int(json.loads(before[-1][0])["dispatch"]) if before else None

    def replaced(
        self, task_id: str, dispatch: int, *, ends: bool, timeout: float = _TIMEOUT
    ) -> None:
        """Report that another task was sent in place of one that was released for it.

        Args:
            task_id: The id that both have.
            dispatch: What the release returned.
            ends: The other has no lease, and so will not come here.
            timeout: Seconds for the statement.
        """
        params = {"task_id": task_id, "dispatch": dispatch}
        script = "replaced_for_good" if ends else "replaced"
        self.database.run(script, params, timeout=timeout)

    def _end(self, script: str, params: dict[str, Any], end: State, timeout: float) -> bool:
        if self.database.run(script, params, timeout=timeout):
            return True
        # Refused, or done by a first run whose answer was lost: the token decides.
        found = self.database.run("outcome_of", params, timeout=timeout)
        return bool(found) and found[0][0] == end.value

    def _first_claim(self, request: ClaimRequest) -> str:
        """Return the statement to begin with, by what the message makes likely.

        A message that was never sent again mostly belongs to a task without a
        row; that is inserted by a statement that is quick to plan. Whatever the
        guess, the whole claim decides.
        """
        likely_new = request.dispatch == 0 and request.retries == 0
        return "claim_new" if likely_new and "claim_new" in self.database.scripts else "claim"

    def _granted(self, request: ClaimRequest, values: tuple[Any, ...]) -> Claim:
        token, attempt, crashes, lease_until, details = values
        return Claim(
            Verdict.GRANTED,
            ref=LeaseRef(request.task_id, request.owner_id, token),
            attempt=attempt,
            crashes=crashes,
            lease_until=self.database.dialect.instant(lease_until),
            details=details,
        )

    def _refused(
        self, row: LeaseRow | None, verdict: Verdict, request: ClaimRequest, timeout: float
    ) -> Claim:
        if row is None or not row.state.terminal or row.announced_at is not None:
            return Claim(verdict, row=row)
        params = {"task_id": request.task_id, "announce_in": float(request.lease_duration)}
        if self.database.run("grant_announcement", params, timeout=timeout):
            return Claim(verdict, row=row, replay=True)
        return Claim(Verdict.HELD, row=row)

    def _announcing(
        self,
        script: str,
        params: dict[str, Any],
        announced: Sequence[LeaseRef],
        *,
        without: Sequence[LeaseRef],
    ) -> str:
        riding = [ref for ref in announced if ref not in without] if without else announced
        if not riding:
            return script
        params.update(self._announcements(riding))
        return f"{script}_announcing"
