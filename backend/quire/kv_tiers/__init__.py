"""KV tiers: blocks in host memory, on disk and in third-party stores, behind one interface.

The engine holds a `KVTiers`; a store implements `KVConnector` (docs/kv-tiers.md). Nothing here imports torch.
For a store, blocks are rows of bytes; a `BlockAccess` reads and writes the pool.
"""

from quire.kv_tiers.connector import BlockAccess, BlockArray, KVConnector
from quire.kv_tiers.disk import DiskTier
from quire.kv_tiers.fingerprint import fingerprint, needs_fingerprint
from quire.kv_tiers.host import HostTier
from quire.kv_tiers.tiers import KVTiers, make_tiers

__all__ = [
    "BlockAccess",
    "BlockArray",
    "DiskTier",
    "HostTier",
    "KVConnector",
    "KVTiers",
    "fingerprint",
    "make_tiers",
    "needs_fingerprint",
]
