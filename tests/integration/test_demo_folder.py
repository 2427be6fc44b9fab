"""The folder that is the demo's broker where there is no Redis."""

from __future__ import annotations

import multiprocessing
import queue
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from celery_lease import demo_folder

MESSAGES = 400


def _connection(folder: Path) -> Connection:
    options = {"data_folder_in": str(folder), "data_folder_out": str(folder)}
    options |= {"control_folder": str(folder / "control"), "polling_interval": 0.001}
    return Connection("folder://", transport_options=options)


def _receive(folder: Path, name: str, count: int) -> list[Any]:
    received = []
    deadline = time.monotonic() + 30
    with _connection(folder) as connection, connection.SimpleQueue(name) as work:
        while len(received) < count and time.monotonic() < deadline:
            try:
                message = work.get(block=False)
            except queue.Empty:
                continue
            received.append(message.payload)
            message.ack()
    return received


def _send(folder: Path, name: str, sender: int) -> None:
    with _connection(folder) as connection, connection.SimpleQueue(name) as work:
        for number in range(MESSAGES):
            work.put([sender, number, "x" * 50_000])
            time.sleep(0.002)  # the reader is to wait for messages, not the messages for it


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert "folder" in demo_folder.TRANSPORT_ALIASES
    (tmp_path / "control").mkdir()
    return tmp_path


@pytest.fixture
def name() -> str:
    """Give a queue's name that is new to this process, which remembers what it has bound."""
    return f"queue-{uuid.uuid4().hex[:8]}"


def test_no_message_is_read_before_it_is_whole(folder: Path, name: str) -> None:
    """Two processes send while this one looks all the time: each message comes once and whole."""
    context = multiprocessing.get_context("spawn")
    senders = [context.Process(target=_send, args=(folder, name, sender)) for sender in range(2)]
    for sender in senders:
        sender.start()
    received = _receive(folder, name, 2 * MESSAGES)
    for sender in senders:
        sender.join()
    assert 2 * MESSAGES == len({(sender, number) for sender, number, _ in received})
    assert 2 * MESSAGES == len(received)


def test_an_unfinished_message_is_not_found(folder: Path, name: str) -> None:
    """What a killed sender left half written is never delivered."""
    (folder / f"1_a.{name}.msg.unfinished").write_text("{")
    with _connection(folder) as connection, connection.SimpleQueue(name) as work:
        work.put("whole")
    assert ["whole"] == _receive(folder, name, 1)
