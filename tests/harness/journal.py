"""The journal: what task bodies did, written by them in workers and read by the test.

It is the side effect that the tests count. One line of JSON per event, appended by a single
write, so that lines of several processes never mix and SIGKILL leaves none out that was written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from harness.waiting import until

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One event. `token` is None where no lease was held; `facts` is whatever else was told."""

    event: str
    task_id: str | None
    token: int | None
    pid: int
    t: float
    facts: dict[str, Any] = field(default_factory=dict)


class Journal:
    """An append-only file of events, shared by processes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def write(
        self, event: str, task_id: str | None = None, token: int | None = None, **facts: Any
    ) -> None:
        """Append one event, with this process's id and the time."""
        entry = Entry(event, task_id, token, os.getpid(), time.time(), facts)
        line = json.dumps(entry.__dict__, default=str).encode() + b"\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    def entries(self, event: str | None = None, **match: Any) -> list[Entry]:
        """Return the events so far, oldest first.

        Args:
            event: Only events of this name.
            match: Only those with these values, in a field or among the facts.
        """
        text = self.path.read_text() if self.path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        found = [Entry(**json.loads(line)) for line in lines]
        return [
            entry
            for entry in found
            if event in (None, entry.event)
            and all(value == _value(entry, name) for name, value in match.items())
        ]

    def wait_for(self, predicate: Callable[[list[Entry]], T], timeout: float = 15.0) -> T:
        """Wait until a predicate over all entries is true, and return its value."""
        return until(lambda: predicate(self.entries()), timeout=timeout, what=self._told)

    def wait(
        self, event: str, *, count: int = 1, timeout: float = 15.0, **match: Any
    ) -> list[Entry]:
        """Wait for `count` events of a name, and return all there are."""

        def enough() -> list[Entry]:
            found = self.entries(event, **match)
            return found if len(found) >= count else []

        return until(
            enough, timeout=timeout, what=lambda: f"{count} × {event} {match or ''}; {self._told()}"
        )

    def _told(self) -> str:
        return "the journal holds\n" + "\n".join(map(str, self.entries()))


def _value(entry: Entry, name: str) -> Any:
    return getattr(entry, name) if hasattr(entry, name) else entry.facts.get(name)
