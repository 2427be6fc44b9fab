"""A worker that is cut off from the lease database, while another one is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
from harness.journal import Journal
from harness.length import by_length
from harness.proxy import Proxy
from harness.rows import Rows
from harness.workers import Crew

from celery_lease.database import Database
from celery_lease.lease import Encoded, LeaseRef, Renewal
from celery_lease.store import LeaseStore

#: Seconds; longer than the lease, so that worker 1's body goes on after its end.
BODY = 6.0


@pytest.fixture
def rows(postgresql_database: str) -> Iterator[Rows]:
    found = Rows(postgresql_database)
    yield found
    found.close()


def _cut_off(
    crew: Crew, proxy: Proxy, fault: str, *, interrupt: bool, stubborn: bool
) -> tuple[str, LeaseRef]:
    """Let worker 1 begin a guarded task behind the proxy, then cut it off, and start worker 2."""
    behind = dataclasses.replace(
        crew.settings,
        lease_url=proxy.url,
        receiver_url=crew.settings.lease_url,
        conf={"lease_interrupt": interrupt},
    )
    first = crew.start("first", settings=behind)
    sent = crew.task("guarded").delay("account", BODY, stubborn=stubborn)
    (effect,) = crew.journal.wait("effect", part=1, token=1)
    assert effect.pid in first.children()
    # Cut off for good measure from new messages too: the take-over is worker 2's.
    crew.app.control.cancel_consumer(crew.settings.queue, destination=[first.node], reply=True)
    first.wait_for_log("heartbeat_ok")
    getattr(proxy, fault)()
    second = crew.start("second")
    crew.journal.wait("effect", part=1, token=2, timeout=12)
    assert crew.journal.entries("effect", token=2)[0].pid in second.children()
    return str(sent.id), LeaseRef(str(sent.id), "", 1)


@pytest.mark.parametrize("fault", ["cut", "refuse"])
def test_a_worker_cut_off_from_the_database_is_fenced(
    fault: str,
    postgresql_database: str,
    crews: Callable[..., Crew],
    proxies: Callable[[str], Proxy],
    journal: Journal,
    rows: Rows,
) -> None:
    """It cannot renew, cannot commit, and the receiver refuses its side effect; interruption off.

    The fence by itself: the first body swallows nothing and is told nothing, and goes on.
    """
    crew = crews(postgresql_database)
    proxy = proxies(postgresql_database)
    task_id, _ = _cut_off(crew, proxy, fault, interrupt=False, stubborn=True)
    proxy.restore()
    first = crew.workers[0]
    (refused,) = journal.wait("refused", part=2, token=1, timeout=BODY + 5)
    assert refused.pid in first.children()
    assert 2 == crew.app.AsyncResult(task_id).get(timeout=BODY + 10)["token"]
    log = first.wait_for_log("result_rejected")
    assert (1, 2) == (
        len(journal.entries("effect", token=1)),
        len(journal.entries("effect", token=2)),
    )
    assert log.index("ownership_unknown") < log.index("heartbeat_lost")
    after = log[log.index("heartbeat_lost") :]
    assert "heartbeat_ok" not in after
    assert "job_committed" not in log
    row = rows.wait(task_id, state="succeeded")
    assert 2 == row["fencing_token"]
    _assert_refused_by_hand(postgresql_database, rows, task_id)


def _assert_refused_by_hand(url: str, rows: Rows, task_id: str) -> None:
    """What worker 1 might still send in the name of its grant has no effect."""
    before = rows.get(task_id)
    assert before is not None
    (told,) = rows.history(task_id, "result_rejected")
    stale = LeaseRef(task_id, told["owner_id"], 1)
    database = Database(url)
    store = LeaseStore(database, before["namespace"])
    assert [] == store.renew([Renewal(stale, 3.0)])
    assert not store.commit(stale, Encoded(b"1", "application/json", "utf-8"), announce_in=1)
    assert not store.fail(stale, "{}", announce_in=1)
    assert store.release(stale, cause="retry", charge=False, dispatch=True) is None
    database.dispose()
    assert before == rows.get(task_id)


@pytest.mark.parametrize("fault", ["cut", "refuse"])
def test_running_code_is_broken_off_before_another_worker_takes_over(
    fault: str,
    postgresql_database: str,
    crews: Callable[..., Crew],
    proxies: Callable[[str], Proxy],
    journal: Journal,
    rows: Rows,
) -> None:
    """With `lease_interrupt` the first body ends before the second starts, and has no effect 2."""
    crew = crews(postgresql_database)
    proxy = proxies(postgresql_database)
    task_id, _ = _cut_off(crew, proxy, fault, interrupt=True, stubborn=False)
    (broken_off,) = journal.wait("interrupted", token=1)
    assert "LeaseLost" == broken_off.facts["error"]
    assert broken_off.t < journal.entries("effect", token=2)[0].t
    assert 2 == crew.app.AsyncResult(task_id).get(timeout=BODY + 10)["token"]
    proxy.restore()
    assert [1] == [entry.facts["part"] for entry in journal.entries("effect", token=1)]
    assert [] == journal.entries("refused")
    log = crew.workers[0].log()
    assert log.index("ownership_unknown") < log.index("heartbeat_lost")
    assert "job_committed" not in log
    row = rows.wait(task_id, state="succeeded")
    assert (2, 2) == (row["fencing_token"], row["attempt"])


def test_status_goes_from_held_over_unknown_to_lost(
    postgresql_database: str,
    crews: Callable[..., Crew],
    proxies: Callable[[str], Proxy],
    journal: Journal,
) -> None:
    """The running code can see it happen, without asking anybody."""
    proxy = proxies(postgresql_database)
    crew = crews(proxy.url, conf={"lease_interrupt": False})
    worker = crew.start(source=WATCHER)
    crew.app.send_task("watcher")
    journal.wait("status", status="held")
    worker.wait_for_log("heartbeat_ok")
    proxy.cut()
    journal.wait("status", status="lost", timeout=8)
    assert ["held", "unknown", "lost"] == [
        entry.facts["status"] for entry in journal.entries("status")
    ]
    refusals = {entry.facts["status"]: entry.facts["ensure"] for entry in journal.entries("status")}
    assert {"held": "", "unknown": "OwnershipUnknown", "lost": "LeaseLost"} == refusals


WATCHER = """
import time
from celery_lease import LeasedTask
from harness.apps import AppSettings, build
from harness.journal import Journal

app = build(AppSettings.from_environment())

def ensured(lease):
    try:
        lease.ensure()
    except Exception as error:
        return type(error).__name__
    return ""

@app.task(base=LeasedTask, bind=True, name="watcher")
def watcher(self):
    seen = None
    while seen != "lost":
        answer = ensured(self.lease)
        if self.lease.status != seen and ensured(self.lease) == answer:
            seen = self.lease.status
            Journal(app.conf.harness_journal).write(
                "status", self.request.id, status=seen, ensure=answer
            )
        time.sleep(0.01)
"""


def test_a_message_that_cannot_be_claimed_waits(
    postgresql_database: str,
    crews: Callable[..., Crew],
    proxies: Callable[[str], Proxy],
) -> None:
    """It is not lost, is not tried in a hot loop, and ordinary tasks of the same queue go on."""
    proxy = proxies(postgresql_database)
    crew = crews(proxy.url)
    worker = crew.start()
    assert 3 == crew.task("adder").delay(1, 2).get(timeout=10)
    proxy.cut()
    sent = crew.task("adder").delay(3, 4)
    worker.wait_for_log("job_postponed", timeout=20)
    assert "x" == crew.task("plain").delay("x").get(timeout=5)
    assert 1 == worker.log().count("job_postponed")
    proxy.restore()
    assert 7 == sent.get(timeout=10)


def test_a_cut_off_worker_hoards_no_messages(
    postgresql_database: str,
    crews: Callable[..., Crew],
    proxies: Callable[[str], Proxy],
) -> None:
    """What it took and cannot claim goes to a worker that can, while the network is still cut."""
    proxy = proxies(postgresql_database)
    crew = crews(postgresql_database)
    behind = dataclasses.replace(crew.settings, lease_url=proxy.url)
    first, second = crew.start("first", settings=behind), crew.start("second")
    proxy.refuse()
    sent = [crew.task("adder").delay(n, 0) for n in range(by_length(10, 100))]
    first.wait_for_log("job_postponed")
    assert list(range(len(sent))) == [one.get(timeout=30) for one in sent]
    assert "job_committed" in second.log()
    assert "job_committed" not in first.log()
