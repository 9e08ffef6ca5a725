"""IncrementalDetokenizer against whole decodes and a character-by-character definition of stop strings."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer, PreTrainedTokenizerFast

from quire.frontend.detokenizer import IncrementalDetokenizer, TokenDecoder, _safe_cut
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.stop_matcher import StopAutomaton, StopMatcher
from quire.outputs import EngineCoreOutput, TokenLogprobs
from quire.request.sampling_params import SamplingParams
from tests.fixtures.properties import settings

REPLACEMENT = "\ufffd"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's what they don't say, isn't it?",
    "Größe, naïve café, señor, Ελληνικά, русский текст, עברית, العربية",
    "人工智能正在改变世界。今天天气很好，我们去公园吧！",
    "こんにちは世界。東京は日本の首都です。 안녕하세요 세계",
    "def f(x):\n    return x ** 2  # comment\n\n\tprint(f(3))",
    "😀😁 👩‍👩‍👧‍👦 🇫🇷 ❤️ 1234567890 !@#$%^&*()",
] * 4
SPECIALS = ["<s>", "</s>", "<|im_end|>"]
# Letters, spaces, CJK inside and outside the corpus, astral emoji with joiners, combining marks, controls.
ALPHABET = list("abc XYZ  .,!?'n\n\t0129éßñ人工智龘鿕世界こ한글ไทยคำ😀🧿👩‍👧‍👦🇫🇷❤️\u0301\u0308\u200d\u00a0ﷺ𝔘𐍈")


def byte_level() -> Any:
    """As GPT-2, Llama 3 and Qwen: BPE over bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIALS
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # An added token that is not special has text of its own, outside the byte alphabet.
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.add_tokens(["<tool 工>"])
    return fast


def llama2(with_metaspace: bool = False) -> Any:
    """As Llama 2: SentencePiece spaces, byte fallback, the first space stripped."""
    words = [chr(c) for c in range(0x21, 0x7F)] + list("éñ人工世界こ")
    tokens = SPECIALS + ["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁"] + words
    merges: list[tuple[str, str]] = []
    for pair in [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁", "▁"), ("▁▁", "▁▁"), ("人", "工"), ("▁", ".")]:
        merges.append(pair)
        tokens.append("".join(pair))
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if with_metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
        )
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    return fast


def word_piece() -> Any:
    """As BERT: no spaces in the tokens, "##" joins, transformers cleans spaces up afterwards."""
    letters = [*"abcdnestvm.,!?'é人", "do", "it", "the"]
    tokens = ["[UNK]", "[CLS]", "[SEP]", *letters, *("##" + letter for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", clean_up_tokenization_spaces=True
    )


def unigram() -> Any:
    """As T5: Unigram with SentencePiece spaces and no byte fallback."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=[*SPECIALS, "<unk>"], unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


BUILDERS: dict[str, Callable[[], Any]] = {
    "byte_level": byte_level,
    "llama2": llama2,
    "metaspace_fallback": lambda: llama2(with_metaspace=True),
    "word_piece": word_piece,
    "unigram": unigram,
}
_BUILT: dict[str, Any] = {}


def tokenizer_of(name: str) -> Any:
    if name not in _BUILT:
        _BUILT[name] = BUILDERS[name]()
    return _BUILT[name]


def pieces_of(token_ids: list[int], rng: random.Random) -> Iterator[list[int]]:
    position = 0
    while position < len(token_ids):
        size = rng.choice([1, 1, 1, 2, 5, 30])
        yield token_ids[position : position + size]
        position += size


def stream(
    detokenizer: IncrementalDetokenizer, token_ids: list[int], rng: random.Random | None = None
) -> list[str]:
    """Deltas, one per token or piece, with the flush's last."""
    deltas = []
    for piece in pieces_of(token_ids, rng) if rng else ([i] for i in token_ids):
        stopped = detokenizer.append(piece)
        deltas.append(detokenizer.take_delta())
        if stopped is not None:
            break
    deltas.append(detokenizer.take_delta(flush=True))
    return deltas


def random_text(rng: random.Random) -> str:
    pieces = [rng.choice([rng.choice(ALPHABET), rng.choice(CORPUS)[: rng.randint(1, 20)]]) for _ in range(12)]
    return "".join(pieces)


# Texts and whole decodes (A14)


@pytest.mark.parametrize("name", ["byte_level", "llama2", "metaspace_fallback"])
def test_texts_of_single_tokens_add_up(name: str) -> None:
    """With the spaces that SentencePiece's `decode` strips from the first token of a text."""
    tokenizer = tokenizer_of(name)
    decoder = TokenDecoder.for_tokenizer(tokenizer)
    text = " ".join(CORPUS).encode("ascii", "ignore").decode()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(map(decoder.text_of, token_ids)).removeprefix(" ") == text.removeprefix(" ")
    assert decoder.text_of(10**6) == "", "beyond the vocabulary"
    assert decoder.bytes_of(10**6) is None


@pytest.mark.parametrize("name", ["byte_level", "llama2", "metaspace_fallback"])
def test_bytes_of_parts_of_characters_add_up(name: str) -> None:
    tokenizer = tokenizer_of(name)
    decoder = TokenDecoder.for_tokenizer(tokenizer)
    text = " ".join([*CORPUS, "\U00010348 \u01c6 \u16a0 \U0001f986"])
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    texts = [decoder.text_of(i) for i in token_ids]
    assert any("\ufffd" in one for one in texts)
    told = [
        decoder.bytes_of(i) if "\ufffd" in one else one.encode()
        for i, one in zip(token_ids, texts, strict=True)
    ]
    assert None not in told
    assert b"".join(one or b"" for one in told).decode().removeprefix(" ") == text.removeprefix(" ")


@pytest.mark.row("A14", clauses=("fuzz", "concat", "sentencepiece"))
@pytest.mark.parametrize("name", BUILDERS)
def test_concatenated_deltas_equal_the_whole_decode(name: str) -> None:
    """1,000 texts with CJK, emoji, combining marks and byte fallback; no U+FFFD that the whole has not."""
    tokenizer = tokenizer_of(name)
    rng = random.Random(14)
    split_characters = 0
    for number in range(1000):
        text = random_text(rng)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        whole = tokenizer.decode(token_ids, skip_special_tokens=True)
        detokenizer = IncrementalDetokenizer(tokenizer)
        deltas = stream(detokenizer, token_ids, rng if rng.random() < 0.3 else None)
        assert "".join(deltas) == whole == detokenizer.text
        assert detokenizer.num_tokens_used == len(token_ids)
        if name in ("byte_level", "llama2"):
            assert whole == text, "the test's tokenizer should lose nothing"
            assert not any(REPLACEMENT in delta for delta in deltas)
            if number < 100:
                prefixes = (token_ids[:end] for end in range(len(token_ids)))
                split_characters += sum(REPLACEMENT in tokenizer.decode(prefix) for prefix in prefixes)
    if name in ("byte_level", "llama2"):
        assert split_characters > 500, "the texts should split characters over tokens"


@pytest.mark.row("A14", clauses=("special",))
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("name", BUILDERS)
def test_random_token_ids_equal_the_whole_decode(name: str, skip_special_tokens: bool) -> None:
    """What a model may emit: invalid bytes, special tokens inside characters, ids past the vocabulary."""
    tokenizer = tokenizer_of(name)
    rng = random.Random(15)
    special_ids = tokenizer.all_special_ids
    byte_ids = [
        i
        for i, token in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
        if (token.startswith("<0x") if name != "byte_level" else len(token) == 1)
    ]
    # Bytes of real characters, so that valid, unfinished and broken sequences all occur.
    valid = [tokenizer.encode(c, add_special_tokens=False) for c in "龘😀é𝔘"]
    for _ in range(600):
        token_ids: list[int] = []
        while len(token_ids) < 60:
            kind = rng.random()
            if kind < 0.3:
                token_ids += rng.choice(valid)
            elif kind < 0.4:
                token_ids += rng.choice(valid)[: rng.randint(1, 3)]
            elif kind < 0.5 and byte_ids:
                token_ids.append(rng.choice(byte_ids))
            elif kind < 0.6:
                token_ids.append(rng.choice(special_ids))
            elif kind < 0.65:
                token_ids.append(len(tokenizer) + rng.randrange(1000))
            else:
                token_ids.append(rng.randrange(len(tokenizer)))
        token_ids = limit_byte_runs(tokenizer, token_ids)
        inside = [i for i in token_ids if i < len(tokenizer)]
        whole = tokenizer.decode(inside, skip_special_tokens=skip_special_tokens)
        for pieces in (None, rng):
            detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
            assert "".join(stream(detokenizer, token_ids, pieces)) == whole


def limit_byte_runs(tokenizer: Any, token_ids: list[int]) -> list[int]:
    """Keeps runs within the 16 bytes for which the whole decode is promised even if they are broken."""
    kept: list[int] = []
    run = 0
    for i in token_ids:
        token = tokenizer.convert_ids_to_tokens(i) if i < len(tokenizer) else None
        is_byte = token is not None and token.startswith("<0x")
        if is_byte and run == 16:
            continue
        if is_byte:
            run += 1
        elif token is not None and i not in tokenizer.all_special_ids:
            run = 0
        kept.append(i)
    return kept


@pytest.mark.row("A14")
@settings(max_examples=150)
@given(text=st.text(max_size=60), name=st.sampled_from(["byte_level", "llama2"]))
@example(text="  two spaces first", name="llama2")
@example(text="�", name="byte_level")
@example(text="��� literal", name="llama2")
def test_any_text_survives_the_stream(text: str, name: str) -> None:
    tokenizer = tokenizer_of(name)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = stream(IncrementalDetokenizer(tokenizer), token_ids)
    assert "".join(deltas) == tokenizer.decode(token_ids)


@pytest.mark.row("A14")
@pytest.mark.parametrize("name", ["byte_level", "llama2"])
def test_every_cut_flushes_as_the_whole_decode(name: str) -> None:
    """max_tokens can end a request inside a character: the tail is then U+FFFD as in the whole decode."""
    tokenizer = tokenizer_of(name)
    token_ids = tokenizer.encode("a 龘 b 😀😀 é𝔘", add_special_tokens=False)
    broken = 0
    for end in range(len(token_ids) + 1):
        whole = tokenizer.decode(token_ids[:end])
        broken += REPLACEMENT in whole
        assert "".join(stream(IncrementalDetokenizer(tokenizer), token_ids[:end])) == whole
    assert broken > 5


def test_text_is_streamed_and_not_kept_to_the_end() -> None:
    """Every complete character leaves with its last token (byte level), or with the next token (llama2)."""
    tokenizer = tokenizer_of("byte_level")
    detokenizer = IncrementalDetokenizer(tokenizer)
    token_ids = tokenizer.encode("ab龘c", add_special_tokens=False)
    seen = ""
    for count, token_id in enumerate(token_ids, 1):
        detokenizer.append([token_id])
        seen += detokenizer.take_delta()
        assert seen == tokenizer.decode(token_ids[:count]).rstrip(REPLACEMENT)

    tokenizer = tokenizer_of("llama2")
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("a😀b", add_special_tokens=False)
    assert detokenizer.append(ids[:-1]) is None and detokenizer.take_delta() == "a"
    assert detokenizer.append(ids[-1:]) is None and detokenizer.take_delta() == "😀b"


def test_long_byte_run_is_not_held_for_ever() -> None:
    """A script the vocabulary lacks is one long run of byte tokens: it must still stream."""
    tokenizer = tokenizer_of("llama2")
    text = "ไทยคำ😀" * 20
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    longest_wait, wait, seen = 0, 0, ""
    for token_id in token_ids:
        detokenizer.append([token_id])
        delta = detokenizer.take_delta()
        wait = 0 if delta else wait + 1
        longest_wait = max(longest_wait, wait)
        seen += delta
    assert longest_wait <= 17
    assert seen + detokenizer.take_delta(flush=True) == text


def test_long_broken_byte_runs() -> None:
    """Broken within 16 bytes: equal to the whole decode. Broken later: what was sent stays."""
    tokenizer = tokenizer_of("llama2")
    bytes_of = {b: tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in range(256)}
    after = tokenizer.convert_tokens_to_ids("▁a")
    # The first 17 bytes end with a whole character: what follows is valid by itself, yet part of the run.
    early = [bytes_of[b] for b in "人工智".encode() + b"\xff" + "éé世龘龘".encode()]
    assert "".join(stream(IncrementalDetokenizer(tokenizer), [*early, after])) == tokenizer.decode(
        [*early, after]
    )
    late = [bytes_of[b] for b in " 龘龘龘龘龘龘龘".encode() + b"\xff"]
    text = "".join(stream(IncrementalDetokenizer(tokenizer), [*late, after]))
    assert text.startswith("龘龘龘龘龘") and text.endswith(" a") and REPLACEMENT in text


def test_first_space_only_of_the_output_is_stripped() -> None:
    """Regression guard for windows: the space after a skipped special token is inside the text."""
    tokenizer = tokenizer_of("llama2")
    special = tokenizer.convert_tokens_to_ids("<|im_end|>")
    word = tokenizer.convert_tokens_to_ids("▁a")
    for count in (1, 30, 60):
        token_ids = ([word] + [special] * 30) * count
        assert (
            "".join(stream(IncrementalDetokenizer(tokenizer), token_ids))
            == " ".join(["a"] * count)
            == (tokenizer.decode(token_ids, skip_special_tokens=True))
        )


def test_bare_rust_tokenizer_and_python_tokenizer_interface() -> None:
    """A `tokenizers.Tokenizer` works as well, and one without a Rust half by its own decode."""
    fast = tokenizer_of("llama2")
    token_ids = fast.encode("a 龘 😀b  人", add_special_tokens=False)
    whole = fast.decode(token_ids)
    rust = fast.backend_tokenizer
    assert "".join(stream(IncrementalDetokenizer(rust), token_ids)) == whole

    class Slow:
        """The part of PreTrainedTokenizerBase that a tokenizer in Python has."""

        all_special_ids = fast.all_special_ids
        clean_up_tokenization_spaces = False

        def __len__(self) -> int:
            return len(fast)

        def get_vocab(self) -> dict[str, int]:
            return fast.get_vocab()

        def convert_ids_to_tokens(self, token_id: int) -> str:
            return fast.convert_ids_to_tokens(token_id)

        def decode(
            self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool
        ) -> str:
            assert not clean_up_tokenization_spaces
            return fast.decode(ids, skip_special_tokens=skip_special_tokens)

    slow = Slow()
    ids = [fast.bos_token_id, *token_ids[:5], len(fast) + 5, *token_ids[5:], fast.eos_token_id]
    assert "".join(stream(IncrementalDetokenizer(slow), ids)) == whole
    assert TokenDecoder.for_tokenizer(slow) is TokenDecoder.for_tokenizer(slow)


def test_context_without_text_is_not_a_context() -> None:
    """Control tokens without text must not become all of the window: the next space is not the first."""

    class ControlTokens:
        all_special_ids: tuple[int, ...] = ()

        def __len__(self) -> int:
            return 2

        def get_vocab(self) -> dict[str, int]:
            return {"<ctl>": 0, "▁a": 1}

        def convert_ids_to_tokens(self, token_id: int) -> str:
            return ["<ctl>", "▁a"][token_id]

        def decode(self, ids: list[int], **kwargs: bool) -> str:
            return "".join(["", " a"][i] for i in ids).removeprefix(" ")

    detokenizer = IncrementalDetokenizer(ControlTokens(), skip_special_tokens=False)
    assert "".join(stream(detokenizer, [1, *[0] * 100, 1])) == "a a"


# clean_up_tokenization_spaces


def test_word_piece_fixture_really_cleans_up() -> None:
    tokenizer = tokenizer_of("word_piece")
    token_ids = tokenizer.convert_tokens_to_ids(["do", "n", "'", "t", ".", "it", "'", "s"])
    whole = tokenizer.decode(token_ids)
    assert whole != tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
    assert "".join(stream(IncrementalDetokenizer(tokenizer), token_ids)) == whole


def test_clean_up_flag_is_ignored_for_bpe_as_in_transformers() -> None:
    tokenizer = byte_level()
    tokenizer.clean_up_tokenization_spaces = True
    token_ids = tokenizer.encode("a , b . c 's", add_special_tokens=False)
    assert tokenizer.decode(token_ids) == "a , b . c 's"
    assert "".join(stream(IncrementalDetokenizer(tokenizer), token_ids)) == "a , b . c 's"


@settings(max_examples=500)
@given(text=st.text(alphabet=" 'ntsverm.,!?xé", max_size=24), end=st.integers(1, 24))
@example(text="x n ' t", end=3)
@example(text="x  ' s", end=4)
def test_safe_cut_is_safe(text: str, end: int) -> None:
    clean = tokenizer_of("word_piece").clean_up_tokenization

    cut = _safe_cut(text[:end])
    assert clean(text[:cut]) + clean(text[cut:]) == clean(text)


def test_bert_tokenizer_class() -> None:
    tokenizer = BertTokenizer(
        vocab={
            t: i for i, t in enumerate(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "it", "'", "s", "##a"])
        }
    )
    token_ids = [1, 5, 6, 7, 8, 5, 2]
    assert "".join(stream(IncrementalDetokenizer(tokenizer), token_ids)) == tokenizer.decode(
        token_ids, skip_special_tokens=True
    )


# Stop strings (A13)


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By definition: the match that ends first, the longest of those; returns its start."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


TEXTS = st.text(alphabet="ab 人😀\n", max_size=30)
STOPS = st.lists(st.text(alphabet="ab 人😀\n", min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.mark.row("A13", clauses=("no-leak", "include"))
@settings(max_examples=400)
@given(
    text=TEXTS,
    stops=STOPS,
    name=st.sampled_from(["byte_level", "llama2"]),
    include_stop=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(text="a人人b", stops=["人"], name="llama2", include_stop=False, seed=0)
@example(text="abab", stops=["ba", "abab"], name="byte_level", include_stop=False, seed=0)
def test_stream_never_contains_a_stop_nor_leaks_its_prefix(
    text: str, stops: list[str], name: str, include_stop: bool, seed: int
) -> None:
    tokenizer = tokenizer_of(name)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    rng = random.Random(seed)
    detokenizer = IncrementalDetokenizer(tokenizer, stop=tuple(stops), include_stop=include_stop)
    expected_match = first_stop(text, stops)
    expected = text
    if expected_match is not None:
        start, stop = expected_match
        expected = text[: start + len(stop)] if include_stop else text[:start]

    sent = ""
    for piece in pieces_of(token_ids, rng):
        detokenizer.append(piece)
        sent += detokenizer.take_delta()
        # A leaked prefix of the stop, or anything sent too early, would break this.
        assert expected.startswith(sent)
        if detokenizer.matched_stop is not None:
            break
    sent += detokenizer.take_delta(flush=True)
    assert sent == expected == detokenizer.text
    assert detokenizer.matched_stop == (expected_match[1] if expected_match else None)
    if not include_stop:
        assert not any(stop in sent for stop in stops)
    if expected_match is not None:
        start, stop = expected_match
        used = detokenizer.num_tokens_used
        assert tokenizer.decode(token_ids[:used]).startswith(text[: start + len(stop)])
        assert not tokenizer.decode(token_ids[: used - 1]).startswith(text[: start + len(stop)])


@pytest.mark.row("A13")
def test_held_tail_is_only_what_could_become_a_stop() -> None:
    tokenizer = tokenizer_of("llama2")
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("END",))

    def feed(text: str) -> str:
        detokenizer.append(tokenizer.convert_tokens_to_ids(list(text)))
        return detokenizer.take_delta()

    assert feed("x") == "x"
    assert feed("E") == ""
    assert feed("N") == ""
    assert feed("E") == "EN"
    assert feed("N") == ""
    assert feed("DE") == ""
    assert detokenizer.matched_stop == "END"
    assert detokenizer.num_tokens_used == 6
    assert detokenizer.append(tokenizer.convert_tokens_to_ids(["x"])) == "END"
    assert detokenizer.text == "xEN" and detokenizer.take_delta(flush=True) == ""


@pytest.mark.row("A13")
def test_tail_is_released_when_the_request_ends_without_the_stop() -> None:
    tokenizer = tokenizer_of("llama2")
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("END",))
    assert detokenizer.append(tokenizer.convert_tokens_to_ids(["x", "E", "N"])) is None
    assert detokenizer.take_delta() == "x"
    assert detokenizer.take_delta(flush=True) == "EN"
    assert detokenizer.matched_stop is None


@pytest.mark.row("A13")
def test_stop_in_a_tail_that_only_the_end_decides() -> None:
    """Bytes of 😀 are held until their run ends: the stop is found in the flush, and still cuts the text."""
    tokenizer = tokenizer_of("llama2")
    token_ids = tokenizer.encode("a😀", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("😀",))
    assert detokenizer.append(token_ids) is None
    assert detokenizer.take_delta(flush=True) == "a"
    assert detokenizer.matched_stop == "😀"
    assert detokenizer.num_tokens_used == len(token_ids)


@pytest.mark.row("A13")
@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("min_tokens", range(8))
def test_min_tokens_ignores_stops_that_end_too_early(min_tokens: int, include_stop: bool) -> None:
    tokenizer = tokenizer_of("llama2")
    token_ids = tokenizer.convert_tokens_to_ids(list("abxabyab"))  # "ab" ends at tokens 2, 5 and 8
    expected_end = next(end for end in (2, 5, 8) if end >= min_tokens)
    for whole in (True, False):
        detokenizer = IncrementalDetokenizer(
            tokenizer, stop=("ab",), include_stop=include_stop, min_tokens=min_tokens
        )
        if whole:
            assert detokenizer.append(token_ids) == "ab"
            text = detokenizer.take_delta(flush=True)
        else:
            text = "".join(stream(detokenizer, token_ids))
        assert text == "abxabyab"[: expected_end if include_stop else expected_end - 2]
        assert detokenizer.num_tokens_used == expected_end


@pytest.mark.row("A13")
def test_tail_of_an_ignored_stop_can_begin_the_next() -> None:
    tokenizer = tokenizer_of("llama2")
    token_ids = tokenizer.convert_tokens_to_ids(list("aaab"))
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("aa",), min_tokens=3)
    assert stream(detokenizer, token_ids) == ["", "a", "", ""]
    assert detokenizer.matched_stop == "aa" and detokenizer.num_tokens_used == 3


@pytest.mark.row("A13")
def test_stop_found_late_is_counted_by_its_own_tokens() -> None:
    """Both with bytes of one run and with words cleaned up later, tokens after the stop are not counted."""
    tokenizer = tokenizer_of("llama2")
    token_ids = tokenizer.encode("a😀龘b", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("😀",))
    assert detokenizer.append(token_ids) == "😀"
    assert detokenizer.num_tokens_used == 5 and detokenizer.text == "a"
    # The byte tokens of the stop are the 2nd to 5th, so with min_tokens 6 they are ignored.
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("😀",), min_tokens=6)
    assert detokenizer.append(token_ids) is None
    assert detokenizer.take_delta(flush=True) == "a😀龘b"
    assert detokenizer.matched_stop is None

    tokenizer = tokenizer_of("word_piece")
    token_ids = tokenizer.convert_tokens_to_ids(["do", "it", "##n", "a", "'", "n", "the"])
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("itn",))
    detokenizer.append(token_ids)
    assert detokenizer.take_delta(flush=True) == "do " and detokenizer.matched_stop == "itn"
    assert detokenizer.num_tokens_used == 3 and detokenizer.text == "do "


def test_stop_matcher_cost_does_not_grow_with_the_stops() -> None:
    """64 stops of 1,024 characters that all nearly match: character steps stay linear in the text."""
    matcher = StopMatcher(StopAutomaton(tuple("a" * 1023 + chr(0x4E00 + i) for i in range(64))))
    assert matcher.feed("a" * 200_000) is None
    assert matcher.held == 1023
    assert matcher.feed("a" * 1023 + chr(0x4E00 + 63)) == (1024, "a" * 1023 + chr(0x4E00 + 63))


# Bounded work


@pytest.mark.parametrize("name", BUILDERS)
def test_work_per_token_is_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the output, each token decodes a few dozen tokens at most."""
    tokenizer = tokenizer_of(name)
    decoder = TokenDecoder.for_tokenizer(tokenizer)
    sizes: list[int] = []
    original = TokenDecoder.decode

    def counted(self: TokenDecoder, visible_ids: list[int]) -> str:
        sizes.append(len(visible_ids))
        return original(self, visible_ids)

    monkeypatch.setattr(TokenDecoder, "decode", counted)
    rng = random.Random(3)
    token_ids = [rng.randrange(len(tokenizer)) for _ in range(3000)]
    # Endless invalid bytes must not grow the window either.
    if name == "byte_level":
        token_ids += [tokenizer.convert_tokens_to_ids("Ģ")] * 1000
        assert tokenizer.decode(token_ids[-3:]) == REPLACEMENT * 3
    if decoder.byte_fallback:
        token_ids += [tokenizer.convert_tokens_to_ids("<0x80>")] * 1000
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token_id in token_ids:
        detokenizer.append([token_id])
    assert max(sizes) <= 12 + 17
    assert sum(sizes) <= 12 * len(token_ids)


def test_a_text_never_decided_is_not_read_once_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias for the first byte of a character, `min_tokens`, and U+FFFD as a stop string: the search for its
    tokens decoded all prefixes of the output, a minute for 32k tokens, in which no stream got one."""
    tokenizer = tokenizer_of("byte_level")
    start = tokenizer.convert_tokens_to_ids("ä")
    sizes: list[int] = []
    original = TokenDecoder.decode
    monkeypatch.setattr(
        TokenDecoder, "decode", lambda self, ids: sizes.append(len(ids)) or original(self, ids)
    )
    detokenizer = IncrementalDetokenizer(tokenizer, stop=(REPLACEMENT,), min_tokens=1000)
    found = [detokenizer.append([start]) for _ in range(1001)]
    assert found == [None] * 1000 + [REPLACEMENT] and detokenizer.num_tokens_used == 1000
    assert sum(sizes) <= 12 * 1001 + 4 * 1000


def test_tokens_behind_a_stop_string_are_not_told() -> None:
    """Ranked choices come whole at their end: stop strings in them have any number of tokens behind."""
    tokenizer = byte_level()
    ids = tokenizer("quick brown fox jumps over")["input_ids"]
    used = next(count for count in range(len(ids)) if "fox" in tokenizer.decode(ids[:count]))
    assert used < len(ids) - 1
    params = SamplingParams(stop=("fox",), logprobs=0)
    processor = OutputProcessor("r", 1, params, tokenizer)
    logprobs = [TokenLogprobs([token_id], [-1.0]) for token_id in ids]
    assert not processor.process(EngineCoreOutput("r", ids, "length", logprobs=logprobs))
    output = processor.pop_output()
    assert (output.text, output.finish_reason, output.stop_reason) == ("quick brown ", "stop", "fox")
    assert output.token_ids == ids[:used] and output.num_output_tokens == used
    assert len(output.logprobs or ()) == used and output.cumulative_logprob == -used


@pytest.mark.parametrize("hides_last", [False, True])
def test_a_stop_string_ends_the_same_tokens_however_they_come(hides_last: bool) -> None:
    """A run of bytes is text when it has ended, and its tokens have been told by then. What the result cache
    has comes at once, and gave others: a repeated answer had fewer tokens than the first."""
    tokenizer = tokenizer_of("llama2")
    ids = tokenizer.convert_tokens_to_ids(
        ["a", "<0x0A>", "<0x0A>", "<0x0A>", "b", "a"][: 4 if hides_last else 6]
    )
    ids += tokenizer.convert_tokens_to_ids(["</s>"] if hides_last else [])
    told = []
    for size in (1, 2, len(ids)):
        processor = OutputProcessor("r", 1, SamplingParams(stop=("\n",), logprobs=0), tokenizer)
        for at in range(0, len(ids), size):
            logprobs = [TokenLogprobs([one], [-1.0]) for one in ids[at : at + size]]
            output = EngineCoreOutput("r", ids[at : at + size], logprobs=logprobs)
            if at + size >= len(ids):
                output.finish_reason, output.stop_reason = "stop", ids[-1]
            processor.process(output)
        told.append(processor.pop_output())
    assert [(one.text, one.stop_reason) for one in told] == [("a", "\n")] * 3
    assert told[0].token_ids == told[1].token_ids == told[2].token_ids == ids[:4]
    assert told[0] == told[1] == told[2]


def test_counts_of_drafts_are_of_the_whole_request() -> None:
    """Each output tells them so; they are no sums of what each of them tells."""
    processor = OutputProcessor("r", 1, SamplingParams(), byte_level())
    for tried, right in ((4, 1), (8, 3)):
        processor.process(EngineCoreOutput("r", [5], num_draft_tokens=tried, num_accepted_drafts=right))
    assert (processor.num_draft_tokens, processor.num_accepted_drafts) == (8, 3)
