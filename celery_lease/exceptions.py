"""The errors of celery_lease, all in one place and never moved.

The JSON result backends rebuild an exception from its module and its name, so
a class that once left a worker must stay importable from here for ever.

Every error passes positional, JSON-safe arguments straight to
``super().__init__``: that is what survives pickle (the way from a pool child to
its worker) as well as the JSON result backends.

.. code-block:: text

    LeaseError
    ├── LeaseLost                 also a celery Ignore
    ├── LeaseNotGranted           also a celery Ignore
    ├── OwnershipUnknown
    ├── TaskCancelled
    ├── AttemptsExhausted
    ├── DatabaseUnavailable
    ├── StaleFence
    └── SchemaOutdated

Rule for authors: give every parameter a default. An asynchronous exception and
an unpickler both build instances without arguments.
"""

from __future__ import annotations

from celery.exceptions import Ignore

__all__ = (
    "AttemptsExhausted",
    "DatabaseUnavailable",
    "LeaseError",
    "LeaseLost",
    "LeaseNotGranted",
    "OwnershipUnknown",
    "SchemaOutdated",
    "StaleFence",
    "TaskCancelled",
)


class LeaseError(Exception):
    """Base of everything celery_lease raises about leases."""


class LeaseLost(LeaseError, Ignore):
    """This execution no longer owns its task: stop, and change nothing outside.

    It is also a :class:`celery.exceptions.Ignore`, so that Celery stores no
    result, calls no callback or errback and sends no retry for it.

    Args:
        task_id: Id of the task.
        fencing_token: The token this execution held; 0 if it is not known.
        reason: Why, as one word: ``zero_rows`` (the database said no),
            ``deadline`` (no renewal was confirmed in time), ``executor_gone`` (the
            thread that ran it has ended), ``parent_gone`` (its worker has) or
            ``no_heartbeat`` (no thread for it could be started).
    """

    def __init__(self, task_id: str = "", fencing_token: int = 0, reason: str = "") -> None:
        self.task_id = task_id
        self.fencing_token = fencing_token
        self.reason = reason
        super().__init__(task_id, fencing_token, reason)

    def __str__(self) -> str:
        return f"lease of task {self.task_id} lost: token={self.fencing_token} reason={self.reason}"


class LeaseNotGranted(LeaseError, Ignore):
    """This copy of the message was turned away before the body ran.

    Args:
        task_id: Id of the task.
        owner_id: Who holds the lease, or None.
        lease_until: Until when, in ISO 8601, or None.
        reason: The verdict: ``held``, ``superseded``, ``succeeded``,
            ``failed``, ``cancelled`` or ``exhausted``.
        final: True if nobody will ever need this copy again, so that the
            broker may forget it; False if it must stay where it is.
    """

    def __init__(
        self,
        task_id: str = "",
        owner_id: str | None = None,
        lease_until: str | None = None,
        reason: str = "held",
        final: bool = False,  # noqa: FBT001, FBT002 - positional, to survive pickle and JSON
    ) -> None:
        self.task_id = task_id
        self.owner_id = owner_id
        self.lease_until = lease_until
        self.reason = reason
        self.final = final
        super().__init__(task_id, owner_id, lease_until, reason, final)

    def __str__(self) -> str:
        return (
            f"lease of task {self.task_id} not granted: {self.reason}"
            f" (owner={self.owner_id} lease_until={self.lease_until})"
        )


class OwnershipUnknown(LeaseError):
    """Ownership is not certain now, so no irreversible step may start.

    Args:
        task_id: Id of the task.
        fencing_token: The token this execution holds or held.
    """

    def __init__(self, task_id: str = "", fencing_token: int = 0) -> None:
        self.task_id = task_id
        self.fencing_token = fencing_token
        super().__init__(task_id, fencing_token)

    def __str__(self) -> str:
        return f"ownership of task {self.task_id} is unknown: token={self.fencing_token}"


class TaskCancelled(LeaseError):
    """Somebody asked for this task to be cancelled.

    Args:
        task_id: Id of the task.
        reason: What the canceller gave as reason.
    """

    def __init__(self, task_id: str = "", reason: str = "") -> None:
        self.task_id = task_id
        self.reason = reason
        super().__init__(task_id, reason)

    def __str__(self) -> str:
        return f"task {self.task_id} was cancelled: {self.reason}"


class AttemptsExhausted(LeaseError):
    """The task lost its lease or crashed as often as it may.

    Args:
        task_id: Id of the task.
        crashes: Executions that ended by a lost lease or a crash.
        limit: ``lease_max_attempts`` of the task.
    """

    def __init__(self, task_id: str = "", crashes: int = 0, limit: int = 0) -> None:
        self.task_id = task_id
        self.crashes = crashes
        self.limit = limit
        super().__init__(task_id, crashes, limit)

    def __str__(self) -> str:
        return (
            f"task {self.task_id} given up: {self.crashes} of {self.limit} allowed"
            " executions ended by a lost lease or a crash"
        )


class DatabaseUnavailable(LeaseError):
    """The lease database could not be reached or did not answer in time.

    Args:
        detail: What the driver said, without parameters.
    """

    def __init__(self, detail: str = "") -> None:
        self.detail = detail
        super().__init__(detail)

    def __str__(self) -> str:
        return f"lease database unavailable: {self.detail}"


class StaleFence(LeaseError):
    """A receiver saw a fencing token below one that it accepted before.

    Args:
        resource: What is protected.
        fencing_token: The token that was refused.
        highest: The highest token accepted so far.
    """

    def __init__(self, resource: str = "", fencing_token: int = 0, highest: int = 0) -> None:
        self.resource = resource
        self.fencing_token = fencing_token
        self.highest = highest
        super().__init__(resource, fencing_token, highest)

    def __str__(self) -> str:
        return f"{self.resource}: token {self.fencing_token} refused, {self.highest} was accepted before"


class SchemaOutdated(LeaseError):
    """The tables in the lease database are not those this version needs.

    Args:
        found: Schema version in the database; 0 if there are no tables.
        needed: Schema version this release works with.
    """

    def __init__(self, found: int = 0, needed: int = 0) -> None:
        self.found = found
        self.needed = needed
        super().__init__(found, needed)

    def __str__(self) -> str:
        if self.found > self.needed:
            return (
                f"lease tables have schema version {self.found}, this release needs {self.needed}:"
                " upgrade celery_lease in this worker"
            )
        state = f"have schema version {self.found}" if self.found else "are missing"
        return (
            f"lease tables {state}, this release needs version {self.needed}: run"
            " `celery -A yourproject lease migrate`"
        )
