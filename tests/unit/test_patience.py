"""The thread that shuts the socket of a call that takes too long."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from harness.waiting import until

from celery_lease.patience import Line, Watch, watch


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give the two ends of a connection."""
    one, two = socket.socketpair()
    with one, two:
        yield one, two


def test_an_overdue_line_is_cut(ends: tuple[socket.socket, socket.socket]) -> None:
    """Whoever waits on the connection sees its end, and the line says why."""
    line = Line(ends[0].fileno())
    watch().add(line, time.monotonic())
    ends[0].settimeout(10)
    assert b"" == ends[0].recv(1)
    assert line.cut
    line.close()


def test_a_call_that_ended_in_time_is_left_alone(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """After the call the connection is good for the next one."""
    line, overdue = Line(ends[0].fileno()), Line(ends[1].fileno())
    watch().add(line, time.monotonic() + 0.01)
    watch().remove(line)
    watch().add(overdue, time.monotonic() + 0.02)
    until(lambda: overdue.cut, what="the other line's end")
    assert not line.cut
    line.close()
    overdue.close()


def test_cutting_a_closed_line_touches_no_other(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """A number that the system gave to somebody else since is not shut."""
    line = Line(ends[0].fileno())
    line.close()
    line.close()
    line.shut()
    ends[1].send(b"x")
    assert b"x" == ends[0].recv(1)


def test_the_descriptor_is_given_back(ends: tuple[socket.socket, socket.socket]) -> None:
    """A line that nobody holds any more keeps no descriptor open."""
    process = psutil.Process()
    before = process.num_fds()
    lines = [Line(ends[0].fileno()) for _ in range(5)]
    assert before + 5 == process.num_fds()
    del lines
    assert before == process.num_fds()


def test_there_is_one_watch_per_process() -> None:
    """However many threads ask for it at the same time."""
    start, found = threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        found.append(watch())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {id(watch())} == {id(one) for one in found}


def test_a_sleeping_watch_wakes(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a time without calls the next one is watched like the first."""
    monkeypatch.setattr("celery_lease.patience._IDLE_POLLS", 0)
    lazy = Watch()
    for _ in range(2):
        line = Line(ends[0].fileno())
        lazy.add(line, time.monotonic())
        until(lambda line=line: line.cut)
        until(lambda: lazy._asleep, what="sleep")
        line.close()


def test_a_watch_that_was_killed_is_started_again(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception that hits the watching thread costs no later call its bound."""
    monkeypatch.setattr("celery_lease.patience._START_TIME", 0.05)
    monkeypatch.setattr("celery_lease.patience._thread.start_new_thread", lambda *_: 0)
    killed, line = Watch(), Line(ends[0].fileno())
    killed.add(line, time.monotonic())
    monkeypatch.undo()
    monkeypatch.setattr("celery_lease.patience._START_TIME", 0.05)
    time.sleep(0.06)
    killed.add(line, time.monotonic())
    until(lambda: line.cut)
    line.close()


def test_a_child_watches_for_itself() -> None:
    """A fork takes no thread along, so the child starts its own."""
    one, two = socket.socketpair()
    parents, line = watch(), Line(one.fileno())
    parents.add(line, time.monotonic() + 60)
    pid = os.fork()
    if pid == 0:
        one.settimeout(10)
        own = watch()
        own.add(line, time.monotonic())
        # The line is cut for the parent as well: the connection is one.
        os._exit(0 if own is not parents and one.recv(1) == b"" else 1)
    _, status = os.waitpid(pid, 0)
    parents.remove(line)
    line.close()
    assert 0 == os.waitstatus_to_exitcode(status)
    one.close()
    two.close()
