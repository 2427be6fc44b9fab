"""Ends worker processes when the test process is gone, however that ended.

One watchdog per test process, started with the first worker. The test process tells it each
worker's process group over a pipe (`+123`, and `-123` once that worker is reaped); at the end of
the pipe it kills the groups that are left. Run as a script, it imports nothing of the tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys


class Watchdog:
    """The test process's side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, start_new_session=True
        )

    def watch(self, group: int) -> None:
        """Have a process group killed at the end."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Leave a group alone, for its leader was reaped and the number may come back."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Kill what is left, now."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        if self._process.stdin is None:
            raise RuntimeError("the watchdog has no pipe")
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()


def _main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _main()
