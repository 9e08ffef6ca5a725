"""KVConnector: the interface of a store of KV blocks, and BlockAccess: the pool as the tiers see it."""

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
    """The pool's blocks as bytes.

    `read` and `copy_blocks` are called by the runner's thread alone. `write` is called by the transfer thread
    alone, also while a step computes on other blocks.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: every layer of its group, keys, values and scales."""

    def read(self, block_ids: list[int], out: BlockArray) -> None:
        """Copies blocks out: `out` [len(block_ids), block_bytes] holds them when this returns."""

    def write(self, block_ids: list[int], data: BlockArray) -> None:
        """Copies `data` [len(block_ids), block_bytes] in: a step that begins after this returns sees it."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies (source, target) inside the pool; all sources are read before any target is written."""


class KVConnector(ABC):
    """A store of blocks by key.

    A key (16 to 32 bytes) names its content: until it is dropped, each save of it brings equal content, so a
    store may keep what it has. A store may forget any block at any time, unless it says otherwise.

    Threads: every method may be called by any thread at any time, also while another one is under way; only
    `close` is called last and once. The engine's thread calls `contains`, `save`, `touch`, `prefetch`,
    `drop`, `clear` and `stats`, for which a step waits: they must neither touch a network nor a disk. The
    transfer thread calls `load`, which may take its time.

    Failures: a method may raise. `KVTiers` counts it, treats it as a miss and leaves the store alone for a
    few seconds: a lost store costs recomputation and nothing else.

    A store named by the configuration key `kv_connector` as "module:Class" is built as
    `Class(block_bytes=..., fingerprint=..., **kv_connector_options)`. Blocks of another fingerprint
    (`quire.kv_tiers.fingerprint`) belong to other weights or another layout: they must never be returned.
    """

    name: ClassVar[str]
    """Prefix of its numbers among those of all tiers, [a-z_]."""

    @abstractmethod
    def contains(self, key: bytes) -> bool:
        """Whether `load` would probably have the block; asked for every block of every waiting prompt."""

    @abstractmethod
    def save(self, keys: Sequence[bytes], data: BlockArray) -> None:
        """Takes copies of blocks; `data` [len(keys), block_bytes] is overwritten after this returns.

        It returns fast: what takes time is left to a thread of the store behind a bounded queue, and when
        that is full blocks are left out.
        """

    @abstractmethod
    def load(self, keys: Sequence[bytes], out: BlockArray) -> int:
        """Copies blocks into the rows of `out` [len(keys), block_bytes]; may block.

        Returns:
            How many leading rows are whole and verified. The first block that is missing or damaged ends it;
            rows from there on hold anything.
        """

    def touch(self, keys: Sequence[bytes]) -> None:  # noqa: B027
        """Hint: these are about to be loaded, so they should not be evicted next."""

    def prefetch(self, keys: Sequence[bytes]) -> None:  # noqa: B027
        """Hint: these may be loaded soon; a remote store may begin to fetch them."""

    @abstractmethod
    def drop(self, keys: Sequence[bytes]) -> None:
        """Forgets blocks; unknown keys are ignored. `contains` is False and `load` misses from then on."""

    @abstractmethod
    def clear(self) -> int:
        """Forgets all blocks of this model (those that are pinned stay); returns how many it forgot."""

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until all saves and drops so far are done in the store; False: not within the time."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Ends what the store does in the background and gives back what it holds."""

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Finite numbers by name; `blocks` and `bytes` say what it holds for this model."""
