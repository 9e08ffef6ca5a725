"""KVConnector: the interface of a store of KV blocks. BlockAccess: the tiers' access to the pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

BlockArray: TypeAlias = npt.NDArray[np.uint8]
"""C-contiguous uint8 [n, block_bytes], one block a row."""

MAX_KEY_BYTES = 32


class BlockAccess(Protocol):
    """Access to the pool's blocks as bytes.

    Only the runner's thread calls `read` and `copy_blocks`. Only the transfer thread calls `write`, even
    while a step computes on other blocks.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: what every layer in its KV group keeps there, scales included."""

    def read(self, block_ids: list[int], out: BlockArray) -> None:
        """Copies blocks out of the pool. On return, `out` [len(block_ids), block_bytes] holds them."""

    def write(self, block_ids: list[int], data: BlockArray) -> None:
        """Copies `data` [len(block_ids), block_bytes] into the pool; steps that begin after the return see
        it."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (source, target) blocks inside the pool; all sources are read before any target is
        written."""


class KVConnector(ABC):
    """A store of blocks by key.

    A key (16 to 32 bytes) identifies its content. Until the key is dropped, each save of it has equal
    content, so a store may keep the block it has. A store may forget any block at any time, except those that
    it promises to keep, such as the pinned ones of HostTier.

    Threads: any thread may call any method at any time, also while another call is under way; only `close` is
    called last and once. The engine's and the runner's threads call `contains`, `save`, `touch`, `prefetch`,
    `drop`, `clear` and `stats` while a step waits, so these methods must not access a network or a disk. The
    transfer thread calls `load`, which may be slow.

    Failures: a method may raise. `KVTiers` then counts the failure, treats it as a miss and neither loads
    from the store nor saves to it for a few seconds. So a lost store costs only recomputation. (A failure of
    `stats` only leaves them out.)

    A store named by the configuration key `kv_connector` as "module:Class" is built as
    `Class(block_bytes=..., fingerprint=..., **options)`, with the key's `options`. Blocks of another
    fingerprint (`quire.kv_tiers.fingerprint`) belong to other weights or another layout and must never be
    returned.
    """

    name: ClassVar[str]
    """Prefix of the store's statistics among those of all tiers, [a-z_]."""

    @abstractmethod
    def contains(self, key: bytes) -> bool:
        """Returns whether `load` would probably find the block; called for every block of every waiting
        prompt."""

    @abstractmethod
    def save(self, keys: Sequence[bytes], data: BlockArray) -> None:
        """Copies blocks into the store; `data` [len(keys), block_bytes] is overwritten after the return.

        Must return fast. Slow writes belong on a thread of the store behind a bounded queue; if that is full,
        blocks are skipped.
        """

    @abstractmethod
    def load(self, keys: Sequence[bytes], out: BlockArray) -> int:
        """Copies blocks into the rows of `out` [len(keys), block_bytes]; may block.

        Returns:
            Number of leading rows that are complete and verified. Loading stops at the first block that is
            missing or damaged; later rows are undefined.
        """

    def touch(self, keys: Sequence[bytes]) -> None:  # noqa: B027
        """Hints that these blocks are about to be loaded, so they should not be evicted next."""

    def prefetch(self, keys: Sequence[bytes]) -> None:  # noqa: B027
        """Hints that these blocks may be loaded soon; a remote store may begin to fetch them."""

    @abstractmethod
    def drop(self, keys: Sequence[bytes]) -> None:
        """Forgets blocks; ignores unknown keys. Afterwards `contains` returns False and `load` misses."""

    @abstractmethod
    def clear(self) -> int:
        """Forgets all blocks of this model except pinned ones; returns how many."""

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until the store has completed all earlier saves and drops; returns False after `timeout_s`
        seconds."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Ends the store's background work and frees its resources."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Returns finite numbers by name. `blocks` and `bytes` count what the store holds for this model."""
