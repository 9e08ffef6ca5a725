"""A text that is refused before all of it was tokenized could not have fitted, whatever it is made of."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire_common.errors import InputError
from quire_ensemble import tokenizer as module
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


def words() -> Tokenizer:
    """As BERT's: white space and accents vanish, and a long word is one unknown token."""
    vocab = {token: i for i, token in enumerate(["[UNK]", "a", "##a", "abcd", "##bcd", "##efgh", "e", "kk"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def likely_pieces() -> Tokenizer:
    """As T5's: the likeliest of all ways to cut a text, in which runs of spaces are one."""
    scores = [
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("a", -4.0),
        ("aaaa", -5.0),
        ("bcd", -6.0),
        ("▁abc", -5.0),
        ("efgh", -6),
    ]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def swallowing() -> Tokenizer:
    tokenizer = byte_level("abcdefgh", "ĠĠĠĠĠĠĠĠ")
    tokenizer.add_special_tokens([AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True)])
    return tokenizer


TOKENIZERS = {
    "byte_level": lambda: byte_level("abcdefgh", "ĠĠĠĠĠĠĠĠ"),
    "overlapping": lambda: byte_level("aaaaaaaa", "abab", "baba", "bcd", "dab"),
    "nfkc": lambda: byte_level("KKKK", "0000", normalizer=normalizers.NFKC()),
    "strip": lambda: byte_level(
        "abcdefgh", normalizer=normalizers.Sequence([normalizers.Strip(), normalizers.StripAccents()])
    ),
    "removed": lambda: byte_level("aaaa", normalizer=normalizers.Replace("lengthy", "")),
    "long": lambda: byte_level("ab" * 40, "Ġ" * 100),
    "byte_fallback": byte_fallback,
    "swallowing": swallowing,
    "words": words,
    "likely_pieces": likely_pieces,
}


def wrapped(tokenizer: Tokenizer) -> module.Tokenizer:
    made = module.Tokenizer.__new__(module.Tokenizer)
    made.hf = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return made


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
PIECES += ["ab" * 30, " " * 90, "<l>", "<r>", "a" * 150, "lengthy" * 30, "dababcd"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_that_fits_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of some 800 characters where they are of 65,536, so that more of what happens is at cuts."""
    monkeypatch.setattr(module, "_PIECE", 64)
    monkeypatch.setattr(module, "_CHARACTERS_PER_TOKEN", 0)
    tokenizer = wrapped(TOKENIZERS[name]())
    rng = random.Random(7)
    for _ in range(300):
        text = "".join(rng.choice(PIECES) * rng.randrange(1, 30) for _ in range(rng.randrange(1, 30)))
        num_tokens = len(tokenizer.encode(text, False))
        assert len(tokenizer.encode(text, False, max_tokens=num_tokens)) == num_tokens


@pytest.mark.parametrize(
    "name", ["byte_level", "swallowing", "byte_fallback", "words", "likely_pieces", "nfkc"]
)
@pytest.mark.parametrize("text", ["x a ", "日本語a ", "<l> a" + " " * 1000, "abcdefgh\n"])
def test_a_text_that_is_far_too_long_is_left_after_a_piece_or_two(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vocabulary with one long token, or with a token that swallows spaces, had texts of 8 MiB pass for a
    model of some thousand tokens: 6 s, and 2 GB."""
    tokenizer = wrapped(TOKENIZERS[name]())
    seen: list[int] = []
    ids = tokenizer._ids
    monkeypatch.setattr(tokenizer, "_ids", lambda *args: seen.append(len(args[1])) or ids(*args))
    long = text * (2**21 // len(text))
    per_token = len(text * 100) / max(len(ids("x", text * 100, False)), 1)
    with pytest.raises(
        InputError, match=rf"x: {len(long.encode())} bytes are more than 1000 tokens can hold"
    ):
        tokenizer.encode(long, field="x", max_tokens=1000)
    assert sum(seen) <= max(2 * 2**16, 3000 * per_token)


def test_a_text_at_the_limit_and_one_far_beyond_it_take_the_same(tmp_path: Path) -> None:
    """Two texts of 4 MiB for a model of 1,024 tokens were tokenized before they were refused, and held every
    other request for 28 s."""
    write_tokenizer(tmp_path)
    tokenizer = module.Tokenizer(tmp_path)
    tokenizer.encode("warm")
    peaks = []
    for length in (2**16, 2**24):
        raw = b"x" * (length + 1)
        tracemalloc.start()
        with pytest.raises(
            InputError, match=r"text_input: \d+ bytes are more than 10 tokens can hold"
        ) as error:
            tokenizer.encode_bytes("text_input", raw, max_tokens=10)
        peaks.append(tracemalloc.get_traced_memory()[1] - 2 * length)
        tracemalloc.stop()
        assert str(length + 1) in str(error.value)
    assert peaks[1] < 2 * peaks[0]
    long = json.dumps([{"role": "user", "content": "x" * 2**17}])
    with pytest.raises(InputError, match=r"messages: .* are more than 10 tokens can hold"):
        tokenizer.encode_chat(long, max_tokens=10)[0]


@pytest.mark.parametrize("text", ["a" + " " * 100_000 + "<l>", "<r>" + " " * 100_000 + "a"])
def test_spaces_that_a_token_swallows_do_not_count(text: str) -> None:
    assert len(wrapped(swallowing()).encode(text, False, max_tokens=2)) == 2
    with pytest.raises(InputError, match="more than 2 tokens"):
        wrapped(swallowing()).encode(text.replace("<", "a"), False, max_tokens=2)


def spaced() -> Tokenizer:
    """As RoBERTa's: words with the space before them, and a mask that swallows spaces before itself alone."""
    tokenizer = byte_level("Ġtokenization")
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def test_the_space_that_belongs_to_a_word_counts_with_it() -> None:
    """It was taken away with those that a special token before it might have swallowed; the word alone has
    many tokens, and a text that fits was refused."""
    tokenizer, text = wrapped(spaced()), "<mask> tokenization" * 10_000
    num_tokens = len(tokenizer.encode(text, False))
    assert len(tokenizer.encode(text, False, max_tokens=num_tokens)) == num_tokens
