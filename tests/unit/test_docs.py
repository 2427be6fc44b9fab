"""The code of the documentation is code that runs."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, _state

from celery_lease import LeasedTask

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = {
    page.relative_to(ROOT).as_posix(): blocks
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if (blocks := BLOCK.findall(page.read_text()))
}


@pytest.fixture(autouse=True)
def _own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tasks of a page from every other app of this process."""
    monkeypatch.setattr(_state, "_on_app_finalizers", set())


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str) -> None:
    """What a page shows can be typed in, block after block; every app in it can be finalized."""
    names: dict[str, object] = {
        "__name__": "page",
        "Celery": Celery,
        "LeasedTask": LeasedTask,
        "app": Celery("docs", set_as_current=False),
    }
    # A tutorial may define a task anew, better; a module may not, and is warned.
    warnings.simplefilter("ignore")
    for number, block in enumerate(PAGES[page], 1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)  # noqa: S102 - our own pages
    app = names["app"]
    assert isinstance(app, Celery)
    app.finalize()


def test_the_tutorials_task_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tutorial's last task runs as a plain function, with the stand-in lease."""
    names: dict[str, Any] = {"__name__": "page"}
    for block in PAGES["docs/tutorial.md"]:
        exec(compile(block, "docs/tutorial.md", "exec"), names)  # noqa: S102
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert names["export"](3) == 3
