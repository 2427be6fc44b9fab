"""A message that the reaper sends again is the message that was sent first."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from harness.bomb import Bomb
from harness.journal import Journal
from harness.length import by_length
from harness.redis_queue import RedisQueue
from harness.rows import Rows
from harness.workers import Crew, WorkerProcess
from kombu import Connection

#: Recovery is the reaper's alone: the broker would not deliver again for an hour.
CONF = {
    "lease_reaper_interval": 0.3,
    "accept_content": ["json", "pickle"],
    "task_routes": {"collector": {"queue": "aside"}},
}


#: What no database can change is tested on one of them in a short run.
ONE_DATABASE = pytest.mark.parametrize(
    "lease_database", by_length(["postgresql"], ["postgresql", "sqlite"]), indirect=True
)


@pytest.fixture
def crew(crews: Callable[..., Crew], lease_database: str) -> Crew:
    return crews(lease_database, conf=CONF)


def _start(crew: Crew, name: str, **options: Any) -> WorkerProcess:
    # Celery refuses to accept pickle as root, which a test may be.
    return crew.start(name, app="harness.trap_app", env={"C_FORCE_ROOT": "1"}, **options)


def _lose(crew: Crew, rows: Rows, task_id: str) -> WorkerProcess:
    """Let a first worker take the task, and lose it with all that it knew."""
    first = _start(crew, "first")
    crew.journal.wait("whole", task_id=task_id)
    first.kill_group()
    rows.expire(task_id)
    return _start(crew, "second")


def _seen(journal: Journal, task_id: str) -> list[dict[str, Any]]:
    found = [entry.facts["seen"] for entry in journal.wait("whole", count=2, task_id=task_id)]
    for seen in found:
        # The number of the dispatch is the reaper's own.
        seen["headers"].pop("lease_dispatch", None)
    return found


@pytest.mark.parametrize(
    ("serializer", "compression"),
    [("json", None), ("pickle", "bzip2"), ("json", "gzip"), ("pickle", None)][: by_length(2, 4)],
)
def test_a_message_is_sent_again_whole(
    serializer: str, compression: str | None, crew: Crew, rows: Rows, journal: Journal
) -> None:
    """Arguments, headers, routing, canvas, limits, stamps and serializer: the second run sees all.

    What follows from the result (callback, chain, chord) happens once, from the second run.
    """
    collector, errback = crew.task("collector"), crew.task("errback")
    main = {"queue": crew.settings.queue}
    signature = crew.app.signature(
        "whole", args=(1, "zwei", [3]), kwargs={"four": {"five": 6}}, app=crew.app
    )
    signature.set(
        serializer=serializer,
        compression=compression,
        headers={"tenant": "blue", "trace": {"id": 7}},
        priority=6,
        expires=datetime.now(timezone.utc) + timedelta(hours=1),
        time_limit=300,
        soft_time_limit=200,
        shadow="whole (blue)",
        **main,
    )
    signature.link(collector.s(label="callback").set(**main))
    signature.link_error(errback.s().set(**main))
    signature.stamp(audit="yes")
    chain = signature | collector.s(label="link").set(**main)
    sent = chain.apply_async()
    _lose(crew, rows, sent.parent.id)
    first, second = _seen(journal, sent.parent.id)
    assert first == second
    for name in ("expires", "callbacks", "errbacks", "chain", "stamps", "reply_to", "shadow"):
        assert first[name], name
    assert [300, 200] == list(first["timelimit"])
    assert {"tenant": "blue", "trace": {"id": 7}}.items() <= first["headers"].items()
    assert {"token": 2} == sent.get(timeout=20)
    journal.wait("collected", label="callback")
    assert 1 == len(journal.entries("collected", label="link"))
    assert 1 == len(journal.entries("collected", label="callback"))
    assert [] == journal.entries("errback")


@ONE_DATABASE
def test_a_header_of_a_chord_is_sent_again(crew: Crew, rows: Rows, journal: Journal) -> None:
    """Group, index and chord survive: the chord's body gets every part, once."""
    from celery import chord

    main = {"queue": crew.settings.queue}
    header = [
        crew.app.signature("whole", app=crew.app).set(**main),
        crew.task("adder").s(1, 2).set(**main),
    ]
    result = chord(header, app=crew.app)(crew.task("collector").s(label="body").set(**main))
    lost = next(one.id for one in result.parent.results if one.id != _adder(result, header))
    _lose(crew, rows, lost)
    first, second = _seen(journal, lost)
    assert first == second
    assert (True, 0) == (bool(first["chord"]), first["group_index"])
    assert [{"token": 2}, 3] == result.get(timeout=20)
    assert 1 == len(journal.entries("collected", label="body"))


def _adder(result: Any, header: list[Any]) -> str:
    return str(result.parent.results[1].id)


@pytest.mark.parametrize(
    "options",
    [
        {"global_keyprefix": "tenant:"},
        {
            "unacked_key": "mine",
            "unacked_index_key": "mine-index",
            "queue_order_strategy": "priority",
        },
        {"sep": ":", "priority_steps": [0, 5, 9]},
    ],
    ids=["prefix", "keys", "steps"],
)
def test_the_brokers_own_keys_are_respected(
    options: dict[str, Any],
    crews: Callable[..., Crew],
    sqlite_database: str,
    broker_url: str,
    journal: Journal,
) -> None:
    """With a key prefix and custom keys the message is sent again, and nothing is left over."""
    crew = crews(sqlite_database, conf=CONF, transport_options=options)
    rows = Rows(sqlite_database)
    sent = crew.app.send_task("whole", queue=crew.settings.queue, priority=5)
    _lose(crew, rows, sent.id)
    first, second = _seen(journal, sent.id)
    assert first == second
    assert {"token": 2} == sent.get(timeout=20)
    crew.workers[-1].stop()
    queue = RedisQueue(broker_url, crew.settings.queue)
    prefix = options.get("global_keyprefix", "")
    keys = [
        prefix + options.get("unacked_key", "unacked"),
        prefix + options.get("unacked_index_key", "unacked_index"),
        prefix + crew.settings.queue,
    ]
    assert [0, 0, 0] == [queue.client.exists(key) for key in keys]
    if prefix:
        broker_keys = [
            key for key in queue.client.scan_iter() if "unacked" in key or "queue-" in key
        ]
        assert [] == [key for key in broker_keys if not key.startswith(prefix)]
    queue.close()
    rows.close()


@ONE_DATABASE
def test_a_message_of_protocol_1_is_sent_again(crew: Crew, rows: Rows, journal: Journal) -> None:
    """Old senders' messages are leased and recovered as well."""
    body = {
        "task": "whole",
        "id": "old-one",
        "args": [1, "zwei"],
        "kwargs": {"three": 3},
        "retries": 0,
        "eta": None,
        "expires": None,
        "callbacks": [dict(crew.task("collector").s(label="old").set(queue=crew.settings.queue))],
        "errbacks": None,
        "timelimit": [300, None],
        "utc": True,
    }
    with Connection(crew.settings.broker_url) as connection:
        producer = connection.Producer()
        producer.publish(
            body, routing_key=crew.settings.queue, serializer="json", headers={"tenant": "blue"}
        )
    _lose(crew, rows, "old-one")
    first, second = _seen(journal, "old-one")
    for name in ("args", "kwargs", "callbacks", "timelimit", "retries"):
        assert first[name] == second[name], name
    assert "blue" == second["headers"].get("tenant", "blue")
    assert {"token": 2} == crew.app.AsyncResult("old-one").get(timeout=20)
    journal.wait("collected", label="old")


@ONE_DATABASE
def test_trap_15_a_reaper_never_unpickles(crew: Crew, rows: Rows, journal: Journal) -> None:
    """A pickled payload is opened by the worker that runs the task, by nobody else."""
    conf = {"lease_reaper": False}
    first = _start(crew, "first", conf=conf)
    sent = crew.app.send_task(
        "whole", [Bomb(str(journal.path))], serializer="pickle", queue=crew.settings.queue
    )
    journal.wait("whole")
    first.kill_group()
    rows.expire(sent.id)
    opened = {entry.pid for entry in journal.entries("unpickled")}
    reaper = crew.start_reaper(app="harness.trap_app")
    rows.wait(sent.id, state="queued", dispatches=1)
    queue = RedisQueue(crew.settings.broker_url, crew.settings.queue)
    while not queue.waiting():
        pass
    queue.close()
    second = _start(crew, "second", conf=conf)
    assert {"token": 2} == sent.get(timeout=20)
    later = {entry.pid for entry in journal.entries("unpickled")} - opened
    assert later <= {second.pid, *second.children()}
    assert reaper.pid not in later
    assert reaper.running


@ONE_DATABASE
def test_a_message_that_expired_meanwhile_is_not_run(
    crew: Crew, rows: Rows, journal: Journal
) -> None:
    """`expires` survives as the instant it was: the second copy is revoked, not run."""
    first = _start(crew, "first")
    sent = crew.app.send_task("whole", queue=crew.settings.queue, expires=4)
    journal.wait("whole")
    first.kill_group()
    envelope = json.loads((rows.get(sent.id) or {})["message"])
    expires = datetime.fromisoformat(envelope["headers"]["expires"])
    while datetime.now(timezone.utc) < expires:
        pass
    rows.expire(sent.id)
    _start(crew, "second")
    row = rows.wait(sent.id, timeout=20)
    assert "cancelled" == row["state"]
    assert 1 == len(journal.entries("whole"))
    assert "REVOKED" == crew.app.backend.get_task_meta(sent.id, cache=False)["status"]
