"""Stores for the result cache's entries, bytes by key: in this process, and in a Redis (or Valkey).

Redis is not trusted: it may be slow, gone, or hold anything. A look-up waits LOOKUP_S at most, and after a
failure Redis is not asked for PAUSE_S.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import xxhash

from quire.errors import ConfigError

logger = logging.getLogger("quire")

LOOKUP_S = 0.05
"""Longest wait for an answer from Redis, in seconds."""
PAUSE_S = 5.0
"""Seconds for which Redis is not asked after a failure."""
MAX_PENDING = 64
"""Most entries that may wait to be written to Redis. Further ones are dropped."""
OVERHEAD = 512
"""Memory that an entry is taken to use in addition to its value, in bytes."""
_SUM_BYTES = 16


class MemoryStore:
    """Entries in this process's memory. The least recently used are dropped first. Thread-safe.

    Args:
        max_bytes: limit of the size of all entries, each with OVERHEAD.
        ttl_s: seconds after which an entry is not found any more; 0: it never expires.
        clock: returns the time in seconds.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._entries: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if self._ttl_s and self._clock() - entry[0] >= self._ttl_s:
                self._drop(key)
                return None
            self._entries.move_to_end(key)
            return entry[1]

    def put(self, key: bytes, value: bytes) -> None:
        with self._lock:
            if key in self._entries:
                self._drop(key)
            if len(value) + OVERHEAD > self.max_bytes:
                return
            self._entries[key] = self._clock(), value
            self.num_bytes += len(value) + OVERHEAD
            while self.num_bytes > self.max_bytes:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        self.num_bytes -= len(self._entries.pop(key)[1]) + OVERHEAD


class RedisStore:
    """Entries in Redis, shared by all frontends with the same URL. Redis's `maxmemory` limits their size.

    Args:
        url: redis://, rediss:// or unix://, in redis-py's form.
        ttl_s: seconds after which Redis drops an entry; 0: it never expires.
        max_bytes: limit of one entry's value. Larger ones are not written.

    Raises:
        ConfigError: redis-py is not installed, or the URL is invalid.
    """

    def __init__(self, url: str, ttl_s: float, max_bytes: int) -> None:
        try:
            import redis
        except ModuleNotFoundError:
            raise ConfigError("result_cache: url needs redis-py: pip install redis") from None
        self._ttl_ms, self._max_bytes = math.ceil(ttl_s * 1000), max_bytes
        timeouts = {"socket_timeout": LOOKUP_S, "socket_connect_timeout": LOOKUP_S}
        try:
            # Two, as a client is for one thread at a time.
            self._reader, self._writer = (redis.Redis.from_url(url, **timeouts) for _ in range(2))
        except ValueError as error:
            raise ConfigError(f"result_cache: url: {error}") from None
        self._reads: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writes: queue.Queue[tuple[bytes, bytes] | None] = queue.Queue(MAX_PENDING)
        self._paused_until = 0.0
        for name, work in (("read", self._read_all), ("write", self._write_all)):
            threading.Thread(target=work, name=f"quire-results-{name}", daemon=True).start()

    def get(self, key: bytes) -> bytes | None:
        """Returns an entry's value; None if it is missing, damaged or late, or if Redis fails or is not
        asked."""
        if time.monotonic() < self._paused_until:
            return None
        answer: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reads.put((key, answer))
        try:
            found = answer.get(timeout=LOOKUP_S)
        except queue.Empty:
            self._pause(f"no answer in {LOOKUP_S * 1000:.0f} ms")
            return None
        return None if found is None else checked(key, found)

    def put(self, key: bytes, value: bytes) -> None:
        """Writes an entry in the background. Drops it if it is too large, too many wait, or Redis fails or is
        not asked."""
        if len(value) <= self._max_bytes and time.monotonic() >= self._paused_until:
            try:
                self._writes.put_nowait((key, summed(key, value)))
            except queue.Full:
                pass

    def close(self) -> None:
        self._reads.put(None)
        try:
            self._writes.put_nowait(None)
        except queue.Full:
            pass  # its thread ends with the process

    def _pause(self, reason: object) -> None:
        if time.monotonic() >= self._paused_until:
            logger.warning("result cache: Redis is not asked for %.0f s: %s", PAUSE_S, reason)
        self._paused_until = time.monotonic() + PAUSE_S

    def _read_all(self) -> None:
        while (item := self._reads.get()) is not None:
            key, answer = item
            found = None
            if time.monotonic() >= self._paused_until:  # else whoever asked has gone
                try:
                    # However much there is under the key.
                    found = self._reader.getrange(_name(key), 0, self._max_bytes + _SUM_BYTES)
                except Exception as error:  # what a server sends may break its client in many ways
                    self._pause(error)
            answer.put(found if isinstance(found, bytes) and found else None)

    def _write_all(self) -> None:
        while (item := self._writes.get()) is not None:
            key, value = item
            try:
                self._writer.set(_name(key), value, px=self._ttl_ms or None)
            except Exception as error:
                self._pause(error)


def summed(key: bytes, value: bytes) -> bytes:
    """Returns an entry to store: a checksum of key and value (16 bytes), then the value."""
    return xxhash.xxh3_128(key + value).digest() + value


def checked(key: bytes, entry: bytes) -> bytes | None:
    """Returns the value of an entry that `summed` made for this key; None: the checksum is wrong."""
    value = entry[_SUM_BYTES:]
    return value if entry[:_SUM_BYTES] == xxhash.xxh3_128(key + value).digest() else None


def _name(key: bytes) -> str:
    return f"quire:result:{key.hex()}"
