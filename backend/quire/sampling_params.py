"""SamplingParams: what a request may say about how its tokens are chosen and when it ends.

The same names reach us as typed tensors, as JSON, and as Triton request parameters, with numbers often
written as strings (perf_analyzer cannot send floats). `parse_sampling_params` is the one place where all
of these are checked; everything behind it may trust the values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.errors import InvalidArgumentError

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 64
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 4096
MAX_BAD_WORDS = 256


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request is sampled and ended. Defaults are neutral; temperature 0 is greedy.

    Order of the transforms is that of transformers: penalties, logit bias, bans (n-grams, bad words,
    min-tokens masks), then temperature, top-k, top-p, min-p, typical-p.
    """

    max_tokens: int | None = None
    """Most tokens to generate; None: as many as the model length leaves."""
    min_tokens: int = 0
    """EOS, stop ids and stop strings are ignored until this many tokens exist."""
    temperature: float = 0.0
    top_k: int = 0
    """Keep the k most likely tokens; 0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens seen in prompt or output (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from logits of generated tokens (OpenAI)."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the generated tokens (OpenAI)."""
    no_repeat_ngram_size: int = 0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[str, ...] = ()
    """Words that never appear; tokenized in the frontend, which fills `bad_words_ids`."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    """None: no log-probabilities; k: of the sampled token and the k most likely ones."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _fail(field: str, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(field, message)


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def convert(field: str, value: Any) -> int:
        if isinstance(value, str):
            try:
                value = int(value.strip())
            except ValueError:
                raise _fail(field, f"must be an integer, got {value!r:.80}") from None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _fail(field, f"must be an integer, got {_kind(value)}")
        if not low <= value <= high:
            raise _fail(field, f"must be in [{low}, {high}], got {value!r:.80}")
        return value

    return convert


def _number(low: float, high: float, *, low_open: bool = False) -> Callable[[str, Any], float]:
    def convert(field: str, value: Any) -> float:
        if isinstance(value, str):
            try:
                value = float(value.strip())
            except ValueError:
                raise _fail(field, f"must be a number, got {value!r:.80}") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _fail(field, f"must be a number, got {_kind(value)}")
        try:
            value = float(value)
        except OverflowError:
            raise _fail(field, "must be a number, got an integer too large for one") from None
        if math.isnan(value):
            raise _fail(field, "must be a number, got NaN")
        if value < low or value > high or (low_open and value == low):
            raise _fail(field, f"must be in {'(' if low_open else '['}{low:g}, {high:g}], got {value:g}")
        return value

    return convert


def _boolean(field: str, value: Any) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("true", "false", "1", "0"):
        return value.strip().lower() in ("true", "1")
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise _fail(field, f"must be a boolean, got {_kind(value)}")


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}"


def _json_if_text(field: str, value: Any, opening: str) -> Any:
    """Request parameters carry only scalars, so lists and objects may come as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith(opening):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _fail(field, f"invalid JSON: {error}") from None
    return value


def _strings(limit: int) -> Callable[[str, Any], tuple[str, ...]]:
    def convert(field: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            try:
                value = _json_if_text(field, value, "[")
            except InvalidArgumentError:
                pass  # "[INST]" is a string like any other
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple):
            raise _fail(field, f"must be a string or a list of strings, got {_kind(value)}")
        if len(value) > limit:
            raise _fail(field, f"at most {limit} entries are allowed, got {len(value)}")
        for entry in value:
            if not isinstance(entry, str) or not entry:
                raise _fail(field, f"entries must be non-empty strings, got {_kind(entry)}")
            if len(entry) > MAX_STOP_LENGTH:
                raise _fail(field, f"entries are limited to {MAX_STOP_LENGTH} characters, got {len(entry)}")
            if any("\ud800" <= char <= "\udfff" for char in entry):
                raise _fail(field, "entries must not hold unpaired surrogates, which have no UTF-8 form")
        return tuple(value)

    return convert


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    value = _json_if_text(field, value, "[")
    if isinstance(value, int | str) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list | tuple):
        raise _fail(field, f"must be a list of token ids, got {_kind(value)}")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise _fail(field, f"at most {MAX_STOP_TOKEN_IDS} entries are allowed, got {len(value)}")
    one = _integer(0, 2**31 - 1)
    return tuple(one(field, entry) for entry in value)


def _logit_bias(field: str, value: Any) -> dict[int, float]:
    value = _json_if_text(field, value, "{")
    if not isinstance(value, Mapping):
        raise _fail(field, f"must be an object of token id to bias, got {_kind(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise _fail(field, f"at most {MAX_LOGIT_BIAS} entries are allowed, got {len(value)}")
    key, bias = _integer(0, 2**31 - 1), _number(-100.0, 100.0)
    return {key(field, k): bias(field, v) for k, v in value.items()}


_INT32 = 2**31 - 1
_CONVERTERS: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _integer(1, _INT32),
    "min_tokens": _integer(0, _INT32),
    "temperature": _number(0.0, 100.0),
    "top_k": _integer(-1, _INT32),
    "top_p": _number(0.0, 1.0, low_open=True),
    "min_p": _number(0.0, 1.0),
    "typical_p": _number(0.0, 1.0, low_open=True),
    "repetition_penalty": _number(0.0, 100.0, low_open=True),
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "no_repeat_ngram_size": _integer(0, 1024),
    "logit_bias": _logit_bias,
    "bad_words": _strings(MAX_BAD_WORDS),
    "seed": _integer(-(2**63), MAX_SEED),
    "stop": _strings(MAX_STOP_STRINGS),
    "stop_token_ids": _token_ids,
    "include_stop_str_in_output": _boolean,
    "ignore_eos": _boolean,
    "skip_special_tokens": _boolean,
    "logprobs": _integer(0, MAX_LOGPROBS),
}

SAMPLING_FIELDS: tuple[str, ...] = tuple(_CONVERTERS)
"""Every name a request may use, in the three forms (tensor, JSON, request parameter)."""

ALIASES: dict[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_words": "stop",
}
"""Names of peers that mean the same thing."""


def parse_sampling_params(
    *sources: Mapping[str, Any], defaults: SamplingParams | None = None
) -> SamplingParams:
    """Checks and merges what a request says; the first source that names a parameter wins.

    Args:
        sources: mappings of parameter name to raw value, most specific first (typed tensors, JSON object,
            request parameters). A value of None means "not given".
        defaults: values for what no source names: those of the checkpoint's generation_config.json.

    Raises:
        InvalidArgumentError: unknown name, wrong type or value outside its range; names the parameter.
    """
    given: dict[str, Any] = {}
    for source in sources:
        for name, value in source.items():
            field = ALIASES.get(name, name)
            if field not in _CONVERTERS:
                raise _fail(name, f"unknown parameter; known are {', '.join(SAMPLING_FIELDS)}")
            if value is None:
                continue
            # Every source is checked, also where a more specific one overrides it.
            converted = _CONVERTERS[field](name, value)
            given.setdefault(field, converted)

    if given.get("top_k") == -1:
        given["top_k"] = 0
    if given.get("seed") is not None:
        given["seed"] %= 2**64
    base = defaults or SamplingParams()
    # A request that shapes the distribution but names no temperature means to sample from it.
    shapes = ("top_k", "top_p", "min_p", "typical_p")
    if base.is_greedy and "temperature" not in given and any(_shapes(given, name) for name in shapes):
        given["temperature"] = 1.0
    params = msgspec.structs.replace(base, **given)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        if "min_tokens" not in given:
            # Only the checkpoint's default is in the way of what the request asks for.
            return msgspec.structs.replace(params, min_tokens=params.max_tokens)
        raise _fail(
            "min_tokens", f"must not exceed max_tokens ({params.max_tokens}), got {params.min_tokens}"
        )
    return params


def _shapes(given: Mapping[str, Any], name: str) -> bool:
    return name in given and given[name] not in (0, 0.0, 1.0)


def defaults_from_generation_config(config: Mapping[str, Any]) -> SamplingParams:
    """Defaults that a checkpoint's generation_config.json states, by the rules of transformers.

    `do_sample` false or absent means greedy whatever temperature the file carries. EOS ids are not part
    of the sampling parameters: see `quire.config.ModelConfig`.
    """
    given: dict[str, Any] = {}
    if config.get("do_sample"):
        given["temperature"] = 1.0
        for name in ("temperature", "top_k", "top_p", "min_p", "typical_p"):
            if config.get(name) is not None:
                given[name] = config[name]
    for name in ("repetition_penalty", "no_repeat_ngram_size"):
        if config.get(name) is not None:
            given[name] = config[name]
    if config.get("max_new_tokens") is not None:
        given["max_tokens"] = config["max_new_tokens"]
    if config.get("min_new_tokens") is not None:
        given["min_tokens"] = config["min_new_tokens"]
    return parse_sampling_params(given)
