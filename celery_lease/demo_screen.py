"""How the demo looks: a timeline with one line per event, a line that lives, a table of checks.

What it knows: rich, and lines of text. On a terminal the last line shows the lease as it is now;
elsewhere (a file, a pipe) there are plain lines of at most a hundred columns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from celery_lease.demo_checks import Check
from celery_lease.demo_timeline import Event

__all__ = ("Screen",)

_COLUMNS = 100
#: Seconds for which an event is held back, so that those of other sources can come before it.
_PATIENCE = 0.15
_BAR = 24
_TONES = {"good": "green", "bad": "red", "quiet": "dim", "plain": ""}
_PEOPLE = {"worker 1": "cyan", "worker 2": "magenta", "worker 3": "yellow", "demo": "bold"}


class Screen:
    """Everything that the demo prints.

    Args:
        start: Seconds since the epoch; the timeline counts from there.
    """

    def __init__(self, start: float) -> None:
        self.console = Console(highlight=False, soft_wrap=False)
        if not self.console.is_terminal:
            self.console = Console(highlight=False, width=_COLUMNS)
        self.start = start
        self._held: list[Event] = []
        self._live: Live | None = None
        self._shown_at = 0.0

    def heading(self, text: str, *explained: str) -> None:
        """Print a heading, and below it what is going to happen."""
        self.flush()
        self.console.print()
        self.console.print(Text(text, style="bold"))
        for line in explained:
            self.console.print(Text(line, style="dim"))
        self.console.print()

    def say(self, text: str) -> None:
        """Print a line that belongs to no event."""
        self.console.print(Text(text))

    def add(self, events: Sequence[Event]) -> None:
        """Take new events, and print those that no other can precede any more."""
        self._held += events
        self._print_until(time.time() - _PATIENCE)

    def flush(self) -> None:
        """Print all events that are held back."""
        self._print_until(float("inf"))

    def _print_until(self, instant: float) -> None:
        due = sorted((event for event in self._held if event.at <= instant), key=lambda e: e.at)
        self._held = [event for event in self._held if event.at > instant]
        for event in due:
            self.console.print(self._line(event), no_wrap=True, overflow="ellipsis")

    def _line(self, event: Event) -> Text:
        name = _PEOPLE.get(event.who, "bold blue")
        return Text.assemble(
            (f"{event.at - self.start:5.1f} s  ", "dim"),
            (f"{event.who:<9} ", name),
            (f"{event.source:<8} ", "dim"),
            (event.text, _TONES[event.tone]),
        )

    def status(self, text: str, remaining: float | None, duration: float) -> None:
        """Show on the last line what the lease's row says now; on a terminal only.

        Args:
            text: State, token and owner.
            remaining: Seconds of the lease that are left; None without a lease.
            duration: Seconds that a bar stands for when it is full.
        """
        if not self.console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self.console, transient=True, auto_refresh=False)
            self._live.start()
        line = Text.assemble(("now      ", "bold"), f"{text:<48} ", no_wrap=True, overflow="crop")
        if remaining is not None:
            full = round(_BAR * max(0.0, min(1.0, remaining / duration)))
            colour = "green" if remaining > duration / 4 else "red"
            line.append("█" * full, colour).append("░" * (_BAR - full), "dim")
            line.append(f" {remaining:3.1f} s" if remaining > 0 else " expired", colour)
        self._live.update(line, refresh=True)

    def quiet(self) -> None:
        """Take the living line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def table(self, checks: Sequence[Check]) -> None:
        """Print the verdicts."""
        self.flush()
        self.quiet()
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for title in ("verdict", "what must hold", "what was found"):
            table.add_column(title, header_style="bold")
        for check in checks:
            mark = Text("holds", style="green") if check.holds else Text("FAILS", style="bold red")
            table.add_row(mark, check.claim, check.shown)
        self.console.print(table)
