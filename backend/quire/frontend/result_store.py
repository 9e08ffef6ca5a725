"""Where results of requests are kept as bytes by key: in this process, and optionally in a Redis (or Valkey).

What a Redis says is judged as what a stranger says: it may be slow, gone, or hold anything. A look-up takes
LOOKUP_S at most, whatever it does, and after a failure it is left alone for a while.
"""

from __future__ import annotations

import logging
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
"""Memory for an entry beside its value, in bytes."""
_SUM_BYTES = 16


class MemoryStore:
    """Least recently used entries leave first; those older than `ttl_s` are not found. Thread-safe.

    Args:
        max_bytes: of all entries.
        ttl_s: 0: entries have no end.
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
    """Entries of all frontends that name the same Redis; its own `maxmemory` bounds them.

    Args:
        url: redis://, rediss:// or unix://, as redis-py takes it.
        ttl_s: as of `MemoryStore`.
        max_bytes: of an entry; more is neither written nor read.

    Raises:
        ConfigError: redis-py is not installed, or the URL is none.
    """

    def __init__(self, url: str, ttl_s: float, max_bytes: int) -> None:
        try:
            import redis
        except ModuleNotFoundError:
            raise ConfigError("result_cache_url needs redis-py: pip install redis") from None
        self._ttl_ms, self._max_bytes = int(ttl_s * 1000), max_bytes
        timeouts = {"socket_timeout": LOOKUP_S, "socket_connect_timeout": LOOKUP_S}
        try:
            # Two, as a client is for one thread at a time.
            self._reader, self._writer = (redis.Redis.from_url(url, **timeouts) for _ in range(2))
        except ValueError as error:
            raise ConfigError(f"result_cache_url: {error}") from None
        self._reads: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._writes: queue.Queue[tuple[bytes, bytes] | None] = queue.Queue(MAX_PENDING)
        self._paused_until = 0.0
        for name, work in (("read", self._read_all), ("write", self._write_all)):
            threading.Thread(target=work, name=f"quire-results-{name}", daemon=True).start()

    def get(self, key: bytes) -> bytes | None:
        """Returns the entry; None if it is missing, damaged or late."""
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
        """Writes in the background; what does not fit or cannot be written is dropped."""
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
    """An entry with its checksum, over the key too."""
    return xxhash.xxh3_128(key + value).digest() + value


def checked(key: bytes, entry: bytes) -> bytes | None:
    """Returns the value that `summed` was given; None: the entry's checksum is wrong."""
    value = entry[_SUM_BYTES:]
    return value if entry[:_SUM_BYTES] == xxhash.xxh3_128(key + value).digest() else None


def _name(key: bytes) -> str:
    return f"quire:result:{key.hex()}"
