"""KV events: which blocks others can find in this engine's cache, as routers want to be told.

The layout is vLLM's: msgspec structs written as msgpack arrays with a tag, in the field order below.
Its newest versions write events as maps; subscribers (Dynamo, llm-d) read arrays too, and older ones nothing
else. Dynamo takes block hashes only as 64-bit integers, llm-d as integers or as bytes of which it uses the
last eight, big endian: those eight, as an unsigned integer, are what is sent.
"""

from __future__ import annotations

import time

import msgspec

from quire.adapters import Adapter

MEDIUM_POOL = "GPU"
"""The pool that attention reads, on the CPU too: to routers this name means "no load needed"."""

ExtraKeys = tuple[str, ...]
"""Keys beside its tokens that a block is found by, hexadecimal: a hash of the cache salt, and what
`PromptEmbeds.key_of` gives for its images and positions."""


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """Blocks of one chain, in order; the first follows `parent_block_hash`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    """The tokens of all blocks, `block_size` each."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM_POOL
    lora_name: str | None = None
    extra_keys: list[ExtraKeys | None] | None = None
    """Extra keys of each block; None: no block has any."""


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """Blocks that can no longer be found."""

    block_hashes: list[int]
    medium: str | None = MEDIUM_POOL


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """Nothing can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True):
    """The KV events between two steps, in order."""

    ts: float
    """Seconds since the epoch."""
    events: list[KVEvent]
    data_parallel_rank: int = 0
    """vLLM's; each engine here is one of its own."""


def external_hash(content_hash: bytes) -> int:
    """A block's name in events: the last 8 bytes of its hash, big endian."""
    return int.from_bytes(content_hash[-8:], "big")


class KVEventCollector:
    """Gathers what the cache registers and evicts until `pop_batch` hands it over; merges neighbours.

    The first batch begins with AllBlocksCleared: a subscriber that outlived another engine at this address
    must forget what that one had.
    """

    def __init__(self) -> None:
        self._events: list[KVEvent] = [AllBlocksCleared()]

    def block_stored(
        self,
        content_hash: bytes,
        parent_hash: bytes | None,
        token_ids: list[int],
        *,
        extra_keys: ExtraKeys | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """A block can be found from now on.

        Args:
            parent_hash: of the block before it; None: it is the first of its sequence.
            token_ids: as many as every block has.
            adapter: what it was computed with, as all blocks of its chain.
        """
        name = external_hash(content_hash)
        parent = None if parent_hash is None else external_hash(parent_hash)
        event = self._newest
        if not (isinstance(event, BlockStored) and event.block_hashes[-1] == parent):
            event = BlockStored([name], parent, list(token_ids), len(token_ids))
            if adapter is not None:
                event.lora_id, event.lora_name = adapter.number, adapter.name
            if extra_keys is not None:
                event.extra_keys = [extra_keys]
            self._events.append(event)
            return
        if extra_keys is not None and event.extra_keys is None:
            event.extra_keys = [None] * len(event.block_hashes)
        if event.extra_keys is not None:
            event.extra_keys.append(extra_keys)
        event.block_hashes.append(name)
        event.token_ids += token_ids

    def block_removed(self, content_hash: bytes) -> None:
        """A block can no longer be found."""
        name = external_hash(content_hash)
        event = self._newest
        if isinstance(event, BlockRemoved):
            event.block_hashes.append(name)
        else:
            self._events.append(BlockRemoved([name]))

    def all_cleared(self) -> None:
        """Nothing can be found any more; what is pending is moot."""
        self._events = [AllBlocksCleared()]

    def pop_batch(self) -> KVEventBatch | None:
        """Hands over the events since the last call; None: there are none."""
        if not self._events:
            return None
        batch = KVEventBatch(time.time(), self._events)
        self._events = []
        return batch

    @property
    def _newest(self) -> KVEvent | None:
        return self._events[-1] if self._events else None
