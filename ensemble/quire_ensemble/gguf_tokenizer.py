"""Tokenizers of GGUF files. A file holds its tokenizer as lists of tokens, often with a chat template.

A byte-level BPE tokenizer (`gpt2`) cuts texts by a rule before it merges tokens. The file holds only a name
for this rule (`tokenizer.ggml.pre`). The rules here follow llama.cpp (src/llama-vocab.cpp), in the terms of
Hugging Face's `tokenizers`. A missing or unknown name is refused, because another rule would give wrong
tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire_common.errors import is_panic, one_line, shown
from quire_common.gguf_file import GGUFFile
from quire_ensemble.errors import TokenizerError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens (the GGUF specification's `tokenizer.ggml.token_type`)."""

_MAX_SQUARES = 2**27
"""Largest sum of the squares of the lengths, in characters, of a SentencePiece vocabulary's tokens. It bounds
the time, and the memory, for looking up every pair of parts into which a token can be cut. Large vocabularies
have about 2**24."""

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(ending: str, digits: str) -> str:
    """Returns the pattern of a rule that begins a new word where a capital letter follows a small one.

    Args:
        ending: pattern of what may follow a word's letters.
        digits: pattern of numbers.
    """
    begin, rest = r"[^\r\n\p{L}\p{N}]?", _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
    return f"{begin}{_UPPER}*{_LOWER}+{ending}|{begin}{_UPPER}+{_LOWER}*{ending}|{digits}{rest}"


_PATTERNS = {
    "llama3": (_WORDS + r"\p{N}{1,3}" + _REST,),
    "qwen2": (_WORDS + r"\p{N}" + _REST,),
    "qwen35": (
        (_WORDS + r"\p{N}" + _REST)
        .replace(r"?\p{L}+", r"?[\p{L}\p{M}]+")
        .replace(r"\s\p{L}", r"\s\p{L}\p{M}"),
    ),
    "tekken": (_by_case("", r"\p{N}"),),
    "gpt-4o": (_by_case(f"{_ENDINGS}?", r"\p{N}{1,3}"),),
    "seed-coder": (_WORDS + r"\p{N}" + _REST.replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+", 1),),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
}
"""Patterns of each rule but `gpt2` and `digits`. A pattern cuts the parts that the patterns before it have
made of a text."""
_RULES = {
    **dict.fromkeys(("gpt-2", "default"), "gpt2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), "digits"),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "lfm2"), "llama3"),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), "llama3"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), "qwen2"),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), "gpt-4o"),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), "deepseek-v3"),
    "qwen35": "qwen35",
    "tekken": "tekken",
    "seed-coder": "seed-coder",
}
"""Name of the rule, by the supported values of `tokenizer.ggml.pre`."""
_BEGIN_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "lfm2", "tekken")
"""Values of `tokenizer.ggml.pre` with which texts begin with BOS, unless the file says otherwise."""
_WITH_WHOLE_WORDS = (*_BEGIN_WITH_BOS, "glm4")
"""Values of `tokenizer.ggml.pre` with which a word that is in the vocabulary becomes that token, without
merges."""


def load_gguf_tokenizer(opened: GGUFFile) -> Any:
    """Returns the tokenizer in a GGUF file as transformers' `PreTrainedTokenizerFast`, with the file's chat
    template if it has one.

    Raises:
        TokenizerError: the tokenizer is broken or of an unknown kind; the message names the file.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer, special, template = _read(opened)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False, **special
    )


def gguf_tokenizer_json(opened: GGUFFile) -> str:
    """Returns the text of a tokenizer.json for the tokenizer in a GGUF file; raises TokenizerError."""
    text: str = _read(opened)[0].to_str()
    return text


def _read(opened: GGUFFile) -> tuple[Any, dict[str, str], str | None]:
    """Returns the tokenizer (of `tokenizers`), its BOS, EOS, unknown and padding tokens by transformers'
    names, as far as the file states them, and the chat template (None: there is none). Raises
    TokenizerError."""
    file = opened.path
    try:
        values = {
            name.removeprefix("tokenizer.").removeprefix("ggml."): value
            for name, value in opened.metadata.items()
            if name.startswith("tokenizer.")
        }
        kind = values["model"]
        tokens, kinds = values["tokens"], values.get("token_type") or []
        if kind == "gpt2":
            tokenizer = _byte_level(file, values)
        elif kind == "llama":
            tokenizer = _sentencepiece(values)
        else:
            raise TokenizerError(
                f"{file}: tokenizer.ggml.model {shown(kind)} is not supported; supported: gpt2, llama"
            )
        _add_special(tokenizer, tokens, kinds)
        special = {}
        for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            token_id = values.get(f"{name}_token_id")
            if token_id is not None:
                if not 0 <= token_id < len(tokens):
                    raise TokenizerError(
                        f"{file}: {name}_token_id {token_id} is none of {len(tokens)} tokens"
                    )
                special[f"{role}_token"] = tokens[token_id]
        _begin_and_end(tokenizer, values, special)
        template = values.get("chat_template")
        if not isinstance(template, str | None):
            raise TokenizerError(f"{file}: tokenizer.chat_template is no text")
        return tokenizer, special, template
    except TokenizerError:
        raise
    except BaseException as error:  # whatever lies in the file
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise TokenizerError(f"{file}: its tokenizer cannot be read: {one_line(error)}") from error


def _byte_level(file: Path, values: dict[str, Any]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = values.get("pre")
    if name is None:  # files of before May 2024: llama.cpp warns, and takes GPT-2's rule
        raise TokenizerError(
            f"{file}: names no tokenizer.ggml.pre, the rule by which texts are cut, and another would give "
            "wrong tokens: state it (gguf-new-metadata --pre-tokenizer), or name a tokenizer's directory"
        )
    rule = _RULES.get(name)
    if rule is None:
        known = ", ".join(sorted(_RULES))
        raise TokenizerError(f"{file}: tokenizer.ggml.pre {shown(name)} is not supported; supported: {known}")
    vocab = {token: token_id for token_id, token in enumerate(values["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in values["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=name in _WITH_WHOLE_WORDS))
    if rule in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    parts: list[Any] = []
    if rule == "digits":
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    elif rule != "gpt2":
        parts += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[rule]]
    use_regex = rule in ("gpt2", "digits")
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(values: dict[str, Any]) -> Any:
    """Makes the tokenizer of a SentencePiece BPE model, in which the pair whose merged token has the highest
    score merges first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = values["tokens"], values["scores"]
    kinds = values.get("token_type") or [_NORMAL] * len(tokens)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if sum(len(token) ** 2 for token in tokens) > _MAX_SQUARES:
        raise ValueError(f"its tokens' lengths have squares of more than {_MAX_SQUARES} in total")
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind == _NORMAL:
            pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
            known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
            merges += [(-score, vocab[left], vocab[right], left, right) for left, right in known]
    merges.sort()
    unknown = values.get("unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            [(left, right) for *_, left, right in merges],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in kinds,
        )
    )
    adds_space = values.get("add_space_prefix", True)
    before = [normalizers.Prepend("▁")] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after = [decoders.Strip(" ", 1, 0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return tokenizer


def _add_special(tokenizer: Any, tokens: list[str], kinds: list[int]) -> None:
    """Adds the control and user-defined tokens to the tokenizer, which then finds them as wholes in a text.
    `kinds`: types of `tokens`; empty: the file states none, and nothing is added."""
    from tokenizers import AddedToken

    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)  # together: each call takes a time that grows with all that are there


def _begin_and_end(tokenizer: Any, values: dict[str, Any], special: dict[str, str]) -> None:
    """Makes the tokenizer put BOS before and EOS after a text, as the file's `add_bos_token` and
    `add_eos_token` say. By default it puts no EOS; BOS, for `llama` and the names of _BEGIN_WITH_BOS. A token
    that `special` does not have is left out."""
    from tokenizers import processors

    begins = values["model"] == "llama" or values.get("pre", "") in _BEGIN_WITH_BOS
    bos = special.get("bos_token") if values.get("add_bos_token", begins) else None
    eos = special.get("eos_token") if values.get("add_eos_token", False) else None
    around = [token for token in (bos, eos) if token]
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in set(around)],
        )
