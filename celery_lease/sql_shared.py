"""Statements that read the same in every database.

Each is one statement on the row it names, so that its condition and its change
are one step for everybody else.
"""

from __future__ import annotations

from celery_lease.dialects import Script
from celery_lease.sql_phrases import TERMINAL, Phrases

__all__ = ("shared_scripts",)


def shared_scripts(phrases: Phrases) -> dict[str, Script]:
    """Return the statements by name."""
    return {**_ends(phrases), **_announcements(phrases), **_reads(phrases)}


def _ends(phrases: Phrases) -> dict[str, Script]:
    lease, now = phrases.names.lease, phrases.now
    soon = phrases.dialect.later(":announce_in")
    success = (
        f"UPDATE {lease} SET state = 'succeeded', finished_at = {now}, lease_until = NULL,"
        " result = :result, result_type = :result_type, result_encoding = :result_encoding"
    )
    failure = (
        f"UPDATE {lease} SET state = 'failed', finished_at = {now}, lease_until = NULL,"
        " error = :error"
    )
    later = f"announce_until = {soon}, dispatch_at = {soon}"
    condition = f"WHERE {phrases.held} RETURNING fencing_token"
    replaced = "task_id = :task_id AND dispatch = :dispatch AND state = 'queued'"
    return {
        "commit": Script((f"{success}, {later} {condition}",)),
        "commit_announced": Script((f"{success}, {phrases.announced} {condition}",)),
        "fail": Script((f"{failure}, {later} {condition}",)),
        "fail_announced": Script((f"{failure}, {phrases.announced} {condition}",)),
        "replaced": Script(
            (
                f"UPDATE {lease} SET dispatch_at = NULL, payload = NULL, message = NULL"
                f" WHERE {replaced}",
            )
        ),
        "replaced_for_good": Script(
            (
                f"UPDATE {lease} SET state = 'succeeded', finished_at = {now},"
                f" announced_at = {now}, dispatch_at = NULL, {phrases.erased} WHERE {replaced}",
            )
        ),
        # The token decides: only this very grant can have made the row what it is.
        "outcome_of": Script(
            (
                f"SELECT state FROM {lease} WHERE task_id = :task_id AND owner_id = :owner_id"
                " AND fencing_token = :fencing_token",
            ),
            writes=False,
        ),
        "released_before": Script(
            (
                f"SELECT facts FROM {phrases.names.history} WHERE task_id = :task_id"
                " AND fencing_token = :fencing_token AND owner_id = :owner_id"
                " AND event = 'released' AND cause = :cause",
            ),
            writes=False,
        ),
    }


def _announcements(phrases: Phrases) -> dict[str, Script]:
    lease, now = phrases.names.lease, phrases.now
    later = phrases.dialect.later(":announce_in")
    return {
        "grant_announcement": Script(
            (
                f"UPDATE {lease} SET announce_until = {later}, dispatch_at = {later}"
                f" WHERE task_id = :task_id AND state IN {TERMINAL} AND announced_at IS NULL"
                f" AND (announce_until IS NULL OR announce_until <= {now}) RETURNING task_id",
            )
        ),
        "announce_now": Script(
            (
                f"UPDATE {lease} SET announce_until = {now}, dispatch_at = {now}"
                f" WHERE task_id = :task_id AND owner_id = :owner_id AND state IN {TERMINAL}"
                " AND announced_at IS NULL RETURNING task_id",
            )
        ),
        "note": Script(
            (
                phrases.story(
                    f"task_id, namespace, {_parameter('event', 32)}, :fencing_token,"
                    f" {_parameter('owner_id', 255)}, attempt, {_parameter('cause', 64)},"
                    f" {_parameter('facts', 0)} FROM {lease} WHERE task_id = :task_id"
                ),
            )
        ),
    }


def _parameter(name: str, size: int) -> str:
    kind = f"VARCHAR({size})" if size else "TEXT"
    return f"CAST(:{name} AS {kind})"


def _reads(phrases: Phrases) -> dict[str, Script]:
    lease, now = phrases.names.lease, phrases.now
    filters = (
        "namespace = :namespace"
        " AND (CAST(:state AS VARCHAR) IS NULL OR CAST(state AS VARCHAR) = :state)"
        " AND (CAST(:task_name AS VARCHAR) IS NULL OR task_name = :task_name)"
        # The beginning is enough: host, then pid, then what is random.
        " AND (CAST(:owner AS VARCHAR) IS NULL"
        " OR substr(owner_id, 1, length(CAST(:owner AS VARCHAR))) = :owner)"
        f" AND (NOT :expired OR (state = 'running' AND lease_until <= {now}))"
    )
    return {
        "find": Script(
            (f"SELECT {phrases.row} FROM {lease} WHERE task_id = :task_id",), writes=False
        ),
        "rows": Script(
            (
                f"SELECT {phrases.row} FROM {lease} WHERE {filters}"
                " ORDER BY created_at DESC LIMIT :limit",
            ),
            writes=False,
        ),
        "history": Script(
            (
                "SELECT task_id, event, fencing_token, owner_id, attempt, cause, at, facts"
                f" FROM {phrases.names.history} WHERE task_id = :task_id ORDER BY id",
            ),
            writes=False,
        ),
        "version": Script((f"SELECT max(version) FROM {phrases.names.version}",), writes=False),
    }
