"""Where Celery keeps the settings: from ``app.conf`` and task attributes to :class:`Settings`.

Reads ``lease_*`` settings in whatever case and with whatever namespace the
app was configured (Django: ``CELERY_LEASE_*``). Nothing here looks at a
message or a request.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from celery.exceptions import ImproperlyConfigured
from kombu.utils.url import parse_url

from celery_lease.config import Settings, check_names

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("app_settings", "is_housekeeping", "is_leased", "leased_tasks", "settings_of")

#: Celery's own tasks that poll, fan out or clean up: a lease would only cost.
_HOUSEKEEPING = frozenset(
    {
        "celery.accumulate",
        "celery.backend_cleanup",
        "celery.chain",
        "celery.chord",
        "celery.chord_unlock",
        "celery.group",
    }
)


def app_values(app: Celery) -> dict[str, Any]:
    """The app's ``lease_*`` settings without the prefix.

    Raises:
        celery.exceptions.ImproperlyConfigured: A name is unknown.
    """
    keys = list(app.conf)
    # Only now has a lazy configuration been loaded, and says its prefix.
    conf: Any = app.conf
    prefix = str(getattr(conf, "prefix", None) or "").lower()
    found = {}
    for key in keys:
        bare = str(key).lower().removeprefix(prefix)
        if bare.startswith("lease_"):
            found[bare.removeprefix("lease_")] = conf[key]
    check_names(found, where="app.conf")
    if not found.get("url"):
        found["url"] = _result_database(conf) or ""
    if not found.get("namespace"):
        found["namespace"] = _namespace(app)
    return found


def task_values(task: Any) -> dict[str, Any]:
    """The task's ``lease_*`` attributes without the prefix.

    Raises:
        celery.exceptions.ImproperlyConfigured: A name is unknown.
    """
    # A task may still be a promise, whose class only `__class__` tells.
    cls: Any = task if isinstance(task, type) else task.__class__
    found = {}
    for name in dir(cls):
        if name.startswith("lease_"):
            found[name.removeprefix("lease_")] = getattr(cls, name)
    check_names(found, where=f"task {cls.name}")
    return {key: value for key, value in found.items() if value is not None}


def settings_of(task: Any, *, app: Celery | None = None) -> Settings:
    """The settings of one task (or of a task class that is being bound to ``app``).

    Raises:
        celery.exceptions.ImproperlyConfigured: See :class:`Settings`.
    """
    return Settings.from_layers(app_values(app or task.app), task_values(task), task.name)


def app_settings(app: Celery) -> Settings:
    """The app-wide settings, with a database URL.

    Raises:
        celery.exceptions.ImproperlyConfigured: See :class:`Settings`; or no
            URL is set.
    """
    settings = Settings.from_layers(app_values(app), {}, "(app)")
    if not settings.url:
        raise ImproperlyConfigured(
            "lease_url is not set: expected a SQLAlchemy URL such as"
            " postgresql+psycopg://user@host/database or sqlite:////path/leases.db"
            " (a db+… result backend would serve as well)"
        )
    return settings


def is_housekeeping(task_name: str | None) -> bool:
    """Whether this is one of Celery's own tasks that never take a lease."""
    return task_name in _HOUSEKEEPING


def is_leased(task: Any) -> bool:
    """Whether runs of this task take a lease."""
    return (
        getattr(task, "is_leased", False)
        and not is_housekeeping(task.name)
        and settings_of(task).mode == "enforce"
    )


def leased_tasks(app: Celery) -> list[Any]:
    """The app's leased tasks."""
    return [task for task in app.tasks.values() if is_leased(task)]


def _result_database(conf: Any) -> str | None:
    backend = conf.result_backend
    if isinstance(backend, str) and backend.startswith("db+"):
        return backend.removeprefix("db+")
    url = conf.get("database_url")
    return url if backend == "database" and isinstance(url, str) else None


def _namespace(app: Celery) -> str:
    """App name and broker, without credentials: who else can run what this app sent."""
    url = str(app.conf.broker_write_url or app.conf.broker_url or "")
    first = url.split(";", maxsplit=1)[0].split(",", maxsplit=1)[0]
    try:
        parts = parse_url(first)
    except ValueError:
        parts = {}
    options = app.conf.broker_transport_options or {}
    identity = "|".join(
        str(part or "")
        for part in (
            parts.get("transport"),
            parts.get("hostname"),
            parts.get("port"),
            parts.get("virtual_host"),
            options.get("global_keyprefix"),
        )
    )
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return f"{app.main or 'celery'}@{digest}"[:128]
