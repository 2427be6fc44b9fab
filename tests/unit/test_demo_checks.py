"""The demo's verdict: it holds for the story as it should be, and for no other."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest
from harness.waiting import until

from celery_lease.demo import judge
from celery_lease.demo_checks import Case, Evidence, verdicts
from celery_lease.demo_screen import Screen
from celery_lease.demo_timeline import Event
from celery_lease.lease import HistoryEntry, LeaseRef, LeaseRow, Renewed, State

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)
RESULT = {"token": 2, "pid": 12}
STALE_RESULT = {"token": 1, "pid": 11}


def _row(task_id: str, **changed: Any) -> LeaseRow:
    values: dict[str, Any] = {field.name: None for field in dataclasses.fields(LeaseRow)}
    values |= {"task_id": task_id, "namespace": "demo", "state": State.SUCCEEDED}
    values |= {"owner_id": "worker2@demo:12:aa", "fencing_token": 2, "read_at": NOW}
    return LeaseRow(**values | changed)


def _history(task_id: str, event: str, token: int) -> HistoryEntry:
    return HistoryEntry(task_id, event, token, None, token, None, NOW, None)


def _case(task_id: str, *journal: dict[str, Any], refused: bool) -> Case:
    history = [_history(task_id, "reclaimed", 1), _history(task_id, "claimed", 2)]
    if refused:
        history.append(_history(task_id, "result_rejected", 1))
    delivered = {"event": "delivered", "token": None, "node": "worker2@demo", "result": RESULT}
    return Case(
        first=LeaseRef(task_id, "worker1@demo:11:bb", 1),
        row=_row(task_id),
        row_result=RESULT,
        history=history,
        journal=[*journal, delivered],
        result=RESULT,
    )


def _entry(event: str, token: int, **facts: Any) -> dict[str, Any]:
    return {"event": event, "token": token, "node": f"worker{token}@demo", **facts}


def _killed() -> Case:
    return _case(
        "answer",
        _entry("start", 1, words=0),
        _entry("word", 1, words=10),
        _entry("start", 2, words=9),
        _entry("end", 2),
        refused=False,
    )


def _stale() -> Case:
    return _case(
        "order",
        _entry("end", 2),
        _entry("told", 1),
        _entry("refused", 1, action="charge"),
        _entry("end", 1),
        refused=True,
    )


def _evidence() -> Evidence:
    ledger = [("order:order", "reserve", 1), ("order:order", "charge", 2)]
    return Evidence(killed=_killed(), stale=_stale(), renewed=[], ledger=ledger)


def _without(case: Case, event: str) -> Case:
    return dataclasses.replace(
        case,
        journal=[entry for entry in case.journal if entry["event"] != event],
        history=[entry for entry in case.history if entry.event != event],
    )


def _killed_with(**changed: Any) -> Callable[[Evidence], Evidence]:
    return lambda good: dataclasses.replace(
        good, killed=dataclasses.replace(good.killed, **changed)
    )


def _stale_with(**changed: Any) -> Callable[[Evidence], Evidence]:
    return lambda good: dataclasses.replace(good, stale=dataclasses.replace(good.stale, **changed))


#: Name: how the evidence is doctored, and a word of the claim that has to fail.
DOCTORED: dict[str, tuple[Callable[[Evidence], Evidence], str]] = {
    "never finished": (_killed_with(row=_row("answer", state=State.RUNNING)), "finished"),
    "finished by the killed one": (
        _killed_with(first=LeaseRef("answer", "worker2@demo:9:cc", 1)),
        "finished",
    ),
    "begun anew": (
        _killed_with(journal=[*_killed().journal, _entry("start", 2, words=0)]),
        "checkpoint",
    ),
    "renewed": (
        lambda good: dataclasses.replace(good, renewed=[Renewed(good.stale.first, NOW)]),
        "renew",
    ),
    "never told": (
        lambda good: dataclasses.replace(good, stale=_without(good.stale, "told")),
        "renew",
    ),
    "not refused": (
        lambda good: dataclasses.replace(good, stale=_without(good.stale, "result_rejected")),
        "write its result",
    ),
    "stale result in the row": (_stale_with(row_result=STALE_RESULT), "write its result"),
    "stale result in the backend": (_stale_with(result=STALE_RESULT), "Callers"),
    "no result in the backend": (_killed_with(result=None), "Callers"),
    "charged twice": (
        lambda good: dataclasses.replace(good, ledger=[*good.ledger, ("order:order", "charge", 1)]),
        "side effect",
    ),
    "charge not refused": (
        lambda good: dataclasses.replace(good, stale=_without(good.stale, "refused")),
        "side effect",
    ),
    "delivered twice": (
        _stale_with(journal=[*_stale().journal, _stale().journal[-1]]),
        "one outcome",
    ),
    "stale result delivered": (
        _stale_with(journal=[*_stale().journal, {**_stale().journal[-1], "result": STALE_RESULT}]),
        "one outcome",
    ),
    "first token unknown": (
        lambda good: dataclasses.replace(good, killed=_without(good.killed, "reclaimed")),
        "both tokens",
    ),
}


def test_the_story_as_it_should_be_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """All checks hold, and the exit status is 0."""
    assert 0 == judge(Screen(time.time()), _evidence())
    assert "All 8 checks hold" in capsys.readouterr().out


@pytest.mark.parametrize("name", DOCTORED)
def test_any_other_story_fails(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The check that is concerned fails, it is shown, and the exit status is 1."""
    doctor, claim = DOCTORED[name]
    evidence = doctor(_evidence())
    failed = [check.claim for check in verdicts(evidence) if not check.holds]
    assert any(claim in text for text in failed), failed
    assert 1 == judge(Screen(time.time()), evidence)
    assert "FAILS" in capsys.readouterr().out


def test_events_appear_in_the_order_of_their_instants(capsys: pytest.CaptureFixture[str]) -> None:
    """One source is read after another, and still what came first stands first."""
    now = time.time()
    screen = Screen(now)
    screen.add([Event(now + 0.02, "worker 1", "log", "later")])
    screen.add([Event(now + 0.01, "database", "history", "sooner")])
    shown = ""

    def both() -> bool:
        nonlocal shown
        screen.add([])
        shown += capsys.readouterr().out
        return "later" in shown

    until(both)
    assert shown.index("sooner") < shown.index("later")
