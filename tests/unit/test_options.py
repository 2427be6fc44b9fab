"""Settings as Celery keeps them: names, namespaces, fallbacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_lease import LeasedTask
from celery_lease.options import app_settings, app_values, leased_tasks, settings_of
from celery_lease.worker import LeaseWorker


def body() -> None:
    """Do nothing: what is made a task here never runs."""


def make(**conf: Any) -> Celery:
    app = Celery("shop", broker="redis://:pw@broker:6380/4", set_as_current=False)
    app.conf.update(lease_url="sqlite:////tmp/none.db", **conf)
    return app


def test_a_task_option_lies_over_the_apps_setting() -> None:
    """The same name as a task attribute overrides app.conf."""
    app = make(lease_duration=120)
    long = app.task(base=LeasedTask, shared=False, name="long", lease_duration=600)(body)
    short = app.task(base=LeasedTask, shared=False, name="short")(body)
    app.finalize()
    assert (600, 120) == (settings_of(long).duration, settings_of(short).duration)


def test_a_namespace_of_the_configuration_is_understood() -> None:
    """Django's CELERY_LEASE_* settings are the same settings."""

    class Django:
        CELERY_BROKER_URL = "memory://"
        CELERY_LEASE_URL = "sqlite:////tmp/none.db"
        CELERY_LEASE_MAX_ATTEMPTS = 7
        UNRELATED = 1

    app = Celery("site", set_as_current=False)
    app.config_from_object(Django, namespace="CELERY")
    assert (7, "sqlite:////tmp/none.db") == (app_settings(app).max_attempts, app_settings(app).url)


def test_a_misspelt_app_setting_is_refused() -> None:
    """A typing error in app.conf is found when the app is finalized."""
    app = make(lease_durration=5)
    app.task(base=LeasedTask, shared=False, name="export")(body)
    with pytest.raises(ImproperlyConfigured, match="did you mean lease_duration"):
        app.finalize()


def test_illegal_intervals_are_found_when_the_app_is_finalized() -> None:
    """L > R × H + J is checked before any worker takes a message."""
    app = make()
    app.task(base=LeasedTask, shared=False, name="export", lease_duration=10)(body)
    with pytest.raises(ImproperlyConfigured, match="task export: lease_duration=10"):
        app.finalize()


def test_a_database_result_backend_serves_as_lease_database() -> None:
    """Without lease_url the URL of a db+… result backend is used."""
    app = Celery("shop", backend="db+postgresql+psycopg://h/db", set_as_current=False)
    assert app_settings(app).url == "postgresql+psycopg://h/db"


def test_without_any_database_the_error_says_what_to_set() -> None:
    """The key is named, and what a legal value looks like."""
    app = Celery("shop", backend="redis://", set_as_current=False)
    with pytest.raises(ImproperlyConfigured, match=r"lease_url is not set.*postgresql\+psycopg"):
        app_settings(app)


def test_the_namespace_tells_apps_and_brokers_apart_and_holds_no_password() -> None:
    """Two apps may share one database; the derived name shows no credentials."""
    mine = app_values(make())["namespace"]
    other_app = Celery("other", broker="redis://:pw@broker:6380/4", set_as_current=False)
    other_broker = Celery("shop", broker="redis://:pw@broker:6380/5", set_as_current=False)
    other_password = Celery("shop", broker="redis://:new@broker:6380/4", set_as_current=False)
    assert mine != app_values(other_app)["namespace"]
    assert mine != app_values(other_broker)["namespace"]
    assert mine == app_values(other_password)["namespace"]
    assert "pw" not in mine


def test_celerys_own_housekeeping_takes_no_lease() -> None:
    """An app that leases every task does not lease chord polling and clean-up."""
    app = Celery("shop", task_cls="celery_lease:LeasedTask", set_as_current=False)
    app.conf.lease_url = "sqlite:////tmp/none.db"
    app.finalize()
    names = {task.name for task in leased_tasks(app)}
    assert "celery.map" in names
    assert not names & {"celery.chord_unlock", "celery.backend_cleanup", "celery.chord"}


def test_a_task_in_mode_off_is_plain_celery() -> None:
    """Turned off, a task takes no lease, and needs no database."""
    app = Celery("shop", set_as_current=False)
    app.conf.lease_mode = "off"
    app.task(base=LeasedTask, shared=False, name="export")(body)
    app.finalize()
    assert not leased_tasks(app)


def test_a_request_class_that_knows_no_leases_is_refused() -> None:
    """A worker with such a task does not start: it would acknowledge what is another's."""
    app = make()
    app.task(base=LeasedTask, shared=False, name="export", Request="celery.worker.request:Request")(
        body
    )
    with pytest.raises(ImproperlyConfigured, match=r"task export: Request=celery\.worker"):
        LeaseWorker(SimpleNamespace(app=app))
