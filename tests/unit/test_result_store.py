"""Where results are kept: bounded, forgetful, and careful with what a Redis says."""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from quire.errors import ConfigError
from quire.frontend import result_store
from quire.frontend.result_store import OVERHEAD, MemoryStore, RedisStore, checked, summed
from tests.fixtures.redis_server import find_redis, redis_server
from tests.fixtures.waiting import wait_until

KEY, OTHER = b"k" * 24, b"o" * 24
WAIT_S = 60.0


def test_the_least_recently_used_leave_first() -> None:
    store = MemoryStore(3 * (OVERHEAD + 100), 0.0)
    for name in (b"a", b"b", b"c"):
        store.put(name, name * 100)
    assert store.get(b"a") == b"a" * 100
    store.put(b"d", b"d" * 100)
    assert store.get(b"b") is None and store.get(b"a") and store.get(b"c") and store.get(b"d")
    store.put(b"e", bytes(2 * (OVERHEAD + 100)))  # room of two and more
    assert [name for name in (b"a", b"c", b"d", b"e") if store.get(name)] == [b"e"]
    store.put(b"f", bytes(10_000))
    assert store.get(b"f") is None and store.get(b"e") is not None, "what cannot fit drives nobody out"
    store.put(b"e", b"new")
    assert store.get(b"e") == b"new" and store.num_bytes == OVERHEAD + 3


def test_entries_have_an_end() -> None:
    now = [100.0]
    store = MemoryStore(10**6, 5.0, clock=lambda: now[0])
    store.put(b"a", b"1")
    now[0] += 4.9
    assert store.get(b"a") == b"1"
    now[0] += 0.1
    assert store.get(b"a") is None and store.num_bytes == 0


def test_an_entry_is_good_under_its_own_key_only() -> None:
    entry = summed(KEY, b"value")
    assert checked(KEY, entry) == b"value"
    assert checked(OTHER, entry) is None
    for broken in (b"", entry[:-1], entry + b"x", entry[:20] + b"\0" + entry[21:], pickle.dumps(entry)):
        assert checked(KEY, broken) is None


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="result_cache: url: Redis URL must specify"):
        RedisStore("http://example.org", 1.0, 100)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    binary = find_redis()
    if binary is None:
        pytest.skip("there is no redis-server")
    with redis_server(binary, tmp_path_factory.mktemp("redis")) as (url, process):
        yield url, process.pid


@pytest.fixture
def client(server: tuple[str, int]) -> Iterator[Any]:
    """Another one's, without limits of time."""
    with redis.Redis.from_url(server[0]) as client:
        client.flushall()
        yield client


@pytest.fixture
def store(
    server: tuple[str, int], client: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[RedisStore]:
    """A look-up may take as long as a busy machine makes it take, unless a test is about that."""
    if "bound" not in request.function.__name__:
        monkeypatch.setattr(result_store, "LOOKUP_S", WAIT_S)
    store = RedisStore(server[0], 60.0, 1000)
    yield store
    store.close()


def test_entries_are_there_for_all_for_their_time(
    server: tuple[str, int], store: RedisStore, client: Any
) -> None:
    assert store.get(KEY) is None
    RedisStore(server[0], 6000.0, 1000).put(KEY, b"value")
    assert wait_until(lambda: store.get(KEY)) == b"value" and store.get(OTHER) is None
    assert 5_000_000 < client.pttl(f"quire:result:{KEY.hex()}") <= 6_000_000
    assert RedisStore(server[0], 0.0001, 1000)._ttl_ms == 1, "0 is without an end"
    store.put(OTHER, bytes(1001))
    store.put(KEY, b"later")  # behind it in the queue
    wait_until(lambda: store.get(KEY) == b"later")
    assert store.get(OTHER) is None, "larger than an entry may be"


def test_what_somebody_else_wrote_is_no_entry(store: RedisStore, client: Any) -> None:
    """Garbage, a pickle with a command, values of other types, and one of 50 MB, of which no more is fetched
    than an entry may have."""
    name = f"quire:result:{KEY.hex()}"
    for value in (b"", b"\0" * 100, pickle.dumps(print), summed(OTHER, b"value"), b"x" * 50_000_000):
        client.set(name, value)
        assert store.get(KEY) is None
    assert store._paused_until == 0.0
    client.delete(name)
    client.rpush(name, b"a", b"b")
    assert store.get(KEY) is None
    store._paused_until = 0.0
    client.delete(name)
    store.put(KEY, b"value")
    assert wait_until(lambda: store.get(KEY)) == b"value", "and nothing is broken after it"


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> list[RedisStore]:
    """Stores that have begun to ask their Redis no more: for ever, so that no later look-up is made."""
    monkeypatch.setattr(result_store, "PAUSE_S", math.inf)
    pause, stores = RedisStore._pause, list[RedisStore]()
    monkeypatch.setattr(RedisStore, "_pause", lambda self, why: (stores.append(self), pause(self, why)))
    return stores


def test_a_redis_that_stands_still_costs_its_bound_once(
    server: tuple[str, int],
    store: RedisStore,
    client: Any,
    paused: list[RedisStore],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client.set(f"quire:result:{KEY.hex()}", summed(KEY, b"value"))
    os.kill(server[1], signal.SIGSTOP)
    try:
        for _ in range(1000):  # the first one does not wait until it goes on
            assert store.get(KEY) is None
            store.put(OTHER, b"lost")
    finally:
        os.kill(server[1], signal.SIGCONT)
    assert paused.count(store) in (1, 2), "for who asked, and for the thread that did: once"
    monkeypatch.setattr(result_store, "LOOKUP_S", WAIT_S)
    patient = {"socket_timeout": WAIT_S, "socket_connect_timeout": WAIT_S}
    store._reader.connection_pool.connection_kwargs.update(patient)
    store._reader.connection_pool.disconnect()
    monkeypatch.setattr(result_store, "PAUSE_S", 0.0)
    store._paused_until = 0.0
    assert wait_until(lambda: store.get(KEY)) == b"value"


class DrippingServer(threading.Thread):
    """Accepts, and says a byte every 20 ms, which no time limit of a socket notices."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.stopped = threading.Event()
        self.port = self.socket.getsockname()[1]
        self.start()

    def run(self) -> None:
        self.socket.settimeout(0.1)
        connections = []
        while not self.stopped.wait(0.02):
            try:
                connections.append(self.socket.accept()[0])
            except TimeoutError:
                pass
            for one in connections:
                try:
                    one.send(b"$")
                except OSError:
                    pass
        for one in [*connections, self.socket]:
            one.close()


def test_neither_a_slow_nor_an_absent_redis_costs_more(tmp_path: Path, paused: list[RedisStore]) -> None:
    dripping = DrippingServer()
    for url in (f"redis://127.0.0.1:{dripping.port}", f"unix://{tmp_path}/none"):
        store = RedisStore(url, 1.0, 1000)
        for _ in range(1000):
            assert store.get(KEY) is None
            store.put(KEY, b"value")
        store.close()
        assert paused.count(store) in (1, 2), "one look-up was made"
    dripping.stopped.set()
    dripping.join(WAIT_S)
