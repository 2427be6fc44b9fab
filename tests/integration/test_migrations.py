"""The tables come to be by numbered steps, in three ways, and twice at once does no harm."""

from __future__ import annotations

import io
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from harness.leases import held, open_store
from sqlalchemy import Engine

from celery_lease import migrations
from celery_lease.exceptions import SchemaOutdated
from celery_lease.schema import SCHEMA_VERSION, tables
from celery_lease.store import check_schema


@pytest.fixture
def engine(empty_database: str) -> Iterator[Engine]:
    """Give an engine on a database without tables."""
    made = sqlalchemy.create_engine(empty_database, poolclass=sqlalchemy.NullPool)
    yield made
    made.dispose()


def _version(engine: Engine) -> int:
    with engine.connect() as connection:
        return migrations.current_version(connection)


def _tables(engine: Engine) -> set[str]:
    return set(sqlalchemy.inspect(engine).get_table_names())


def test_the_steps_make_the_tables_that_the_code_knows(engine: Engine) -> None:
    """Frozen steps and present tables agree in names, types and nullability."""
    migrations.upgrade(engine)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert [] == compare_metadata(context, tables().metadata)


def test_indexes_agree_too(engine: Engine) -> None:
    """Also the parts that the comparison above leaves out."""
    migrations.upgrade(engine)
    inspector = sqlalchemy.inspect(engine)
    for table in (tables().lease, tables().history):
        found = {
            (index["name"], tuple(index["column_names"]), bool(index["unique"]))
            for index in inspector.get_indexes(table.name)
        }
        expected = {
            (index.name, tuple(column.name for column in index.columns), bool(index.unique))
            for index in table.indexes
        }
        assert expected == found


def test_a_beat_touches_no_index(engine: Engine) -> None:
    """What a renewal changes is in no index, so that it stays a heap-only update."""
    changed = {"lease_until", "heartbeat_at", "details", "lease_duration"}
    for index in tables().lease.indexes:
        assert set() == changed & {column.name for column in index.columns}


def test_an_upgrade_is_done_once(engine: Engine) -> None:
    """It returns what it found; a second one finds nothing to do."""
    assert [0, SCHEMA_VERSION] == [migrations.upgrade(engine), migrations.upgrade(engine)]
    assert SCHEMA_VERSION == _version(engine)


def test_a_downgrade_removes_everything(engine: Engine) -> None:
    """Version 0 is a database without a trace, and it can be upgraded again."""
    migrations.upgrade(engine)
    assert SCHEMA_VERSION == migrations.downgrade(engine)
    assert (set(), 0) == (_tables(engine), _version(engine))
    assert 0 == migrations.downgrade(engine)
    assert 0 == migrations.upgrade(engine)


def test_two_upgrades_at_once(engine: Engine) -> None:
    """Two deployments that start together: one makes the tables, the other waits and sees."""
    start = threading.Barrier(4)

    def upgrade(_: int) -> int:
        start.wait()
        return migrations.upgrade(engine)

    with ThreadPoolExecutor(4) as threads:
        assert [0, SCHEMA_VERSION, SCHEMA_VERSION, SCHEMA_VERSION] == sorted(
            threads.map(upgrade, range(4))
        )


def test_a_failed_upgrade_leaves_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps of an upgrade are one transaction."""

    class Broken:
        @staticmethod
        def up(dialect_name: str, prefix: str) -> tuple[str, ...]:
            return ("CREATE TABLE half_done (id INTEGER)", "CREATE TABLE no such thing")

    monkeypatch.setitem(migrations._STEPS, 1, Broken)
    with pytest.raises(sqlalchemy.exc.DBAPIError):
        migrations.upgrade(engine)
    assert (set(), 0) == (_tables(engine), _version(engine))


def test_a_revision_of_the_users_own_alembic(engine: Engine) -> None:
    """`up(op)` and `down(op)` run in the revision's transaction."""
    with engine.begin() as connection:
        op = Operations(MigrationContext.configure(connection))
        migrations.up(op, version=1)
    assert 1 == _version(engine)
    with engine.begin() as connection:
        op = Operations(MigrationContext.configure(connection))
        migrations.down(op, version=0)
    assert 0 == _version(engine)


def test_alembic_offline_prints_the_same_statements(engine: Engine) -> None:
    """`alembic upgrade --sql` gets every step as text."""
    printed = io.StringIO()
    name = engine.dialect.name
    context = MigrationContext.configure(
        dialect_name=name, opts={"as_sql": True, "output_buffer": printed}
    )
    migrations.up(Operations(context))
    text = printed.getvalue()
    for statement in migrations.sql(name).split(";\n\n")[1:-1]:
        assert statement.replace("%%", "%") in text
    migrations.down(Operations(context))
    assert "DROP TABLE celery_lease_version" in printed.getvalue()


def test_the_printed_statements_make_the_tables(empty_database: str) -> None:
    """What `lease migrate --sql` prints can be run by somebody else's tool."""
    url = sqlalchemy.make_url(empty_database)
    text = migrations.sql(url.get_backend_name())
    if url.get_backend_name() == "sqlite":
        with sqlite3.connect(str(url.database)) as connection:
            connection.executescript(text)
        connection.close()
    else:
        import psycopg

        plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute(text)  # type: ignore[call-overload]
    store = open_store(empty_database)
    check_schema(store.database)
    held(store)
    store.database.dispose()


def test_a_schema_is_created(empty_postgresql: str) -> None:
    """A database schema that is named and missing is made, and found again."""
    engine = sqlalchemy.create_engine(empty_postgresql, poolclass=sqlalchemy.NullPool)
    assert [0, 1] == [migrations.upgrade(engine, schema="leases") for _ in range(2)]
    with engine.connect() as connection:
        assert 1 == migrations.current_version(connection, schema="leases")
        assert 0 == migrations.current_version(connection)
    assert 1 == migrations.downgrade(engine, schema="leases")
    assert 'CREATE SCHEMA IF NOT EXISTS "leases"' in migrations.sql("postgresql", schema="leases")


def test_sqlite_gets_its_write_ahead_log(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Readers and the writer do not wait for one another."""
    path = tmp_path_factory.mktemp("log") / "lease.db"
    engine = sqlalchemy.create_engine(f"sqlite:///{path}", poolclass=sqlalchemy.NullPool)
    migrations.upgrade(engine)
    with engine.connect() as connection:
        assert "wal" == connection.exec_driver_sql("PRAGMA journal_mode").scalar()


def test_tables_of_a_later_release_are_left_alone(empty_database: str) -> None:
    """This release would not know what it works on."""
    engine = sqlalchemy.create_engine(empty_database)
    migrations.upgrade(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE celery_lease_version SET version = 9")
    with pytest.raises(SchemaOutdated, match="9"):
        migrations.upgrade(engine)
    with engine.begin() as connection:
        assert 9 == migrations.current_version(connection)
    engine.dispose()
