"""The log: one line per event, ``event key=value …`` and the same keys as ``extra``.

Never arguments, results or checkpoints of a task, and no text of a database's
error that could hold them. Imports the standard library only, so that every
floor can write.
"""

from __future__ import annotations

import logging
from datetime import datetime

__all__ = ("line", "log")

log = logging.getLogger("celery_lease")


def line(level: int, event: str, *, exc_info: object = None, **facts: object) -> None:
    """Write ``event key=value …``; facts that are None are left out.

    Args:
        level: Of :mod:`logging`.
        event: One word.
        exc_info: As for :meth:`logging.Logger.log`.
        facts: What is told of it.
    """
    if not log.isEnabledFor(level):
        return
    known = {key: _plain(value) for key, value in facts.items() if value is not None}
    text = " ".join([event, *(f"{key}={value}" for key, value in known.items())])
    given: dict[str, object] = {"lease_event": event, **known}
    log.log(level, "%s", text, extra=given, exc_info=exc_info)  # type: ignore[arg-type]


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return value
