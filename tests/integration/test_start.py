"""What is wrong with a deployment is said at its start, before a message is taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from celery import Celery
from celery.exceptions import ImproperlyConfigured
from harness.length import by_length
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.workers import PACKAGE, Crew

from celery_lease import LeasedTask
from celery_lease.options import app_settings, settings_of

#: Name: settings of the app, and what the error has to say.
WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "intervals": (
        {"lease_duration": 10, "lease_heartbeat_interval": 5, "lease_margin": 5},
        ["lease_duration=10", "lease_heartbeat_interval=5", "lease_margin=5", "greater than 10"],
    ),
    "policy": (
        {"lease_policy": "exprot", "lease_policies": {"export": {"lease_duration": 300}}},
        ["lease_policy='exprot'", "'export'"],
    ),
    "unknown setting": ({"lease_durration": 5}, ["lease_durration", "did you mean lease_duration"]),
    "negative": ({"lease_duration": -1}, ["lease_duration=-1", "> 0"]),
    "attempts": ({"lease_max_attempts": 0}, ["lease_max_attempts=0", ">= 1"]),
    "payload": ({"lease_payload": "gone"}, ["lease_payload='gone'", "'erase', 'keep', 'never'"]),
    "mode": ({"lease_mode": "on"}, ["lease_mode='on'", "'enforce'"]),
    "interrupt": ({"lease_interrupt": "yes"}, ["lease_interrupt='yes'", "True or False"]),
}

#: Name: the URL, and what the error has to say. Each but the first holds a password.
WRONG_URLS: dict[str, tuple[str, list[str]]] = {
    "none": ("", ["lease_url is not set", "postgresql+psycopg://"]),
    "not a URL": ("postgresql//me:pa55word@localhost", ["lease_url", "cannot be read as a URL"]),
    "missing driver": ("postgresql+asyncpg://me:pa55word@localhost/x", ["psycopg"]),
    "bad port": (
        "postgresql://me:pa55word@localhost:port/x",
        ["lease_url", "postgresql://me:***@"],
    ),
    "unknown database": ("oracle://me:pa55word@localhost/x", ["oracle", "no support"]),
    "in memory": ("sqlite://", ["memory"]),
}


def _refused(crew: Crew, url: str, texts: list[str], **conf: Any) -> str:
    """Start a worker that must not start; return its log."""
    sent = crew.task("plain").delay("kept")
    queue = RedisQueue(crew.settings.broker_url, crew.settings.queue)
    worker = crew.start(
        ready=False, source=APP, env={"CONF": json.dumps({"lease_url": url, **conf})}
    )
    status = worker.process.wait(30)
    log = worker.log()
    assert 0 != status, log
    for text in texts:
        assert text in log
    assert "ready." not in log
    assert 1 == queue.waiting()
    queue.close()
    assert [] == crew.journal.entries()
    assert not sent.ready()
    return log


#: The settings are laid over the harness's own here, in the worker only: the sender has to start.
APP = """
import json, os
from harness.apps import AppSettings, build
app = build(AppSettings.from_environment())
app.conf.update(json.loads(os.environ["CONF"]))
"""


@pytest.mark.parametrize("name", list(WRONG)[: by_length(3, len(WRONG))])
def test_a_wrong_setting_is_refused(
    name: str, crews: Callable[..., Crew], sqlite_database: str
) -> None:
    """The worker ends; the error names key, value and legal range; the message stays."""
    conf, texts = WRONG[name]
    _refused(crews(sqlite_database), sqlite_database, texts, **conf)


@pytest.mark.parametrize("name", list(WRONG_URLS)[: by_length(3, len(WRONG_URLS))])
def test_a_wrong_url_is_refused(
    name: str, crews: Callable[..., Crew], sqlite_database: str
) -> None:
    """As a wrong setting; the password is never shown."""
    url, texts = WRONG_URLS[name]
    log = _refused(crews(sqlite_database), url, texts)
    assert "pa55word" not in log


def test_missing_tables_are_refused(crews: Callable[..., Crew], empty_database: str) -> None:
    """The error says how to make them."""
    _refused(crews(empty_database), empty_database, ["SchemaOutdated", "lease migrate"])


@pytest.mark.parametrize("version", [0, 1000])
def test_tables_of_another_version_are_refused(
    version: int, crews: Callable[..., Crew], lease_database: str
) -> None:
    """Older or newer, the error names both versions; the tables stay as they are."""
    rows = Rows(lease_database)
    rows.execute("UPDATE celery_lease_version SET version = :version", version=version)
    _refused(crews(lease_database), lease_database, ["SchemaOutdated", str(version)])
    assert version == rows.query("SELECT version FROM celery_lease_version")[0]["version"]
    rows.close()


def test_a_missing_driver_is_named(tmp_path: Path, crews: Callable[..., Crew]) -> None:
    """Without psycopg the error says what to install."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'psycopg':\n            raise ModuleNotFoundError(name=name)\n"
        "import importlib.util\n"
        "find_spec = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'psycopg' else find_spec(n, *a)\n"
    )
    url = "postgresql+psycopg://me:pa55word@127.0.0.1/x"
    log = _refused(crews(f"sqlite:///{tmp_path / 'x.db'}"), url, ["celery-lease[postgresql]"])
    assert "pa55word" not in log


def _celery(crew: Crew, *arguments: str, **conf: Any) -> subprocess.CompletedProcess[str]:
    process = crew.start(
        "command", ready=False, source=APP, env={"CONF": json.dumps(conf)}, command=arguments
    )
    status = process.process.wait(30)
    return subprocess.CompletedProcess(arguments, status, process.log())


@pytest.mark.parametrize("name", ["intervals", "unknown setting"][: by_length(1, 2)])
@pytest.mark.parametrize("command", ["migrate", "reap"])
def test_commands_refuse_wrong_settings(
    command: str, name: str, crews: Callable[..., Crew], sqlite_database: str
) -> None:
    """Exit status 2, with the same words as a worker."""
    conf, texts = WRONG[name]
    done = _celery(crews(sqlite_database), "lease", command, **conf)
    assert 2 == done.returncode, done.stdout
    for text in texts:
        assert text in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("name", list(WRONG_URLS)[: by_length(3, len(WRONG_URLS))])
def test_commands_refuse_wrong_urls(
    name: str, crews: Callable[..., Crew], sqlite_database: str
) -> None:
    """Exit status 2, and the password is never shown."""
    url, texts = WRONG_URLS[name]
    done = _celery(crews(sqlite_database), "lease", "migrate", lease_url=url)
    assert 2 == done.returncode, done.stdout
    for text in texts:
        assert text in " ".join(done.stdout.split())
    assert "pa55word" not in done.stdout
    assert "Traceback" not in done.stdout


def test_commands_report_an_unusable_database(
    crews: Callable[..., Crew], empty_database: str
) -> None:
    """Exit status 3 for missing tables and for a database that does not answer."""
    crew = crews(empty_database)
    missing = _celery(crew, "lease", "reap", "--once")
    away = _celery(
        crew, "lease", "migrate", lease_url="postgresql+psycopg://a:pa55word@127.0.0.1:1/x"
    )
    for done in (missing, away):
        assert 3 == done.returncode, done.stdout
        assert "Traceback" not in done.stdout
        assert "pa55word" not in done.stdout
    assert "lease migrate" in missing.stdout


def test_migrate_makes_the_tables_and_a_second_time_changes_nothing(
    crews: Callable[..., Crew], empty_database: str
) -> None:
    """Exit status 0 both times; a worker then starts."""
    crew = crews(empty_database)
    made, again = (_celery(crew, "lease", "migrate") for _ in range(2))
    assert (0, 0) == (made.returncode, again.returncode), made.stdout + again.stdout
    assert "already" in again.stdout
    crew.start()
    assert 3 == crew.task("adder").delay(1, 2).get(timeout=10)


def test_migrate_prints_statements_that_make_the_tables(
    crews: Callable[..., Crew], empty_database: str
) -> None:
    """`--sql` touches no database; what it prints is what a database administrator may run."""
    crew = crews(empty_database)
    printed = _celery(crew, "lease", "migrate", "--sql")
    assert 0 == printed.returncode
    engine = sqlalchemy.create_engine(empty_database)
    assert [] == sqlalchemy.inspect(engine).get_table_names()
    with engine.begin() as connection:
        for statement in printed.stdout.split(";\n"):
            if statement.strip(" \n;"):
                connection.exec_driver_sql(statement)
    engine.dispose()
    crew.start()
    assert 3 == crew.task("adder").delay(1, 2).get(timeout=10)


# Where settings come from


def nothing() -> None:
    """Do nothing."""


def _app(**conf: Any) -> Celery:
    app = Celery("settings", set_as_current=False, broker="memory://")
    app.conf.update(conf)
    return app


@pytest.mark.parametrize("namespace", [None, "CELERY"])
def test_settings_in_djangos_style(namespace: str | None) -> None:
    """`CELERY_LEASE_*` in an object, with the namespace `CELERY`, as `lease_*` without."""
    prefix = f"{namespace}_" if namespace else ""
    values = {"LEASE_URL": "sqlite:////nowhere/x.db", "LEASE_DURATION": 33, "LEASE_MARGIN": 2}
    names = {prefix + key if namespace else key.lower(): value for key, value in values.items()}
    app = Celery("django", set_as_current=False)
    app.config_from_object(type("settings", (), names), namespace=namespace)
    task = app.task(base=LeasedTask, shared=False, name="t")(nothing)
    app.finalize()
    settings = settings_of(task)
    assert ("sqlite:////nowhere/x.db", 33, 2) == (settings.url, settings.duration, settings.margin)


def test_an_unknown_setting_in_djangos_style_is_refused() -> None:
    """The typing error is found there too."""
    app = Celery("django", set_as_current=False)
    app.config_from_object(
        type("settings", (), {"CELERY_LEASE_DURRATION": 3, "CELERY_LEASE_URL": "sqlite:////x.db"}),
        namespace="CELERY",
    )
    app.task(base=LeasedTask, shared=False, name="t")(nothing)
    with pytest.raises(ImproperlyConfigured, match="did you mean lease_duration"):
        app.finalize()


@pytest.mark.parametrize(
    "conf",
    [
        {"result_backend": "db+sqlite:////nowhere/results.db"},
        {"result_backend": "database", "database_url": "sqlite:////nowhere/results.db"},
    ],
)
def test_the_database_of_a_result_backend_is_used(conf: dict[str, str]) -> None:
    """Without `lease_url`, the leases lie beside the results."""
    assert "sqlite:////nowhere/results.db" == app_settings(_app(**conf)).url


def test_leases_beside_the_results(crews: Callable[..., Crew], lease_database: str) -> None:
    """A worker without `lease_url` runs leased tasks in its result backend's database."""
    crew = crews("", result_backend=f"db+{lease_database}")
    crew.start()
    sent = crew.task("adder").delay(1, 2)
    assert 3 == sent.get(timeout=10)
    rows = Rows(lease_database)
    assert "succeeded" == rows.wait(sent.id)["state"]
    rows.close()


def test_a_task_may_have_settings_of_its_own_and_not_the_apps() -> None:
    """Task attribute over policy over app; what belongs to the app is refused on a task."""
    app = _app(
        lease_url="sqlite:////x.db",
        lease_duration=60,
        lease_heartbeat_interval=10,
        lease_policies={"long": {"lease_duration": 600, "lease_max_attempts": 7}},
    )
    plain = app.task(base=LeasedTask, shared=False, name="a")(nothing)
    policy = app.task(base=LeasedTask, shared=False, name="b", lease_policy="long")(nothing)
    own = app.task(base=LeasedTask, shared=False, name="c", lease_policy="long", lease_duration=61)(
        nothing
    )
    app.finalize()
    assert [(60, 3), (600, 7), (61, 7)] == [
        (settings_of(task).duration, settings_of(task).max_attempts)
        for task in (plain, policy, own)
    ]
    with pytest.raises(ImproperlyConfigured, match="lease_url belongs to the whole app"):
        app.task(base=LeasedTask, shared=False, name="d", lease_url="sqlite:////y.db")(nothing)


def test_a_sender_needs_neither_tables_nor_driver(
    tmp_path: Path, broker_url: str, sqlite_database: str
) -> None:
    """Sending connects to the broker only, and imports no driver."""
    script = (
        "import sys\nsys.modules['psycopg'] = None\n"
        "from celery import Celery\nfrom celery_lease import LeasedTask\n"
        "app = Celery('sender', broker=sys.argv[1])\n"
        "app.conf.lease_url = 'postgresql+psycopg://a:b@127.0.0.1:1/nowhere'\n"
        "@app.task(base=LeasedTask)\ndef work(): pass\n"
        "work.delay()\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, broker_url],
        cwd=tmp_path,
        check=True,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
    )
    queue = RedisQueue(broker_url, "celery")
    assert 1 == queue.waiting()
    queue.close()
