"""The demo's verdict: what must hold after the story, computed from what was stored.

What it is: `Evidence` holds rows, histories, the journal, the receiver's ledger and the result
backend's answers, as they were read; `verdicts` judges them. A pure function: the same evidence
gives the same verdict, and doctored evidence a failing one.

What it must not know: how the story went, or was told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery_lease.lease import HistoryEntry, LeaseRef, LeaseRow, Renewed, State

__all__ = ("Case", "Check", "Evidence", "verdicts")

#: The tokens of the two owners that each task has.
_FIRST, _SECOND = 1, 2


@dataclass(frozen=True)
class Case:
    """One task whose first owner was overtaken.

    Attributes:
        first: The first owner's grant, as it stood in the row.
        row: The row at the end.
        row_result: The result that the row keeps.
        history: The task's history.
        journal: What its bodies and its callback wrote down.
        result: What the result backend answers a caller.
    """

    first: LeaseRef
    row: LeaseRow
    row_result: Any
    history: Sequence[HistoryEntry]
    journal: Sequence[Mapping[str, Any]]
    result: Any

    @property
    def task_id(self) -> str:
        """Id of the task."""
        return self.row.task_id

    def noted(self, event: str) -> list[Mapping[str, Any]]:
        """Return the journal's entries of a name."""
        return [entry for entry in self.journal if entry["event"] == event]

    def tokens(self, event: str) -> list[int]:
        """Return the tokens of the journal's entries of a name, in their order."""
        return [entry["token"] for entry in self.noted(event)]


@dataclass(frozen=True)
class Evidence:
    """All that was read after the story.

    Attributes:
        killed: The task whose first worker was killed.
        stale: The task whose first worker was stopped and continued.
        renewed: The database's answer to a renewal under the stale worker's token.
        ledger: Resource, action and token of everything that the receiver did.
    """

    killed: Case
    stale: Case
    renewed: Sequence[Renewed]
    ledger: Sequence[tuple[str, str, int]]


@dataclass(frozen=True)
class Check:
    """One line of the verdict: what must hold, what was found, and whether it does."""

    claim: str
    shown: str
    holds: bool


def verdicts(evidence: Evidence) -> list[Check]:
    """Judge the evidence."""
    return [
        _taken_over(evidence.killed),
        _resumed(evidence.killed),
        _cannot_renew(evidence),
        _cannot_write(evidence.stale),
        _cannot_charge(evidence),
        _backend(evidence),
        _accepted_once(evidence),
        _both_tokens(evidence),
    ]


def _taken_over(case: Case) -> Check:
    row, second = case.row, _node(case.row.owner_id)
    ended = [(entry["node"], entry["token"]) for entry in case.noted("end")]
    return Check(
        "Another worker finished the killed one's task",
        f"row: {row.state.value}, token {row.fencing_token}, {second}",
        _settled(case) and second != _node(case.first.owner_id) and ended == [(second, _SECOND)],
    )


def _resumed(case: Case) -> Check:
    starts = {entry["token"]: entry["words"] for entry in case.noted("start")}
    said = max((e["words"] for e in case.noted("word") if e["token"] == _FIRST), default=0)
    resumed = starts.get(_SECOND, 0)
    return Check(
        "It went on from the last checkpoint",
        f"journal: {said} words said, went on after {resumed}",
        0 < resumed <= said,
    )


def _cannot_renew(evidence: Evidence) -> Check:
    rows, told = len(evidence.renewed), evidence.stale.tokens("told")
    return Check(
        "The stale worker cannot renew its lease",
        f"database: {rows} rows renewed by token {_FIRST}",
        rows == 0 and told == [_FIRST],
    )


def _cannot_write(case: Case) -> Check:
    refused = [entry.fencing_token for entry in case.history if entry.event == "result_rejected"]
    kept = _token(case.row_result)
    return Check(
        "It cannot write its result",
        f"history: token {_list(refused)} refused; row: token {kept}",
        refused == [_FIRST] and kept == _SECOND and _FIRST in case.tokens("end"),
    )


def _cannot_charge(evidence: Evidence) -> Check:
    case = evidence.stale
    mine = (f"order:{case.task_id}", "charge")
    charged = [token for *action, token in evidence.ledger if tuple(action) == mine]
    refused = [entry["token"] for entry in case.noted("refused") if entry["action"] == "charge"]
    return Check(
        "It cannot do a second side effect",
        f"ledger: token {_list(charged)} charged; {_list(refused)} refused",
        charged == [_SECOND] and refused == [_FIRST],
    )


def _backend(evidence: Evidence) -> Check:
    cases = (evidence.killed, evidence.stale)
    found = [_token(case.result) for case in cases]
    return Check(
        "Callers get the new owners' results",
        f"result backend: tokens {_list(found)}",
        found == [_SECOND, _SECOND] and all(case.result == case.row_result for case in cases),
    )


def _accepted_once(evidence: Evidence) -> Check:
    cases = (evidence.killed, evidence.stale)
    delivered = [[_token(e["result"]) for e in case.noted("delivered")] for case in cases]
    ended = len(evidence.stale.noted("end"))
    return Check(
        "Exactly one outcome of each was accepted",
        f"journal: {ended} bodies ended, {len(delivered[1])} callback ran",
        delivered == [[_SECOND], [_SECOND]] and all(map(_settled, cases)),
    )


def _both_tokens(evidence: Evidence) -> Check:
    cases = (evidence.killed, evidence.stale)
    found = [sorted({entry.fencing_token for entry in case.history}) for case in cases]
    return Check(
        "The history of each task shows both tokens",
        f"history: tokens {'; '.join(map(_list, found))}",
        found == [[_FIRST, _SECOND], [_FIRST, _SECOND]],
    )


def _settled(case: Case) -> bool:
    return (case.row.state, case.row.fencing_token) == (State.SUCCEEDED, _SECOND)


def _node(owner_id: str | None) -> str:
    return (owner_id or "nobody").partition(":")[0]


def _token(result: Any) -> Any:
    return result.get("token") if isinstance(result, dict) else None


def _list(values: Any) -> str:
    return " and ".join(map(str, values)) or "none"
