"""The statements for SQLite: several in one ``BEGIN IMMEDIATE`` transaction.

There is one writer at a time, so the steps of a script see one state and one
clock (``:now``), and together they are one step for everybody else. A step that
needs the row as it was before comes before the change.
"""

from __future__ import annotations

from celery_lease.dialects import Script
from celery_lease.sql_changes import Changes
from celery_lease.sql_phrases import TERMINAL, Phrases

__all__ = ("sqlite_scripts",)


def sqlite_scripts(phrases: Phrases) -> dict[str, Script]:
    """Return the statements by name."""
    return {**_holder(phrases), **_keeper(phrases), **_reaper(phrases)}


def _table(name: str, *columns: str) -> str:
    """Return the rows of a batch as a table."""
    values = ", ".join(
        f"json_extract(value, '$[{index}]') AS {column}" for index, column in enumerate(columns)
    )
    return f"(SELECT {values} FROM json_each(:{name})) AS {name}"


def _announce(phrases: Phrases) -> str:
    rows = _table("done", "task_id", "fencing_token")
    return (
        f"UPDATE {phrases.names.lease} AS lease SET {phrases.announced} FROM {rows}"
        " WHERE lease.task_id = done.task_id AND lease.fencing_token = done.fencing_token"
        f" AND state IN {TERMINAL} AND announced_at IS NULL"
    )


def _claim(phrases: Phrases) -> tuple[str, ...]:
    changes, lease = Changes(phrases), phrases.names.lease
    same, charge = phrases.same_owner("lease"), phrases.charge("lease")
    takeable = phrases.takeable("lease", charge)
    taken_anew = f"FROM {lease} AS lease WHERE task_id = :task_id AND {takeable} AND NOT {same}"
    head, values = changes.claim_insert("1", "1")
    step = f"CASE WHEN {same} THEN 0 ELSE 1 END"
    charged = f"CASE WHEN {phrases.expired('lease')} AND NOT {same} THEN {charge} ELSE 0 END"
    return (
        phrases.story(
            f"{changes.expired_story('lease', charge)} {taken_anew} AND {phrases.expired('lease')}"
        ),
        phrases.story(f"{changes.claimed_story('lease')} {taken_anew} AND attempt > 0"),
        f"{head} VALUES ({values})"
        f" ON CONFLICT (task_id) DO {changes.claim_update(step, charged)} WHERE {takeable}"
        " RETURNING fencing_token, attempt, crashes, lease_until, details",
    )


def _renew(phrases: Phrases) -> str:
    rows = _table("beat", "task_id", "owner_id", "fencing_token", "duration", "details")
    return (
        f"UPDATE {phrases.names.lease} AS lease SET"
        f" lease_until = {phrases.dialect.later('beat.duration')}, heartbeat_at = {phrases.now},"
        " details = COALESCE(beat.details, lease.details)"
        f" FROM {rows}"
        " WHERE lease.task_id = beat.task_id AND lease.owner_id = beat.owner_id"
        " AND lease.fencing_token = beat.fencing_token"
        f" AND state = 'running' AND lease_until > {phrases.now}"
        " RETURNING task_id, owner_id, fencing_token, lease_until, cancel_requested_at, cancel_reason"
    )


def _holder(phrases: Phrases) -> dict[str, Script]:
    claim, renew, announce = _claim(phrases), _renew(phrases), _announce(phrases)
    crashed = "task_id = :task_id AND owner_id = :owner_id AND state = 'running'"
    return {
        "claim": Script(claim),
        "claim_announcing": Script((announce, *claim)),
        "renew": Script((renew,)),
        "renew_announcing": Script((announce, renew)),
        "announce": Script((announce,)),
        "release": Script(_release(phrases, phrases.held)),
        "crash": Script(_release(phrases, crashed)),
    }


def _release(phrases: Phrases, condition: str) -> tuple[str, ...]:
    changes, lease = Changes(phrases), phrases.names.lease
    outcome = changes.release_outcome("lease")
    return (
        phrases.story(
            f"{changes.released_story('lease', outcome)} FROM {lease} AS lease WHERE {condition}"
        ),
        f"UPDATE {lease} AS lease {changes.release_update(outcome)} WHERE {condition}"
        " RETURNING dispatch",
    )


def _keeper(phrases: Phrases) -> dict[str, Script]:
    changes, lease = Changes(phrases), phrases.names.lease
    charge = phrases.charge("lease")
    later = phrases.dialect.later("COALESCE(:announce_in, lease.lease_duration)")
    spent = (
        f"task_id = :task_id AND {phrases.expired('lease')} AND cancel_requested_at IS NULL"
        f" AND lease.crashes + {charge} >= lease.max_attempts"
    )
    open_row = "task_id = :task_id AND state IN ('queued', 'running')"
    return {
        "give_up": Script(
            (
                phrases.story(
                    f"{changes.reclaimed_story('lease', charge)} FROM {lease} AS lease"
                    f" WHERE {spent}"
                ),
                f"UPDATE {lease} AS lease"
                f" {changes.reclaim_update(_quoted('failed'), charge, later, later)}"
                f" WHERE {spent} RETURNING task_id",
            )
        ),
        "cancel": Script(
            (
                phrases.story(
                    f"{changes.cancel_story('lease')} FROM {lease} AS lease WHERE {open_row}"
                    " AND cancel_requested_at IS NULL"
                ),
                f"UPDATE {lease} AS lease {changes.cancel_update()} WHERE {open_row}",
                f"SELECT state FROM {lease} WHERE task_id = :task_id",
            )
        ),
    }


def _quoted(word: str) -> str:
    return f"'{word}'"


def _reaper(phrases: Phrases) -> dict[str, Script]:
    lease, history = phrases.names.lease, phrases.names.history
    changes = Changes(phrases)
    due = f"SELECT task_id FROM {lease} WHERE {changes.due(phrases.now)}"
    old = (
        f"SELECT task_id FROM {lease} WHERE namespace = :namespace AND state IN {TERMINAL}"
        f" AND announced_at IS NOT NULL AND finished_at <= {phrases.dialect.later('-:older_than')}"
        " ORDER BY finished_at LIMIT :limit"
    )
    sent = _table("sent", "task_id", "dispatch", "resend_in")
    return {
        "reclaim": _reclaim(phrases),
        "take_due": Script(
            (
                f"UPDATE {lease} AS lease {changes.take_update()}"
                f" WHERE task_id IN ({due} ORDER BY dispatch_at LIMIT :limit)"
                f" RETURNING {phrases.row}",
            )
        ),
        "take_one": Script(
            (
                f"UPDATE {lease} AS lease {changes.take_update()} WHERE task_id = :task_id"
                f" AND {changes.due(phrases.now)} RETURNING {phrases.row}",
            )
        ),
        "dispatched": Script(
            (
                f"UPDATE {lease} AS lease"
                f" SET dispatch_at = {phrases.dialect.later('sent.resend_in')} FROM {sent}"
                " WHERE lease.task_id = sent.task_id AND lease.dispatch = sent.dispatch"
                " AND (state = 'queued' OR (state = 'succeeded' AND announced_at IS NULL))",
            )
        ),
        "purge": Script(
            (
                f"DELETE FROM {history} WHERE task_id IN ({old})",
                f"DELETE FROM {lease} WHERE task_id IN ({old}) RETURNING task_id",
            )
        ),
        "reaper_turn": _reaper_turn(phrases),
    }


def _reclaim(phrases: Phrases) -> Script:
    changes, lease = Changes(phrases), phrases.names.lease
    charge = phrases.charge("lease")
    outcome = changes.reclaim_outcome("lease", charge)
    batch = (
        f"SELECT task_id FROM {lease} WHERE namespace = :namespace AND state = 'running'"
        f" AND lease_until <= {phrases.now} ORDER BY lease_until LIMIT :limit"
    )
    late = phrases.dialect.seconds(phrases.now, "lease.lease_until")
    return Script(
        (
            f"SELECT task_id, task_name, {outcome}, owner_id, fencing_token, attempt,"
            f" crashes + {charge}, {late} FROM {lease} AS lease WHERE task_id IN ({batch})"
            " ORDER BY lease_until",
            phrases.story(
                f"{changes.reclaimed_story('lease', charge)} FROM {lease} AS lease"
                f" WHERE task_id IN ({batch})"
            ),
            f"UPDATE {lease} AS lease"
            f" {changes.reclaim_update(outcome, charge, phrases.now, 'NULL')}"
            f" WHERE task_id IN ({batch})",
        ),
        answer=0,
    )


def _reaper_turn(phrases: Phrases) -> Script:
    reaper, now, dialect = phrases.names.reaper, phrases.now, phrases.dialect
    due = f"(next_pass_at IS NULL OR next_pass_at <= {now})"
    covered = "outage_from IS NOT NULL AND pass_at <= " + dialect.plus(
        "outage_until", "3 * :interval"
    )
    return Script(
        (
            f"INSERT OR IGNORE INTO {reaper} (namespace) VALUES (:namespace)",
            f"SELECT {due}, {due} AND (pass_at IS NULL"
            f" OR pass_at < {dialect.later('-3 * :interval')}),"
            f" CASE WHEN {due} THEN :interval ELSE {dialect.seconds('next_pass_at', now)} END"
            f" FROM {reaper} WHERE namespace = :namespace",
            f"UPDATE {reaper} SET outage_until = {now},"
            f" outage_from = CASE WHEN {covered} THEN outage_from ELSE pass_at END"
            " WHERE namespace = :namespace AND :saw_outage",
            f"UPDATE {reaper} SET pass_at = {now}, owner = :owner,"
            f" next_pass_at = {dialect.later(':interval')}"
            f" WHERE namespace = :namespace AND {due}",
        ),
        answer=1,
    )
