"""A value whose unpickling leaves a trace."""

from __future__ import annotations

from typing import Any

from harness.journal import Journal


class Bomb:
    """Writes `unpickled` into a journal whenever it is unpickled."""

    def __init__(self, journal: str) -> None:
        self.journal = journal

    def __reduce__(self) -> Any:
        return _explode, (self.journal,)


def _explode(journal: str) -> Bomb:
    Journal(journal).write("unpickled")
    return Bomb(journal)
