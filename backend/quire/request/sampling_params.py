"""SamplingParams: a request's parameters for sampling and for its end.

The same names arrive as typed tensors, as JSON, and as Triton request parameters, with numbers often written
as strings (perf_analyzer cannot send floats). `parse_sampling_params` validates all of these. The engine
checks the ranges of numbers and conflicts once more when it gets a message; later code may trust these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from quire.converters import INT32_MAX, boolean, converter, fail, has_surrogates, integer, number
from quire.request.logits_processors import MAX_PROCESSORS, NamedProcessor, parse_logits_processors
from quire.request.structured_output import FIELDS as STRUCTURED_FIELDS
from quire.request.structured_output import StructuredOutput as StructuredOutput
from quire.request.structured_output import check_structured_output, parse_structured_output
from quire_common.client_json import parse_json
from quire_common.errors import InputError, kind

logger = logging.getLogger("quire")

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 64
MAX_PROMPT_LOGPROBS = 2**18
"""Most log-probabilities that a request may ask for of one prompt; it bounds the size of a response."""
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STRINGS_LENGTH = 4096
"""Most characters of a request's stop strings together; the same limit holds for its bad words together."""
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 4096
MAX_BAD_WORDS = 256
MAX_CHOICES = 64
MAX_BEAM_WIDTH = 32
MAX_BIAS = 100

_Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
_Share = Annotated[float, Meta(gt=0, le=1)]
_SomeIds = Annotated[tuple[_Count, ...], Meta(min_length=1, max_length=256)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class Thinking(msgspec.Struct, frozen=True):
    """Tags around a model's reasoning, for `thinking_budget`: token ids, and whether the prompt opens it."""

    is_open: bool
    """Whether reasoning is open at the end of the prompt."""
    open_ids: _SomeIds
    end_ids: _SomeIds
    forced_ids: _SomeIds
    """Token ids that are forced once the reasoning budget is used up; they begin with `end_ids`."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result that a prompt is pooled to, for a request that wants no tokens (`SamplingParams.dimensions`)."""

    task: Literal["embed", "classify"] = "embed"
    """embed: an embedding; classify: the scores of a classifier, reranker or reward model."""
    use_activation: bool = True
    """Whether scores are the classifier's activation (such as softmax) of the logits; False: the logits."""
    second_text: _Count = 0
    """Index of the first token with token type 1, for a pair of texts: that token and all after it have type
    1; 0: all tokens have type 0."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and end of one request. The defaults are greedy decoding (temperature 0) without transforms,
    and no end but EOS and the model's length. The ranges of numbers apply to what the engine receives;
    `parse_sampling_params` converts clients' values into them.

    Order of the transforms: logits processors, the grammar's mask, penalties, logit bias, bans (n-grams, bad
    words, min-tokens masks), then temperature, top-k, top-p, min-p, typical-p.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    """Most tokens to generate; None: as many as `max_model_len` and the KV cache leave."""
    min_tokens: _Count = 0
    """Until this many tokens exist, stop strings are ignored, and stop ids and (without `ignore_eos`) EOS are
    not sampled if any other token is possible."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    top_k: _Count = 0
    """Keep the k most likely tokens, and those as likely as the last of them; 0: all."""
    top_p: _Share = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    typical_p: _Share = 1.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    """Divides positive, multiplies negative logits of tokens seen in prompt or output (arXiv 1909.05858)."""
    presence_penalty: _Penalty = 0.0
    """Amount subtracted once from logits of generated tokens (OpenAI)."""
    frequency_penalty: _Penalty = 0.0
    """Amount subtracted per occurrence in the generated tokens (OpenAI)."""
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=1024)] = 0
    logit_bias: dict[_Count, Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]] = {}
    bad_words: tuple[str, ...] = ()
    """Words to avoid. The frontend tokenizes them and adds their token ids to `bad_words_ids`."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    seed: Annotated[int, Meta(ge=0)] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: Annotated[tuple[_Count, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probabilities to return: k for the sampled token and the k most likely ones; None: none."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Log-probabilities to return for the prompt's tokens after the first, k as in `logprobs`; None: none."""
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    """Choices to return, each with an index."""
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    """Choices to generate; None: `n`. If there are more than `n`, the `n` with the highest mean
    log-probability are returned, at the end."""
    beam_width: Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)] = 1
    """Above 1: beam search instead of sampling; the `n` best beams are returned, at the end."""
    length_penalty: Annotated[float, Meta(ge=-10, le=10)] = 1.0
    """Ended beams are ranked by the sum of log-probabilities / length ** length_penalty (as transformers),
    where length counts the generated tokens."""
    early_stopping: bool | None = False
    """When beam search ends, once there are `beam_width` ended beams: True: at once; False: when a better one
    is unlikely; None: when a better one is impossible (transformers' "never")."""
    thinking_budget: _Count | None = None
    """Most tokens of the reasoning at the beginning of the output. The closing tag is forced after them,
    unless a grammar forbids it. None: no limit."""
    thinking: Thinking | None = None
    """Token ids of the tags around the model's reasoning. The frontend sets it if there is a
    `thinking_budget`; else None."""
    structured_output: StructuredOutput | None = None
    """The grammar that the output follows; None: none."""
    dimensions: _Count = 0
    """Number of the dimensions of the prompt's embedding, or of its scores, which the engine returns instead
    of tokens; 0: it generates tokens."""
    pooling: PoolingParams = PoolingParams()
    """Result that the prompt is pooled to. The frontend sets it; it has no effect if `dimensions` is 0."""
    logits_processors: Annotated[tuple[NamedProcessor, ...], Meta(max_length=MAX_PROCESSORS)] = ()
    """Logits processors for the request, in the order in which they are called. The engine's configuration
    must list them."""

    @property
    def num_sequences(self) -> int:
        """Most sequences that are generated for the request at the same time."""
        return max(self.n, self.best_of or 1, self.beam_width)

    @property
    def is_ranked(self) -> bool:
        """Whether choices compete, so that the result is known only when all have ended."""
        return self.beam_width > 1 or (self.best_of or 1) > self.n

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


_UNUSED_DEFAULTS = (
    "num_beams", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens",
    "exponential_decay_length_penalty", "epsilon_cutoff", "eta_cutoff", "top_h", "penalty_alpha",
    "encoder_repetition_penalty", "guidance_scale", "watermarking_config", "min_length", "max_length",
    "max_time", "num_beam_groups", "diversity_penalty", "constraints", "force_words_ids", "dola_layers",
    "forced_decoder_ids", "token_healing",
)  # fmt: skip
"""Keys of generation_config.json that are ignored although transformers uses or used them. A value other than
null, 0, 1, false or [] causes a warning, because transformers may then choose other tokens than we do."""


def choice_seed(seed: int, index: int) -> int:
    """Returns the seed of choice `index` of a request with `seed`: `seed` itself for choice 0.

    Other choices get the `index`-th number of SplitMix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014), started at the mixed seed. Started at the seed itself,
    requests whose seeds differ by SplitMix64's increment would share choices. The result must never change,
    because seeded outputs depend on it.

    Args:
        seed: in [0, 2**64).
        index: at least 0.
    """
    return seed if index == 0 else _mix((_mix(seed) + index * 0x9E3779B97F4A7C15) % 2**64)


def _mix(value: int) -> int:
    """SplitMix64's finalizer, a bijection of 64-bit numbers."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def _json_if_text(field: str, value: Any, opening: str) -> Any:
    """Returns the value, parsed as JSON if it is text that begins with `opening`: request parameters carry
    only scalars. Raises InvalidArgumentError if it is not JSON."""
    if isinstance(value, str) and value.lstrip().startswith(opening):
        try:
            return parse_json(field, value)
        except InputError as error:
            raise fail(field, error.reason) from None
    return value


def _strings(limit: int) -> Callable[[str, Any], tuple[str, ...]]:
    def convert(field: str, value: Any) -> tuple[str, ...]:
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple):
            raise fail(field, f"must be a string or a list of strings, got {kind(value)}")
        if len(value) > limit:
            raise fail(field, f"at most {limit} entries are allowed, got {len(value)}")
        for entry in value:
            if not isinstance(entry, str) or not entry:
                raise fail(field, f"entries must be non-empty strings, got {kind(entry)}")
            if len(entry) > MAX_STOP_LENGTH:
                raise fail(field, f"entries are limited to {MAX_STOP_LENGTH} characters, got {len(entry)}")
            if has_surrogates(entry):
                raise fail(field, "entries must not hold unpaired surrogates, which have no UTF-8 form")
        total = sum(map(len, value))
        if total > MAX_STRINGS_LENGTH:
            raise fail(field, f"entries are limited to {MAX_STRINGS_LENGTH} characters together, got {total}")
        return tuple(value)

    return convert


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    value = _json_if_text(field, value, "[")
    if isinstance(value, int | str) and not isinstance(value, bool):
        value = [value]
    if not isinstance(value, list | tuple):
        raise fail(field, f"must be a list of token ids, got {kind(value)}")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise fail(field, f"at most {MAX_STOP_TOKEN_IDS} entries are allowed, got {len(value)}")
    one = integer(0, INT32_MAX)
    return tuple(one(field, entry) for entry in value)


def _logit_bias(field: str, value: Any) -> dict[int, float]:
    value = _json_if_text(field, value, "{")
    if not isinstance(value, Mapping):
        raise fail(field, f"must be an object of token id to bias, got {kind(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise fail(field, f"at most {MAX_LOGIT_BIAS} entries are allowed, got {len(value)}")
    key, bias = integer(0, INT32_MAX), number(-MAX_BIAS, MAX_BIAS)
    return {key(field, k): bias(field, v) for k, v in value.items()}


def _early_stopping(field: str, value: Any) -> bool | None:
    if isinstance(value, str) and value.strip().lower() == "never":
        return None
    return boolean(field, value)


_SPECIAL: dict[str, Callable[[str, Any], Any]] = {
    "top_k": integer(-1, INT32_MAX),
    "top_p": number(0, 1),
    "logit_bias": _logit_bias,
    "bad_words": _strings(MAX_BAD_WORDS),
    "seed": integer(-(2**63), MAX_SEED),
    "stop": _strings(MAX_STOP_STRINGS),
    "stop_token_ids": _token_ids,
    "early_stopping": _early_stopping,
    "structured_output": parse_structured_output,
    "logits_processors": parse_logits_processors,
}
_CONVERTERS = {
    name: _SPECIAL.get(name) or converter(kind)
    for name, kind in get_type_hints(SamplingParams, include_extras=True).items()
    if name not in ("bad_words_ids", "thinking", "pooling")
}

SAMPLING_FIELDS: tuple[str, ...] = tuple(_CONVERTERS)
"""Names of sampling parameters that a request may use, besides ALIASES, as tensors, JSON keys or request
parameters."""

ALIASES: dict[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_words": "stop",
    **dict.fromkeys(STRUCTURED_FIELDS, "structured_output"),
}
"""Field of SamplingParams by each further name that a request may use for it. Most of these names are those
of other servers."""


def parse_sampling_params(
    *sources: Mapping[str, Any], defaults: SamplingParams | None = None
) -> SamplingParams:
    """Validates and merges a request's parameters; the first source that names a parameter wins. A
    temperature that no source names becomes 1 if the default is greedy and a source limits the distribution
    (`top_k` above 1, or `top_p`, `min_p` or `typical_p` between 0 and 1). Else it is 0 with `beam_width` > 1,
    and else the default. The default of `min_tokens` is lowered to `max_tokens`. A `top_k` of -1 and a
    `top_p` of 0 mean no limit, and a negative seed counts modulo 2**64.

    Args:
        sources: mappings of parameter name to raw value, most specific first (typed tensors, JSON object,
            request parameters). A value of None means "not given".
        defaults: values for parameters that no source names, such as those of the checkpoint's
            generation_config.json; None: those of SamplingParams.

    Raises:
        InvalidArgumentError: unknown name, wrong type, value outside its range, or parameters that conflict;
            names a parameter.
    """
    given: dict[str, Any] = {}
    for source in sources:
        _check_one_grammar(source)
        for name, value in source.items():
            field = ALIASES.get(name, name)
            if field not in _CONVERTERS:
                raise fail(name[:80], f"unknown parameter; known are {', '.join(SAMPLING_FIELDS)}")
            if value is None:
                continue
            # Every source is checked, also where a more specific one overrides it.
            converted = _CONVERTERS[field](name, value)
            given.setdefault(field, converted)

    if given.get("top_k") == -1:
        given["top_k"] = 0
    if given.get("top_p") == 0:
        given["top_p"] = 1.0  # no nucleus, as others mean it
    if given.get("seed") is not None:
        given["seed"] %= 2**64
    base = defaults or SamplingParams()
    # A request that shapes the distribution but names no temperature means to sample from it.
    shapes = ("top_k", "top_p", "min_p", "typical_p")
    if base.is_greedy and "temperature" not in given and any(_shapes(given, name) for name in shapes):
        given["temperature"] = 1.0
    if given.get("beam_width", 1) > 1:
        given.setdefault("temperature", 0.0)  # whatever the checkpoint samples with by default
    if (most := given.get("max_tokens", base.max_tokens)) is not None:
        # A checkpoint's default is not to be in the way of what the request asks for.
        given.setdefault("min_tokens", min(base.min_tokens, most))
    params = msgspec.structs.replace(base, **given)
    check_together(params)
    return params


def check_limits(params: SamplingParams) -> None:
    """Raises InvalidArgumentError for numbers outside their ranges, grammars that `check_structured_output`
    refuses, and parameters that conflict. The number and length of strings and the number of biases are not
    checked."""
    try:
        msgspec.convert(msgspec.structs.asdict(params), SamplingParams)
    except msgspec.ValidationError as error:
        raise fail("sampling_parameters", str(error)) from None
    if params.seed is not None:
        integer(0, MAX_SEED)("seed", params.seed)
    if params.structured_output is not None:
        check_structured_output(params.structured_output)
    check_together(params)


def check_together(params: SamplingParams) -> None:
    """Raises InvalidArgumentError for parameters that conflict."""
    if params.best_of is not None and params.best_of < params.n:
        raise fail("best_of", f"must be at least n ({params.n}), got {params.best_of}")
    if params.beam_width > 1:
        if params.structured_output is not None:
            raise fail("structured_output", "must not be given with beam_width: beams follow no grammar")
        if params.best_of is not None:
            raise fail("best_of", "must not be given with beam_width")
        if params.logits_processors:
            raise fail("logits_processors", "must not be given with beam_width")
        if params.n > params.beam_width:
            raise fail("n", f"must not exceed beam_width ({params.beam_width}), got {params.n}")
        if params.thinking_budget is not None:
            raise fail("thinking_budget", "must not be given with beam_width")
        if not params.is_greedy:
            raise fail("beam_width", "beams are searched, not sampled: temperature must be 0")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise fail("min_tokens", f"must not exceed max_tokens ({params.max_tokens}), got {params.min_tokens}")


def _check_one_grammar(source: Mapping[str, Any]) -> None:
    """Raises InvalidArgumentError if one source states a grammar under several names."""
    named = [name for name in STRUCTURED_FIELDS if source.get(name) is not None]
    if len(named) > 1:
        raise fail(named[1], f"must not be given beside {named[0]}: a request has one grammar")


def _shapes(given: Mapping[str, Any], name: str) -> bool:
    return name in given and given[name] not in (0, 0.0, 1.0)


def defaults_from_generation_config(config: Mapping[str, Any]) -> SamplingParams:
    """Returns the sampling defaults in a checkpoint's generation_config.json.

    If `do_sample` is false or absent, sampling is greedy whatever temperature the file has. Without `top_k`
    there is no such limit, as in vLLM. EOS ids are not sampling parameters: see
    `quire.loader.info`.

    Raises:
        InvalidArgumentError: a value that is used is wrong.
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
    given["stop"] = config.get("stop_strings")
    values = {name: config.get(name) for name in _UNUSED_DEFAULTS}
    unused = [name for name, one in values.items() if one is True or one not in (None, 0, 1, False, [])]
    if unused:
        logger.warning("generation_config.json: %s: not supported, and not used", ", ".join(unused))
    try:
        alone = msgspec.convert(config.get("suppress_tokens") or [], list[_Count])
        banned = msgspec.convert(config.get("bad_words_ids") or [], list[tuple[_Count, ...]])
    except msgspec.ValidationError as error:
        raise fail("generation_config.json", f"suppress_tokens or bad_words_ids: {error}") from None
    words = (*((token_id,) for token_id in alone), *filter(None, banned))
    return msgspec.structs.replace(parse_sampling_params(given), bad_words_ids=words)
