"""What a run of the benchmarks has found: printed, and written where an environment variable says.

`CELERY_LEASE_BENCHMARK_REPORT` names a folder; `benchmarks.json` and `benchmarks.md` are put there,
with the facts of the machine and the versions, so that figures can be quoted with them.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

REPORT_VARIABLE = "CELERY_LEASE_BENCHMARK_REPORT"
_PACKAGES = ("celery", "kombu", "redis", "psycopg", "sqlalchemy", "celery-lease")


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: What was measured.
        value: The median.
        unit: Of the value; empty for a ratio.
        least: The lowest of what it is the median of.
        most: The highest.
        wanted: The bound or the aim, in words.
    """

    name: str
    value: float
    unit: str = ""
    least: float | None = None
    most: float | None = None
    wanted: str = ""

    def row(self) -> list[str]:
        """Return the cells of its row in a table."""
        spread = "" if self.least is None else f"{_short(self.least)} – {_short(self.most)}"
        return [self.name, f"{_short(self.value)} {self.unit}".strip(), spread, self.wanted]


@dataclass
class Findings:
    """Everything found so far."""

    servers: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)
    #: Title -> rows, the first of which is the head.
    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)

    def add(self, figure: Figure) -> None:
        """Keep a figure and print it."""
        self.figures.append(figure)
        print("  ".join(cell for cell in figure.row() if cell), flush=True)

    def report(self) -> str:
        """Return all of it as Markdown."""
        parts = [f"Measured on {facts(self.servers)['measured on']}."]
        parts += [f"**{title}**\n\n{_table(rows)}" for title, rows in self.tables.items()]
        head = ["figure", "median", "lowest – highest", "wanted"]
        parts.append(_table([head, *(figure.row() for figure in self.figures)]))
        parts.append(_table([["", ""], *([k, v] for k, v in facts(self.servers).items())]))
        return "\n\n".join(parts) + "\n"

    def write(self) -> None:
        """Print the report, and write it where the variable says."""
        if not self.figures:
            return
        print(f"\n\n{self.report()}", flush=True)
        folder = os.environ.get(REPORT_VARIABLE)
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            found = {
                "facts": facts(self.servers),
                "figures": [asdict(figure) for figure in self.figures],
                "tables": self.tables,
                "raw": self.raw,
            }
            Path(folder, "benchmarks.json").write_text(json.dumps(found, indent=1) + "\n")
            Path(folder, "benchmarks.md").write_text(self.report())


def facts(servers: Mapping[str, str]) -> dict[str, str]:
    """Return what the figures depend on."""
    memory = psutil.virtual_memory().total / 2**30
    return {
        "measured on": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "processors": f"{os.cpu_count()} × {_processor()}",
        "memory": f"{memory:.0f} GB",
        "system": f"{platform.system()} {platform.release()}",
        "load average at the end": ", ".join(f"{load:.2f}" for load in os.getloadavg()),
        "Python": platform.python_version(),
        **servers,
        **{name: _version(name) for name in _PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed, from its sources"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "| --- " * len(rows[0]) + "|", *rest])


def _short(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
