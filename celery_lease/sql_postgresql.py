"""The statements for PostgreSQL: each operation is one statement, one round trip.

Where the row as it was before is needed (for the history, for the charge), a
first part of the statement locks it and reads it; the row cannot change between
that part and the next. In statements that follow one row the clock is
``clock_timestamp()``, which is right after a wait for a lock; scans use
``statement_timestamp()``, so that one batch is judged by one instant.

A batch comes as the array of its task ids and a JSON object by task id: the
array finds the rows by the primary key, the object gives each row its values.
A join with ``unnest`` would be shorter, and on a table whose statistics are old
it is planned as a loop in a loop: ten thousand renewals then take minutes.
"""

from __future__ import annotations

from celery_lease.dialects import Script
from celery_lease.sql_changes import Changes
from celery_lease.sql_phrases import COLUMNS, TERMINAL, Phrases

__all__ = ("postgresql_scripts",)

_SCAN_NOW = "statement_timestamp()"


def postgresql_scripts(phrases: Phrases) -> dict[str, Script]:
    """Return the statements by name."""
    statements = {**_holder(phrases), **_keeper(phrases), **_reaper(phrases)}
    return {name: Script((statement,)) for name, statement in statements.items()}


def _of(name: str, index: int, kind: str) -> str:
    """Return a value of the row's own in a batch."""
    return f"(:{name}::jsonb -> lease.task_id ->> {index})::{kind}"


def _among(table: str, found: str) -> str:
    """Return whether a row is one of those that an earlier part of the statement has found.

    As an array, for the same reason as in a batch: a join may be planned the wrong way round.
    """
    return f"{table}.task_id = ANY(ARRAY(SELECT {found}.task_id FROM {found}))"


def _announce(phrases: Phrases) -> str:
    return (
        f"UPDATE {phrases.names.lease} AS lease SET {phrases.announced}"
        " WHERE lease.task_id = ANY(:done_ids::varchar[])"
        f" AND lease.fencing_token = {_of('done', 0, 'bigint')}"
        f" AND lease.state IN {TERMINAL} AND lease.announced_at IS NULL"
    )


def _claim_new(phrases: Phrases) -> str:
    # The usual case by itself: planning the whole claim takes longer than running it.
    head, values = Changes(phrases).claim_insert("1", "1")
    return (
        f"{head} VALUES ({values}) ON CONFLICT (task_id) DO NOTHING"
        " RETURNING fencing_token, attempt, crashes, lease_until, details"
    )


def _claim(phrases: Phrases) -> str:
    changes, lease = Changes(phrases), phrases.names.lease
    charge = (
        f"CASE WHEN {phrases.expired('lease')} AND NOT {phrases.same_owner('lease')}"
        f" THEN {phrases.charge('lease')} ELSE 0 END"
    )
    step = f"CASE WHEN {phrases.same_owner('prior')} THEN 0 ELSE 1 END"
    head, values = changes.claim_insert(
        f"COALESCE(prior.fencing_token, 0) + {step}", f"COALESCE(prior.attempt, 0) + {step}"
    )
    update = changes.claim_update(
        "(excluded.fencing_token - lease.fencing_token)",
        "COALESCE((SELECT prior.charge FROM prior), 0)",
    )
    anew = "FROM taken JOIN prior ON taken.fencing_token > prior.fencing_token"
    return (
        "prior AS (SELECT lease.task_id, lease.namespace, lease.state, lease.owner_id,"
        " lease.lease_until, lease.fencing_token, lease.attempt, lease.crashes,"
        " lease.max_attempts, lease.dispatch, lease.retries, lease.cancel_requested_at,"
        f" {charge} AS charge FROM {lease} AS lease"
        " WHERE lease.task_id = :task_id FOR UPDATE),"
        f" taken AS ({head} SELECT {values} FROM (VALUES (1)) AS one LEFT JOIN prior ON TRUE"
        f" WHERE prior.task_id IS NULL OR {phrases.takeable('prior', 'prior.charge')}"
        f" ON CONFLICT (task_id) DO {update}"
        # The row that was locked, and none that came into being since.
        " WHERE EXISTS (SELECT 1 FROM prior)"
        " RETURNING lease.fencing_token, lease.attempt, lease.crashes, lease.lease_until,"
        " lease.details),"
        f" story AS ({phrases.story(changes.expired_story('prior', 'prior.charge'))} {anew}"
        f" WHERE prior.state = 'running' UNION ALL SELECT {phrases.now},"
        f" {changes.claimed_story('prior')} {anew} WHERE prior.attempt > 0)"
        " SELECT * FROM taken"
    )


def _renew(phrases: Phrases) -> str:
    later = phrases.dialect.later(_of("beat", 2, "float8"))
    return (
        f"UPDATE {phrases.names.lease} AS lease SET"
        f" lease_until = {later}, heartbeat_at = {phrases.now},"
        f" details = COALESCE({_of('beat', 3, 'text')}, lease.details)"
        " WHERE lease.task_id = ANY(:beat_ids::varchar[])"
        f" AND lease.owner_id = {_of('beat', 0, 'varchar')}"
        f" AND lease.fencing_token = {_of('beat', 1, 'bigint')}"
        f" AND {phrases.running('lease.state')} AND lease.lease_until > {phrases.now}"
        " RETURNING lease.task_id, lease.owner_id, lease.fencing_token, lease.lease_until,"
        " lease.cancel_requested_at, lease.cancel_reason"
    )


def _holder(phrases: Phrases) -> dict[str, str]:
    claim, renew, announce = _claim(phrases), _renew(phrases), _announce(phrases)
    claim_new = _claim_new(phrases)
    crashed = f"task_id = :task_id AND owner_id = :owner_id AND {phrases.running('state')}"
    return {
        "claim_new": claim_new,
        "claim_new_announcing": f"WITH announced AS ({announce}) {claim_new}",
        "claim": f"WITH {claim}",
        "claim_announcing": f"WITH announced AS ({announce}), {claim}",
        "renew": renew,
        "renew_announcing": f"WITH announced AS ({announce}) {renew}",
        "announce": announce,
        "release": _release(phrases, phrases.held),
        "crash": _release(phrases, crashed),
    }


def _release(phrases: Phrases, condition: str) -> str:
    changes, lease = Changes(phrases), phrases.names.lease
    return (
        f"WITH prior AS (SELECT lease.*, {changes.release_outcome('lease')} AS outcome"
        f" FROM {lease} AS lease WHERE {condition} FOR UPDATE),"
        f" story AS ({phrases.story(changes.released_story('prior', 'prior.outcome'))} FROM prior)"
        f" UPDATE {lease} AS lease {changes.release_update('prior.outcome')} FROM prior"
        " WHERE lease.task_id = :task_id AND lease.task_id = prior.task_id"
        " RETURNING lease.dispatch"
    )


def _keeper(phrases: Phrases) -> dict[str, str]:
    changes, lease = Changes(phrases), phrases.names.lease
    later = phrases.dialect.later("COALESCE(:announce_in, lease.lease_duration)")
    charge = phrases.charge("lease")
    spent = (
        f"{phrases.running('lease.state')} AND lease.lease_until <= {phrases.now}"
        " AND lease.cancel_requested_at IS NULL"
        f" AND lease.crashes + {charge} >= lease.max_attempts"
    )
    failed = changes.reclaim_update("'failed'", "prior.charge", later, later)
    return {
        "give_up": (
            f"WITH prior AS (SELECT lease.*, {charge} AS charge FROM {lease} AS lease"
            f" WHERE lease.task_id = :task_id AND {spent} FOR UPDATE),"
            f" story AS ({phrases.story(changes.reclaimed_story('prior', 'prior.charge'))}"
            " FROM prior)"
            f" UPDATE {lease} AS lease {failed} FROM prior"
            " WHERE lease.task_id = :task_id AND lease.task_id = prior.task_id"
            " RETURNING lease.task_id"
        ),
        "cancel": (
            f"WITH prior AS (SELECT lease.* FROM {lease} AS lease"
            " WHERE lease.task_id = :task_id FOR UPDATE),"
            f" story AS ({phrases.story(changes.cancel_story('prior'))} FROM prior"
            " WHERE prior.state IN ('queued', 'running') AND prior.cancel_requested_at IS NULL),"
            f" changed AS (UPDATE {lease} AS lease {changes.cancel_update()} FROM prior"
            " WHERE lease.task_id = :task_id AND lease.task_id = prior.task_id"
            " AND prior.state IN ('queued', 'running')"
            " RETURNING lease.state)"
            " SELECT COALESCE((SELECT changed.state FROM changed), prior.state) FROM prior"
        ),
    }


def _reaper(phrases: Phrases) -> dict[str, str]:
    changes, lease = Changes(phrases), phrases.names.lease
    columns = ", ".join(f"lease.{name}" for name in COLUMNS)
    return {
        "reclaim": _reclaim(phrases),
        "take_due": (
            f"WITH due AS (SELECT task_id FROM {lease} WHERE {changes.due(_SCAN_NOW)}"
            " ORDER BY dispatch_at LIMIT :limit FOR UPDATE SKIP LOCKED)"
            f" UPDATE {lease} AS lease {changes.take_update()}"
            f" WHERE {_among('lease', 'due')} RETURNING {columns}, {phrases.now}"
        ),
        "take_one": (
            f"UPDATE {lease} AS lease {changes.take_update()} WHERE task_id = :task_id"
            f" AND {changes.due(phrases.now)} RETURNING {columns}, {phrases.now}"
        ),
        "dispatched": (
            f"UPDATE {lease} AS lease"
            f" SET dispatch_at = {phrases.dialect.later(_of('sent', 1, 'float8'))}"
            " WHERE lease.task_id = ANY(:sent_ids::varchar[])"
            f" AND lease.dispatch = {_of('sent', 0, 'integer')} AND (lease.state = 'queued'"
            " OR (lease.state = 'succeeded' AND lease.announced_at IS NULL))"
        ),
        "purge": (
            f"WITH old AS (SELECT task_id FROM {lease} WHERE namespace = :namespace"
            f" AND state IN {TERMINAL} AND announced_at IS NOT NULL"
            f" AND finished_at <= {_SCAN_NOW} - make_interval(secs => :older_than)"
            " ORDER BY finished_at LIMIT :limit FOR UPDATE SKIP LOCKED),"
            f" gone AS (DELETE FROM {lease} AS lease WHERE {_among('lease', 'old')}"
            " RETURNING lease.task_id),"
            f" told AS (DELETE FROM {phrases.names.history} AS history"
            f" WHERE {_among('history', 'old')})"
            " SELECT task_id FROM gone"
        ),
        "reaper_turn": _reaper_turn(phrases),
    }


def _reclaim(phrases: Phrases) -> str:
    changes, lease = Changes(phrases), phrases.names.lease
    outcome = changes.reclaim_outcome("lease", "due.charge")
    late = phrases.dialect.seconds(_SCAN_NOW, "due.lease_until")
    update = changes.reclaim_update(outcome, "due.charge", phrases.now, "NULL")
    return (
        "WITH due AS (SELECT lease.task_id, lease.namespace, lease.owner_id, lease.fencing_token,"
        f" lease.attempt, lease.lease_until, {phrases.charge('lease')} AS charge"
        f" FROM {lease} AS lease WHERE lease.namespace = :namespace AND lease.state = 'running'"
        f" AND lease.lease_until <= {_SCAN_NOW} ORDER BY lease.lease_until LIMIT :limit"
        " FOR UPDATE SKIP LOCKED),"
        # State, token and expiry once more: whoever changes the lines above cannot
        # make this one touch a row that has been finished or claimed since.
        f" reclaimed AS (UPDATE {lease} AS lease {update} FROM due"
        f" WHERE lease.task_id = due.task_id AND {phrases.running('lease.state')}"
        " AND lease.fencing_token = due.fencing_token"
        f" AND lease.lease_until <= {_SCAN_NOW}"
        " RETURNING lease.task_id, lease.task_name, lease.state, due.owner_id,"
        f" due.fencing_token, due.attempt, lease.crashes, {late} AS late),"
        f" story AS ({phrases.story(changes.reclaimed_story('due', 'due.charge'))}"
        " FROM due JOIN reclaimed ON reclaimed.task_id = due.task_id)"
        " SELECT * FROM reclaimed ORDER BY late DESC"
    )


def _reaper_turn(phrases: Phrases) -> str:
    reaper, now, dialect = phrases.names.reaper, phrases.now, phrases.dialect
    covered = "asked.outage_from IS NOT NULL AND asked.pass_at <= " + dialect.plus(
        "asked.outage_until", "3 * :interval"
    )
    return (
        f"WITH prior AS (SELECT * FROM {reaper} WHERE namespace = :namespace FOR UPDATE),"
        " asked AS MATERIALIZED (SELECT prior.*, (prior.next_pass_at IS NULL"
        f" OR prior.next_pass_at <= {now}) AS due, (prior.pass_at IS NULL"
        f" OR prior.pass_at < {dialect.later('-3 * :interval')}) AS grace"
        " FROM (VALUES (1)) AS one LEFT JOIN prior ON TRUE),"
        f" turn AS (INSERT INTO {reaper} AS reaper"
        " (namespace, pass_at, next_pass_at, owner, outage_from, outage_until)"
        f" SELECT :namespace, CASE WHEN asked.due THEN {now} ELSE asked.pass_at END,"
        f" CASE WHEN asked.due THEN {dialect.later(':interval')} ELSE asked.next_pass_at END,"
        " CASE WHEN asked.due THEN :owner ELSE asked.owner END,"
        f" CASE WHEN NOT :saw_outage OR ({covered}) THEN asked.outage_from"
        " ELSE asked.pass_at END,"
        f" CASE WHEN :saw_outage THEN {now} ELSE asked.outage_until END"
        " FROM asked WHERE asked.due OR :saw_outage"
        " ON CONFLICT (namespace) DO UPDATE SET pass_at = excluded.pass_at,"
        " next_pass_at = excluded.next_pass_at, owner = excluded.owner,"
        " outage_from = excluded.outage_from, outage_until = excluded.outage_until"
        # Not over a first row that another reaper has written since.
        " WHERE EXISTS (SELECT 1 FROM prior) RETURNING namespace)"
        " SELECT asked.due AND EXISTS (SELECT 1 FROM turn), asked.due AND asked.grace,"
        " CASE WHEN asked.due THEN :interval::float8"
        f" ELSE {dialect.seconds('asked.next_pass_at', now)} END FROM asked"
    )
