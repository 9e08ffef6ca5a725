"""Numbers of few bits out of words and bytes."""

from __future__ import annotations

import torch


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Numbers that lie behind each other in the bits of a row's words, the lowest bit first.

    Args:
        words: int32 [rows, at least count * bits / 32].
        bits: 1 to 8; a number may begin in one word and end in the next.
        count: numbers of a row.

    Returns:
        uint8 [rows, count].
    """
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets[:, :count]
    if bits in (2, 4):
        parts = [octets >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
        return torch.stack(parts, 2).flatten(1)[:, :count]
    first = torch.arange(count) * bits
    # A number ends in the next byte at most; behind the last byte there is one of zeros.
    wide = torch.nn.functional.pad(octets, (0, 1)).to(torch.int16)
    both = wide[:, first // 8] | wide[:, first // 8 + 1] << 8
    return (both >> first.remainder(8).to(torch.int16) & (1 << bits) - 1).to(torch.uint8)


def unpack_nibbles(octets: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, n] to [rows, 2 n]: the low half of each byte, then its high half."""
    return torch.stack((octets & 15, octets >> 4), 2).flatten(1)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """float32 of E8M0: uint8 e is 2 ** (e - 127), and 255 is NaN."""
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.to(torch.int32) - 127)
    return torch.where(exponents == 255, torch.nan, powers)
