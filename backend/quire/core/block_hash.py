"""Block hashes: the keys by which blocks of KV cache are found. A hash stands for the block's tokens and all
tokens before them, the embeddings and `position_ids` that came with them, and the request's cache salt and
adapter."""

from __future__ import annotations

import hashlib
from array import array

from quire.adapters import Adapter
from quire.core.request import Request

DIGEST_SIZE = 16
"""Size of a block hash in bytes. A hash of this size resists deliberate collisions, by which one request
could read another's text."""


def root_hash(cache_salt: str, adapter: Adapter | None = None) -> bytes:
    """Returns the hash that precedes a sequence's first block. Requests with different salts, or adapters
    with different weights, share no block hash. Empty without salt and adapter."""
    salt = b""
    if cache_salt:
        salt = hashlib.blake2b(cache_salt.encode("utf-8"), digest_size=DIGEST_SIZE, person=b"salt").digest()
    if adapter is None:
        return salt
    return hashlib.blake2b(adapter.digest + salt, digest_size=DIGEST_SIZE, person=b"adapter").digest()


def hash_blocks(request: Request, count: int, block_size: int) -> list[bytes]:
    """Returns `request.block_hashes`, extended to at least the first `count` blocks, which must be full.

    The hashes stay in the request, because known tokens never change.
    """
    hashes = request.block_hashes
    for index in range(len(hashes), count):
        hashes.append(_hash(request, index * block_size, (index + 1) * block_size))
    return hashes


def group_key(content_hash: bytes, group: int) -> bytes:
    """Returns the key of a block in a KV group; for group 0 it is the content hash itself."""
    return content_hash + bytes((group,)) if group else content_hash


def extra_keys(request: Request, begin: int, end: int) -> tuple[str, ...] | None:
    """Returns the extra keys, for KV events, of the block with tokens [begin, end). None: the request has no
    cache salt and no `position_ids`, and no embeddings (such as an image's) for the block.

    A cache salt appears only as a hash, so that readers of the events cannot use the salt.
    """
    keys = []
    if request.scheduling.cache_salt:
        keys.append(root_hash(request.scheduling.cache_salt).hex())
    if request.embeds is not None and (images := request.embeds.key_of(begin, end)):
        keys.append(images.hex())
    return tuple(keys) or None


def _hash(request: Request, begin: int, end: int) -> bytes:
    assert end <= request.num_tokens, "the block is not full"
    if request.block_hashes:
        before = request.block_hashes[-1]
    else:
        before = root_hash(request.scheduling.cache_salt, request.adapter)
    content = before + array("q", request.token_ids[begin:end]).tobytes()
    if request.embeds is not None:
        content += request.embeds.key_of(begin, end)
    return hashlib.blake2b(content, digest_size=DIGEST_SIZE).digest()
