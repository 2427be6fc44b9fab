"""The worker's part: a reaper thread, the check at start, and the way to the consumer.

Installed into any app that has a leased task, by binding the task; a user
writes no line for it. Nothing here runs at import or before the pool has
forked, but for importing the database driver: a child that had to import it
for its first claim would be a second late.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from celery import bootsteps

from celery_lease import report, signals
from celery_lease.database import Database
from celery_lease.desk import Desk
from celery_lease.exceptions import DatabaseUnavailable
from celery_lease.lease import LeaseRef
from celery_lease.options import app_settings, leased_tasks, settings_of
from celery_lease.publisher import Publisher
from celery_lease.reaper import Reaper
from celery_lease.runtime import Runtime, new_owner
from celery_lease.store import check_schema

if TYPE_CHECKING:
    from celery import Celery

    from celery_lease.lease import Reclaimed

__all__ = ("LeaseConsumer", "LeaseWorker", "install", "make_reaper")

log = logging.getLogger("celery_lease")

#: Seconds between two looks for children that have died.
_LOOK = 0.2


def install(app: Celery) -> None:
    """Add the worker's parts to an app; a second call changes nothing."""
    app.steps["worker"].add(LeaseWorker)
    app.steps["consumer"].add(LeaseConsumer)


def make_reaper(app: Celery, hostname: str) -> tuple[Reaper, Publisher]:
    """A reaper for an app, and the publisher to close after it.

    Raises:
        celery.exceptions.ImproperlyConfigured: The app's settings are wrong.
    """
    runtime = Runtime.of(app)
    publisher = Publisher(app)
    reaper = Reaper(
        runtime.store,
        publish=publisher,
        owner=new_owner(hostname),
        interval=runtime.settings.reaper_interval,
        retention=runtime.settings.retention,
        on_reclaimed=_on_reclaimed,
    )
    return reaper, publisher


def _on_reclaimed(entry: Reclaimed) -> None:
    report.line(
        logging.WARNING,
        "job_reclaimed",
        job=entry.task_id,
        token=entry.fencing_token,
        owner=entry.owner_id,
        state=entry.state.value,
        late=round(entry.late, 1),
        crashes=entry.crashes,
    )
    ref = LeaseRef(entry.task_id, entry.owner_id or "", entry.fencing_token)
    report.tell(signals.lease_reclaimed, entry.task_name, ref, state=entry.state.value)


class LeaseWorker(bootsteps.StartStopStep):
    """Checks the deployment when the worker starts, then reaps while it runs."""

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # Wrong settings end the worker here, before it takes a message; and the
        # driver is imported before the pool forks.
        if leased_tasks(worker.app):
            settings = app_settings(worker.app)
            for task in leased_tasks(worker.app):
                settings_of(task)
            # Imports the driver; connects nowhere.
            assert Database(settings.url, settings.engine_options).engine is not None  # noqa: S101

    def include_if(self, worker: Any) -> bool:
        """Only where a task is leased."""
        return bool(leased_tasks(worker.app))

    def start(self, worker: Any) -> None:
        """Check the tables, then start the reaper.

        Raises:
            SchemaOutdated: The tables are missing, old or too new.
        """
        runtime = Runtime.of(worker.app)
        try:
            check_schema(runtime.database)
        except DatabaseUnavailable as exc:
            # Ordinary tasks go on; leased ones wait until the database is back.
            log.warning("lease_database_unavailable_at_start detail=%s", exc.detail)
        if runtime.settings.reaper:
            self._thread = threading.Thread(
                target=self._reap,
                args=(worker.app, worker.hostname),
                name="lease-reaper",
                daemon=True,
            )
            self._thread.start()

    def stop(self, worker: Any) -> None:  # noqa: ARG002 - celery's signature
        """Tell the reaper to end; a pass under way may be abandoned at any line."""
        self._stop.set()

    def terminate(self, worker: Any) -> None:
        """As :meth:`stop`."""
        self.stop(worker)

    def _reap(self, app: Celery, hostname: str) -> None:
        reaper, publisher = make_reaper(app, hostname)
        try:
            reaper.run(self._stop)
        finally:
            publisher.close()


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
        if consumer.hub is not None and self._look is None:
            self._look = consumer.hub.call_repeatedly(_LOOK, consumer.pool.maintain_pool)

    def stop(self, consumer: Any) -> None:
        """The connection is going."""
        Desk.of(consumer.app).consumer = None
        look, self._look = self._look, None
        if look is not None:
            look.cancel()
