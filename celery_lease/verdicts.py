"""Why a claim was refused: the row as read, put into one word.

Pure: a row and a request in, a verdict out. The row was read after the claim
had been refused, so it may say that the claim would be granted by now; then the
answer is ``AGAIN``.
"""

from __future__ import annotations

from typing import Final

from celery_lease.lease import ClaimRequest, LeaseRow, State, Verdict

__all__ = ("AGAIN", "refusal")

#: The row that refused has changed since: ask again.
AGAIN: Final = Verdict.GRANTED

_ENDS = {
    State.SUCCEEDED: Verdict.SUCCEEDED,
    State.FAILED: Verdict.FAILED,
    State.CANCELLED: Verdict.CANCELLED,
}


def refusal(row: LeaseRow | None, request: ClaimRequest) -> Verdict:
    """Return the verdict on a claim that took nothing.

    A terminal row comes first: even a superseded copy may have to announce the
    outcome. While the right to announce is somebody's, the row is held.
    """
    if row is None:
        return AGAIN
    if row.state in _ENDS:
        return _on_end(row)
    if request.dispatch < row.dispatch or request.retries < row.retries:
        return Verdict.SUPERSEDED
    waiting = row.state is State.QUEUED or row.expired
    if not waiting:
        return Verdict.HELD
    if row.cancel_requested_at is not None:
        return Verdict.CANCELLED
    return _on_waiting(row)


def _on_end(row: LeaseRow) -> Verdict:
    announcing = row.announce_until is not None and row.announce_until > row.read_at
    if row.announced_at is None and announcing:
        return Verdict.HELD
    return _ENDS[row.state]


def _on_waiting(row: LeaseRow) -> Verdict:
    # Whether the expiry is charged only the database can tell, and it has refused:
    # with one crash left to have, the charge is why.
    if row.expired and row.crashes + 1 >= row.max_attempts:
        return Verdict.EXHAUSTED
    return AGAIN
