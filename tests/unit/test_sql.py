"""What the statements of both databases have in common, and must not lose."""

from __future__ import annotations

import re
import sqlite3

import pytest
from celery.exceptions import ImproperlyConfigured

from celery_lease.dialects import POSTGRESQL, SQLITE, Dialect, Names, Script, dialect_named
from celery_lease.sql import scripts
from celery_lease.sql_phrases import Phrases

DIALECT = pytest.mark.parametrize("dialect", [POSTGRESQL, SQLITE], ids=lambda dialect: dialect.name)
#: Only PostgreSQL has a quick form of the first claim.
_ONE_SIDED = {"claim_new", "claim_new_announcing"}


def test_both_databases_have_the_same_statements() -> None:
    """A statement that one of them lacks would be found by a user."""
    postgresql, sqlite = set(scripts(POSTGRESQL, None)), set(scripts(SQLITE, None))
    assert _ONE_SIDED == postgresql ^ sqlite


def test_an_operation_is_one_statement_on_postgresql() -> None:
    """One round trip each, whatever it does."""
    assert {1} == {len(script.steps) for script in scripts(POSTGRESQL, None).values()}


@DIALECT
@pytest.mark.parametrize(
    "name", ["commit", "commit_announced", "fail", "fail_announced", "release"]
)
def test_an_owner_is_named_whole(dialect: Dialect, name: str) -> None:
    """Task, owner, token, state and expiry are in the condition of every change an owner makes."""
    script = scripts(dialect, None)[name]
    for step in script.steps:
        for column in ("task_id", "owner_id", "fencing_token"):
            number = script.names.index(column) + 1 if script.names else 0
            assert re.search(rf"\b{column} = (:{column}\b|\${number}\b)", step)
        assert re.search(r"\bstate(::text)? = 'running'", step)
        assert re.search(r"lease_until > (:now|clock_timestamp\(\))", step)


@DIALECT
def test_the_clock_is_the_databases(dialect: Dialect) -> None:
    """No instant comes in as a parameter, except SQLite's own, read in the transaction."""
    for script in scripts(dialect, None).values():
        for step in script.steps:
            names = set(re.findall(r"(?<![:\w])(?::|%\()([a-z_]\w*)", step))
            instants = {name for name in names if name.endswith(("_at", "_until", "now"))}
            assert instants <= ({"now"} if dialect is SQLITE else set())
            assert not re.search(r"(?<!_)\bnow\(\)|CURRENT_TIMESTAMP", step)


@DIALECT
def test_statements_of_a_schema_name_it_everywhere(dialect: Dialect) -> None:
    """No table is left to the search path once a schema is configured."""
    for script in scripts(dialect, "leases").values():
        for step in script.steps:
            tables = re.findall(r"(?:FROM|INTO|UPDATE|JOIN|USING) (\S*celery_lease\w*)", step)
            assert all(table.startswith('"leases".') for table in tables)


def test_placeholders_are_numbered_for_postgresql() -> None:
    """A name that comes twice has one number; casts and percent signs are left alone."""
    given = "SELECT :task_id::varchar, :ids_0::int[], 'a%b', :payload, :result_type, :task_id"
    placed = POSTGRESQL.placed(Script((given,)))
    assert ("SELECT $1::varchar, $2::int[], 'a%b', $3, $4, $1",) == placed.steps
    assert ("task_id", "ids_0", "payload", "result_type") == placed.names


def test_a_schema_is_quoted() -> None:
    """A name with a quotation mark stays a name."""
    assert '"odd ""name""".celery_lease' == Names.of('odd "name"').lease
    assert "celery_lease" == Names.of(None).lease


def test_an_unknown_database_has_no_statements() -> None:
    """There is nothing to fall back on."""
    with pytest.raises(ImproperlyConfigured, match="mysql"):
        dialect_named("mysql")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "2026-11-30 23:59:59.500000"),
        (0.5, "2026-12-01 00:00:00.000000"),
        (-86400, "2026-11-29 23:59:59.500000"),
        (0.0004, "2026-11-30 23:59:59.500000"),
        (1e6, "2026-12-12 13:46:39.500000"),
    ],
)
def test_spans_on_sqlite(seconds: float, expected: str) -> None:
    """Sums keep the form of an instant, so that text compares as time does."""
    with sqlite3.connect(":memory:") as connection:
        found = connection.execute(
            f"SELECT {SQLITE.later(':seconds')}",
            {"now": "2026-11-30 23:59:59.500000", "seconds": seconds},
        ).fetchone()
    connection.close()
    assert (expected,) == found


def test_a_script_writes_unless_it_says_otherwise() -> None:
    """A transaction that forgets its write lock could not be waited for."""
    assert Script(("SELECT 1",)).writes
    reading = {name for name, script in scripts(SQLITE, None).items() if not script.writes}
    assert {"find", "rows", "history", "version", "outcome_of", "released_before"} == reading
    for name in reading:
        assert all(step.startswith("SELECT") for step in scripts(SQLITE, None)[name].steps)


def test_a_row_is_read_in_the_order_of_its_value() -> None:
    """The row's clock comes last."""
    assert Phrases(SQLITE, Names.of(None)).row.endswith("finished_at, :now AS read_at")
