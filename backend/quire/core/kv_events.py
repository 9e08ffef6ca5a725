"""KV events: tell routers which blocks can be found in this engine's cache.

The layout is vLLM's: msgspec structs written as msgpack arrays in the field order below, events with a tag.
vLLM's newest versions write events as maps. Subscribers (Dynamo, llm-d) read arrays too, and their older
versions read arrays only. Dynamo accepts block hashes only as 64-bit integers. llm-d accepts integers, or
bytes, of which it uses the last eight, big endian. So the events carry those eight bytes as an unsigned
integer.
"""

from __future__ import annotations

import time

import msgspec

from quire.adapters import Adapter

MEDIUM_POOL = "GPU"
"""Medium name for the block pool that attention reads, even on a CPU: to routers it means that no load is
needed."""

ExtraKeys = tuple[str, ...]
"""Keys that identify a block beside its tokens and adapter, hexadecimal: a hash of the cache salt,
`PromptEmbeds.key_of` of its images and positions, or both."""


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    """Event: these consecutive blocks of a sequence can be found in the block pool from now on. The first one
    follows the block with `parent_block_hash`; None: it begins the sequence."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    """Tokens of all blocks in order, `block_size` for each block."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM_POOL
    lora_name: str | None = None
    extra_keys: list[ExtraKeys | None] | None = None
    """Extra keys of each block; None: no block has any."""


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    """Event: these blocks can no longer be found in the block pool."""

    block_hashes: list[int]
    medium: str | None = MEDIUM_POOL


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    """Event: no block can be found in the block pool any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True):
    """The KV events since the previous batch, in order."""

    ts: float
    """When the batch was made, in seconds since the epoch."""
    events: list[KVEvent]
    data_parallel_rank: int = 0
    """Field of vLLM's layout, always 0: each engine here is its own data-parallel group."""


def external_hash(content_hash: bytes) -> int:
    """Returns a block's hash in events: the last 8 bytes of its content hash as an integer, big endian."""
    return int.from_bytes(content_hash[-8:], "big")


class KVEventCollector:
    """Collects the events of blocks stored and removed until `pop_batch` returns them, or `all_cleared` drops
    them. A removed block joins the latest event if that is a BlockRemoved. A stored block joins it if it is a
    BlockStored whose last block is the new block's parent.

    The first batch begins with AllBlocksCleared, so that subscribers forget the blocks of an earlier engine
    at the same address.
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
        """Records that a block can be found from now on.

        Args:
            parent_hash: hash of the block before it; None: it is the first of its sequence.
            token_ids: the block's tokens; every block has the same number.
            adapter: the adapter that computed this block and those before it; None: the model alone.
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
        """Records that a block can no longer be found."""
        name = external_hash(content_hash)
        event = self._newest
        if isinstance(event, BlockRemoved):
            event.block_hashes.append(name)
        else:
            self._events.append(BlockRemoved([name]))

    def all_cleared(self) -> None:
        """Records that no block can be found any more, and drops the events that are pending."""
        self._events = [AllBlocksCleared()]

    def pop_batch(self) -> KVEventBatch | None:
        """Returns the events since the last call and clears them; None: there are none."""
        if not self._events:
            return None
        batch = KVEventBatch(time.time(), self._events)
        self._events = []
        return batch

    @property
    def _newest(self) -> KVEvent | None:
        return self._events[-1] if self._events else None
