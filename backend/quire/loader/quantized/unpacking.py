"""Unpacks numbers of few bits from words and bytes, and powers of two from their exponents."""

from __future__ import annotations

import torch


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpacks numbers that lie one after the other in a row's words, lowest bit first.

    Args:
        words: int32 [rows, at least count * bits / 32].
        bits: bits of a number, 1 to 8. A number may begin in one word and end in the next.
        count: numbers to unpack from each row.

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
    """Unpacks uint8 [rows, n] into [rows, 2 n]: the low half of each byte, then its high half."""
    return torch.stack((octets & 15, octets >> 4), 2).flatten(1)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Returns the float32 values of E8M0 exponents: uint8 e means 2 ** (e - 127), and 255 means NaN."""
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.to(torch.int32) - 127)
    return torch.where(exponents == 255, torch.nan, powers)
