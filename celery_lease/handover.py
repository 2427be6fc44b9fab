"""A lease goes to the next message of its task: a retry.

Before the message is published, so that no copy of it can meet a lease that is
still held; and under the fence, so that only the owner publishes. Killed
between the two, the row is due at the message's time and a reaper sends it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from celery_lease import report
from celery_lease.exceptions import DatabaseUnavailable

if TYPE_CHECKING:
    from celery_lease.execution import Execution
    from celery_lease.lease import Message

__all__ = ("hand_on", "sent_on")


def hand_on(execution: Execution, *, retries: int, due_in: float, message: Message | None) -> int:
    """Give the lease to the next message of this task, before that is published.

    Args:
        execution: Whose lease it is.
        retries: The next message's number of retries.
        due_in: Seconds until it is due.
        message: The next message, for the reaper.

    Returns:
        The dispatch number the next message has to carry.

    Raises:
        LeaseLost: Only the owner may publish, and that is somebody else now.
    """
    hold = execution.hold
    assert hold is not None  # noqa: S101 - only a running body retries
    execution.runtime.heartbeat.discard(hold)
    number = execution.until_answered(
        hold,
        lambda timeout: execution.runtime.store.release(
            hold.ref,
            cause="retry",
            charge=False,
            dispatch=True,
            due_in=due_in,
            message=message,
            retries=retries,
            details=hold.details,
            timeout=timeout,
        ),
    )
    if number is None:
        hold.lose("zero_rows")
        raise execution.lost_error(hold)
    execution.handed_on = True
    report.released(execution.task, hold.ref, "retry")
    return int(number)


def sent_on(execution: Execution, number: int, due_in: float) -> None:
    """The next message is with the broker: a reaper need not send it."""
    resend = due_in + max(execution.settings.duration, 30.0)
    try:
        sent = [(execution.request.id, number, resend)]
        execution.runtime.store.dispatched(sent, timeout=execution.timeout)
    except DatabaseUnavailable as exc:
        # A reaper sends a second copy, which the claim turns away.
        report.line(logging.WARNING, "dispatch_not_noted", job=execution.request.id, error=str(exc))
