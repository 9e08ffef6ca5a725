"""What a block of KV cache is found by: a hash of its tokens, all before them, and the images among them."""

from __future__ import annotations

import hashlib
from array import array

from quire.request import Request

DIGEST_SIZE = 16
"""Bytes; a collision would show one request another's text, so it must not happen by intent either."""


def request_hashes(request: Request, count: int, block_size: int, *, extend: bool = True) -> list[bytes]:
    """Hashes of the first `count` blocks of a request, which must be full.

    They are kept with the request, as tokens that are known never change.

    Args:
        extend: False: only those that are there already.
    """
    hashes = request.block_hashes
    if extend:
        for index in range(len(hashes), count):
            hashes.append(_hash(request, index * block_size, (index + 1) * block_size))
    return hashes[:count]


def _hash(request: Request, begin: int, end: int) -> bytes:
    assert end <= request.num_tokens, "the block is not full"
    state = hashlib.blake2b(digest_size=DIGEST_SIZE)
    if request.block_hashes:
        state.update(request.block_hashes[-1])
    state.update(array("q", request.token_ids[begin:end]).tobytes())
    if request.embeds is not None:
        state.update(request.embeds.key_of(begin, end))
    return state.digest()
