"""`celery-lease demo`: a killed worker's task is taken over, a stale worker is refused.

What it is: it finds servers, makes a folder and the tables, has the story played, judges the
evidence and answers with the exit status. Real Celery workers, real signals; all it needs is
its own package.

Where a server cannot be had, SQLite and a folder as the broker take its place. A folder loses
the message of a killed worker; the reaper sends it again, so the story ends the same.

Invariant: everything it started ends with it, and its folder goes too. `Ctrl-C` and SIGTERM unwind
the stack; after SIGKILL the keeper and the servers' supervisors do it.
"""

from __future__ import annotations

import platform
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import celery

from celery_lease import demo_app, demo_story, migrations, servers
from celery_lease.database import Database
from celery_lease.demo_checks import Evidence, verdicts
from celery_lease.demo_processes import Crew
from celery_lease.demo_screen import Screen
from celery_lease.demo_timeline import Sources
from celery_lease.options import app_settings
from celery_lease.store import LeaseStore

__all__ = ("judge", "run")

_INTERRUPTED = 130


def run(*, with_servers: bool = True) -> int:
    """Play the demo.

    Args:
        with_servers: False: do without PostgreSQL and Redis, as where none can be had.

    Returns:
        0 if every check holds, 1 if one fails or the story stopped, 130 after Ctrl-C.
    """
    screen = Screen(time.time())
    try:
        with _signals(), ExitStack() as stack:
            evidence = demo_story.tell(_stage(stack, screen, with_servers=with_servers))
        return judge(screen, evidence)
    except demo_story.StoryStopped as stopped:
        screen.flush()
        screen.say(f"\nThe demo stopped: {stopped}")
        return 1
    except KeyboardInterrupt:
        screen.say("\nInterrupted; all its processes have ended.")
        return _INTERRUPTED
    finally:
        screen.quiet()


def judge(screen: Screen, evidence: Evidence) -> int:
    """Print the verdicts and return the exit status."""
    checks = verdicts(evidence)
    screen.heading("What was stored in the end")
    screen.table(checks)
    failed = sum(not check.holds for check in checks)
    holds = f"All {len(checks)} checks hold." if not failed else f"{failed} checks FAIL."
    screen.say(f"\n{holds} The demo took {time.time() - screen.start:.0f} seconds.")
    return 1 if failed else 0


def _stage(stack: ExitStack, screen: Screen, *, with_servers: bool) -> demo_story.Stage:
    folder = Path(tempfile.mkdtemp(prefix="celery-lease-demo-"))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    # The crew first: its keeper erases the folder.
    crew = stack.enter_context(Crew("celery_lease.demo_app", folder))
    place = _place(stack, screen, folder, with_servers=with_servers)
    crew.env.update(place.environment())
    app = demo_app.build(place)
    stack.callback(app.close)
    settings = app_settings(app)
    database = Database(settings.url)
    stack.callback(database.dispose)
    migrations.upgrade(database.engine)
    receiver = demo_app.Receiver(place.lease_url)
    receiver.prepare()
    store = LeaseStore(database, settings.namespace)
    journal = Path(place.journal)
    return demo_story.Stage(
        app=app,
        store=store,
        crew=crew,
        journal=journal,
        sources=Sources(crew, journal, store, screen.start),
        screen=screen,
        receiver=receiver,
    )


def _place(stack: ExitStack, screen: Screen, folder: Path, *, with_servers: bool) -> demo_app.Place:
    """Start the servers, or choose what takes their place, and say which."""
    database = _server(stack, servers.postgres, wanted=with_servers)
    broker = _server(stack, servers.redis, wanted=with_servers)
    screen.say(
        f"celery_lease demo: Celery {celery.__version__}, Python {platform.python_version()}\n"
        f"lease database: {_described(database, 'PostgreSQL', 'SQLite, a file')}\n"
        f"broker, results: {_described(broker, 'Valkey or Redis', 'files in a folder')}\n\n"
        "Two workers start. Every line below was read from a worker's log, from the journal that\n"
        "the tasks write, or from the history in the lease database."
    )
    messages = folder / "messages"
    for name in ("queue", "control", "results"):
        (messages / name).mkdir(parents=True)
    in_folder = {
        "data_folder_in": str(messages / "queue"),
        "data_folder_out": str(messages / "queue"),
        "control_folder": str(messages / "control"),
        "polling_interval": 0.05,
    }
    return demo_app.Place(
        broker_url=broker.url if broker else "folder://",
        result_backend=broker.url if broker else f"file://{messages / 'results'}",
        lease_url=database.url if database else f"sqlite:///{folder / 'leases.db'}",
        journal=str(folder / "journal.jsonl"),
        transport_options={} if broker else in_folder,
    )


def _server(
    stack: ExitStack, start: Callable[[], servers.Server], *, wanted: bool
) -> servers.Server | None:
    if not wanted:
        return None
    try:
        return stack.enter_context(start())
    except servers.ServerUnavailable:
        return None


def _described(server: servers.Server | None, name: str, otherwise: str) -> str:
    if server is None:
        return f"{otherwise}, for lack of a server"
    origin = "embedded" if server.embedded else "this machine's program"
    return f"{name}, {origin}, on 127.0.0.1:{server.port}"


@contextmanager
def _signals() -> Iterator[None]:
    """Let SIGTERM and a closed terminal unwind the stack, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise SystemExit(128 + number)
