"""Where the demo's timeline comes from: workers' logs, the tasks' journal, the lease history.

What it is: each source reads what is new in one of them and tells it as `Event`s, in words. An
event that nobody wrote down does not exist: nothing here knows the story.

What it knows: the log lines of `celery_lease`, the journal's entries, the rows. It must not know
how events are shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from celery_lease.demo_app import ANSWER, read_journal
from celery_lease.demo_processes import Crew, Worker
from celery_lease.lease import HistoryEntry
from celery_lease.store import LeaseStore

__all__ = ("Event", "Sources")

_LINE = re.compile(r"^\[(\S+ \S+): \w+/\S+\] (\w+) (\w+=.*)$", re.MULTILINE)
_FACT = re.compile(r"(\w+)=(\S+)")
#: Words of the model that share a line of the timeline.
_WORDS = 6
_ALL_WORDS = len(ANSWER.split())
#: Logs cut their instants to the millisecond; this is the end of it.
_CUT = 0.001


@dataclass(frozen=True)
class Event:
    """One line of the timeline.

    Attributes:
        at: Seconds since the epoch.
        who: A worker, "database" or "demo".
        source: Where it was read: "log", "journal", "history" or, for the demo itself, "signal".
        text: What happened.
        tone: "good", "bad", "quiet" or "plain".
    """

    at: float
    who: str
    source: str
    text: str
    tone: str = "plain"


class Sources:
    """All that is new since the last look, in the order of its own time stamps.

    Args:
        crew: Its workers' logs.
        journal: The journal of the tasks.
        store: The lease rows.
        start: Instants are told in seconds since then.
    """

    def __init__(self, crew: Crew, journal: Path, store: LeaseStore, start: float) -> None:
        self._crew, self._journal, self._store, self._start = crew, journal, store, start
        self._offsets: dict[str, int] = {}
        self._entries = 0
        self._said: list[str] = []
        #: Ids of the tasks to follow, and how many lines of their histories were told.
        self.followed: dict[str, int] = {}

    def news(self) -> list[Event]:
        """Return the events since the last call."""
        found = [event for worker in self._crew.workers for event in self._from_log(worker)]
        found += self._from_journal()
        found += [event for task_id in self.followed for event in self._from_history(task_id)]
        return found

    def _from_log(self, worker: Worker) -> Iterator[Event]:
        data = worker.log.read_bytes()[self._offsets.get(worker.node, 0) :]
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[worker.node] = self._offsets.get(worker.node, 0) + len(whole)
        for written, name, facts in _LINE.findall(whole.decode(errors="replace")):
            phrase = _LOG.get(name)
            if phrase is None:
                continue
            instant = datetime.strptime(written, "%Y-%m-%d %H:%M:%S,%f").astimezone()
            known = dict(_FACT.findall(facts))
            known["until"] = self._relative(known.get("lease_until"))
            text, tone = phrase
            yield Event(
                instant.timestamp() + _CUT, worker.name, "log", text.format_map(known), tone
            )

    def _relative(self, instant: str | None) -> str:
        if instant is None:
            return ""
        until = datetime.strptime(instant, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)
        return f"{until.timestamp() - self._start:.1f} s"

    def _from_journal(self) -> Iterator[Event]:
        entries = read_journal(self._journal)
        for entry in entries[self._entries :]:
            if entry["event"] == "start":
                self._said = []  # what a killed body said last was not told
            phrase = self._words if entry["event"] == "word" else _JOURNAL[entry["event"]]
            text = phrase(entry)
            if text:
                tone = _JOURNAL_TONES.get(entry["event"], "plain")
                yield Event(entry["at"], self._crew.named(entry["node"]), "journal", text, tone)
        self._entries = len(entries)

    def _words(self, entry: Mapping[str, Any]) -> str:
        self._said.append(entry["said"])
        if entry["words"] % _WORDS and entry["words"] < _ALL_WORDS:
            return ""
        said, self._said = " ".join(self._said), []
        return f"model: “{said}” ({entry['words']} of {_ALL_WORDS} words)"

    def _from_history(self, task_id: str) -> Iterator[Event]:
        history = self._store.history(task_id)
        for entry in history[self.followed[task_id] :]:
            phrase = _HISTORY.get(entry.event)
            if phrase is not None:
                text, tone = phrase(entry, self._crew.named(entry.owner_id))
                yield Event(entry.at.timestamp(), "database", "history", text, tone)
        self.followed[task_id] = len(history)


_LOG: dict[str, tuple[str, str]] = {
    "job_claimed": (
        "claims the task: token {token}, attempt {attempt}, lease until {until}",
        "good",
    ),
    "heartbeat_ok": ("heartbeat: token {token} renewed, lease until {until}", "quiet"),
    "heartbeat_lost": ("knows that the lease of token {token} is lost ({reason})", "bad"),
    "ownership_unknown": ("is not certain any more that token {token} is its own", "bad"),
    "result_rejected": ("its result under token {token} is refused", "bad"),
    "job_committed": ("its outcome under token {token} is accepted: {state}", "good"),
    "job_reclaimed": ("its reaper takes the expired lease of token {token} away", "plain"),
    "job_dispatched": ("its reaper sends the message again", "plain"),
    "job_turned_away": ("turns a copy of the message away: {reason}", "plain"),
}

_HISTORY: dict[str, Callable[[HistoryEntry, str], tuple[str, str]]] = {
    "claimed": lambda entry, owner: (f"token {entry.fencing_token} belongs to {owner}", "good"),
    "reclaimed": lambda entry, owner: (f"token {entry.fencing_token} of {owner} expired", "bad"),
    "expired": lambda entry, owner: (f"token {entry.fencing_token} of {owner} expired", "bad"),
    "result_rejected": lambda entry, owner: (
        f"a result under token {entry.fencing_token} of {owner} was refused",
        "bad",
    ),
}


def _started(entry: Mapping[str, Any]) -> str:
    words = entry.get("words")
    resumed = f", from the checkpoint: {words} of {_ALL_WORDS} words" if words else ""
    return f"the body starts{resumed}"


_JOURNAL: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "start": _started,
    "end": lambda _: "the body has ended, with a result to store",
    "told": lambda _: "the body is told that the lease is lost, and goes on regardless",
    "effect": lambda entry: (
        f"receiver: “{entry['action']}” under token {entry['token']} {entry['answer']}"
    ),
    "refused": lambda entry: (
        f"receiver: “{entry['action']}” under token {entry['token']} refused,"
        f" {entry['highest']} was here"
    ),
    "delivered": lambda entry: (
        f"callback: gets the result made under token {entry['result']['token']}"
    ),
}
_JOURNAL_TONES = {"effect": "good", "refused": "bad", "told": "bad", "delivered": "good"}
