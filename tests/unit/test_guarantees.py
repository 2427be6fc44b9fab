"""The guarantees page names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_promise_has_a_test_that_exists() -> None:
    """A renamed test takes its line in the documentation along."""
    page = (ROOT / "docs/explanation/guarantees.md").read_text()
    named = NAMED.findall(page)
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text()
    ]
    assert [] == missing
    table = page.split("## The tests")[1].split("##")[0]
    promised = {line.split("|")[1].strip() for line in table.splitlines() if "`tests/" in line}
    assert {"P1", "P2", "P3", "P4", "P5", "P6", "P7"} == promised
