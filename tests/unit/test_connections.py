"""How a connection shows that a pooler stands before the server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_lease.connections import _is_straight


def _wire(told: int, served: int) -> Any:
    info = SimpleNamespace(backend_pid=told)
    return SimpleNamespace(connection=SimpleNamespace(info=info), run=lambda *_: [(served,)])


@pytest.mark.parametrize(("told", "straight"), [(4711, True), (2_000_000_001, False)])
def test_a_pooler_makes_up_the_process_id(told: int, *, straight: bool) -> None:
    """The server's own answer is compared with what the connection was told at its start."""
    assert straight == _is_straight(_wire(told, 4711), 0.0)
