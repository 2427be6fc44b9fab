"""The worker's part: the check at start, the clerk, and the way to the consumer.

Installed into any app that has a leased task, by binding the task; a user
writes no line for it. Nothing here runs at import or before the pool has
forked, but for importing the database driver: a child that had to import it
for its first claim would be a second late.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from celery import bootsteps
from celery.exceptions import ImproperlyConfigured
from kombu.utils.imports import symbol_by_name

from celery_lease.broker import broker_of
from celery_lease.database import Database
from celery_lease.desk import Desk
from celery_lease.exceptions import DatabaseUnavailable
from celery_lease.logbook import line
from celery_lease.options import app_settings, leased_tasks, settings_of
from celery_lease.store import check_schema

if TYPE_CHECKING:
    from celery import Celery

    from celery_lease.config import Settings

__all__ = ("LeaseConsumer", "LeaseWorker", "install")


#: Seconds between two looks for children that have died.
_LOOK = 0.2


def install(app: Celery) -> None:
    """Add the worker's parts to an app; a second call changes nothing."""
    app.steps["worker"].add(LeaseWorker)
    app.steps["consumer"].add(LeaseConsumer)


class LeaseWorker(bootsteps.StartStopStep):
    """Checks the deployment when the worker starts, then engages the clerk."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        self._desk: Desk | None = None
        # Wrong settings end the worker here, before it takes a message; and the
        # driver is imported before the pool forks.
        if leased_tasks(worker.app):
            settings = app_settings(worker.app)
            for task in leased_tasks(worker.app):
                settings_of(task)
                _check_request(task)
            _hold_no_more_than_runs(worker)
            # Imports the driver; connects nowhere.
            assert Database(settings.url, settings.engine_options).engine is not None  # noqa: S101

    def include_if(self, worker: Any) -> bool:
        """Only where a task is leased."""
        return bool(leased_tasks(worker.app))

    def start(self, worker: Any) -> None:
        """Check the tables, then engage the clerk, which reaps.

        Raises:
            SchemaOutdated: The tables are missing, old or too new.
        """
        settings = app_settings(worker.app)
        database = Database(settings.url, settings.engine_options, schema=settings.schema)
        try:
            check_schema(database)
        except DatabaseUnavailable as exc:
            # Ordinary tasks go on; leased ones wait until the database is back.
            line(logging.WARNING, "lease_database_unavailable_at_start", detail=exc.detail)
        finally:
            database.dispose()
        _warn_of_hoarding(worker, settings)
        self._desk = Desk.of(worker.app)
        self._desk.open(worker.hostname, forks=_forks(worker.pool))

    def register_with_event_loop(self, worker: Any, hub: Any) -> None:  # noqa: ARG002 - celery's signature
        """The loop begins, or begins anew after a lost connection."""
        if self._desk is not None:
            self._desk.attach(hub)

    def stop(self, worker: Any) -> None:
        """Tasks still run in a warm shutdown: the clerk stays until the process ends."""

    def terminate(self, worker: Any) -> None:
        """As :meth:`stop`."""


def _hold_no_more_than_runs(worker: Any) -> None:
    """Receive no message that cannot begin, where a dead worker's come back late.

    Only where the user has not chosen a multiplier: Celery's default is four.
    """
    conf = worker.app.conf
    default = worker.prefetch_multiplier == conf.worker_prefetch_multiplier
    chosen = any(
        "prefetch_multiplier" in str(key).lower() for layer in conf.maps[:-1] for key in layer
    )
    if default and not chosen and broker_of(worker.app).returns_after() is not None:
        worker.prefetch_multiplier = 1


def _warn_of_hoarding(worker: Any, settings: Settings) -> None:
    """Say it if messages that a worker has not begun would outlast its death by long.

    Such a message has no row yet, so that only the broker can bring it back.
    """
    seconds = broker_of(worker.app).returns_after()
    if seconds is None or worker.prefetch_multiplier == 1:
        return
    if seconds > settings.duration + settings.reaper_interval:
        line(
            logging.WARNING,
            "prefetched_messages_wait_for_broker",
            worker_prefetch_multiplier=worker.prefetch_multiplier,
            expected=1,
            visibility_timeout=f"{seconds:g}",
        )


def _check_request(task: Any) -> None:
    """Refuse a request class that does not know leases: it would acknowledge what is another's."""
    # Here, so that a client that only sends does not import the worker.
    from celery_lease.request import LeasedRequest

    kind = symbol_by_name(task.Request)
    if not issubclass(kind, LeasedRequest):
        raise ImproperlyConfigured(
            f"task {task.name}: Request={kind.__module__}.{kind.__qualname__} is not legal for a"
            " leased task: expected a subclass of celery_lease.request.LeasedRequest"
        )


def _forks(pool: Any) -> bool:
    return hasattr(os, "fork") and any(
        kind.__module__ == "celery.concurrency.prefork" for kind in type(pool).__mro__
    )


class LeaseConsumer(bootsteps.StartStopStep):
    """Lets the desk find the consumer, whose timer belongs to the event loop."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._look: Any = None

    def include_if(self, consumer: Any) -> bool:
        """Only where a task is leased."""
        return bool(leased_tasks(consumer.app))

    def start(self, consumer: Any) -> None:
        """A connection is up."""
        Desk.of(consumer.app).consumer = consumer
        # A child's exit can be signalled before the child can be reaped; the
        # pool then looks again only after five seconds.
        if consumer.hub is None:
            Desk.of(consumer.app).attach()
        elif self._look is None:
            self._look = consumer.hub.call_repeatedly(_LOOK, self._look_around, consumer)

    def _look_around(self, consumer: Any) -> None:
        consumer.pool.maintain_pool()
        Desk.of(consumer.app).look()

    def stop(self, consumer: Any) -> None:
        """The connection is going."""
        Desk.of(consumer.app).leave()
        look, self._look = self._look, None
        if look is not None:
            look.cancel()
