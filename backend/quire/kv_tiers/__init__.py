"""KV blocks beside the pool: host memory, disk, and stores of third parties behind one interface.

`KVTiers` is what the engine holds; `KVConnector` is what a store implements (docs/kv-tiers.md). Nothing in
here imports torch: blocks are rows of bytes, and only a `BlockAccess` knows where the pool lies.
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
