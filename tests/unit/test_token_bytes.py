"""A text that is refused for its length could not have fitted, whatever it is made of."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire_ensemble import tokenizer as module
from quire_ensemble.errors import InputError
from quire_ensemble.token_bytes import _SHRINK, max_bytes_per_token
from tests.fixtures.checkpoints import write_tokenizer

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(*merges: str, normalizer: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    """BPE over bytes with the words of `merges`, each built up from its left."""
    vocab, pairs = {token: i for i, token in enumerate(BYTES)}, []
    for word in merges:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                pairs.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As SentencePiece's BPE models are converted: spaces as a character, unknown ones as bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {token: 256 + i for i, token in enumerate(("<unk>", "▁", "▁▁", "▁▁▁▁", "a", "aa", "日"))}
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("a", "a")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


BOUNDED = {
    "byte_level": lambda: byte_level("abcdefgh", "ĠĠĠĠĠĠĠĠ"),
    "nfc": lambda: byte_level("abcdefgh", normalizer=normalizers.NFC()),
    "nfkc": lambda: byte_level("KKKK", "0000", normalizer=normalizers.NFKC()),
    "lower": lambda: byte_level(
        "kkkk", normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
    ),
    "replace": lambda: byte_level("aaaa", normalizer=normalizers.Replace("lengthy", "aa")),
    "split": lambda: byte_level(
        "abcdefgh",
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
        ),
    ),
    "byte_fallback": byte_fallback,
}
PIECES = ["abcdefgh", " ", "        ", "a", "aaaa", "lengthy", "K", "K", "\u212a", "𝐊", "ΐ", "\u1fbe\u0344"]
PIECES += [
    "0000",
    "𝟬𝟬𝟬𝟬",
    "각",
    "\u1100\u1161\u11a8",
    "ﷺ",
    "日",
    "\u0300" * 3,
    "e\u0301",
    "ﬁ",
    "\u1fef",
    "😀",
]


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_its_bytes_allow(name: str) -> None:
    tokenizer = BOUNDED[name]()
    most = max_bytes_per_token(tokenizer)
    assert most is not None
    rng = random.Random(7)
    for _ in range(400):
        text = "".join(rng.choice(PIECES) * rng.randrange(1, 9) for _ in range(rng.randrange(1, 6)))
        num_tokens = len(tokenizer.encode(text).ids)
        assert len(text.encode()) <= most * num_tokens, (text, num_tokens)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: setattr(t, "normalizer", normalizers.Strip()),
        lambda t: setattr(
            t, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])
        ),
        lambda t: setattr(t, "normalizer", normalizers.Replace("x", "")),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        lambda t: t.add_special_tokens([AddedToken("<end>", rstrip=True)]),
        lambda t: setattr(t, "model", models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
        lambda t: setattr(t, "model", models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
    ],
)
def test_a_tokenizer_that_can_make_text_vanish_has_no_bound(spoil: Any) -> None:
    tokenizer = byte_level("abcd")
    assert max_bytes_per_token(tokenizer) == 4
    spoil(tokenizer)
    assert max_bytes_per_token(tokenizer) is None


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_no_character_is_made_of_more_bytes_than_the_forms_are_said_to_shrink(form: str) -> None:
    """Over all of Unicode: the longest spelling of each letter and mark, and of what they compose to."""
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    longest: dict[str, int] = {}
    for char in characters:
        parts = unicodedata.normalize("NFKD" if "K" in form else "NFD", char)
        if len(parts) == 1:
            longest[parts] = max(longest.get(parts, 0), len(char.encode()))
    for char in characters:
        if unicodedata.normalize(form, char) == char:
            parts = unicodedata.normalize("NFD", char)
            spelled = sum(longest.get(part, len(part.encode())) for part in parts)
            assert spelled <= _SHRINK[form] * len(char.encode()), hex(ord(char))


def test_a_text_that_is_far_too_long_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts of 4 MiB for a model of 1,024 tokens were tokenized before they were refused, and held every
    other request for 28 s."""
    write_tokenizer(tmp_path)
    tokenizer = module.Tokenizer(tmp_path)
    limit = 10 * (tokenizer._bytes_per_token or 0)
    assert limit
    monkeypatch.setattr(tokenizer, "_hf", lambda text, **_: {"input_ids": [1] * 11})
    assert len(tokenizer.encode_bytes("text_input", b"x" * limit, max_tokens=10)) == 11
    for raw in (b"x" * (limit + 1), b"\xff" * 2**22):
        with pytest.raises(
            InputError, match=rf"text_input: \d+ bytes are more than 10 tokens.*at most {limit}"
        ):
            tokenizer.encode_bytes("text_input", raw, max_tokens=10)
    monkeypatch.undo()
    long = json.dumps([{"role": "user", "content": "x" * (limit + 1)}])
    with pytest.raises(InputError, match=r"messages: .* are more than 10 tokens can hold"):
        tokenizer.encode_messages(long, max_tokens=10)
