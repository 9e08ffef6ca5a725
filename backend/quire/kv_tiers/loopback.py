"""LoopbackConnector: a remote store that is not remote; the example of a plug-in, and its test.

kv_connector: "quire.kv_tiers.loopback:LoopbackConnector"
kv_connector_options: {"capacity_bytes": 67108864, "store": "shared"}
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from quire.kv_tiers.connector import BlockArray, KVConnector


class _Store:
    """The store, which stands for a server: blocks by fingerprint and key, least recently used first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.blocks: OrderedDict[tuple[str, bytes], BlockArray] = OrderedDict()


class LoopbackConnector(KVConnector):
    """Blocks in a dictionary of this process.

    Connectors with the same `store` share their blocks, as two engines share a server; the bound of the one
    that saves counts.
    """

    name: ClassVar[str] = "loopback"
    _stores: ClassVar[dict[str, _Store]] = {}

    def __init__(
        self, *, block_bytes: int, fingerprint: str, capacity_bytes: int = 2**26, store: str = ""
    ) -> None:
        self.block_bytes = block_bytes
        self._fingerprint = fingerprint
        self._capacity = capacity_bytes // block_bytes
        self._store = self._stores.setdefault(store, _Store()) if store else _Store()
        self._num_saved = self._num_loaded = 0

    def contains(self, key: bytes) -> bool:
        return (self._fingerprint, key) in self._store.blocks

    def save(self, keys: Sequence[bytes], data: BlockArray) -> None:
        for key, row in zip(keys, data, strict=True):
            block = np.copy(row)
            with self._store.lock:
                self._store.blocks[self._fingerprint, key] = block
                self._store.blocks.move_to_end((self._fingerprint, key))
                while len(self._store.blocks) > self._capacity:
                    self._store.blocks.popitem(last=False)
                self._num_saved += 1

    def load(self, keys: Sequence[bytes], out: BlockArray) -> int:
        for index, key in enumerate(keys):
            with self._store.lock:
                block = self._store.blocks.get((self._fingerprint, key))
                if block is None:
                    return index
                self._store.blocks.move_to_end((self._fingerprint, key))
                self._num_loaded += 1
            out[index] = block
        return len(keys)

    def drop(self, keys: Sequence[bytes]) -> None:
        with self._store.lock:
            for key in keys:
                self._store.blocks.pop((self._fingerprint, key), None)

    def clear(self) -> int:
        with self._store.lock:
            mine = [key for key in self._store.blocks if key[0] == self._fingerprint]
            for key in mine:
                del self._store.blocks[key]
            return len(mine)

    def close(self) -> None:
        """Nothing of it outlives its process."""

    def stats(self) -> dict[str, float]:
        with self._store.lock:
            num_blocks = sum(fingerprint == self._fingerprint for fingerprint, _ in self._store.blocks)
        return {
            "blocks": num_blocks,
            "bytes": num_blocks * self.block_bytes,
            "saved_blocks": self._num_saved,
            "loaded_blocks": self._num_loaded,
        }
