"""A folder as a broker: kombu's filesystem transport, without its two races.

What it is: the transport `folder://` for the demo where there is no Redis. kombu gives a message
file its final name before it writes into it, and a binding file likewise; a reader that comes
between the two finds it empty, loses it and raises. Here files become visible when they are whole.

What it knows: kombu. It must not know leases.
"""

from __future__ import annotations

import fcntl
import time
import uuid
from pathlib import Path
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, filesystem
from kombu.utils.json import dumps

__all__ = ("Channel", "Transport")


class Channel(filesystem.Channel):
    """Writes a message under another name first, and bindings one process at a time."""

    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:  # type: ignore[override]
        del kwargs
        name = f"{time.monotonic_ns() // 1_000_000}_{uuid.uuid4()}.{queue}.msg"
        unfinished = Path(self.data_folder_out, f"{name}.unfinished")
        unfinished.write_text(dumps(payload))
        unfinished.replace(Path(self.data_folder_out, name))

    def _queue_bind(self, *args: Any, **kwargs: Any) -> None:
        with Path(self.control_folder, "bindings.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            super()._queue_bind(*args, **kwargs)


class Transport(filesystem.Transport):
    """See the module."""

    Channel = Channel


TRANSPORT_ALIASES.setdefault("folder", f"{__name__}:Transport")
