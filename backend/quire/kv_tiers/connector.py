"""KVConnector: the interface of a store of KV blocks. BlockAccess: the tiers' access to the pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

BlockArray: TypeAlias = npt.NDArray[np.uint8]
"""uint8 [n, block_bytes], one block a row; or [block_bytes], a single block. Arrays that a KVConnector gets
are C-contiguous."""

MAX_KEY_BYTES = 32


class BlockAccess(Protocol):
    """Access to the pool's blocks as bytes.

    Only the runner's thread calls `read` and `copy_blocks`. Only the transfer thread calls `write`, even
    while a step computes on other blocks.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of one block. It has room for what all layers of its KV group keep there, scales included."""

    def read(self, block_ids: list[int], out: BlockArray) -> None:
        """Copies blocks out of the pool. On return, `out` [len(block_ids), block_bytes] holds them."""

    def write(self, block_ids: list[int], data: BlockArray) -> None:
        """Copies `data` [len(block_ids), block_bytes] into the pool; steps that begin after the return see
        it."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (source, target) pairs of blocks inside the pool. A target gets what its source held before
        the call, even if the source is also a target."""


class KVConnector(ABC):
    """A store of blocks by key.

    A key (16 to 32 bytes) identifies the content of a block. Until the key is dropped, contents that are
    saved under it are interchangeable, so a store may keep the block it has. A store may forget any block at
    any time, except those that it promises to keep, such as the pinned ones of HostTier.

    Threads: any thread may call any method at any time, also while another call is under way. `close` is
    called once, when the store is no longer needed; a `load` that takes very long may still be under way. The
    engine's and the runner's threads call `contains`, `save`, `touch`, `prefetch`, `drop`, `clear` and
    `stats` while a step waits, so these methods must not wait for a network or a disk. The transfer thread
    calls `load`, which may be slow.

    Failures: a method may raise. `KVTiers` then counts the failure, treats it as a miss and neither loads
    from the store nor saves to it for a few seconds. So a lost store costs only recomputation. After a
    failure of `stats`, only the store's statistics are missing.

    A store named by the configuration key `kv_connector` as "module:Class" is built as
    `Class(block_bytes=..., fingerprint=..., **options)`, with the key's `options`. Blocks of another
    fingerprint (`quire.kv_tiers.fingerprint`) may belong to other weights or another layout, and must never
    be returned.
    """

    name: ClassVar[str]
    """Prefix of the store's statistics among those of all tiers, [a-z_]."""

    @abstractmethod
    def contains(self, key: bytes) -> bool:
        """Returns whether `load` would probably find the block. It is called very often, for blocks of
        waiting prompts."""

    @abstractmethod
    def save(self, keys: Sequence[bytes], data: BlockArray) -> None:
        """Copies blocks into the store; `data` [len(keys), block_bytes] may be overwritten after the return.

        The method must return fast. Slow writes belong on a thread of the store behind a bounded queue; if
        that is full, blocks are skipped.
        """

    @abstractmethod
    def load(self, keys: Sequence[bytes], out: BlockArray) -> int:
        """Copies blocks into the rows of `out` [len(keys), block_bytes]; may take long.

        Returns:
            Number of leading rows that are complete and verified. Loading stops at the first block that is
            missing or damaged; later rows are undefined.
        """

    def touch(self, keys: Sequence[bytes]) -> None:  # noqa: B027
        """Hints that these blocks will probably be loaded soon, so they should not be evicted next."""

    def prefetch(self, keys: Sequence[bytes]) -> None:  # noqa: B027
        """Hints that these blocks may be loaded soon; a remote store may begin to fetch them."""

    @abstractmethod
    def drop(self, keys: Sequence[bytes]) -> None:
        """Forgets blocks; ignores unknown keys. Later calls of `contains` and `load` do not find the blocks,
        unless they are saved again."""

    @abstractmethod
    def clear(self) -> int:
        """Forgets all blocks of this model except pinned ones; returns how many."""

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until the store has processed all earlier saves and drops. Returns False if that takes longer
        than `timeout_s` seconds (None: no limit)."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Ends the store's background work and frees its resources."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Returns finite numbers by name, among them `blocks` and `bytes`: how much the store holds for this
        model."""
