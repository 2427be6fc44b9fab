"""A lease goes to the next message of its task: a retry, or another task in its place.

Before the message is published, so that no copy of it can meet a lease that is
still held; and under the fence, so that only the owner publishes.

Killed between the two, a retry is due at its time, and a reaper sends it. A
replacement may be a whole canvas, which the row does not keep; so what is due
is the replaced task's own message: it runs again, and replaces itself again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from celery.canvas import Signature

from celery_lease import report
from celery_lease.exceptions import DatabaseUnavailable
from celery_lease.options import is_leased

if TYPE_CHECKING:
    from celery_lease.execution import Execution
    from celery_lease.lease import Message

__all__ = ("hand_on", "replaced_by", "sent_on", "stand_in")


def hand_on(
    execution: Execution,
    *,
    cause: str,
    due_in: float,
    retries: int | None = None,
    message: Message | None = None,
) -> int:
    """Give the lease to the next message of this task, before that is published.

    Args:
        execution: Whose lease it is.
        cause: Why, for the history.
        due_in: Seconds until a reaper sends the row's message, if nobody else has.
        retries: The next message's number of retries; None: as before.
        message: The next message, for the reaper; None: as before.

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
            cause=cause,
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
    report.released(execution.task, hold.ref, cause)
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


def stand_in(execution: Execution, canvas: Any) -> Signature | None:
    """Find the task of a canvas that takes over this task's id.

    Args:
        execution: Of the task that is being replaced.
        canvas: What replaces it, frozen.
    """
    found = [
        sig for sig in _signatures(canvas) if sig.options.get("task_id") == execution.request.id
    ]
    return found[0] if found else None


def replaced_by(execution: Execution, number: int, sig: Signature | None) -> None:
    """The canvas is with the broker, and the row's own message is not to be sent any more.

    What takes over the id claims the row when its time comes. A task without a
    lease never will: then the row's part is done.
    """
    task = execution.task.app.tasks.get(sig.task) if sig is not None else execution.task
    ends = task is not None and not is_leased(task)
    try:
        execution.runtime.store.replaced(
            execution.request.id, number, ends=ends, timeout=execution.timeout
        )
    except DatabaseUnavailable as exc:
        # The task runs again and replaces itself once more, if nobody has claimed the row by then.
        report.line(
            logging.WARNING, "replacement_not_noted", job=execution.request.id, error=str(exc)
        )


def _signatures(canvas: Any) -> Iterator[Signature[Any]]:
    """Yield the single tasks of a canvas."""
    parts = (*(getattr(canvas, "tasks", None) or ()), getattr(canvas, "body", None))
    inner = [part for part in parts if isinstance(part, Signature)]
    if not inner:
        yield canvas
    for part in inner:
        yield from _signatures(part)
