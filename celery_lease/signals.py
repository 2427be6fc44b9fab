"""Signals that tell a program what happens to its leases.

Each is a :class:`celery.utils.dispatch.Signal`; the sender is the task (a
:class:`~celery_lease.LeasedTask`), or the task's name where the task's code is
not at hand (in a reaper). Receivers run in the process where it happened: a
pool child for everything but ``lease_reclaimed``, and on the thread that saw
it, which for renewals and losses is a heartbeat thread. They never carry
arguments or results.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = (
    "lease_claimed",
    "lease_committed",
    "lease_lost",
    "lease_reclaimed",
    "lease_released",
    "lease_renewed",
    "lease_unknown",
    "result_rejected",
)

_LEASE = ("task_id", "fencing_token", "owner_id")

#: A claim was granted; also ``attempt`` and ``lease_until`` (aware datetime).
lease_claimed = Signal(name="lease_claimed", providing_args=(*_LEASE, "attempt", "lease_until"))
#: A renewal was confirmed; also ``lease_until``.
lease_renewed = Signal(name="lease_renewed", providing_args=(*_LEASE, "lease_until"))
#: A renewal failed or is overdue; also ``request_id``, the outside action under way.
lease_unknown = Signal(name="lease_unknown", providing_args=(*_LEASE, "request_id"))
#: The lease is lost to this execution; also ``reason``.
lease_lost = Signal(name="lease_lost", providing_args=(*_LEASE, "reason"))
#: The outcome was accepted; also ``state``, succeeded or failed.
lease_committed = Signal(name="lease_committed", providing_args=(*_LEASE, "state"))
#: The lease was given back before an outcome; also ``cause``.
lease_released = Signal(name="lease_released", providing_args=(*_LEASE, "cause"))
#: A reaper took an expired lease away; also ``state``, what became of the task.
lease_reclaimed = Signal(name="lease_reclaimed", providing_args=(*_LEASE, "state"))
#: An outcome came too late and was refused; also ``digest`` and ``size`` of it.
result_rejected = Signal(name="result_rejected", providing_args=(*_LEASE, "digest", "size"))
