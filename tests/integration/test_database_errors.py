"""Tables that are missing, old or newer, and settings that cannot work: said clearly, at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.leases import held, open_store, request
from harness.rows import Rows

from celery_lease import migrations
from celery_lease.database import Database
from celery_lease.exceptions import DatabaseUnavailable, SchemaOutdated
from celery_lease.store import LeaseStore, check_schema


def test_tables_of_this_version_are_fine(store: LeaseStore) -> None:
    """The check passes, and says nothing."""
    check_schema(store.database)


def test_missing_tables(empty_database: str) -> None:
    """Without tables neither check nor statement goes on, and none is created."""
    store = open_store(empty_database)
    with pytest.raises(SchemaOutdated, match=r"are missing.*lease migrate") as checked:
        check_schema(store.database)
    with pytest.raises(SchemaOutdated) as claimed:
        store.claim(request())
    assert (0, 1) == checked.value.args == claimed.value.args
    with store.database.engine.connect() as connection:
        assert 0 == migrations.current_version(connection)
    store.database.dispose()


@pytest.mark.parametrize(("found", "told"), [(0, "are missing"), (2, "upgrade celery_lease")])
def test_tables_of_another_version(store: LeaseStore, rows: Rows, found: int, told: str) -> None:
    """Older tables need a migration, newer ones a newer release."""
    rows.execute(f"UPDATE celery_lease_version SET version = {found}")
    with pytest.raises(SchemaOutdated, match=told) as outdated:
        check_schema(store.database)
    assert (found, 1) == outdated.value.args


def test_a_column_that_is_missing(store: LeaseStore, rows: Rows) -> None:
    """A statement on older tables fails as such, not as a database that is away."""
    rows.execute("UPDATE celery_lease_version SET version = 0")
    rows.execute("ALTER TABLE celery_lease DROP COLUMN labels")
    with pytest.raises(SchemaOutdated):
        store.claim(request())


def test_tables_in_another_schema(postgresql_database: str) -> None:
    """Tables that lie where this connection does not look are missing."""
    store = open_store(postgresql_database, schema="elsewhere")
    with pytest.raises(SchemaOutdated) as outdated:
        check_schema(store.database)
    assert (0, 1) == outdated.value.args
    store.database.dispose()


def test_a_column_added_under_a_prepared_statement(postgresql_database: str) -> None:
    """A migration beside running workers does not break statements that they have prepared."""
    store, rows = open_store(postgresql_database), Rows(postgresql_database)
    for number in range(8):
        store.release(
            held(store, "task", owner=f"owner-{number}", dispatch=number),
            cause="retry",
            charge=False,
            dispatch=True,
        )
        store.find("task")
    rows.execute("ALTER TABLE celery_lease ADD COLUMN later_release text")
    rows.execute("ALTER TABLE celery_lease ALTER COLUMN details TYPE varchar")
    ref = held(store, "task", owner="owner-8", dispatch=8)
    assert store.find("task") is not None
    assert 9 == store.release(ref, cause="retry", charge=False, dispatch=True)
    store.database.dispose()
    rows.close()


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    """A folder that does not exist is a database that cannot be reached."""
    store = open_store(f"sqlite:///{tmp_path / 'nowhere' / 'lease.db'}")
    with pytest.raises(DatabaseUnavailable, match="unable to open"):
        store.find("task")


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    """SQLite says so, and so does the store."""
    path = tmp_path / "lease.db"
    path.write_bytes(b"this is not a database, but long enough to be looked at" * 40)
    store = open_store(f"sqlite:///{path}")
    with pytest.raises(DatabaseUnavailable, match="not a database"):
        store.find("task")


def test_a_database_that_may_not_be_written(sqlite_database: str, tmp_path: Path) -> None:
    """A read-only standby, or a file without the right to write, is not available."""
    store = open_store(f"{sqlite_database}?mode=ro&uri=true".replace("///", "///file:"))
    with pytest.raises(DatabaseUnavailable, match="readonly"):
        store.claim(request())


def test_a_standby_is_not_available(postgresql_database: str) -> None:
    """After a failover a connection may end at a server that only reads."""
    options = {"connect_args": {"options": "-c default_transaction_read_only=on"}}
    store = LeaseStore(Database(postgresql_database, options), "app")
    with pytest.raises(DatabaseUnavailable, match="read-only"):
        store.claim(request())
    store.database.dispose()
