"""Teaches ``celery.events.state`` about leases, so that monitors show them.

Celery's monitors turn an unknown event type into the task's *state*: a
``task-leased`` event would hide STARTED (and Flower's terminate button with
it). Importing celery_lease therefore registers, once per process, that
``leased`` leaves the state STARTED, and which fields a lease's events bring.
Knows nothing of leases themselves.
"""

from __future__ import annotations

from typing import Any

from celery import states
from celery.events import state as events_state

__all__ = ("FIELDS", "LeaseTaskState", "install")

#: Fields of lease events, shown by monitors under these names.
FIELDS = ("lease_token", "lease_owner", "lease_until", "lease_attempt", "reason")

_Base: Any = events_state.State.Task


class LeaseTaskState(_Base):  # type: ignore[misc]
    """A monitor's view of a task, with its lease."""

    _fields = (*_Base._fields[:3], *FIELDS, *_Base._fields[3:])
    _info_fields = (*_Base._info_fields, *FIELDS)  # noqa: SLF001

    lease_token = lease_owner = lease_until = lease_attempt = reason = None
    #: When the event came; celery sets an attribute named as the event.
    leased = None


def install() -> None:
    """Register the fields and the event; a second call changes nothing."""
    events: Any = events_state
    events.TASK_EVENT_TO_STATE.setdefault("leased", states.STARTED)
    if events_state.State.Task is _Base:
        events_state.State.Task = LeaseTaskState
