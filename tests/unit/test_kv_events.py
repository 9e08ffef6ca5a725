"""KV events: layout, merging, and a subscriber that always knows what is cached."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quire.core.kv_events import BlockRemoved, BlockStored, KVEventCollector, external_hash
from quire.engine import kv_event_publisher
from quire.engine.kv_event_publisher import KVEventPublisher
from quire.errors import ConfigError
from quire.models.kv_groups import KVGroup
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.fake_runner import VOCAB_SIZE

TIMEOUT_MS = 60_000


def content_hash(number: int) -> bytes:
    return number.to_bytes(2, "big") * 8


class Subscriber:
    """A router's view: the set of blocks, from messages alone. It decodes the layout without our structs."""

    def __init__(
        self,
        publisher: KVEventPublisher,
        loses: Callable[[int], bool] = lambda number: False,
        *,
        parents: bool = True,
    ) -> None:
        """`loses`: whether the message of a number gets lost. `parents`: whether the block before a new one
        is always known."""
        self.blocks: set[int] = set()
        self.tokens: dict[int, list[int]] = {}
        self.num_live = self.num_replayed = 0
        self._loses = loses
        self._parents = parents
        self._next = 0
        self._context: zmq.Context[Any] = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(publisher.endpoint)
        self._sub.subscribe(b"kv@")
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(publisher.replay_endpoint)

    def join(self, publisher: KVEventPublisher, events: KVEventCollector) -> int:
        """Publishes until the subscription is in effect; the number of the last batch."""
        last = -1
        while not self.num_live:
            events.all_cleared()
            last += publish(publisher, events)
            self.follow(last)
        return last

    def follow(self, last: int) -> None:
        """Reads until batch `last` is known; asks for what it lost on the way."""
        while self._next <= last:
            if not self._sub.poll(TIMEOUT_MS if self.num_live else 20):
                assert not self.num_live, "a message has not come"
                self._ask()  # what was sent before the subscription took effect
                continue
            topic, told, payload = self._sub.recv_multipart()
            assert topic == b"kv@pod@model"
            number = int.from_bytes(told, "big")
            if number >= self._next and self.num_live and self._loses(number):
                if number == last:  # none comes behind it that would show the gap
                    self._ask()
            elif number > self._next:
                self._ask()
            elif number == self._next:
                self._apply(payload)
                self.num_live += 1

    def _ask(self) -> None:
        self._replay.send_multipart([b"", self._next.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(TIMEOUT_MS), "no answer to a replay request"
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return
            assert int.from_bytes(number, "big") == self._next
            self._apply(payload)
            self.num_replayed += 1

    def _apply(self, payload: bytes) -> None:
        self._next += 1
        timestamp, events, rank = msgspec.msgpack.decode(payload)
        assert timestamp > 1e9 and rank == 0
        for tag, *fields in events:
            if tag == "AllBlocksCleared":
                self.blocks.clear()
            elif tag == "BlockRemoved":
                assert self.blocks >= set(fields[0]) and fields[1] == "GPU"
                self.blocks -= set(fields[0])
            else:
                assert tag == "BlockStored"
                hashes, parent, token_ids, block_size = fields[:4]
                assert parent is None or parent in self.blocks or not self._parents, "an unknown parent"
                assert not self.blocks & set(hashes), "a block is announced twice"
                assert len(token_ids) == len(hashes) * block_size
                self.blocks |= set(hashes)
                for index, name in enumerate(hashes):
                    self.tokens[name] = token_ids[index * block_size :][:block_size]

    def close(self) -> None:
        self._context.destroy(linger=0)


def some(number: int) -> bool:
    """Every thirteenth message gets lost."""
    return number % 13 == 5


def publish(publisher: KVEventPublisher, events: KVEventCollector) -> bool:
    """Whether there was anything to publish."""
    batch = events.pop_batch()
    if batch is not None:
        publisher.publish(batch)
    return batch is not None


@pytest.fixture
def subscribe() -> Iterator[Callable[..., Subscriber]]:
    """Makes subscribers, closed after the test: a context with open sockets would wait for them."""
    with contextlib.ExitStack() as stack:

        def made(*given: Any, **named: Any) -> Subscriber:
            subscriber = Subscriber(*given, **named)
            stack.callback(subscriber.close)
            return subscriber

        yield made


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    made = KVEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@pod@model", buffer_batches=5000)
    yield made
    made.close()


@pytest.mark.row("C17", clauses=("layout",))
def test_layout_is_that_of_vllm() -> None:
    events = KVEventCollector()
    first, second, other = b"\xff" * 16, b"\x00" * 15 + b"\x05", b"\x01" * 16
    events.block_stored(first, None, [1, 2])
    events.block_stored(second, first, [3, 4], extra_keys=("salt",))
    events.block_stored(other, first, [5, 6])
    events.block_removed(second)
    events.block_removed(first)
    batch = events.pop_batch()
    assert batch is not None and events.pop_batch() is None
    timestamp, listed, rank = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    assert isinstance(timestamp, float) and rank == 0
    ones = 0x0101010101010101
    assert listed == [
        ["AllBlocksCleared"],
        # tag, block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name, extra_keys
        ["BlockStored", [2**64 - 1, 5], None, [1, 2, 3, 4], 2, None, "GPU", None, [None, ["salt"]]],
        ["BlockStored", [ones], 2**64 - 1, [5, 6], 2, None, "GPU", None, None],
        ["BlockRemoved", [5, 2**64 - 1], "GPU"],
    ]


def test_events_keep_their_order_and_blocks_of_other_chains_do_not_merge() -> None:
    events = KVEventCollector()
    assert events.pop_batch() is not None
    a, b, c = map(content_hash, range(3))
    events.block_stored(a, None, [1])
    events.block_stored(b, None, [2])
    events.block_removed(a)
    events.block_stored(a, None, [1])
    events.block_stored(c, a, [3])
    batch = events.pop_batch()
    assert batch is not None
    listed = [(type(event).__name__, getattr(event, "block_hashes", None)) for event in batch.events]
    assert listed == [
        ("BlockStored", [external_hash(a)]),
        ("BlockStored", [external_hash(b)]),
        ("BlockRemoved", [external_hash(a)]),
        ("BlockStored", [external_hash(a), external_hash(c)]),
    ]
    # A batch that was taken does not grow any more.
    events.block_stored(content_hash(4), c, [4])
    assert len(batch.events) == 4 and batch.events[-1].block_hashes == [external_hash(a), external_hash(c)]  # type: ignore[union-attr]
    events.all_cleared()
    cleared = events.pop_batch()
    assert cleared is not None and [type(event).__name__ for event in cleared.events] == ["AllBlocksCleared"]


def test_a_subscriber_that_loses_messages_knows_every_block(
    publisher: KVEventPublisher, subscribe: Callable[..., Subscriber]
) -> None:
    """1 000 random operations in a forest of chains; messages get lost."""
    rng = random.Random(5)
    events = KVEventCollector()
    subscriber = subscribe(publisher, some)
    published = subscriber.join(publisher, events)
    parents: dict[bytes, bytes | None] = {}
    numbers = iter(range(10_000))
    for operation in range(1000):
        kind = rng.random()
        if kind < 0.01:
            parents.clear()
            events.all_cleared()
        elif kind < 0.4 and parents:
            leaves = sorted(parents.keys() - set(parents.values()))
            victim = rng.choice(leaves)
            del parents[victim]
            events.block_removed(victim)
        else:
            parent = rng.choice([None, *sorted(parents)])
            for _ in range(rng.randint(1, 4)):
                number = next(numbers)
                parents[content_hash(number)] = parent
                events.block_stored(content_hash(number), parent, [number, 7])
                parent = content_hash(number)
        if rng.random() < 0.5:
            published += publish(publisher, events)
        if operation % 50 == 49:
            published += publish(publisher, events)
            subscriber.follow(published)
            assert subscriber.blocks == {external_hash(key) for key in parents}
    assert subscriber.num_live > 50 and subscriber.num_replayed > 30
    for key in parents:
        assert subscriber.tokens[external_hash(key)] == [int.from_bytes(key[:2], "big"), 7]
    # One that comes late learns everything by replay.
    late = subscribe(publisher)
    late.follow(published)
    assert late.blocks == subscriber.blocks


def test_replay_gives_what_is_still_kept() -> None:
    publisher = KVEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", buffer_batches=3)
    context: zmq.Context[Any] = zmq.Context()
    subscriber, replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    subscriber.connect(publisher.endpoint)
    subscriber.subscribe(b"")
    replay.connect(publisher.replay_endpoint)
    events = KVEventCollector()

    def ask(first: int) -> list[int]:
        replay.send_multipart([b"", first.to_bytes(8, "big")])
        numbers = []
        while not numbers or numbers[-1] >= 0:
            assert replay.poll(TIMEOUT_MS)
            numbers.append(int.from_bytes(replay.recv_multipart()[1], "big", signed=True))
        return numbers

    for number in range(5):
        events.block_stored(content_hash(number), None, [1])
        assert publish(publisher, events)
        assert ask(number)[0] == number  # so none piles up, which may be lost
    assert ask(0) == [2, 3, 4, -1]
    assert ask(4) == [4, -1]
    assert ask(5) == [-1]
    replay.send_multipart([b"", b"short"])  # ignored
    assert ask(5) == [-1]
    publisher.close()
    context.destroy(linger=0)


def test_close_sends_what_is_pending(
    subscribe: Callable[..., Subscriber], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_publisher, "LINGER_MS", TIMEOUT_MS)
    publisher = KVEventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@pod@model")
    events = KVEventCollector()
    subscriber = subscribe(publisher)
    last = subscriber.join(publisher, events)
    for number in range(50):
        events.block_stored(content_hash(number), None, [1])
        last += publish(publisher, events)
    publisher.close()
    subscriber.follow(last)
    assert len(subscriber.blocks) == 50


def test_an_address_that_is_taken_is_named() -> None:
    publisher = KVEventPublisher("tcp://127.0.0.1:*")
    with pytest.raises(ConfigError, match=publisher.endpoint):
        KVEventPublisher(publisher.endpoint)
    publisher.close()


def test_an_address_of_this_machine_is_bound_and_another_is_connected_to(tmp_path: Path) -> None:
    bound = KVEventPublisher(f"ipc://{tmp_path}/events")
    assert bound.endpoint == f"ipc://{tmp_path}/events" and (tmp_path / "events").is_socket()
    connected = KVEventPublisher("tcp://192.0.2.1:5557")
    assert connected.endpoint == "tcp://192.0.2.1:5557"
    bound.close()
    connected.close()


@pytest.mark.row("C17", clauses=("rebuild", "replay"))
@pytest.mark.parametrize("lookahead", [False, True])
def test_a_subscriber_knows_what_the_engine_has_cached(
    publisher: KVEventPublisher, subscribe: Callable[..., Subscriber], lookahead: bool
) -> None:
    """1 000 requests with shared beginnings in a small pool, cancellations and resets; messages get lost."""
    rng = random.Random(17)
    events = KVEventCollector()
    subscriber = subscribe(publisher, some, parents=False)
    published, most = subscriber.join(publisher, events), 0
    engine = FakeEngine(
        num_blocks=48,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        lookahead=lookahead,
        cache={"enable_prefix_caching": True, "events": events},
    )
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(4, 40))] for _ in range(8)]
    for number in range(1000):
        prompt = [*rng.choice(prefixes), *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12)))]
        engine.add(f"r{number}", 0, rng.randint(1, 12), prompt=prompt)
        if rng.random() < 0.1:
            engine.abort(f"r{number}")
        if rng.random() < 0.01:
            engine.scheduler.reset_cache()
        while engine.scheduler.stats().num_waiting > 4:
            engine.step()
            published += publish(publisher, events)
        if number % 50 == 49:
            published += publish(publisher, events)
            subscriber.follow(published)
            expected = {external_hash(key) for key in engine.kv.pool.cached_hashes()}
            assert subscriber.blocks == expected
            most = max(most, len(expected))
    engine.run()
    engine.check_outputs()
    published += publish(publisher, events)
    subscriber.follow(published)
    assert subscriber.blocks == {external_hash(key) for key in engine.kv.pool.cached_hashes()}
    assert most > 20 and engine.kv.num_cached_tokens > 1000
    assert subscriber.num_live > 50 and subscriber.num_replayed > 30


def test_events_that_leave_the_machine_are_warned_of(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """They hold the token ids of everybody's prompts."""
    for endpoint in (f"ipc://{tmp_path}/events", "inproc://events", "tcp://127.0.0.1:*", "tcp://localhost:*"):
        KVEventPublisher(endpoint).close()
    assert not caplog.records
    KVEventPublisher("tcp://*:*", "tcp://0.0.0.0:*").close()
    assert [("token ids of all prompts" in record.getMessage()) for record in caplog.records] == [True, True]


def test_blocks_of_other_groups_are_nobodys_business() -> None:
    """Routers know a sequence by the blocks of its first group. Blocks of windows have keys of their own,
    which were told as removed under names that nobody knew."""
    events = KVEventCollector()
    groups = (KVGroup(None, (0,)), KVGroup(8, (1,)))
    cache = {"enable_prefix_caching": True, "events": events}
    engine = FakeEngine(num_blocks=40, groups=groups, max_num_seqs=4, cache=cache)
    for number in range(30):
        engine.add(f"r{number}", 5 + number, 6)
    engine.run()
    known: set[int] = set()
    num_removed = 0
    batch = events.pop_batch()
    assert batch is not None
    for event in batch.events:
        if isinstance(event, BlockStored):
            known.update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            num_removed += len(event.block_hashes)
            assert known.issuperset(event.block_hashes)
            known.difference_update(event.block_hashes)
    assert known == {external_hash(key) for key in engine.kv.pool.cached_hashes() if len(key) == 16}
    assert num_removed > 20
