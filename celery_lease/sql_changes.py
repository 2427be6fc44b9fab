"""Pieces of the statements that take, give back and reclaim a lease.

PostgreSQL puts them into one statement with several ``WITH`` parts, SQLite runs
them one after the other in one transaction. Each takes the name under which
the row *before* the change can be read.
"""

from __future__ import annotations

from celery_lease.sql_phrases import Phrases

__all__ = ("Changes",)

_TAKEN = (
    "task_id, namespace, task_name, state, owner_id, lease_until, fencing_token, heartbeat_at,"
    " attempt, retries, max_attempts, lease_duration, dispatch, payload, message, delivery_tag,"
    " labels, keep_payload, created_at, claimed_at"
)


class Changes:
    """The pieces in one database's SQL."""

    def __init__(self, phrases: Phrases) -> None:
        self.phrases = phrases

    # Claim

    def claim_insert(self, token: str, attempt: str) -> tuple[str, str]:
        """Return the head of the insertion and its values."""
        now = self.phrases.now
        values = (
            ":task_id, :namespace, :task_name, 'running', :owner_id,"
            f" {self.phrases.dialect.later(':lease_duration')}, {token}, {now}, {attempt},"
            # The row numbers its dispatches, from nought: a message may claim any number.
            " :retries, :max_attempts, :lease_duration, 0, :payload, :message,"
            f" :delivery_tag, :labels, :keep_payload, {now}, {now}"
        )
        return f"INSERT INTO {self.phrases.names.lease} AS lease ({_TAKEN})", values

    def claim_update(self, step: str, charge: str) -> str:
        """Return what a claim changes in a row that exists.

        Args:
            step: SQL of 1 for a new grant, 0 for the same execution asking again.
            charge: SQL of what is added to the crashes.
        """
        now = self.phrases.now
        return (
            "UPDATE SET namespace = excluded.namespace, state = 'running',"
            " owner_id = excluded.owner_id, lease_until = excluded.lease_until,"
            f" heartbeat_at = {now}, claimed_at = {now},"
            f" fencing_token = lease.fencing_token + {step}, attempt = lease.attempt + {step},"
            f" crashes = lease.crashes + {charge},"
            " retries = CASE WHEN excluded.retries > lease.retries"
            " THEN excluded.retries ELSE lease.retries END,"
            " max_attempts = excluded.max_attempts, lease_duration = excluded.lease_duration,"
            " dispatch_at = NULL, dispatches = 0, announce_until = NULL,"
            # What runs is what would be sent again: a replacement brings its own message.
            " task_name = excluded.task_name,"
            " payload = COALESCE(excluded.payload, lease.payload),"
            " message = COALESCE(excluded.message, lease.message),"
            " labels = COALESCE(lease.labels, excluded.labels),"
            " delivery_tag = excluded.delivery_tag, keep_payload = excluded.keep_payload"
        )

    def expired_story(self, row: str, charge: str) -> str:
        """Return the columns of the history row of an owner whose lease was taken over."""
        facts = self.phrases.expiry_facts(f"{row}.lease_until", charge)
        return (
            f"{row}.task_id, {row}.namespace, 'expired', {row}.fencing_token, {row}.owner_id,"
            f" {row}.attempt, 'expired', {facts}"
        )

    def claimed_story(self, row: str) -> str:
        """Return the columns of the history row of a claim that was not the first."""
        return (
            f"{row}.task_id, {row}.namespace, 'claimed', {row}.fencing_token + 1,"
            f" CAST(:owner_id AS VARCHAR(255)), {row}.attempt + 1, NULL, NULL"
        )

    # Release

    def release_outcome(self, row: str) -> str:
        """Return the state that a release leads to."""
        return (
            f"CASE WHEN {row}.cancel_requested_at IS NOT NULL THEN 'cancelled'"
            f" WHEN :charge AND {row}.crashes + 1 >= {row}.max_attempts THEN 'failed'"
            " ELSE 'queued' END"
        )

    def release_dispatch(self, row: str, outcome: str) -> str:
        """Return the dispatch number after a release."""
        return f"{row}.dispatch + CASE WHEN :redispatch AND {outcome} = 'queued' THEN 1 ELSE 0 END"

    def release_update(self, outcome: str) -> str:
        """Return what a release changes."""
        now, later = self.phrases.now, self.phrases.dialect.later
        return (
            f"SET state = {self.phrases.state(outcome)}, owner_id = NULL, lease_until = NULL,"
            " crashes = lease.crashes + CASE WHEN :charge THEN 1 ELSE 0 END,"
            f" dispatch = {self.release_dispatch('lease', outcome)},"
            f" dispatch_at = CASE WHEN {outcome} <> 'queued' THEN {now}"
            # Not to be sent by anybody now: only in case the copy that is there gets lost.
            f" WHEN :redispatch THEN {later(':due_in')} ELSE {later('lease.lease_duration')} END,"
            " dispatches = 0, announce_until = NULL,"
            f" finished_at = CASE WHEN {outcome} <> 'queued' THEN {now} END,"
            f" error = CASE WHEN {outcome} = 'failed'"
            f" THEN {self.phrases.exhausted_error('lease', 'lease.crashes + 1')} END,"
            " payload = COALESCE(:payload, lease.payload),"
            " message = COALESCE(:message, lease.message),"
            " retries = COALESCE(:retries, lease.retries),"
            " details = COALESCE(:details, lease.details)"
        )

    def released_story(self, row: str, outcome: str) -> str:
        """Return the columns of the history row of a release."""
        json = self.phrases.dialect
        facts = json.json_object(
            {
                "state": outcome,
                "charged": json.json_truth(":charge"),
                "dispatch": self.release_dispatch(row, outcome),
            }
        )
        return (
            f"{row}.task_id, {row}.namespace, 'released', {row}.fencing_token, {row}.owner_id,"
            f" {row}.attempt, CAST(:cause AS VARCHAR(64)), {facts}"
        )

    # Reclaim

    def reclaim_outcome(self, row: str, charge: str) -> str:
        """Return the state that a reclaim leads to."""
        return (
            f"CASE WHEN {row}.cancel_requested_at IS NOT NULL THEN 'cancelled'"
            f" WHEN {row}.crashes + {charge} >= {row}.max_attempts THEN 'failed'"
            " ELSE 'queued' END"
        )

    def reclaim_update(self, outcome: str, charge: str, due: str, announce_until: str) -> str:
        """Return what a reclaim changes."""
        now = self.phrases.now
        return (
            f"SET state = {self.phrases.state(outcome)}, owner_id = NULL, lease_until = NULL,"
            f" crashes = lease.crashes + {charge},"
            f" dispatch = lease.dispatch + CASE WHEN {outcome} = 'queued' THEN 1 ELSE 0 END,"
            f" dispatch_at = {due}, dispatches = 0, announce_until = {announce_until},"
            f" finished_at = CASE WHEN {outcome} <> 'queued' THEN {now} END,"
            f" error = CASE WHEN {outcome} = 'failed'"
            f" THEN {self.phrases.exhausted_error('lease', f'lease.crashes + {charge}')} END"
        )

    def reclaimed_story(self, row: str, charge: str) -> str:
        """Return the columns of the history row of a reclaim."""
        facts = self.phrases.expiry_facts(f"{row}.lease_until", charge)
        return (
            f"{row}.task_id, {row}.namespace, 'reclaimed', {row}.fencing_token, {row}.owner_id,"
            f" {row}.attempt, 'expired', {facts}"
        )

    # Cancel

    def cancel_update(self) -> str:
        """Return what a cancellation changes: a queued row at once, a running one on request."""
        now = self.phrases.now
        cancelled = "CASE WHEN lease.state = 'queued' THEN 'cancelled' ELSE 'running' END"
        return (
            f"SET state = {self.phrases.state(cancelled)},"
            f" cancel_requested_at = COALESCE(lease.cancel_requested_at, {now}),"
            " cancel_reason = COALESCE(lease.cancel_reason, :reason),"
            f" finished_at = CASE WHEN lease.state = 'queued' THEN {now} END,"
            f" dispatch_at = CASE WHEN lease.state = 'queued' THEN {now} END,"
            " announce_until = NULL"
        )

    def cancel_story(self, row: str) -> str:
        """Return the columns of the history row of a cancellation."""
        return (
            f"{row}.task_id, {row}.namespace, 'cancel_requested', {row}.fencing_token,"
            f" {row}.owner_id, {row}.attempt, NULL, NULL"
        )

    # Dispatch

    def take_update(self) -> str:
        """Return what it changes to take a row that is due."""
        later = self.phrases.dialect.later(":retry_in")
        return (
            f"SET dispatch_at = {later}, dispatches = lease.dispatches + 1,"
            f" announce_until = CASE WHEN lease.state IN ('failed', 'cancelled') THEN {later}"
            " ELSE lease.announce_until END"
        )

    def due(self, clock: str) -> str:
        """Return whether a row of this namespace has something to be sent, by a clock.

        A terminal row whose announcement somebody is allowed to make now is not due.
        """
        return (
            f"namespace = :namespace AND dispatch_at <= {clock} AND state <> 'running'"
            f" AND (state = 'queued' OR announce_until IS NULL OR announce_until <= {clock})"
        )
