"""Acknowledgements wait for one another, and are tried again where the broker did not take them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from celery_lease import acknowledge
from celery_lease.acknowledge import Acknowledgements


class _Hub:
    """An event loop whose time the test moves."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_later(self, _: float, callback: Callable[[], None]) -> None:
        self.calls.append(callback)

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Collect what is sent; an entry of the attribute `failures` makes a try fail."""
    found: list[list[str]] = []
    monkeypatch.setattr(acknowledge, "forget", lambda _: True)
    monkeypatch.setattr(acknowledge, "acknowledge_all", lambda _, tags: found.append(list(tags)))
    return found


def _failing(monkeypatch: pytest.MonkeyPatch, sent: list[list[str]], times: int) -> None:
    left = [None] * times

    def send(_: Any, tags: list[str]) -> None:
        if left:
            left.pop()
            raise ConnectionError
        sent.append(list(tags))

    monkeypatch.setattr(acknowledge, "acknowledge_all", send)


def _message(tag: str, channel: object) -> Any:
    return SimpleNamespace(channel=channel, delivery_tag=tag)


def test_they_go_together(sent: list[list[str]]) -> None:
    hub, channel, found = _Hub(), SimpleNamespace(), Acknowledgements()
    for tag in "abc":
        assert found.add(_message(tag, channel), hub)
    assert [] == sent
    hub.turn()
    assert [["a", "b", "c"]] == sent
    hub.turn()
    assert [["a", "b", "c"]] == sent


def test_many_do_not_wait(sent: list[list[str]]) -> None:
    hub, channel, found = _Hub(), SimpleNamespace(), Acknowledgements()
    for number in range(acknowledge._MOST):
        found.add(_message(str(number), channel), hub)
    assert 1 == len(sent)


def test_each_channel_has_its_own(sent: list[list[str]]) -> None:
    """A new connection's acknowledgements are not sent with an old one's."""
    hub, found = _Hub(), Acknowledgements()
    old, new = SimpleNamespace(), SimpleNamespace()
    found.add(_message("a", old), hub)
    found.add(_message("b", new), hub)
    assert [["a"]] == sent
    hub.turn()
    assert [["a"], ["b"]] == sent


def test_what_was_not_taken_is_sent_again_with_what_came_since(
    sent: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, channel, found = _Hub(), SimpleNamespace(), Acknowledgements()
    _failing(monkeypatch, sent, 1)
    found.add(_message("a", channel), hub)
    hub.turn()
    found.add(_message("b", channel), hub)
    hub.turn()
    assert [["a", "b"]] == sent


def test_three_tries_are_enough(sent: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker delivers those messages again, and the row turns them away."""
    hub, channel, found = _Hub(), SimpleNamespace(), Acknowledgements()
    _failing(monkeypatch, sent, 3)
    found.add(_message("a", channel), hub)
    for _ in range(5):
        hub.turn()
    assert [] == sent
    found.add(_message("b", channel), hub)
    hub.turn()
    assert [["b"]] == sent


def test_a_connection_that_goes_is_asked_once(
    sent: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, channel, found = _Hub(), SimpleNamespace(), Acknowledgements()
    _failing(monkeypatch, sent, 1)
    found.add(_message("a", channel), hub)
    found.leave()
    hub.turn()
    hub.turn()
    assert [] == sent
