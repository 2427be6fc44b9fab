"""Phrases that the statements of every database are made of.

Knows the conditions of the protocol, each written once: who holds a lease, who
may take it, what an expiry is charged. Knows no parameters' values and runs
nothing.
"""

from __future__ import annotations

from celery_lease.dialects import Dialect, Names
from celery_lease.lease import LeaseRow

__all__ = ("COLUMNS", "TERMINAL", "Phrases")

#: The columns of ``celery_lease``, in the order of :class:`celery_lease.lease.LeaseRow`.
COLUMNS = tuple(name for name in LeaseRow.__dataclass_fields__ if name != "read_at")

TERMINAL = "('succeeded', 'failed', 'cancelled')"


class Phrases:
    """The phrases in one database's SQL."""

    def __init__(self, dialect: Dialect, names: Names) -> None:
        self.dialect = dialect
        self.names = names
        self.now = dialect.now
        #: Owner, token and expiry, all three, always.
        self.held = (
            "task_id = :task_id AND owner_id = :owner_id AND fencing_token = :fencing_token"
            f" AND {self.running('state')} AND lease_until > {self.now}"
        )
        self.row = f"{', '.join(COLUMNS)}, {self.now} AS read_at"
        #: What becomes of a row's message once the outcome has been announced.
        self.erased = (
            "payload = CASE WHEN keep_payload THEN payload END,"
            " message = CASE WHEN keep_payload THEN message END"
        )
        self.announced = (
            f"announced_at = {self.now}, announce_until = NULL, dispatch_at = NULL, {self.erased}"
        )

    def running(self, state: str) -> str:
        """Return whether a row that is found by its id is running.

        The index of running rows is no way to it: where the statistics are old, that index
        looks like the shorter way, and every statement reads all running rows.
        """
        return f"{self.dialect.unsought(state)} = 'running'"

    def state(self, text: str) -> str:
        """Return an expression whose text is a state, as a value of the column."""
        return self.dialect.state(text, self.names.state)

    def charge(self, row: str) -> str:
        """Return 0 for an expiry that a recorded outage of the database explains, else 1.

        Free is what expired between a reaper's last good pass and the
        database's return plus the lease's own duration.
        """
        until = self.dialect.plus("reaper.outage_until", f"{row}.lease_duration")
        return (
            f"CASE WHEN EXISTS (SELECT 1 FROM {self.names.reaper} AS reaper"
            f" WHERE reaper.namespace = {row}.namespace"
            f" AND {row}.lease_until >= reaper.outage_from AND {row}.lease_until <= {until})"
            " THEN 0 ELSE 1 END"
        )

    def expired(self, row: str) -> str:
        """Return whether the row's lease is over."""
        return f"{row}.state = 'running' AND {row}.lease_until <= {self.now}"

    def same_owner(self, row: str) -> str:
        """Return whether the execution that asks already holds the lease."""
        return f"({row}.state = 'running' AND {row}.owner_id = :owner_id)"

    def takeable(self, row: str, charge: str) -> str:
        """Return whether a claim with these parameters may take the row as it is."""
        return (
            f"({self.same_owner(row)} OR ({row}.cancel_requested_at IS NULL"
            f" AND {row}.dispatch <= :dispatch AND {row}.retries <= :retries"
            f" AND ({row}.state = 'queued' OR ({self.expired(row)}"
            f" AND {row}.crashes + {charge} < {row}.max_attempts))))"
        )

    def exhausted_error(self, row: str, crashes: str) -> str:
        """Return the stored error of a task that may not be tried again."""
        return self.dialect.json_object(
            {
                "exc_type": "'AttemptsExhausted'",
                "exc_module": "'celery_lease.exceptions'",
                "exc_message": self.dialect.json_array(
                    f"{row}.task_id", crashes, f"{row}.max_attempts"
                ),
            }
        )

    def expiry_facts(self, lease_until: str, charge: str) -> str:
        """Return what the history keeps about an expiry."""
        return self.dialect.json_object(
            {
                "lease_until": self.dialect.json_instant(lease_until),
                "charged": self.dialect.json_truth(f"{charge} = 1"),
            }
        )

    def story(self, select: str) -> str:
        """Return the insertion of history rows; the select gives all columns but the instant."""
        return (
            f"INSERT INTO {self.names.history}"
            " (at, task_id, namespace, event, fencing_token, owner_id, attempt, cause, facts)"
            f" SELECT {self.now}, {select}"
        )
