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


def test_there_is_one_thread_per_process() -> None:
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
    until(lambda: not lazy._busy.is_set())
    line = Line(ends[0].fileno())
    lazy.add(line, time.monotonic())
    until(lambda: line.cut)
    line.close()


def test_a_child_watches_for_itself() -> None:
    """A fork takes no thread along, so the child starts its own."""
    parents = watch()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = b"1" if watch() is not parents and watch()._thread.is_alive() else b"0"
        os.write(writing, code)
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"1" == os.read(reading, 1)
    os.close(reading)
    os.close(writing)
