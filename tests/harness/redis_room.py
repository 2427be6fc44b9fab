"""Room for tests on a Redis server: one database index, never anybody's data.

On a server that was started for the tests the index is the URL's own. On any other, an index is
reserved by a marker key that names this process: an empty index is taken, or one whose marker was
left by a test process that is gone. Only a reserved index is ever erased, and never by FLUSHALL.
"""

from __future__ import annotations

import os

import psutil
import redis

_MARKER = "celery-lease-tests:reserved-by"
_TAKE_OVER = (
    "if redis.call('get', KEYS[1]) == ARGV[1] then"
    " redis.call('set', KEYS[1], ARGV[2]) return 1 end return 0"
)


class RedisRoom:
    """A reserved database index.

    Attributes:
        url: Redis URL with that index.
    """

    def __init__(self, url: str, *, private: bool) -> None:
        self._private = private
        base, _, index = url.rpartition("/")
        if private:
            self.url = f"{base}/{index}"
        else:
            self.url = next((u for i in range(15, 0, -1) if _reserve(u := f"{base}/{i}")), "")
        if not self.url:
            raise RuntimeError("no database index of the Redis server between 1 and 15 is empty")

    def erase(self) -> None:
        """Delete every key but the marker."""
        with redis.Redis.from_url(self.url) as client:
            if self._private:
                client.flushdb()
                return
            keys = [key for key in client.scan_iter(count=1000) if key != _MARKER.encode()]
            if keys:
                client.delete(*keys)

    def close(self) -> None:
        """Delete every key, and the reservation last."""
        self.erase()
        with redis.Redis.from_url(self.url) as client:
            client.delete(_MARKER)


def _reserve(url: str) -> bool:
    me = f"{os.getpid()}:{psutil.Process().create_time()}"
    with redis.Redis.from_url(url, decode_responses=True) as client:
        holder = client.get(_MARKER)
        if holder is None:
            return client.dbsize() == 0 and bool(client.set(_MARKER, me, nx=True))
        return not _alive(str(holder)) and bool(client.eval(_TAKE_OVER, 1, _MARKER, holder, me))


def _alive(holder: str) -> bool:
    pid, _, started = holder.partition(":")
    try:
        return str(psutil.Process(int(pid)).create_time()) == started
    except psutil.NoSuchProcess:
        return False
