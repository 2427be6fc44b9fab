"""The values that leases are spoken of with: plain, frozen, without behaviour.

A :class:`LeaseRef` names one grant of one lease; every statement that touches
a lease takes it whole (task, owner *and* token), so that no statement can
name a task alone by accident. Knows nothing of SQL, Celery or threads.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime

__all__ = (
    "Claim",
    "ClaimRequest",
    "Dispatch",
    "Encoded",
    "HistoryEntry",
    "LeaseRef",
    "LeaseRow",
    "Message",
    "ReaperTurn",
    "Reclaimed",
    "Renewal",
    "Renewed",
    "State",
    "Verdict",
)


class State(str, enum.Enum):
    """What has become of the work. The right to do it is the lease, not the state."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether the state never changes again by itself."""
        return self not in (State.QUEUED, State.RUNNING)


class Verdict(str, enum.Enum):
    """The answer to a claim."""

    GRANTED = "granted"
    #: A live owner holds the lease, or is still announcing the outcome.
    HELD = "held"
    #: Finished before; ``Claim.replay`` says whether the caller announces it.
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    #: Expired, and no attempt is left: the caller or a reaper gives it up.
    EXHAUSTED = "exhausted"
    #: A later message for this task has been sent.
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class LeaseRef:
    """One grant of one lease."""

    task_id: str
    owner_id: str
    fencing_token: int


@dataclass(frozen=True, slots=True)
class Message:
    """Everything a reaper needs to send a message again, byte for byte.

    ``envelope`` is a JSON object: headers, properties, routing, and the
    callbacks, errbacks, chain and chord as far as they are JSON.
    """

    body: bytes
    envelope: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """A serialized value with what is needed to load it again."""

    data: bytes
    content_type: str
    content_encoding: str


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """What an execution brings to its claim.

    ``dispatch`` and ``retries`` come from the message and only ever make a
    copy *older* than the row; they grant nothing. The rest is the worker's.
    """

    task_id: str
    task_name: str
    owner_id: str
    lease_duration: float
    max_attempts: int
    dispatch: int = 0
    retries: int = 0
    message: Message | None = None
    delivery_tag: str | None = None
    labels: str | None = None
    keep_payload: bool = False


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One row of ``celery_lease``, as read. Instants are aware UTC datetimes."""

    task_id: str
    namespace: str
    task_name: str
    state: State
    owner_id: str | None
    lease_until: datetime | None
    fencing_token: int
    heartbeat_at: datetime | None
    attempt: int
    crashes: int
    retries: int
    max_attempts: int
    lease_duration: float
    idempotency_key: str | None
    dispatch: int
    dispatch_at: datetime | None
    dispatches: int
    payload: bytes | None
    message: str | None
    delivery_tag: str | None
    result: bytes | None
    result_type: str | None
    result_encoding: str | None
    error: str | None
    details: str | None
    labels: str | None
    cancel_requested_at: datetime | None
    cancel_reason: str | None
    deadline_at: datetime | None
    announce_until: datetime | None
    announced_at: datetime | None
    keep_payload: bool
    created_at: datetime
    claimed_at: datetime | None
    finished_at: datetime | None
    #: The database's clock when the row was read.
    read_at: datetime

    @property
    def expired(self) -> bool:
        """Whether the lease was over, by the database's clock, when this was read."""
        return (
            self.state is State.RUNNING
            and self.lease_until is not None
            and self.lease_until <= self.read_at
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """The outcome of one claim."""

    verdict: Verdict
    #: With GRANTED: the new lease.
    ref: LeaseRef | None = None
    attempt: int = 0
    crashes: int = 0
    lease_until: datetime | None = None
    #: With GRANTED: the checkpoint of the previous execution, as JSON.
    details: str | None = None
    #: With a refusal: the row that refused.
    row: LeaseRow | None = None
    #: With SUCCEEDED, FAILED or CANCELLED: this caller, and nobody else now, announces it.
    replay: bool = False


@dataclass(frozen=True, slots=True)
class Renewal:
    """One lease in a batch of renewals. ``details`` only when they changed."""

    ref: LeaseRef
    lease_duration: float
    details: str | None = None


@dataclass(frozen=True, slots=True)
class Renewed:
    """One lease that is still held. A lease missing from the answer is lost."""

    ref: LeaseRef
    lease_until: datetime
    #: Set when somebody asked for the task to be cancelled.
    cancel_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """What one reclaim did to one expired row."""

    task_id: str
    task_name: str
    #: QUEUED, FAILED or CANCELLED.
    state: State
    owner_id: str | None
    fencing_token: int
    attempt: int
    crashes: int
    #: Seconds from the lease's end to its reclaim.
    late: float


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One row whose message (or outcome) a reaper has to send, with the row as read."""

    row: LeaseRow


@dataclass(frozen=True, slots=True)
class ReaperTurn:
    """Whether this reaper makes the namespace's next pass, and when to ask again."""

    granted: bool
    #: Seconds until a turn can be granted again.
    next_in: float
    #: True on the first pass after a gap: look, but condemn nobody yet.
    grace: bool = False


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One row of ``celery_lease_history``."""

    task_id: str
    event: str
    fencing_token: int
    owner_id: str | None
    attempt: int
    cause: str | None
    at: datetime
    facts: str | None
