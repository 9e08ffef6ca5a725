"""How long a text may be that becomes so many tokens: what lets a far too long one be refused unread.

Nothing that would fit may be refused, so every part of a tokenizer that can make text vanish (strip it,
collapse it, drop unknown characters or replace any number of them by one token) leaves texts unbounded.
Only parts that are known to keep every byte, or to shorten text by a known factor, are let through.
"""

from __future__ import annotations

import json
from typing import Any

_SHRINK = {
    "NFC": 4,
    "NFD": 4,
    "NFKC": 4,
    "NFKD": 4,
    "Lowercase": 3,
    "Prepend": 1,
    "ByteLevel": 1,
}
"""Bytes of text that one byte of a normalizer's result stands for at most: three for a syllable of Hangul
that was written in letters, or for the Kelvin sign, four for a mathematical letter, and no character of
Unicode has more. Other normalizers: not bounded."""

_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "FixedLength"})
"""Pre-tokenizers that keep every character; `Split` and `Punctuation` do unless they are told to remove."""


def max_bytes_per_token(tokenizer: Any) -> int | None:
    """Most bytes of text that one token can stand for; None where that is not bounded.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
    """
    model = tokenizer.model
    if type(model).__name__ != "BPE":
        return None
    normalizer, pre_tokenizer = _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
    shrink = _shrink(normalizer)
    if shrink is None or not _keeps(pre_tokenizer):
        return None
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    if {"ByteLevel"} & {*_kinds(normalizer), *_kinds(pre_tokenizer)}:
        # Every character of a token's name is a byte. Without all 256 the rest would be dropped or unknown.
        if sum(len(token) == 1 for token in vocab) < 256:
            return None
        longest = max(map(len, vocab))
    elif model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        longest = max(len(token.encode()) for token in vocab)
    else:
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # such a token takes in any number of spaces beside it
    return shrink * max([longest, *(len(token.content.encode()) for token in added)])


def _state(part: Any) -> dict[str, Any]:
    return {"type": "Sequence"} if part is None else json.loads(part.__getstate__())


def _parts(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The members of a sequence, or the one part itself."""
    if state["type"] != "Sequence":
        return [state]
    members = state.get("normalizers") or state.get("pretokenizers") or []
    return [part for member in members for part in _parts(member)]


def _kinds(state: dict[str, Any]) -> list[str]:
    return [part["type"] for part in _parts(state)]


def _shrink(state: dict[str, Any]) -> int | None:
    """By what factor a normalizer may shorten text; None: not bounded."""
    factor = 1
    for part in _parts(state):
        if part["type"] == "Replace":
            found, instead = part["pattern"].get("String"), part["content"]
            step = -(-len(found.encode()) // len(instead.encode())) if found and instead else None
        else:
            step = _SHRINK.get(part["type"])
        if step is None:
            return None
        factor *= max(step, 1)
    return factor


def _keeps(state: dict[str, Any]) -> bool:
    return all(
        part["type"] in _KEEPING
        or (part["type"] in ("Split", "Punctuation") and part.get("behavior") != "Removed")
        for part in _parts(state)
    )
