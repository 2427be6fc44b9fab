"""The way in: claims a lease for one delivered message, or says why it is refused.

Every delivery goes through the claim; ``redelivered`` flags are evidence of
nothing. A refusal is an exception that Celery takes as an ``Ignore`` (nothing
is stored, nobody is called), except where the row holds an outcome that nobody
has told yet: then that outcome is given to Celery as if the body had just
ended.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from celery import states
from celery.exceptions import ImproperlyConfigured, SoftTimeLimitExceeded

from celery_lease import outcome, report
from celery_lease.exceptions import (
    AttemptsExhausted,
    DatabaseUnavailable,
    LeaseNotGranted,
    SchemaOutdated,
)
from celery_lease.lease import Claim, ClaimRequest, LeaseRef, LeaseRow, State, Verdict
from celery_lease.message import capture, dispatch_number, successor
from celery_lease.runtime import new_owner

if TYPE_CHECKING:
    from celery_lease.config import Settings
    from celery_lease.lease import Message
    from celery_lease.runtime import Runtime

__all__ = ("Admission", "ignores_result")

#: Longest wait for an answer to a claim, in seconds.
_CLAIM_TIMEOUT = 10.0


def ignores_result(task: Any, request: Any) -> bool:
    """Whether Celery stores no result for this execution."""
    chosen = request.__dict__.get("ignore_result")
    return bool(task.ignore_result if chosen is None else chosen)


class Admission:
    """One delivered message on its way to its body.

    Args:
        task: The task.
        request: Its request, of this execution.
        settings: Its settings.
        runtime: The process's leases.
    """

    def __init__(self, task: Any, request: Any, settings: Settings, runtime: Runtime) -> None:
        self.task = task
        self.settings = settings
        self.runtime = runtime
        self.request = request
        properties = request.properties or {}
        self.delivered = properties.get("lease") or {}
        self.tag = properties.get("delivery_tag")
        self.sends_events = bool(self.delivered.get("events"))
        self.owner_id = self.delivered.get("owner") or new_owner(request.hostname or "local")
        # Trust counts from the start of a request: half a lease still leaves half of it.
        self.timeout = min(settings.duration / 2, _CLAIM_TIMEOUT)
        #: Set when an outcome was given to Celery: what its signal will mark as announced.
        self.outcome_ref: LeaseRef | None = None

    def claim(self) -> Claim:
        """Ask for the lease.

        Raises:
            LeaseNotGranted: ``unavailable``: the database gave no answer.
        """
        announced = self.runtime.riders(self.request.id)
        try:
            return self.runtime.store.claim(
                self._wanted(), announced=announced, timeout=self.timeout
            )
        except (
            DatabaseUnavailable,
            SchemaOutdated,
            ImproperlyConfigured,
            # The claim may have been granted: the postponed copy asks as the same owner.
            SoftTimeLimitExceeded,
        ) as exc:
            self.runtime.give_back(announced)
            report.line(logging.ERROR, "claim_failed", job=self.request.id, error=str(exc))
            raise self.not_granted("unavailable", None) from exc
        except BaseException:
            self.runtime.give_back(announced)
            raise

    def next_message(
        self, args: Any, kwargs: Any, options: dict[str, Any], due_in: float
    ) -> Message | None:
        """The row's copy of a retry, made before it is published."""
        if self.settings.payload == "never":
            return None
        eta = datetime.now(timezone.utc) + timedelta(seconds=due_in) if due_in else None
        headers = {
            "retries": options.get("retries") or 0,
            "eta": eta.isoformat() if eta else None,
        }
        return successor(
            self.request,
            self.delivered,
            self._serializer,
            args=args,
            kwargs=kwargs,
            headers=headers,
        )

    @property
    def _serializer(self) -> str:
        return str(self.task.serializer or self.task.app.conf.task_serializer)

    def _wanted(self) -> ClaimRequest:
        request, task = self.request, self.task
        message = None
        if self.settings.payload != "never":
            message = capture(request, self.delivered, self._serializer)
        return ClaimRequest(
            task_id=request.id,
            task_name=task.name,
            owner_id=self.owner_id,
            lease_duration=self.settings.duration,
            max_attempts=self.settings.max_attempts,
            dispatch=dispatch_number(self.delivered.get("headers") or request.headers),
            retries=request.retries or 0,
            message=message,
            delivery_tag=self.tag,
            keep_payload=self.settings.payload == "keep",
        )

    def refused(self, claim: Claim) -> Any:
        """Settle a claim that was not granted.

        Returns:
            The stored result, where this copy is the one to tell it.

        Raises:
            LeaseNotGranted: This copy has nothing to do.
            AttemptsExhausted: This copy is the one that gives the task up.
            Exception: The stored error, where this copy is the one to tell it.
        """
        row = claim.row
        if claim.verdict is Verdict.EXHAUSTED:
            return self._give_up(row)
        if claim.replay and row is not None:
            return self._replay(claim.verdict, row)
        final = claim.verdict not in (Verdict.HELD, Verdict.EXHAUSTED) or self._is_spare(row)
        raise self.not_granted(claim.verdict.value, row, final=final)

    def _is_spare(self, row: LeaseRow | None) -> bool:
        """Whether the broker may drop this copy though an owner lives: the owner's is another.

        Only where the row can bring the task back by itself. A copy with the
        owner's delivery tag *is* the owner's, for a broker that has one entry
        per message.
        """
        if row is None or row.state is State.QUEUED or row.payload is None:
            return False
        return None not in (self.tag, row.delivery_tag) and str(self.tag) != row.delivery_tag

    def _replay(self, verdict: Verdict, row: LeaseRow) -> Any:
        """Nobody has told this outcome yet: give it to Celery as if the body had just ended."""
        ref = LeaseRef(row.task_id, self.owner_id, row.fencing_token)
        if verdict is Verdict.CANCELLED:
            self.task.backend.mark_as_revoked(
                row.task_id, row.cancel_reason or "cancelled", request=self.request
            )
            self.runtime.announce_later(ref)
            raise self.not_granted("cancelled", row, final=True)
        self.outcome_ref = ref
        report.line(logging.INFO, "job_replayed", job=row.task_id, token=row.fencing_token)
        if verdict is Verdict.FAILED:
            raise outcome.rebuild_error(self.task, row)
        return outcome.decode(self.task, row)

    def _give_up(self, row: LeaseRow | None) -> Any:
        try:
            given_up = self.runtime.store.give_up(
                self.request.id, announce_in=self.settings.duration, timeout=self.timeout
            )
        except DatabaseUnavailable as exc:
            raise self.not_granted("unavailable", row) from exc
        if given_up is None:
            raise self.not_granted("held", row)
        self.outcome_ref = LeaseRef(given_up.task_id, self.owner_id, given_up.fencing_token)
        raise AttemptsExhausted(given_up.task_id, given_up.crashes, given_up.max_attempts)

    def not_granted(
        self, reason: str, row: LeaseRow | None, *, final: bool = False
    ) -> LeaseNotGranted:
        """Report a refusal and make its exception."""
        owner = row.owner_id if row else None
        until = row.lease_until.isoformat() if row and row.lease_until else None
        report.turned_away(self.request.id, reason=reason, owner=owner, lease_until=until)
        if self.sends_events:
            report.send_event(self.task, "task-lease-skipped", reason=reason, lease_owner=owner)
        return LeaseNotGranted(self.request.id, owner, until, reason, final)

    def tell_started(self, claim: Claim) -> None:
        """Report a granted claim, and store STARTED where Celery would have."""
        ref, until = claim.ref, claim.lease_until
        if ref is None or until is None:
            return
        report.claimed(self.task, ref, attempt=claim.attempt, lease_until=until)
        if self.sends_events:
            report.send_event(
                self.task,
                "task-leased",
                lease_token=ref.fencing_token,
                lease_owner=ref.owner_id,
                lease_until=until.timestamp(),
                lease_attempt=claim.attempt,
            )
        if self.task.tracks_started and not ignores_result(self.task, self.request):
            meta = {"pid": self.runtime.pid, "hostname": self.request.hostname}
            try:
                self.task.backend.store_result(
                    self.request.id, meta, states.STARTED, request=self.request
                )
            except Exception as exc:  # noqa: BLE001 - a courtesy, not worth the task
                report.line(logging.WARNING, "started_not_stored", error=type(exc).__name__)
