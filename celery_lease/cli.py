"""``celery -A proj lease …`` and the console script ``celery-lease``.

Exit status: 0 done, 1 the answer is no (see each command), 2 wrong usage, 3 the
lease database or its tables are not usable.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import CeleryCommand, CeleryOption
from celery.exceptions import ImproperlyConfigured

from celery_lease import migrations
from celery_lease.clerk import make_reaper
from celery_lease.database import Database
from celery_lease.exceptions import DatabaseUnavailable, SchemaOutdated
from celery_lease.options import app_settings
from celery_lease.store import check_schema

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("lease", "main")


@click.group(help="Leases of tasks: their tables, and a reaper.")
@click.pass_context
def lease(context: click.Context) -> None:
    """Group of all commands that need an app."""
    app: Celery = context.obj.app
    # Tasks of ``include`` and ``imports`` bring their settings with them.
    app.loader.import_default_modules()
    try:
        app.finalize()
    except ImproperlyConfigured as exc:
        raise click.UsageError(str(exc)) from exc


def _database(context: click.Context) -> Database:
    try:
        settings = app_settings(context.obj.app)
        return Database(settings.url, settings.engine_options, schema=settings.schema)
    except ImproperlyConfigured as exc:
        raise click.UsageError(str(exc)) from exc


class _Unusable(click.ClickException):
    """The lease database or its tables cannot be used."""

    exit_code = 3


@lease.command(cls=CeleryCommand)
@click.option(
    "--sql",
    is_flag=True,
    cls=CeleryOption,
    help_group="Lease Options",
    help="Print the statements for the configured database instead of running them.",
)
@click.pass_context
def migrate(context: click.Context, sql: bool) -> None:  # noqa: FBT001
    """Create the lease tables, or bring them to the schema of this release."""
    database = _database(context)
    if sql:
        click.echo(migrations.sql(database.dialect.name, schema=database.schema))
        return
    try:
        before = database.version(timeout=10)
        migrations.upgrade(database.engine, schema=database.schema)
        after = database.version(timeout=10)
    except (DatabaseUnavailable, SchemaOutdated) as exc:
        raise _Unusable(str(exc)) from exc
    finally:
        database.dispose()
    click.echo(
        f"lease tables are at schema version {after}"
        + (" already" if before == after else f" (were at {before})")
    )


@lease.command(cls=CeleryCommand)
@click.option(
    "--once",
    is_flag=True,
    cls=CeleryOption,
    help_group="Lease Options",
    help="Make one pass that may take leases away, as soon as it is this reaper's turn, and end.",
)
@click.pass_context
def reap(context: click.Context, once: bool) -> None:  # noqa: FBT001
    """Run a reaper in the foreground, until SIGTERM or Ctrl-C.

    It needs neither the workers of a queue nor the code of its tasks.
    """
    app: Celery = context.obj.app
    database = _database(context)
    try:
        check_schema(database)
    except (DatabaseUnavailable, SchemaOutdated) as exc:
        raise _Unusable(str(exc)) from exc
    finally:
        database.dispose()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    reaper, publisher = make_reaper(app, "reaper")
    try:
        if once:
            _one_pass(reaper, stop)
        else:
            click.echo(f"reaping every {reaper.interval:g} s, namespace {reaper.store.namespace}")
            reaper.run(stop)
    finally:
        publisher.close()


def _one_pass(reaper: Any, stop: threading.Event) -> None:
    done = reaper.pass_once()
    sent, announced, failed = done.sent, done.announced, done.failed
    # The first pass after a gap only looks. Whoever asks for single passes has a gap before each,
    # and would never see one that takes a dead owner's lease away: the next turn is waited for.
    while (not done.granted or done.grace) and not stop.is_set():
        if reaper.saw_outage:
            raise _Unusable("lease database unavailable: no answer to the reaper")
        stop.wait(done.next_in)
        done = reaper.pass_once()
        sent, announced, failed = sent + done.sent, announced + done.announced, failed + done.failed
    click.echo(f"reclaimed={done.reclaimed} sent={sent} announced={announced} failed={failed}")
    if failed:
        sys.exit(1)


@click.group(help="celery_lease without an app: see also `celery -A yourproject lease`.")
@click.version_option(package_name="celery-lease")
def main() -> None:
    """Group of the commands that need no app."""


@main.command()
def demo() -> None:
    """Show a killed worker's task taken over, and a stale worker refused, with real workers."""
    try:
        from celery_lease.demo import run
    except ImportError as exc:
        raise click.ClickException(
            f"the demo needs more packages ({exc.name}): pip install 'celery-lease[demo]'"
        ) from exc
    sys.exit(run())
