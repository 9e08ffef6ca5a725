"""Tokenizers of GGUF files give the tokens of the checkpoints that the files were made of."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import (
    GPT2Tokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    Qwen3_5Tokenizer,
)
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.gguf.gguf_tokenizer_mapping import set_split_regex

from quire_ensemble.builder import build_repository, has_chat_template
from quire_ensemble.errors import BuildError, TokenizerError
from quire_ensemble.tokenizer import Tokenizer
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.gguf_files import write_gguf

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>"]
TEXTS = [
    "Hello world, it's 12345 o'clock; don't SHOUT, they'll hear.",
    "  leading, double  and trailing   ",
    "line\nline\r\n\r\n  indented\ttab\n\n\n",
    "Grüße, Łódź, naïve, 日本語のテキスト, العربية, हिन्दी, 😀👩‍👩‍👧 and e\u0301",
    "<|im_start|>user\nhi</s> there<s>",
    "x = [1, 22, 333, 4444]; print(f'{x!r}')  # comment...!!!",
    "",
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level BPE, with SPECIAL as its first tokens."""
    corpus = [
        " ".join(TEXTS).replace("<", ""),
        Path(__file__).read_text("utf-8"),
        "the 2024 12 123 4567 " * 9,
    ]
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(corpus * 2, trainer)
    return _parts(tokenizer)


def _parts(tokenizer: RustTokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def write(file: Path, vocab: dict[str, int], **values: Any) -> Path:
    """A GGUF file of a tokenizer alone."""
    writer = gguf.GGUFWriter(file, "llama")
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens]
    writer.add_token_types(values.pop("kinds", kinds))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in values.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def _llama3(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """As transformers converts the files of Llama 3."""
    converter = TikTokenConverter(vocab_file="unused", extra_special_tokens=SPECIAL)
    tokenizer = RustTokenizer(models.BPE(vocab, merges, ignore_merges=True))
    tokenizer.decoder = decoders.ByteLevel()
    split = pre_tokenizers.Split(Regex(converter.pattern), "isolated", invert=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _smollm(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """As the tokenizer.json of SmolLM2 has it."""
    tokenizer = RustTokenizer(models.BPE(vocab, merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def _of_gguf(rule: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """As transformers reads GGUF files with the rule."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=RustTokenizer(models.BPE(vocab, merges)))
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    return set_split_regex(tokenizer, {"pre_tokenizer_type": rule})


def _by_patterns(*patterns: str, ignore_merges: bool = False) -> Callable[..., Any]:
    """As a tokenizer.json with these patterns has it."""

    def make(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
        tokenizer = RustTokenizer(models.BPE(vocab, merges, ignore_merges=ignore_merges))
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
        tokenizer.decoder = decoders.ByteLevel()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    return make


ORACLES: dict[str, Callable[..., Any]] = {
    "gpt-2": lambda vocab, merges: GPT2Tokenizer(vocab=vocab, merges=merges),
    "qwen2": lambda vocab, merges: Qwen2Tokenizer(vocab=vocab, merges=merges),
    "qwen35": lambda vocab, merges: Qwen3_5Tokenizer(vocab=vocab, merges=merges),
    "llama-bpe": _llama3,
    "lfm2": _llama3,
    "smollm": _smollm,
    **{rule: partial(_of_gguf, rule) for rule in ("gpt-4o", "llama4", "minimax-m2", "dbrx", "smaug-bpe")},
    # GLM-4's has Llama 3's pattern.
    "glm4": _by_patterns(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        ignore_merges=True,
    ),
    "seed-coder": _by_patterns(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "deepseek-v3": _by_patterns(
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}


@pytest.mark.row("D15", clauses=("tokenizer",))
@pytest.mark.parametrize("rule", ORACLES)
def test_byte_level_tokens_equal_those_of_transformers(
    rule: str, trained: tuple[dict[str, int], list[tuple[str, str]]], tmp_path: Path
) -> None:
    vocab, merges = trained
    file = write(
        tmp_path / "model.gguf",
        vocab,
        tokenizer_model="gpt2",
        tokenizer_pre=rule,
        token_merges=[" ".join(pair) for pair in merges],
        add_bos_token=False,
    )
    oracle = ORACLES[rule](vocab, merges)
    oracle.add_special_tokens({"additional_special_tokens": SPECIAL})
    ours = Tokenizer(file)
    for text in [*TEXTS, *noise(200)]:
        assert ours.encode(text) == oracle.encode(text, add_special_tokens=False), text
        assert ours.hf.decode(ours.encode(text)) == oracle.decode(
            oracle.encode(text, add_special_tokens=False)
        )


def noise(count: int) -> list[str]:
    """Random texts of letters, marks, digits, spaces and signs of several scripts."""
    rng = random.Random(20)
    signs = "aaabcXYZéß日本ق́ߒ๔½²Ⅷ 0123456789     \n\n\r\t\u00a0\u200b.,;!?'\"’-_/\\()[]{}<>|@#€😀"
    return ["".join(rng.choices(signs, k=rng.randrange(1, 60))) for _ in range(count)]


@pytest.mark.row("D15")
def test_sentencepiece_tokens_equal_those_of_transformers(tmp_path: Path) -> None:
    """BOS first, a space before the text, bytes for what has no token."""
    corpus = [*TEXTS, "hello world it's the thing " * 20]
    tokenizer = RustTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=pieces)
    tokenizer.train_from_iterator(corpus * 2, trainer)
    vocab, merges = _parts(tokenizer)
    for removed in "日本語":  # what is not in the vocabulary becomes bytes
        vocab.pop(removed, None)
    merges = [pair for pair in merges if not set("".join(pair)) & set("日本語")]
    vocab = {token: number for number, token in enumerate(sorted(vocab, key=vocab.__getitem__))}
    rank = {left + right: number for number, (left, right) in reversed(list(enumerate(merges)))}
    tokens = sorted(vocab, key=vocab.__getitem__)
    kind = gguf.TokenType
    kinds = [
        kind.CONTROL if token in SPECIAL[1:] else kind.UNKNOWN if token == "<unk>"
        else kind.BYTE if token.startswith("<0x") else kind.NORMAL
        for token in tokens
    ]  # fmt: skip
    file = write(
        tmp_path / "model.gguf",
        vocab,
        kinds=kinds,
        tokenizer_model="llama",
        token_scores=[-float(rank.get(token, 10**6)) for token in tokens],
        unk_token_id=0,
    )
    oracle = LlamaTokenizer(vocab=vocab, merges=merges, legacy=True, add_prefix_space=True)
    oracle.add_special_tokens({"additional_special_tokens": SPECIAL[3:]})
    ours = Tokenizer(file)
    for text in TEXTS[:-1]:
        if "<" not in text and not text.startswith(" "):  # there transformers adds no space before the text
            assert ours.encode(text) == [1, *oracle.encode(text, add_special_tokens=False)], text
        assert ours.hf.decode(ours.encode(text)[1:], skip_special_tokens=False).replace(
            " ", ""
        ) == text.replace(" ", "")


@pytest.mark.row("D15")
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokens_equal_those_of_its_own_library(prefix: bool, tmp_path: Path) -> None:
    """As Phi-3 and ERNIE have it, and as Gemma: no space before the text, and runs of spaces and of line ends
    that are tokens of the user's, whose spaces the converter writes as such."""
    of_user = ["<|im_start|>"] if prefix else ["<start_of_turn>", "\n", "\n\n", "\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁"]
    lines = [line for text in (*TEXTS, Path(__file__).read_text("utf-8")) for line in text.split("\n")]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line.replace("<", "") for line in lines if line]),
        model_writer=written,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        minloglevel=2,
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        user_defined_symbols=of_user,
    )
    theirs, kind = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue()), gguf.TokenType
    ids = range(theirs.vocab_size())
    vocab = {
        piece.replace("▁", " ") if piece in of_user else piece: i
        for i, piece in enumerate(map(theirs.id_to_piece, ids))
    }
    file = write(
        tmp_path / "model.gguf",
        vocab,
        kinds=[
            kind.UNKNOWN if theirs.is_unknown(i)
            else kind.CONTROL if theirs.is_control(i)
            else kind.BYTE if theirs.is_byte(i)
            else kind.USER_DEFINED if theirs.id_to_piece(i) in of_user
            else kind.NORMAL
            for i in ids
        ],
        tokenizer_model="llama",
        token_scores=[theirs.get_score(i) for i in ids],
        unk_token_id=0,
        add_space_prefix=prefix,
    )  # fmt: skip
    ours = Tokenizer(file)
    for text in [*TEXTS, *noise(200), "  two", "a      b", "x\n\n\n\ny", "if x:\n    return  y\n\n"]:
        if "<s>" not in text and not (prefix and "<" in text):
            assert ours.encode(text) == [1, *theirs.encode(text)], text


def test_a_repository_of_a_gguf_file_has_its_tokenizer_and_template(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "hf")
    file = write_gguf(checkpoint, tmp_path / "tiny.gguf", "Q8_0")
    assert Tokenizer.exists(file)
    ours, theirs = Tokenizer(file), Tokenizer(checkpoint)
    for text in TEXTS:
        assert ours.encode(text, False) == theirs.encode(text, False)
    for placement in ("link", "copy"):
        out = tmp_path / placement
        *_, placed = build_repository(file, out, placement=placement)
        assert placed == out / "generator" / "1" / "tiny.gguf"
        assert placed.is_symlink() == (placement == "link")
        assert placed.read_bytes() == file.read_bytes()
        assert '"model": "tiny.gguf"' in (out / "generator" / "1" / "quire.json").read_text()
    assert not has_chat_template(file)


def test_a_template_is_that_of_the_file(trained: Any, tmp_path: Path) -> None:
    vocab, merges = trained
    values: dict[str, Any] = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "qwen2",
        "token_merges": [" ".join(pair) for pair in merges],
        "chat_template": TEMPLATE,
    }
    file = write(tmp_path / "model.gguf", vocab, **values)
    assert has_chat_template(file)
    assert Tokenizer(file).hf.chat_template == TEMPLATE
    assert Tokenizer(file).hf.eos_token == "</s>"


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"tokenizer_model": "gpt2", "tokenizer_pre": "unheard-of"}, "'unheard-of' is not supported"),
        # Texts were cut by GPT-2's rule, whatever the model's is: "\n\n" became two tokens, for Llama 3 too.
        ({"tokenizer_model": "gpt2", "token_merges": ["a b"]}, "names no tokenizer.ggml.pre, the rule"),
        ({"tokenizer_model": "t5"}, "tokenizer.ggml.model 't5' is not supported; supported: gpt2, llama"),
        (
            {"tokenizer_model": "gpt2", "tokenizer_pre": "qwen2", "token_merges": ["no-pair"]},
            "cannot be read",
        ),
        ({"tokenizer_model": "llama", "token_scores": [1.0]}, "cannot be read"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    values: dict[str, Any], complaint: str, trained: Any, tmp_path: Path
) -> None:
    file = write(tmp_path / "model.gguf", trained[0], **values)
    with pytest.raises(TokenizerError, match=complaint) as refused:
        Tokenizer(file)
    assert str(file) in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "hf")
    (checkpoint / "tokenizer.json").unlink()
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    assert not Tokenizer.exists(file)
    with pytest.raises(BuildError, match="holds no tokenizer"):
        build_repository(file, tmp_path / "out")


def test_tokens_cost_a_time_that_grows_with_their_number_alone(tmp_path: Path) -> None:
    """8 000 tokens of a kind of their own took 11 s, so that these would take longer than a test may; one of
    a million characters minutes."""
    vocab = {token: i for i, token in enumerate(["a", "b", "ab", *(f"<x{i}>" for i in range(60_000))])}
    kinds = [gguf.TokenType.NORMAL] * 3 + [gguf.TokenType.CONTROL] * 60_000
    values = {"tokenizer_model": "gpt2", "tokenizer_pre": "gpt-2", "token_merges": ["a b"], "kinds": kinds}
    assert Tokenizer(write(tmp_path / "many.gguf", vocab, **values)).encode("ab<x9>") == [2, 12]
    scores = {"tokenizer_model": "llama", "token_scores": [0.0] * 3}
    with pytest.raises(TokenizerError, match="have squares of more than 134217728 in total"):
        Tokenizer(write(tmp_path / "long.gguf", {"a": 0, "b": 1, "a" * 10**6: 2}, **scores))
    # Each beginning of a token is a token, too: pairs of half a GB out of half a MB.
    vocab = {"a" * length: length - 1 for length in range(1, 1025)}
    scores = {"tokenizer_model": "llama", "token_scores": [0.0] * 1024}
    with pytest.raises(TokenizerError, match="have squares of more than 134217728 in total"):
        Tokenizer(write(tmp_path / "pairs.gguf", vocab, **scores))


def test_ids_of_no_token_are_refused(tmp_path: Path) -> None:
    """-1 was the last one."""
    file = tmp_path / "negative.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.add_int32("tokenizer.ggml.eos_token_id", -1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(TokenizerError, match="eos_token_id -1 is none of 3 tokens"):
        Tokenizer(file)


def test_of_equal_tokens_the_last_one_counts(tmp_path: Path) -> None:
    """As in llama.cpp, whose table of tokens is filled in their order."""
    file = tmp_path / "equal.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "\u2581", "a", "\u2581a", "\u2581a"])
    writer.add_token_scores([0.0, -1.0, -2.0, -3.0, -3.0])
    kind = gguf.TokenType
    writer.add_token_types([kind.UNKNOWN, *[kind.NORMAL] * 4])
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert Tokenizer(file).encode("a") == [4]
