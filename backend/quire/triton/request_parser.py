"""RequestParser: checks a request's fields and tokenizes its prompts. The intake's threads call `parse`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_type_hints

import msgspec
import numpy as np

from quire.adapters import AdapterStatus
from quire.config import AdapterConfig, FrontendConfig
from quire.converters import boolean, converter, one_of
from quire.engine.cache_commands import (
    Adapters,
    Health,
    LoadAdapter,
    Requests,
    Sleep,
    UnloadAdapter,
    Wake,
    parse_cache_command,
)
from quire.engine.messages import EmbedsMessage, EngineInfo
from quire.errors import InvalidArgumentError
from quire.frontend.bad_words import with_bad_words_ids
from quire.frontend.chat.formats import ChatParsing, prepare_answer
from quire.frontend.grammar_checker import GrammarChecker
from quire.frontend.output_processor import split_ranking
from quire.frontend.stop_matcher import StopAutomaton
from quire.request.multimodal import check_spans, content_hashes
from quire.request.sampling_params import (
    PoolingParams,
    SamplingParams,
    parse_sampling_params,
)
from quire.request.structured_output import StructuredOutput
from quire.request.validation import (
    as_pooling,
    check_generates,
    check_prompt,
    check_prompt_length,
    check_prompt_logprobs,
    check_token_parameters,
)
from quire.triton.dialects import Translation, rows, translate
from quire.triton.parsed_request import CHAT_OUTPUTS, ParsedRequest
from quire.triton.raw_request import NAME, RawRequest, RequestReader
from quire.triton.request_fields import (
    check_tenant,
    json_parameters,
    pop_named,
    request_parameters,
    typed_tensors,
    wants_no_token,
    with_lists_of_strings,
)
from quire.triton.result_cache import nothing_said
from quire.triton.scheduling_fields import (
    ALIASES,
    SCHEDULING_FIELDS,
    parse_scheduling_params,
)
from quire_common.client_json import decode_utf8
from quire_common.errors import InputError, in_line, shown
from quire_ensemble.chat_format import FIELD as CHAT_FORMAT
from quire_ensemble.chat_format import ChatFormat, parse_chat_format
from quire_ensemble.generator_schema import (
    CONTROL_INPUTS,
    MAX_PROMPTS,
    PROMPT_INPUTS,
    SAMPLING_INPUTS,
    SCHEDULING_INPUTS,
    TEXT_PAIR,
    outputs_of,
)

_SAMPLING_NAMES = frozenset(spec.name for spec in SAMPLING_INPUTS)
_SCHEDULING_NAMES = frozenset(spec.name for spec in SCHEDULING_INPUTS)
_INTERVALS = {
    name: converter(kind)
    for name, kind in get_type_hints(FrontendConfig, include_extras=True).items()
    if name in ("stream_interval", "stream_interval_ms")
}
_CONTROL: dict[str, Callable[[str, Any], Any]] = {
    spec.name: _INTERVALS.get(spec.name, boolean) for spec in CONTROL_INPUTS
}
_CONTROL["output_mode"] = one_of("delta", "cumulative", "final")
_CONTROL["lora_name"] = NAME
_LAST_OUTPUTS = frozenset({"stop_reason", "timing", "num_reasoning_tokens"})
"""Outputs that are complete only when a choice has ended. A client that asks for one by a `return_` input,
and does not name its outputs, gets it with the last response alone."""
_LOGPROB_OUTPUTS = frozenset({"logprobs", "cumulative_logprob", "cum_log_probs", "output_log_probs"})
_PROMPT_NAMES = tuple(spec.name for spec in PROMPT_INPUTS)

VLLM_DEFAULTS = SamplingParams(temperature=1.0, max_tokens=16)
"""Sampling defaults of vllm_backend, which does not use the checkpoint's."""
VLLM_STREAM_WITH_PROMPT = (
    "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
)
"""Error message of vllm_backend for a stream that is to begin with its prompt; clients may compare it."""
VLLM_NO_ADAPTERS = "LoRA feature is not enabled."
"""Error message of vllm_backend for a request that names an adapter where there are none."""
MAX_SEQUENCES = 1024
"""Most choices, or beams, of all of a request's prompts together."""


class RequestParser:
    """Checks requests against one model.

    Args:
        tokenizer: a `quire_ensemble.tokenizer.Tokenizer`; None: prompts must be token ids or embeddings.
        defaults: sampling defaults of the checkpoint.
        info: the engine's limits; a callable since a restarted engine may answer differently.
        config: the frontend's configuration, with its dialect and limits.
        decoupled: whether the model may stream.
        batched: whether the model's tensors have a batch dimension.
        declared: names of the outputs in the model's configuration; None: it has no list, so all of ours.
        grammars: checks `structured_output`; None: there is no tokenizer to check it with.
        adapters: says whether there are adapters, and whether clients may load them.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        defaults: SamplingParams,
        info: Callable[[], EngineInfo],
        config: FrontendConfig,
        *,
        decoupled: bool,
        batched: bool = False,
        declared: frozenset[str] | None = None,
        grammars: GrammarChecker | None = None,
        adapters: AdapterConfig = AdapterConfig(),
    ) -> None:
        self.grammars = grammars
        self.adapters = adapters
        self.tokenizer = tokenizer
        self.chat_parsing = ChatParsing.from_config(tokenizer, config)
        self.batched = batched
        self._form = "batched" if batched else config.dialect
        self._known_outputs = frozenset(spec.name for spec in outputs_of(batched=batched))
        self._all_outputs = self._known_outputs if declared is None else declared
        self.defaults = VLLM_DEFAULTS if config.dialect == "vllm" else defaults
        self.info = info
        self.config = config
        self.decoupled = decoupled
        self._reader = RequestReader(info, config, batched=batched)

    def read(self, request: Any) -> RawRequest:
        """Copies a `pb_utils.InferenceRequest`.

        Raises:
            InvalidArgumentError, UnavailableError, EngineError: as `RequestReader.read`.
        """
        return self._reader.read(request)

    def parse(self, raw: RawRequest) -> ParsedRequest:
        """Checks a copied request and returns it parsed.

        Raises:
            InvalidArgumentError: a field is wrong; the message usually names the field.
            UnavailableError: the process that checks grammars fails.
            EngineError: CUDA fails for embeddings on a GPU.
        """
        if not self.batched:
            return self._parse(raw)
        parts = rows(raw, MAX_PROMPTS if self.decoupled else 1)
        if len(parts) == 1:
            return self._parse(parts[0])
        found = []
        for number, part in enumerate(parts):
            try:
                found.append(self._parse(part))
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"{error.field}[{number}]", error.reason) from None
        return _together(found)

    def _parse(self, raw: RawRequest) -> ParsedRequest:
        """Parses a request or one row of a batch. An error about a field whose name was translated
        (`Translation.names`) has the client's name of it."""
        translation = translate(raw, self.tokenizer, self.info().vocab_size)
        try:
            return self._parse_translated(translation)
        except InvalidArgumentError as error:
            theirs = translation.names.get(error.field)
            if theirs is None:
                raise
            raise InvalidArgumentError(theirs, error.reason) from None

    def _parse_translated(self, translation: Translation) -> ParsedRequest:
        raw = translation.raw
        parameters, headers = request_parameters(raw)
        parameters = translation.values(parameters)
        cancel = translation.cancel
        if isinstance(parameters.get("stop"), bool):
            cancel = parameters.pop("stop") or cancel
        from_json = translation.values(json_parameters(raw))
        control = {
            name: _CONTROL[name](name, value)
            for source in (parameters, from_json, typed_tensors(raw, _CONTROL.keys()))
            for name, value in pop_named(source, _CONTROL).items()
            if value is not None
        }
        stream = _streams(control)
        if stream and not self.decoupled:
            raise InvalidArgumentError(
                "stream", "this model is not decoupled and answers once; use its decoupled variant"
            )
        stated = (
            typed_tensors(raw, _SCHEDULING_NAMES),
            pop_named(from_json, (*SCHEDULING_FIELDS, *ALIASES)),
            pop_named(parameters, SCHEDULING_FIELDS),
        )
        if self.config.tenant_from_header_only:
            check_tenant(stated, headers)
        scheduling = parse_scheduling_params(
            *stated,
            *headers,
            arrived_at=raw.arrived_at,
            timeout_us=raw.timeout_us,
            correlation_id=raw.correlation_id,
            sequence_end=raw.sequence_end,
        )
        if control.get("cancel", cancel):
            if not raw.external_id:
                raise InvalidArgumentError(
                    "cancel", "needs the id of the request to cancel as its request id"
                )
            cancellation = self._command(raw)
            cancellation.cancel, cancellation.scheduling = True, scheduling
            return cancellation
        if "cache_control" in raw.tensors:
            command = parse_cache_command(raw.tensors["cache_control"][0])
            if isinstance(command, Sleep | Wake) and not self.config.allow_sleep:
                raise InvalidArgumentError("cache_control", "needs allow_sleep to sleep and wake")
            if isinstance(command, LoadAdapter | UnloadAdapter) and not self.adapters.lora_root:
                raise InvalidArgumentError("cache_control", "needs lora_root to load and unload adapters")
            is_free = isinstance(command, Health | Sleep | Wake | Adapters)
            is_allowed = self.config.allow_cache_control or is_free
            if isinstance(command, Requests) and not (command.tenant or command.all):
                command, is_allowed = Requests(scheduling.tenant), True
            if not is_allowed:
                raise InvalidArgumentError("cache_control", "is not allowed here (allow_cache_control)")
            control_request = self._command(raw)
            control_request.cache_control = command
            return control_request

        typed = typed_tensors(raw, _SAMPLING_NAMES)
        for name, value in translation.sampling.items():
            typed[name] = [*value, *typed.get(name, [])] if isinstance(value, list) else value
        if self.batched and "beam_width" in typed:
            typed.setdefault("n", typed["beam_width"])  # TensorRT-LLM returns every beam
        is_prompt_alone = self._form == "quire" and wants_no_token(typed, from_json, parameters)
        params = self._sampling(typed, from_json, parameters)
        if translation.bad_words_ids:
            ids = params.bad_words_ids + translation.bad_words_ids
            params = msgspec.structs.replace(params, bad_words_ids=ids)
        num_prompts = max(1, *(len(raw.tensors.get(name, ())) for name in ("text_input", TEXT_PAIR.name)))
        unknown = sorted(raw.requested_outputs - self._known_outputs)
        if unknown and raw.requested_outputs != self._all_outputs:
            raise InvalidArgumentError("outputs", f"{shown(unknown[0])} is no output of a generator")
        outputs, final_outputs = _outputs(
            raw.requested_outputs, control, params, stream, num_prompts, self.config, self._all_outputs
        )
        hides_logprobs = params.logprobs is None
        if params.logprobs is None and final_outputs & _LOGPROB_OUTPUTS:
            params = parse_sampling_params({"logprobs": 0}, defaults=params)
        if "prompt_logprobs" in outputs and params.prompt_logprobs is None:
            params = parse_sampling_params({"prompt_logprobs": 0}, defaults=params)
        if params.prompt_logprobs is not None and "prompt_logprobs" not in raw.requested_outputs:
            params = msgspec.structs.replace(params, prompt_logprobs=None)  # they cost blocks and time
        params = self._pooled(params, final_outputs, control)
        is_pooled = params.dimensions > 0
        if stream and params.is_ranked:
            raise InvalidArgumentError(
                "stream", "must be false with best_of above n or beam_width: choices are ranked at the end"
            )
        for field_name, count in (("n", params.n), ("text_input", num_prompts)):
            if count > 1 and not self.decoupled:
                raise InvalidArgumentError(
                    field_name,
                    f"this model answers once and can return 1 choice, got {count}; "
                    "use its decoupled variant",
                )
        if num_prompts * params.num_sequences > MAX_SEQUENCES:
            raise InvalidArgumentError(
                "text_input",
                f"at most {MAX_SEQUENCES} choices of all prompts together, "
                f"got {num_prompts} x {params.num_sequences}",
            )
        excludes = stream or self.config.dialect == "quire"
        echo_wanted = not control.get("exclude_input_in_output", excludes)
        if echo_wanted and stream and self.config.dialect == "vllm":
            told = VLLM_STREAM_WITH_PROMPT
            raise InvalidArgumentError("exclude_input_in_output", "must be true when streaming", told)
        interval, interval_ms = self._intervals(control)
        info = self.info()
        adapter = self._adapter(control.get("lora_name", ""), info)
        prompts, chat = self._prompts(raw, info, params)
        if is_pooled:
            chat = None  # there is no answer to be read
        if "prompt_embeds" in raw.tensors:
            if params.prompt_logprobs is not None:
                raise InvalidArgumentError("prompt_logprobs", "a prompt given as prompt_embeds has no tokens")
            if control.get("exclude_input_in_output") is False:
                raise InvalidArgumentError(
                    "exclude_input_in_output", "must be true: a prompt given as prompt_embeds has no text"
                )
            echo_wanted = False
        for prompt in prompts:
            check_prompt_logprobs(params, len(prompt.token_ids))
        params, new_answer = prepare_answer(self.chat_parsing, params, chat, self._check_grammar)
        check_token_parameters(params, info.vocab_size)
        skips_empty = raw.requested_outputs == self._all_outputs
        if new_answer is not None and skips_empty:
            beside = CHAT_OUTPUTS & self._all_outputs
            outputs, final_outputs = outputs | beside, final_outputs | beside
        params, num_best = split_ranking(params)
        embeds = _embeds(raw, len(prompts[0].token_ids), info)
        classifier = info.pooling.classifier
        stops = StopAutomaton(params.stop) if params.stop else None
        first, *others = (
            ParsedRequest(
                prompt.token_ids,
                _with_second_text(params, prompt.second_text),
                raw.external_id,
                outputs,
                final_outputs,
                stream=stream,
                stream_interval=interval,
                stream_interval_ms=interval_ms,
                cumulative=stream and control.get("output_mode") == "cumulative",
                scheduling=scheduling,
                arrived_at=raw.arrived_at,
                echo=self._echo(prompt.token_ids, prompt.text, params) if echo_wanted else "",
                is_prompt_alone=is_prompt_alone and not is_pooled,
                labels=classifier.labels if is_pooled and classifier is not None else (),
                embeds=embeds,
                buffer=raw.embeds,
                stops=stops,
                is_chat=chat is not None,
                num_best=num_best,
                adapter=control.get("lora_name", ""),
                adapter_digest="" if adapter is None else adapter.digest,
                new_answer=new_answer,
                skips_empty=skips_empty,
                form=self._form,
                hides_logprobs=hides_logprobs,
            )
            for prompt in prompts
        )
        first.others = others
        if first.is_prompt_alone and params.prompt_logprobs is None:
            first.results = nothing_said([params.n] * len(prompts))
        return first

    def _pooled(
        self, params: SamplingParams, outputs: frozenset[str], control: Mapping[str, Any]
    ) -> SamplingParams:
        """Returns the engine's parameters for a request that wants an embedding or scores; for others,
        `params` unchanged.

        Raises:
            InvalidArgumentError: the model does not do what is asked for, or the request contradicts itself.
        """
        info, scores = self.info(), outputs & {"scores", "label"}
        if not scores and "use_activation" in control:
            raise InvalidArgumentError("use_activation", "is of scores, and none are asked for")
        if "embedding" in outputs and scores:
            raise InvalidArgumentError("return_scores", "must not be true beside return_embedding")
        if "embedding" in outputs:
            return as_pooling(params, info.pooling, info.hidden_size)
        if params.dimensions:
            raise InvalidArgumentError("dimensions", "is of an embedding, and none is asked for")
        if not scores:
            check_generates(info.pooling)
            return params
        pooling = PoolingParams(task="classify", use_activation=control.get("use_activation", True))
        params = msgspec.structs.replace(params, pooling=pooling)
        return as_pooling(params, info.pooling, info.hidden_size)

    def _echo(self, token_ids: list[int], text: str, params: SamplingParams) -> str:
        """The prompt's text. A prompt without a text is decoded; without a tokenizer the result is empty."""
        if text or self.tokenizer is None:
            return text
        decoded: str = self.tokenizer.hf.decode(token_ids, skip_special_tokens=params.skip_special_tokens)
        return decoded

    def _command(self, raw: RawRequest) -> ParsedRequest:
        """Makes the parsed form of a cancellation or command, which is answered and generates nothing."""
        outputs = raw.requested_outputs
        if outputs == self._all_outputs:
            outputs = frozenset({"text_output", "finish_reason"})
        return ParsedRequest([], self.defaults, raw.external_id, outputs, outputs, form=self._form)

    def _adapter(self, name: str, info: EngineInfo) -> AdapterStatus | None:
        """Returns an adapter's status in the engine's latest list; None: no name, or a name that is not
        listed. Whether an adapter that is not listed exists is for the engine to say.

        Raises:
            InvalidArgumentError: the adapter is not listed, and the dialect is vllm_backend's, as is the
                message.
        """
        found = next((one for one in info.adapters if one.name == name), None)
        if name and found is None and self.config.dialect == "vllm":
            names = [one.name for one in info.adapters]
            told = in_line(f"LoRA {name} is not supported, we currently support {names}")
            if not self.adapters.enable_lora:
                told = VLLM_NO_ADAPTERS
            raise InvalidArgumentError("lora_name", "is not the name of an adapter", told)
        return found

    def _intervals(self, control: Mapping[str, int]) -> tuple[int, int]:
        """Returns `stream_interval` and `stream_interval_ms`: the model's if the request states neither. If
        it states one of them, the other is 0."""
        if _INTERVALS.keys().isdisjoint(control):
            return self.config.stream_interval, self.config.stream_interval_ms
        return control.get("stream_interval", 0), control.get("stream_interval_ms", 0)

    def _sampling(
        self, typed: Mapping[str, Any], from_json: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> SamplingParams:
        stated = (typed, from_json, with_lists_of_strings(parameters))
        params = parse_sampling_params(*stated, defaults=self.defaults)
        if (params.stop or params.bad_words) and self.tokenizer is None:
            field = "stop" if params.stop else "bad_words"
            raise InvalidArgumentError(field, "needs a tokenizer, and this checkpoint has none")
        if params.bad_words:
            params = with_bad_words_ids(params, self.tokenizer)
        return params

    def _check_grammar(self, structured: StructuredOutput) -> None:
        if self.grammars is None:
            raise InvalidArgumentError("structured_output", "needs a tokenizer, and this checkpoint has none")
        self.grammars.check(structured)

    def _prompts(
        self, raw: RawRequest, info: EngineInfo, params: SamplingParams
    ) -> tuple[list[_Prompt], ChatFormat | None]:
        """Returns the prompts, and the format of the answer to chat messages.

        The format is None if there is neither `messages` nor a `chat_format`.

        Raises:
            InvalidArgumentError: there is not exactly one kind of prompt, a prompt is invalid or cannot be
                tokenized, or `text_pair` or `chat_format` does not go with it.
        """
        given = [name for name in _PROMPT_NAMES if name in raw.tensors]
        if len(given) != 1:
            found = ", ".join(given) if given else "none"
            raise InvalidArgumentError(
                "prompt", f"exactly one of {', '.join(_PROMPT_NAMES)} must be given, got {found}"
            )
        name = given[0]
        values = raw.tensors[name]
        chat, limits = _chat_format(raw), _PromptLimits.of_request(info, params)
        pairs = raw.tensors.get(TEXT_PAIR.name)
        if pairs is not None and (name != "text_input" or params.pooling.task != "classify"):
            raise InvalidArgumentError(TEXT_PAIR.name, "needs text_input and return_scores")
        if name == "input_ids":
            if not values:
                raise InvalidArgumentError(name, "must hold at least one token")
            limits.check(values)
            return [_Prompt(values)], chat
        if name == "prompt_embeds":
            num_rows = 0 if raw.embeds is None else raw.embeds.shape[0]
            if not num_rows:
                raise InvalidArgumentError(name, "must hold at least one row")
            check_prompt_length(num_rows, info.max_model_len, is_pooled=limits.is_pooled)
            return [_Prompt([0] * num_rows)], chat  # placeholders: no token is known
        if self.tokenizer is None:
            raise InvalidArgumentError(name, "this checkpoint has no tokenizer: send input_ids")
        if name == "messages":
            if chat is not None:
                raise InvalidArgumentError(CHAT_FORMAT, "must not be given beside messages, which say it")
            token_ids, chat = self._encode_messages(values[0], limits)
            return [_Prompt(token_ids)], chat
        if pairs is not None:
            return self._encode_pairs(values, pairs, limits), chat
        if len(values) == 1:
            return [self._encode(name, values[0], limits)], chat
        prompts = []
        for item, value in enumerate(values):
            try:
                prompts.append(self._encode(name, value, limits))
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"{name}[{item}]", error.reason) from None
        return prompts, chat

    def _encode_messages(self, value: bytes, limits: _PromptLimits) -> tuple[list[int], ChatFormat]:
        assert self.tokenizer is not None
        try:
            token_ids, chat = self.tokenizer.encode_chat(
                value, max_bytes=self.config.max_prompt_bytes, max_tokens=limits.most
            )
        except InputError as error:
            raise InvalidArgumentError(error.field, error.reason) from None
        limits.check(token_ids)
        return token_ids, chat

    def _encode(self, name: str, value: bytes, limits: _PromptLimits) -> _Prompt:
        assert self.tokenizer is not None
        try:
            token_ids = self.tokenizer.encode_bytes(name, value, max_tokens=limits.most)
        except InputError as error:
            raise InvalidArgumentError(error.field, error.reason) from None
        limits.check(token_ids)
        return _Prompt(token_ids, value.decode("utf-8"))

    def _encode_pairs(
        self, firsts: list[bytes], seconds: list[bytes], limits: _PromptLimits
    ) -> list[_Prompt]:
        """Encodes pairs of texts. If there is one first text, it belongs to all the second ones.

        Raises:
            InvalidArgumentError: the numbers of texts do not match, or a text or pair is invalid.
        """
        assert self.tokenizer is not None
        names = "text_input", TEXT_PAIR.name
        if len(firsts) not in (1, len(seconds)):
            raise InvalidArgumentError(
                names[1], f"must hold as many texts as text_input ({len(firsts)}), got {len(seconds)}"
            )
        prompts = []
        for item, second in enumerate(seconds):
            pair = firsts[item if len(firsts) > 1 else 0], second
            try:
                texts = [decode_utf8(name, one) for name, one in zip(names, pair, strict=True)]
                token_ids, at = self.tokenizer.encode_pair(*texts, fields=names, max_tokens=limits.most)
                limits.check(token_ids)
            except (InputError, InvalidArgumentError) as error:
                name = error.field if error.field in names else names[1]
                several = len(firsts if name == names[0] else seconds) > 1
                raise InvalidArgumentError(f"{name}[{item}]" if several else name, error.reason) from None
            prompts.append(_Prompt(token_ids, "", at))
        return prompts


class _Prompt(NamedTuple):
    """One prompt as token ids; placeholders stand for embeddings."""

    token_ids: list[int]
    text: str = ""
    """The prompt's text, if it was given as one text; else empty."""
    second_text: int = 0
    """Index of the first token of a pair's second text, as in `PoolingParams`; 0: none is known."""


class _PromptLimits(NamedTuple):
    """Limits of a request's prompts."""

    vocab_size: int
    max_model_len: int
    is_pooled: bool

    @classmethod
    def of_request(cls, info: EngineInfo, params: SamplingParams) -> _PromptLimits:
        return cls(info.vocab_size, info.max_model_len, params.dimensions > 0)

    @property
    def most(self) -> int:
        """Most tokens of a prompt."""
        return self.max_model_len - (not self.is_pooled)

    def check(self, token_ids: list[int]) -> None:
        """Raises InvalidArgumentError for a prompt that is empty or too long, or that has token ids outside
        the vocabulary."""
        check_prompt(token_ids, **self._asdict())


def _with_second_text(params: SamplingParams, second_text: int) -> SamplingParams:
    """Returns `params` with the index `second_text` of the token at which a pair's second text begins. If it
    is 0, returns `params` unchanged."""
    if not second_text:
        return params
    pooling = msgspec.structs.replace(params.pooling, second_text=second_text)
    return msgspec.structs.replace(params, pooling=pooling)


def _chat_format(raw: RawRequest) -> ChatFormat | None:
    """Parses the input `chat_format`; None: it is missing or empty.

    The tokenizer model of an ensemble sends an empty one if the prompt is a text.

    Raises:
        InvalidArgumentError: it is invalid.
    """
    value: bytes = raw.tensors.get(CHAT_FORMAT, [b""])[0]
    if not value:
        return None
    try:
        return parse_chat_format(value)
    except InputError as error:
        raise InvalidArgumentError(error.field, error.reason) from None


def _embeds(raw: RawRequest, num_prompt_tokens: int, info: EngineInfo) -> EmbedsMessage | None:
    """Checks embeddings of images or of the prompt against their other inputs and the model.

    Returns:
        What the engine is told of them; None: the request has no embeddings.

    Raises:
        InvalidArgumentError: the inputs do not fit each other or the model.
        EngineError: CUDA fails for embeddings on a GPU.
    """
    name = "image_embeds"
    values = raw.tensors.get("image_spans", [])
    if len(values) % 2:
        raise InvalidArgumentError("image_spans", f"must hold pairs of numbers, got {len(values)} numbers")
    if "prompt_embeds" in raw.tensors:
        name = "prompt_embeds"
        if values:
            raise InvalidArgumentError("image_spans", "must not be given with prompt_embeds")
        values = [0, num_prompt_tokens]
    spans = list(zip(values[::2], values[1::2], strict=True))
    shape = (0, info.embeds_size) if raw.embeds is None else raw.embeds.shape
    positions = raw.tensors.get("position_ids", [])
    if not (spans or positions or raw.embeds):
        return None
    if name == "image_embeds" and not info.accepts_image_embeds:
        raise InvalidArgumentError(name, "the model reads text only")
    if not raw.tensors.keys() & {"input_ids", "prompt_embeds"}:
        raise InvalidArgumentError("image_embeds", "the prompt must be given as input_ids")
    check_spans(spans, num_rows=shape[0], num_prompt_tokens=num_prompt_tokens)
    if shape[1] != info.embeds_size:
        levels = info.deepstack_levels
        deepstack = f" and {levels} levels of deepstack: {info.embeds_size} numbers" if levels else ""
        raise InvalidArgumentError(
            name,
            f"rows of {shape[1]} numbers, the model has a hidden size of {info.hidden_size}{deepstack}",
        )
    if positions:
        if not info.takes_position_ids:
            raise InvalidArgumentError("position_ids", "the model has no M-RoPE and takes none")
        expected = (3, num_prompt_tokens)
        if raw.shapes["position_ids"] != expected:
            raise InvalidArgumentError(
                "position_ids", f"shape {list(raw.shapes['position_ids'])}, expected {list(expected)}"
            )
        if min(positions) < 0 or max(positions) >= info.max_model_len:
            raise InvalidArgumentError("position_ids", f"must be in [0, {info.max_model_len})")
    elif spans and info.takes_position_ids:
        raise InvalidArgumentError("position_ids", f"the model has M-RoPE and needs them with {name}")
    if raw.embeds is None:
        return None
    # What a client says of its images is not asked: a wrong hash would give others wrong text.
    hashes = content_hashes(raw.embeds.array, spans)
    packed = np.asarray(positions, dtype=np.int32).tobytes()
    is_joint = info.has_joint_images and name == "image_embeds"
    return EmbedsMessage(raw.embeds.descriptor(), spans, hashes, packed, is_joint)


def _streams(control: Mapping[str, Any]) -> bool:
    """Whether the answer is streamed, from `stream` or `output_mode`.

    Raises:
        InvalidArgumentError: they contradict each other.
    """
    mode = control.get("output_mode")
    if mode is None:
        return bool(control.get("stream", False))
    stream = mode != "final"
    if control.get("stream", stream) != stream:
        raise InvalidArgumentError("output_mode", f"{mode!r} contradicts stream={not stream}")
    return stream


def _together(rows: list[ParsedRequest]) -> ParsedRequest:
    """Joins the rows of a Triton batch into one request with several prompts. Of a batch of cancellations,
    only the first row is used.

    Raises:
        InvalidArgumentError: the rows differ in a setting that all must share (such as `stream`), a row has
            several prompts or is a cache command, or the request has too many choices.
    """
    first, *others = rows
    for other in others:
        for name in ("cancel", "stream", "cumulative", "stream_interval", "stream_interval_ms"):
            if getattr(other, name) != getattr(first, name):
                field_name = "output_mode" if name == "cumulative" else name
                raise InvalidArgumentError(field_name, "must be the same in all rows of a batch")
        if bool(other.params.dimensions) != bool(first.params.dimensions):
            raise InvalidArgumentError("return_embedding", "must be the same in all rows of a batch")
        if other.params.pooling.task != first.params.pooling.task:
            raise InvalidArgumentError("return_scores", "must be the same in all rows of a batch")
        if other.others or first.others:
            raise InvalidArgumentError("text_input", "rows of a batch must hold one prompt each")
        other.outputs, other.final_outputs = first.outputs, first.final_outputs
        if other.params.logprobs is None and first.params.logprobs is not None:
            other.params = parse_sampling_params({"logprobs": 0}, defaults=other.params)
    if first.cache_control is not None:
        raise InvalidArgumentError("cache_control", "must be the only row of a batch")
    if not first.cancel:
        first.others = others
    if sum(row.params.num_sequences for row in rows) > MAX_SEQUENCES:
        raise InvalidArgumentError("n", f"at most {MAX_SEQUENCES} choices of all prompts together")
    return first


def _outputs(
    requested: frozenset[str],
    control: Mapping[str, Any],
    params: SamplingParams,
    stream: bool,
    num_prompts: int,
    config: FrontendConfig,
    all_outputs: frozenset[str],
) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the names of the outputs in a choice's responses before its last, and in its last.

    A client that names outputs gets these with each response. (In an ensemble, the step after the generator
    fails without its inputs.) For a client that names none Triton asks for all outputs. Each response to it
    has text and token ids, and the last one also the finish reason and some counts. Indices of choices and
    prompts are added where they are needed, and other outputs mostly if inputs ask for them: a tensor costs
    about 10 us of CPU on either side of the stub. In the dialect of vllm_backend a response has the text and
    what inputs ask for. With `return_embedding` or `return_scores` it has no text. What the model does not
    declare is left out.

    Args:
        requested: names of the outputs that the client asks for.
        num_prompts: number of prompts in the request, or in its row of a batch.
        all_outputs: names of the outputs that the model declares.
    """
    if requested != all_outputs:
        return requested, requested
    asked = {name.removeprefix("return_") for name, wanted in control.items() if wanted is True} & requested
    if asked & {"embedding", "scores"}:
        beside = {"label"} if "scores" in asked else set()
        if num_prompts > 1 or "sequence_index" in all_outputs:
            beside.add("batch_index")
        only = frozenset({"finish_reason", "num_input_tokens", *asked, *beside})
        return only & all_outputs, only & all_outputs
    if config.dialect == "vllm":
        only = frozenset({"text_output", *asked}) & all_outputs
        return only - _LAST_OUTPUTS, only
    outputs = {"text_output", "output_ids"} | asked - _LAST_OUTPUTS
    if params.logprobs is not None:
        outputs.add("logprobs")
    if params.n > 1:
        outputs.add("index")
    if num_prompts > 1:
        outputs.add("batch_index")
    if "sequence_index" in all_outputs:
        outputs |= {"batch_index", "sequence_index", "sequence_length"}
        if "logprobs" in outputs:
            outputs |= {"cum_log_probs", "output_log_probs"}
    final = outputs | asked | {"finish_reason", "num_input_tokens"}
    if params.is_ranked:
        final.add("cumulative_logprob")
    if not stream:
        final.add("num_output_tokens")  # of this response, which here is all of them
    return frozenset(outputs) & all_outputs, frozenset(final) & all_outputs
