"""A TCP proxy with faults, between a worker and a server.

It lives in a thread of the test process. What it can do to the traffic:

- `cut`: a partition. Connections stay open and nothing passes; new ones are accepted and stay
  silent. After `restore` what was sent meanwhile arrives, late, as after a real partition.
- `refuse`: the server is gone. Connections are reset, new ones refused.
- `drop_next_response`: the server does what it was asked, but its answer is lost and the
  connection breaks.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from typing import final
from urllib.parse import urlsplit, urlunsplit

from celery_lease.supervisor import free_port

#: How PostgreSQL ends each answer, once the transaction is committed (idle outside a transaction).
READY_FOR_QUERY = b"Z\x00\x00\x00\x05I"
_CHUNK = 65536


class LostResponse:
    """An ordered fault: the answer to the next request that holds some bytes is to be lost."""

    def __init__(self, request: bytes, answered: bytes) -> None:
        self.request = request
        self.answered = answered
        self._happened = threading.Event()

    def happened(self) -> bool:
        """Tell whether the answer was lost."""
        return self._happened.is_set()

    def wait(self, timeout: float = 15.0) -> None:
        """Wait until the answer was lost."""
        if not self._happened.wait(timeout):
            raise AssertionError(f"no request with {self.request!r} was answered")

    def mark(self) -> None:
        """Note that it has happened."""
        self._happened.set()


class _Pair:
    """A client's connection and the one to the server that belongs to it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.seen = b""
        self.lost: LostResponse | None = None
        self.answer = b""

    def close(self, *, reset: bool) -> None:
        for end in (self.client, self.server):
            if reset:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()


@final
class Proxy:
    """Forwards a free port of 127.0.0.1 to a server; a context manager.

    Args:
        url: URL of the server; `url` of the proxy is the same with another port.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.hostname is None or parts.port is None:
            raise ValueError(f"{parts.scheme}: the URL names no host and port")
        self._target = (parts.hostname, parts.port)
        self.port = free_port()
        self.url = _through(url, self.port)
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._pairs: dict[socket.socket, _Pair] = {}
        self._waiting: list[socket.socket] = []
        self._orders: list[LostResponse] = []
        self._cut = self._closing = False
        self._listener: socket.socket | None = None
        self._selector.register(self._woken, selectors.EVENT_READ)
        with self._lock:
            self._listen()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        with self._lock:
            return len(self._pairs) // 2 + len(self._waiting)

    def cut(self) -> None:
        """Let nothing pass from now on, and say nothing about it."""
        with self._changed():
            self._cut = True
            for end in self._pairs:
                self._watch(end, on=False)

    def refuse(self) -> None:
        """Reset all connections and refuse new ones."""
        with self._changed():
            self._drop_listener()
            for pair in set(self._pairs.values()):
                self._drop(pair, reset=True)
            self._drop_waiting()

    def restore(self) -> None:
        """End every fault; what waited is forwarded."""
        with self._changed():
            self._cut = False
            self._orders.clear()
            if self._listener is None:
                self._listen()
            waiting, self._waiting = self._waiting, []
            for client in waiting:
                self._connect(client)
            for end in self._pairs:
                self._watch(end, on=True)

    def drop_next_response(
        self, matching: bytes, *, answered: bytes = READY_FOR_QUERY
    ) -> LostResponse:
        """Lose one answer: forward the request, wait for the server, close both connections.

        Args:
            matching: Bytes of the request: SQL text, or a parameter's value (a statement that
                the client has prepared is sent without its text).
            answered: How a whole answer of the server ends.
        """
        order = LostResponse(matching, answered)
        with self._lock:
            self._orders.append(order)
        return order

    def close(self) -> None:
        """End the proxy with all connections."""
        if self._closing:
            return
        with self._changed():
            self._closing = True
        self._thread.join()
        self._drop_listener()
        for pair in set(self._pairs.values()):
            self._drop(pair, reset=False)
        self._drop_waiting()
        self._selector.close()
        self._wake.close()
        self._woken.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        with self._lock:
            yield
            self._wake.send(b"!")

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(128)
        listener.setblocking(False)
        self._listener = listener
        self._watch(listener, on=True)

    def _drop_listener(self) -> None:
        if self._listener is not None:
            self._watch(self._listener, on=False)
            self._listener.close()
            self._listener = None

    def _drop_waiting(self) -> None:
        for client in self._waiting:
            client.close()
        self._waiting.clear()

    def _watch(self, end: socket.socket, *, on: bool) -> None:
        watched = end in self._selector.get_map()
        if on and not watched:
            self._selector.register(end, selectors.EVENT_READ)
        elif watched and not on:
            self._selector.unregister(end)

    def _run(self) -> None:
        while not self._closing:
            ready = [key.fileobj for key, _ in self._selector.select(0.5)]
            with self._lock:
                for end in ready:
                    self._serve(end)

    def _serve(self, end: object) -> None:
        if end is self._woken:
            self._woken.recv(_CHUNK)
        elif end is self._listener and self._listener is not None:
            with contextlib.suppress(BlockingIOError):
                client, _ = self._listener.accept()
                if self._cut:
                    self._waiting.append(client)
                else:
                    self._connect(client)
        elif isinstance(end, socket.socket) and end in self._pairs and not self._cut:
            self._forward(end, self._pairs[end])

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target, timeout=5)
        except OSError:
            client.close()
            return
        pair = _Pair(client, server)
        for end in (client, server):
            end.setblocking(True)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs[end] = pair
            self._watch(end, on=True)

    def _drop(self, pair: _Pair, *, reset: bool) -> None:
        if pair.lost is not None and not pair.lost.happened():
            # The connection broke by itself, before the answer: the order still stands.
            self._orders.append(pair.lost)
        for end in (pair.client, pair.server):
            self._watch(end, on=False)
            self._pairs.pop(end, None)
        pair.close(reset=reset)

    def _forward(self, end: socket.socket, pair: _Pair) -> None:
        try:
            received = end.recv(_CHUNK)
            if not received:
                self._drop(pair, reset=False)
            elif end is pair.client:
                self._match(pair, received)
                pair.server.sendall(received)
            elif pair.lost is None:
                pair.client.sendall(received)
            else:
                self._lose(pair, pair.lost, received)
        except OSError:
            self._drop(pair, reset=True)

    def _match(self, pair: _Pair, received: bytes) -> None:
        pair.seen = (pair.seen + received)[-2 * _CHUNK :]
        order = next((order for order in self._orders if order.request in pair.seen), None)
        if order is not None:
            self._orders.remove(order)
            pair.lost, pair.seen = order, b""

    def _lose(self, pair: _Pair, order: LostResponse, received: bytes) -> None:
        pair.answer += received
        if order.answered in pair.answer:
            order.mark()
            self._drop(pair, reset=True)


def _through(url: str, port: int) -> str:
    parts = urlsplit(url)
    place = f"{parts.netloc.rpartition(':')[0]}:{port}"
    query = parts.query
    if parts.scheme.startswith("postgresql"):
        # In the clear, so that requests can be recognised.
        query = "&".join(filter(None, [query, "sslmode=disable", "gssencmode=disable"]))
    return urlunsplit(parts._replace(netloc=place, query=query))
