"""The database does what it was asked, and its answer is lost on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
from harness.journal import Journal
from harness.length import by_length
from harness.proxy import Proxy
from harness.rows import Rows
from harness.waiting import until
from harness.workers import Crew

_TERMINATE = (
    "SELECT count(pg_terminate_backend(pid)) AS ended FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


@pytest.fixture
def rows(postgresql_database: str) -> Iterator[Rows]:
    found = Rows(postgresql_database)
    yield found
    found.close()


@pytest.fixture
def proxy(postgresql_database: str, proxies: Callable[[str], Proxy]) -> Proxy:
    return proxies(postgresql_database)


@pytest.fixture
def crew(crews: Callable[..., Crew], proxy: Proxy) -> Crew:
    """Workers reach the database through the proxy."""
    return crews(proxy.url)


@pytest.mark.parametrize("connection", ["new", "held"])
def test_a_claim_whose_answer_is_lost_is_granted_once(
    connection: str, crew: Crew, proxy: Proxy, journal: Journal, rows: Rows
) -> None:
    """Asking again, the same execution gets the same token, and the body runs once."""
    crew.start()
    for number in range(by_length(2, 20)):
        if connection == "held":
            assert 3 == crew.task("adder").delay(1, 2).get(timeout=10)
        else:
            rows.execute(_TERMINATE)
        lost = proxy.drop_next_response(f"claim-{number}".encode())
        sent = crew.task("sleeper").apply_async([0.2, number], task_id=f"claim-{number}")
        result = sent.get(timeout=20)
        assert lost.happened()
        assert (number, 1) == (result["value"], result["token"])
        row = rows.wait(sent.id, state="succeeded")
        assert (1, 1, 0) == (row["fencing_token"], row["attempt"], row["crashes"])
        assert 1 == len(journal.entries("start", task_id=sent.id))
        assert [] == rows.history(sent.id)


def test_a_commit_whose_answer_is_lost_is_accepted_once(
    crew: Crew, proxy: Proxy, journal: Journal, rows: Rows
) -> None:
    """The outcome is read back by its token: no second run, no refusal, callbacks once."""
    worker = crew.start()
    for number in range(by_length(2, 20)):
        value = f"needle-{number}"
        lost = proxy.drop_next_response(f'"value": "{value}"'.encode())
        link = crew.task("collector").s(label=value)
        sent = crew.task("sleeper").apply_async([0.5, value], link=link)
        assert value == sent.get(timeout=20)["value"]
        assert lost.happened()
        journal.wait("collected", label=value)
        row = rows.wait(sent.id, state="succeeded")
        assert (1, 0) == (row["fencing_token"], row["crashes"])
        assert 1 == len(journal.entries("start", task_id=sent.id))
        assert 1 == len(journal.entries("collected", label=value))
    assert "result_rejected" not in worker.log()
    assert [] == rows.query("SELECT * FROM celery_lease_history")


def test_a_failure_whose_answer_is_lost_is_accepted_once(
    crew: Crew, proxy: Proxy, journal: Journal, rows: Rows
) -> None:
    """As a commit: FAILURE once, one errback."""
    crew.start()
    lost = proxy.drop_next_response(b'"exc_message": ["needle"]')
    sent = crew.task("fragile").apply_async(["needle"], link_error=crew.task("errback").s())
    with pytest.raises(ValueError, match="needle"):
        sent.get(timeout=20)
    assert lost.happened()
    journal.wait("errback", failed=sent.id)
    assert 1 == rows.wait(sent.id, state="failed")["fencing_token"]
    assert 1 == len(journal.entries("start", task_id=sent.id))
    assert 1 == len(journal.entries("errback"))


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_connections_that_end_during_a_body_cost_nothing(
    pool: str, crews: Callable[..., Crew], postgresql_database: str, journal: Journal, rows: Rows
) -> None:
    """`pg_terminate_backend` on every connection of the product: the lease and the result hold."""
    crew = crews(postgresql_database)
    worker = crew.start(pool=pool, concurrency=2)
    for number in range(by_length(2, 10)):
        pair = [crew.task("sleeper").delay(2.0, (number, part)) for part in range(2)]
        journal.wait("start", count=2 * number + 2)
        until(lambda: rows.query(_TERMINATE)[0]["ended"], what="connections to end")
        assert [[number, 0], [number, 1]] == [one.get(timeout=20)["value"] for one in pair]
        for one in pair:
            assert 1 == rows.wait(one.id, state="succeeded")["fencing_token"]
    assert "heartbeat_lost" not in worker.log()


def test_a_dead_connection_is_noticed_before_the_next_short_task(
    crew: Crew, proxy: Proxy, rows: Rows
) -> None:
    """A held connection that the network has dropped costs one reconnection, no postponement."""
    worker = crew.start()
    assert 3 == crew.task("adder").delay(1, 2).get(timeout=10)
    proxy.refuse()
    proxy.restore()
    sent = crew.task("adder").delay(3, 4)
    assert 7 == sent.get(timeout=10)
    assert "job_postponed" not in worker.log()
    assert 1 == rows.wait(sent.id, state="succeeded")["fencing_token"]


def test_a_dispatch_whose_message_is_lost_is_sent_again(
    crews: Callable[..., Crew], postgresql_database: str, journal: Journal, rows: Rows
) -> None:
    """A reclaimed row whose publisher could not reach the broker stays due."""
    crew = crews(postgresql_database)
    first = crew.start("first")
    sent = crew.task("sleeper").delay(2.0, 1)
    journal.wait("start")
    first.kill_group()
    nowhere = dataclasses.replace(crew.settings, broker_url="redis://127.0.0.1:1/0")
    namespace = rows.all()[0]["namespace"]
    reaper = crew.start_reaper(settings=nowhere, conf={"lease_namespace": namespace})
    reaper.wait_for_log("dispatch_failed", timeout=15)
    assert "queued" == rows.wait(sent.id, state="queued")["state"]
    reaper.kill_group()
    crew.start("second")
    assert (1, 2) == tuple(sent.get(timeout=20)[key] for key in ("value", "token"))
    assert 2 == len(journal.entries("start"))
