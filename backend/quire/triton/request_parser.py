"""Turns a Triton request into a validated one.

Two halves, because they run on two threads: `RequestParser.read` copies what the request holds while Triton
still owns it (on the stub's main thread, which must not be held up: whatever is too large is refused there,
before it is copied), `RequestParser.parse` checks and tokenizes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import msgspec
import numpy as np

from quire import converters
from quire.adapters import AdapterStatus
from quire.config import AdapterConfig, FrontendConfig
from quire.converters import boolean, converter, integer, one_of
from quire.engine.cache_commands import (
    Adapters,
    CacheCommand,
    Health,
    LoadAdapter,
    Requests,
    Sleep,
    UnloadAdapter,
    Wake,
    parse_cache_command,
)
from quire.engine.device_array import DeviceBuffer
from quire.engine.messages import EmbedsMessage, EngineInfo
from quire.engine.shared_array import SharedBuffer
from quire.errors import InvalidArgumentError
from quire.frontend.bad_words import with_bad_words_ids
from quire.frontend.chat.formats import Answer, ChatParsing, prepare_answer
from quire.frontend.grammar_checker import GrammarChecker
from quire.frontend.output_processor import split_ranking
from quire.frontend.stop_matcher import StopAutomaton
from quire.multimodal import check_spans, content_hashes
from quire.sampling_params import (
    MAX_BAD_WORDS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
    parse_sampling_params,
)
from quire.scheduling_params import MAX_NAME_LENGTH, SchedulingParams
from quire.structured_output import StructuredOutput
from quire.triton.dialects import Translation, rows, translate
from quire.triton.result_cache import Recording, Results, nothing_said
from quire.triton.scheduling_fields import (
    ALIASES,
    HEADERS,
    SCHEDULING_FIELDS,
    TRACE_HEADERS,
    parse_scheduling_params,
)
from quire.validation import (
    as_embedding,
    check_prompt,
    check_prompt_length,
    check_prompt_logprobs,
    check_token_parameters,
)
from quire_ensemble import client_json
from quire_ensemble.chat_format import FIELD as CHAT_FORMAT
from quire_ensemble.chat_format import ChatFormat, parse_chat_format
from quire_ensemble.errors import InputError, in_line, shown
from quire_ensemble.generator_schema import (
    CONTROL_INPUTS,
    INPUTS,
    MAX_PROMPTS,
    PROMPT_INPUTS,
    SAMPLING_INPUTS,
    SCHEDULING_INPUTS,
    TENSORRT_LLM_INPUTS,
    outputs_of,
)

_SPECS = {spec.name: spec for spec in (*TENSORRT_LLM_INPUTS, *INPUTS)}
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
_NAME = converters.name(MAX_NAME_LENGTH)
_CONTROL["lora_name"] = _NAME
_LAST_OUTPUTS = frozenset({"stop_reason", "timing", "num_reasoning_tokens"})
"""Known when a choice has ended; what asks for one of them gets it with the last response."""
CHAT_OUTPUTS = frozenset({"reasoning_output", "tool_calls"})
"""Outputs that an answer to chat messages has besides its text."""
_LOGPROB_OUTPUTS = frozenset({"logprobs", "cumulative_logprob", "cum_log_probs", "output_log_probs"})
_PROMPT_NAMES = tuple(spec.name for spec in PROMPT_INPUTS)

_SEQUENCE_END = 2  # TRITONSERVER_REQUEST_FLAG_SEQUENCE_END

VLLM_DEFAULTS = SamplingParams(temperature=1.0, max_tokens=16)
"""Sampling defaults of vllm_backend, which does not ask the checkpoint for its own."""
VLLM_STREAM_WITH_PROMPT = (
    "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
)
"""Error message of vllm_backend for a stream that shall begin with its prompt; its clients compare it."""
VLLM_NO_ADAPTERS = "LoRA feature is not enabled."
"""Error message of vllm_backend for a request that names an adapter where there are none."""
MAX_SEQUENCES = 1024
"""Choices of all of a request's prompts together."""

MAX_WORD_TOKENS = 4096
"""Token ids of all words of a list."""
MAX_BIASED_WORDS = 1024

_MOST_ENTRIES = {
    "text_input": MAX_PROMPTS,
    "stop": MAX_STOP_STRINGS,
    "stop_words": MAX_STOP_STRINGS,
    "sampling_param_stop": MAX_STOP_STRINGS,
    "stop_words_list": 2 * MAX_WORD_TOKENS,
    "bad_words_list": 2 * MAX_WORD_TOKENS,
    "embedding_bias_words": MAX_BIASED_WORDS,
    "embedding_bias_weights": MAX_BIASED_WORDS,
    "bad_words": MAX_BAD_WORDS,
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
}
_EMBEDS = ("image_embeds", "prompt_embeds")
_PER_TOKEN = {"image_spans": 2, "position_ids": 3}
"""Elements for each token of the longest prompt; `image_embeds` has a row."""

# Triton's own request parameters. Of HTTP generate they reach a model as they are, from elsewhere by the
# request's methods. `id` is what HTTP generate calls the request id.
_RESERVED = frozenset(
    {
        "id",
        "priority",
        "timeout",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "headers",
        "binary_data_output",
    }
)


@dataclass(slots=True)
class RawRequest:
    """A copy of what a Triton request holds; nothing is checked yet."""

    tensors: dict[str, list[Any]]
    """Input name to its elements, flat; BYTES elements are `bytes`."""
    shapes: dict[str, tuple[int, ...]]
    parameters: str
    external_id: str
    requested_outputs: frozenset[str]
    arrived_at: float = 0.0
    """CLOCK_MONOTONIC seconds; deadlines count from here."""
    timeout_us: int = 0
    """Triton's own timeout; 0: none."""
    correlation_id: str = ""
    sequence_end: bool = False
    embeds: SharedBuffer | DeviceBuffer | None = None
    """`image_embeds` or `prompt_embeds`, where the request has rows of it."""
    num_bytes: int = 0
    """Bytes of its texts."""


@dataclass(slots=True)
class ParsedRequest:
    """A request the engine may be given."""

    prompt_token_ids: list[int]
    params: SamplingParams
    external_id: str
    outputs: frozenset[str]
    """Outputs of every response."""
    final_outputs: frozenset[str]
    """Outputs of the last response."""
    stream: bool = False
    stream_interval: int = 0
    """Tokens in which a response is due; 0: not by their number."""
    stream_interval_ms: int = 0
    """Milliseconds after a stream's response in which the next is due; 0: not by time. Without either the
    load decides (`triton/pacing.py`)."""
    cancel: bool = False
    """Ends the running request with the same external id, and generates nothing."""
    cache_control: CacheCommand | None = None
    """A command for `EngineCore.control`, instead of a generation."""
    stops: StopAutomaton | None = None
    """Automaton of `params.stop`; made here, as it takes milliseconds that no other should wait for."""
    scheduling: SchedulingParams = field(default_factory=SchedulingParams)
    arrived_at: float = 0.0
    """CLOCK_MONOTONIC seconds."""
    form: str = "quire"
    """How tensors are written: "batched" with TensorRT-LLM's ranks, else as the dialect has them."""
    hides_logprobs: bool = False
    """Whether they are asked for by the sum alone: vllm_backend's `logprobs` is null then."""
    cumulative: bool = False
    """Whether every response repeats what those before it said."""
    is_chat: bool = False
    """Whether the prompt was chat messages."""
    num_best: int = 0
    """Choices to tell, as of `split_ranking`."""
    new_answer: Callable[[], Answer] | None = None
    """Makes the parser of a choice's answer to chat messages; None: the text is not parsed."""
    skips_empty: bool = False
    """Whether outputs of CHAT_OUTPUTS are left out of responses for which they are empty."""
    others: list[ParsedRequest] = field(default_factory=list)
    """The same for prompts 1, 2, ... of a request with several."""
    echo: str = ""
    """Prompt text that precedes the output (exclude_input_in_output=false)."""
    is_prompt_alone: bool = False
    """Whether no token is wanted (max_tokens 0): the one that the engine adds is not told."""
    embeds: EmbedsMessage | None = None
    """Points into memory that lives as long as `buffer` is open."""
    buffer: SharedBuffer | DeviceBuffer | None = None
    adapter: str = ""
    """Name of the LoRA adapter; empty: none."""
    adapter_digest: str = ""
    """Digest of the adapter's content, hexadecimal; empty: not known here, or no adapter."""
    results: Results | None = None
    """Results to replay instead of asking the engine, for all prompts together; None: the engine is asked."""
    recording: Recording | None = None
    """Recording of the engine's outputs for the result cache; None: they are not kept."""

    def of_item(self, item: int) -> ParsedRequest:
        return self.others[item - 1] if item else self


UNPARSED = ParsedRequest([], SamplingParams(), "", frozenset(), frozenset())
"""Stands for a request that is refused before it is parsed."""


class RequestParser:
    """Checks requests against one model.

    Args:
        tokenizer: a `quire_ensemble.tokenizer.Tokenizer`; None: only token ids are accepted.
        defaults: sampling defaults of the checkpoint.
        info: the engine's limits; a callable since a restarted engine may answer differently.
        decoupled: whether the model may stream.
        batched: whether its tensors have a batch dimension.
        declared: outputs that the model's configuration declares, which may be others than ours; None: ours.
        grammars: checks `structured_output`; None: there is no tokenizer to check it with.
        adapters: whether there are any, and whether clients may load them.
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

    def read(self, request: Any) -> RawRequest:
        """Copies a `pb_utils.InferenceRequest`: its tensors die when `execute` returns.

        Raises:
            InvalidArgumentError: the id or another text is not UTF-8, or the id or a tensor is larger than
                any that could be right.
            UnavailableError: the embeddings of all requests here would take more than `max_embeds_bytes`.
        """
        info = self.info()
        raw = RawRequest(
            tensors={},
            shapes={},
            # First, as HTTP generate repeats it as a parameter.
            external_id=_NAME("id", _utf8("id", request.request_id)),
            parameters=_utf8("parameters", request.parameters),
            requested_outputs=frozenset(_utf8("outputs", request.requested_output_names)),
            arrived_at=time.monotonic(),
            timeout_us=request.timeout(),
            correlation_id=str(_utf8("sequence_id", request.correlation_id) or ""),
            sequence_end=bool(request.flags() & _SEQUENCE_END),
        )
        _check_size("parameters", len(raw.parameters), client_json.MAX_BYTES)
        for tensor in request.inputs():
            name = tensor.name()
            if name in _EMBEDS and raw.embeds is not None:
                raise InvalidArgumentError("prompt_embeds", "must not be given with image_embeds")
            if name == "prompt_embeds":
                raw.tensors[name] = []  # that the prompt comes by it; the rows are in `embeds`
            if name in _EMBEDS and not tensor.is_cpu():
                raw.embeds = DeviceBuffer(tensor.to_dlpack(), self.config.max_embeds_bytes)
                continue
            array = tensor.as_numpy()
            self._check_elements(name, array, info)
            if name in _EMBEDS:
                raw.shapes[name] = array.shape
                if array.size:
                    rows_of_all = array.reshape(-1, array.shape[-1])
                    raw.embeds = SharedBuffer(rows_of_all, self.config.max_embeds_bytes)
                continue
            values = array.reshape(-1).tolist()
            if array.dtype == np.object_:
                raw.num_bytes += self._check_text(name, values)
            raw.tensors[name], raw.shapes[name] = values, array.shape
        return raw

    def _check_elements(self, name: str, array: np.ndarray, info: EngineInfo) -> None:
        """Refuses by its number of elements what is no good whatever the elements are."""
        rows = max(1, array.shape[0]) if self.batched and array.ndim else 1
        if rows > MAX_PROMPTS:
            raise InvalidArgumentError(name, f"a batch of at most {MAX_PROMPTS} is allowed, got {rows}")
        if _SPECS[name].dims == (1,) or array.dtype == np.bool_:
            if array.size != rows:
                raise InvalidArgumentError(name, f"must hold exactly one element, got shape {array.shape}")
        elif name == "input_ids":
            check_prompt_length(array.size // rows, info.max_model_len)
        else:
            most = _MOST_ENTRIES.get(name)
            if name == "embedding_bias":
                most = info.vocab_size
            if most is None:
                most = info.max_model_len * _PER_TOKEN.get(name, info.embeds_size)
            if array.size > most * rows:
                raise InvalidArgumentError(name, f"at most {most} elements are allowed, got {array.size}")
            if name == "text_input" and not array.size:
                raise InvalidArgumentError(name, "must hold at least one text")

    def _check_text(self, name: str, values: list[bytes]) -> int:
        """The bytes of a STRING tensor; refuses those that no request needs."""
        num_bytes = sum(map(len, values))
        most = self.config.max_prompt_bytes if name in _PROMPT_NAMES else client_json.MAX_BYTES
        _check_size(name, num_bytes, most)
        return num_bytes

    def parse(self, raw: RawRequest) -> ParsedRequest:
        """Raises InvalidArgumentError naming the field and the limit; has no effect then."""
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
        """A request, or one row of a batch."""
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
        parameters, headers = _parameters(raw)
        parameters = translation.values(parameters)
        cancel = translation.cancel
        if isinstance(parameters.get("stop"), bool):
            cancel = parameters.pop("stop") or cancel
        from_json = translation.values(_json_parameters(raw))
        control = {
            name: _CONTROL[name](name, value)
            for source in (parameters, from_json, _typed(raw, _CONTROL.keys()))
            for name, value in _pop_named(source, _CONTROL).items()
            if value is not None
        }
        stream = _streams(control)
        if stream and not self.decoupled:
            raise InvalidArgumentError(
                "stream", "this model is not decoupled and answers once; use its decoupled variant"
            )
        stated = (
            _typed(raw, _SCHEDULING_NAMES),
            _pop_named(from_json, (*SCHEDULING_FIELDS, *ALIASES)),
            _pop_named(parameters, SCHEDULING_FIELDS),
        )
        if self.config.tenant_from_header_only:
            _check_tenant(stated, headers)
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

        typed = _typed(raw, _SAMPLING_NAMES)
        for name, value in translation.sampling.items():
            typed[name] = [*value, *typed.get(name, [])] if isinstance(value, list) else value
        if self.batched and "beam_width" in typed:
            typed.setdefault("n", typed["beam_width"])  # TensorRT-LLM returns every beam
        is_prompt_alone = self._form == "quire" and _wants_no_token(typed, from_json, parameters)
        params = self._sampling(typed, from_json, parameters)
        if translation.bad_words_ids:
            ids = params.bad_words_ids + translation.bad_words_ids
            params = msgspec.structs.replace(params, bad_words_ids=ids)
        num_prompts = max(1, len(raw.tensors.get("text_input", ())))
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
        is_embedding = "embedding" in final_outputs
        if is_embedding:
            params = as_embedding(params, self.info().hidden_size)
        elif params.dimensions:
            raise InvalidArgumentError("dimensions", "is of an embedding, and none is asked for")
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
        prompts, chat = self._prompts(raw, info)
        if is_embedding:
            chat = None  # there is no answer to be read
        if "prompt_embeds" in raw.tensors:
            if params.prompt_logprobs is not None:
                raise InvalidArgumentError("prompt_logprobs", "a prompt given as prompt_embeds has no tokens")
            if control.get("exclude_input_in_output") is False:
                raise InvalidArgumentError(
                    "exclude_input_in_output", "must be true: a prompt given as prompt_embeds has no text"
                )
            echo_wanted = False
        for token_ids, _ in prompts:
            check_prompt_logprobs(params, len(token_ids))
        params, new_answer = prepare_answer(self.chat_parsing, params, chat, self._check_grammar)
        check_token_parameters(params, info.vocab_size)
        skips_empty = raw.requested_outputs == self._all_outputs
        if new_answer is not None and skips_empty:
            beside = CHAT_OUTPUTS & self._all_outputs
            outputs, final_outputs = outputs | beside, final_outputs | beside
        params, num_best = split_ranking(params)
        embeds = _embeds(raw, len(prompts[0][0]), info)
        stops = StopAutomaton(params.stop) if params.stop else None
        first, *others = (
            ParsedRequest(
                token_ids,
                params,
                raw.external_id,
                outputs,
                final_outputs,
                stream=stream,
                stream_interval=interval,
                stream_interval_ms=interval_ms,
                cumulative=stream and control.get("output_mode") == "cumulative",
                scheduling=scheduling,
                arrived_at=raw.arrived_at,
                echo=self._echo(token_ids, text, params) if echo_wanted else "",
                is_prompt_alone=is_prompt_alone and not is_embedding,
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
            for token_ids, text in prompts
        )
        first.others = others
        if first.is_prompt_alone and params.prompt_logprobs is None:
            first.results = nothing_said([params.n] * len(prompts))
        return first

    def _echo(self, token_ids: list[int], text: str, params: SamplingParams) -> str:
        """The prompt as text; decoded where it was given otherwise and there is a tokenizer."""
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
            InvalidArgumentError: the adapter is not listed, and the dialect is vllm_backend's; in its words.
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
        """Tokens and milliseconds: the request's own, or the model's where it states neither."""
        if _INTERVALS.keys().isdisjoint(control):
            return self.config.stream_interval, self.config.stream_interval_ms
        return control.get("stream_interval", 0), control.get("stream_interval_ms", 0)

    def _sampling(
        self, typed: Mapping[str, Any], from_json: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> SamplingParams:
        stated = (typed, from_json, _with_lists_of_strings(parameters))
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
        self, raw: RawRequest, info: EngineInfo
    ) -> tuple[list[tuple[list[int], str]], ChatFormat | None]:
        """Token ids of each prompt, and its text where it was given as one; and what chat messages say of
        their answer."""
        given = [name for name in _PROMPT_NAMES if name in raw.tensors]
        if len(given) != 1:
            found = ", ".join(given) if given else "none"
            raise InvalidArgumentError(
                "prompt", f"exactly one of {', '.join(_PROMPT_NAMES)} must be given, got {found}"
            )
        name = given[0]
        values = raw.tensors[name]
        chat = _chat_format(raw)
        if name == "input_ids":
            if not values:
                raise InvalidArgumentError(name, "must hold at least one token")
            check_prompt(values, vocab_size=info.vocab_size, max_model_len=info.max_model_len)
            return [(values, "")], chat
        if name == "prompt_embeds":
            num_rows = 0 if raw.embeds is None else raw.embeds.shape[0]
            if not num_rows:
                raise InvalidArgumentError(name, "must hold at least one row")
            check_prompt_length(num_rows, info.max_model_len)
            return [([0] * num_rows, "")], chat  # placeholders: no token is known
        if self.tokenizer is None:
            raise InvalidArgumentError(name, "this checkpoint has no tokenizer: send input_ids")
        if name == "messages":
            if chat is not None:
                raise InvalidArgumentError(CHAT_FORMAT, "must not be given beside messages, which say it")
            token_ids, chat = self._encode_messages(values[0], info)
            return [(token_ids, "")], chat
        if len(values) == 1:
            return [self._encode(name, values[0], info)], chat
        prompts = []
        for item, value in enumerate(values):
            try:
                prompts.append(self._encode(name, value, info))
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"{name}[{item}]", error.reason) from None
        return prompts, chat

    def _encode_messages(self, value: bytes, info: EngineInfo) -> tuple[list[int], ChatFormat]:
        assert self.tokenizer is not None
        try:
            token_ids, chat = self.tokenizer.encode_chat(
                value, max_bytes=self.config.max_prompt_bytes, max_tokens=info.max_model_len - 1
            )
        except InputError as error:
            raise InvalidArgumentError(error.field, error.reason) from None
        check_prompt(token_ids, vocab_size=info.vocab_size, max_model_len=info.max_model_len)
        return token_ids, chat

    def _encode(self, name: str, value: bytes, info: EngineInfo) -> tuple[list[int], str]:
        assert self.tokenizer is not None
        try:
            token_ids = self.tokenizer.encode_bytes(name, value, max_tokens=info.max_model_len - 1)
        except InputError as error:
            raise InvalidArgumentError(error.field, error.reason) from None
        check_prompt(token_ids, vocab_size=info.vocab_size, max_model_len=info.max_model_len)
        return token_ids, value.decode("utf-8")


def _parameters(raw: RawRequest) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Request parameters that are ours, and what forwarded headers state, the one that counts first.

    Triton forwards a header as a parameter of that name, over HTTP as the client wrote it and over gRPC in
    lower case. Whatever else an operator's pattern lets through is not ours: no field of ours has a hyphen.
    What HTTP generate has for Triton itself (timeout, sequence_id) is moved to where the others have it.
    """
    try:
        pairs: list[tuple[str, Any]] = json.loads(raw.parameters or "{}", object_pairs_hook=list)
    except ValueError as error:
        raise InvalidArgumentError("parameters", f"cannot be read: {error}") from None
    values = dict(pairs)
    if not raw.timeout_us and "timeout" in values:
        raw.timeout_us = integer(0, 2**63 - 1)("timeout", values["timeout"])
    if not raw.correlation_id and values.get("sequence_id"):
        raw.correlation_id = str(values["sequence_id"])
        raw.sequence_end = boolean("sequence_end", values.get("sequence_end", False))
    headers = [
        {name: value} for header, name in HEADERS.items() for key, value in pairs if key.lower() == header
    ]
    parameters = {
        key: value
        for key, value in values.items()
        if not (_is_header(key) or key in _RESERVED or key.startswith("triton_"))
        and key.lower() not in TRACE_HEADERS
    }
    return parameters, headers


def _check_tenant(stated: Iterable[Mapping[str, Any]], headers: Iterable[Mapping[str, Any]]) -> None:
    """Refuses a tenant that does not come from a header.

    A client's request parameter may have a header's name, and nothing tells them apart; beside the header
    that the gateway sets, another value shows.
    """
    if any(source.get("tenant") is not None for source in stated):
        raise InvalidArgumentError("tenant", "must be given as a header here (tenant_from_header_only)")
    found = {header["tenant"] for header in headers if "tenant" in header}
    if len(found) > 1:
        raise InvalidArgumentError("tenant", f"must be given once, got {len(found)} values")


def _is_header(key: str) -> bool:
    """A field of ours with hyphens for underscores is a mistake to be told, and no header."""
    return "-" in key and key.replace("-", "_") not in _SPECS


def _chat_format(raw: RawRequest) -> ChatFormat | None:
    """Parses the input `chat_format`; None: it is missing, or empty, as a model that tokenizes sends it for a
    text."""
    value: bytes = raw.tensors.get(CHAT_FORMAT, [b""])[0]
    if not value:
        return None
    try:
        return parse_chat_format(value)
    except InputError as error:
        raise InvalidArgumentError(error.field, error.reason) from None


def _json_parameters(raw: RawRequest) -> dict[str, Any]:
    """The object in `sampling_parameters`."""
    field = "sampling_parameters"
    value: bytes = raw.tensors.get(field, [b""])[0]
    if not value.strip():
        return {}
    try:
        found = client_json.parse_json(field, value)
    except InputError as error:
        raise InvalidArgumentError(error.field, error.reason) from None
    if not isinstance(found, dict):
        raise InvalidArgumentError(field, "must be a JSON object")
    return found


def _typed(raw: RawRequest, names: Set[str]) -> dict[str, Any]:
    """Values of the typed tensors among `names`."""
    typed: dict[str, Any] = {}
    for name in names & raw.tensors.keys():
        values = [_text(name, value) for value in raw.tensors[name]]
        typed[name] = values if _SPECS[name].dims == (-1,) else values[0]
    return typed


def _wants_no_token(*sources: dict[str, Any]) -> bool:
    """Whether `max_tokens` is 0, which becomes 1 in the sources; the first that states it counts.

    The engine knows no request without a token: its first one costs nothing beside the prompt."""
    stated = [
        (source, name)
        for source in sources
        for name in ("max_tokens", "max_new_tokens")
        if source.get(name) is not None
    ]
    zeros = [str(source[name]).strip() == "0" for source, name in stated]
    for (source, name), is_zero in zip(stated, zeros, strict=True):
        if is_zero:
            source[name] = 1
    return bool(zeros) and zeros[0]


def _with_lists_of_strings(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Request parameters, which carry only scalars, with lists where JSON text spells a list of strings.

    Only there: what comes as a tensor, in JSON or from Python can be a list, so its text is one string,
    whatever it looks like. "[INST]" and "[1]" are strings here too.
    """
    return {name: _spelled_list(name, value) for name, value in parameters.items()}


def _spelled_list(name: str, value: Any) -> Any:
    if name not in ("stop", "bad_words") or not isinstance(value, str):
        return value
    try:
        found = client_json.parse_json(name, value)
    except InputError:
        return value
    strings = isinstance(found, list) and all(isinstance(entry, str) for entry in found)
    return found if strings else value


def _pop_named(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Moves what has one of `names` out of `values`."""
    return {name: values.pop(name) for name in names if name in values}


def _embeds(raw: RawRequest, num_prompt_tokens: int, info: EngineInfo) -> EmbedsMessage | None:
    """Checks the image inputs against each other and the model; None where the prompt has no image."""
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
    return EmbedsMessage(raw.embeds.descriptor(), spans, hashes, packed)


def _streams(control: Mapping[str, Any]) -> bool:
    """Whether tokens are sent as they come: what `stream` says, or `output_mode` where it is given alone."""
    mode = control.get("output_mode")
    if mode is None:
        return bool(control.get("stream", False))
    stream = mode != "final"
    if control.get("stream", stream) != stream:
        raise InvalidArgumentError("output_mode", f"{mode!r} contradicts stream={not stream}")
    return stream


def _together(rows: list[ParsedRequest]) -> ParsedRequest:
    """One request of the rows of a batch, which must agree in how they are answered."""
    first, *others = rows
    for other in others:
        for name in ("cancel", "stream", "cumulative", "stream_interval", "stream_interval_ms"):
            if getattr(other, name) != getattr(first, name):
                field_name = "output_mode" if name == "cumulative" else name
                raise InvalidArgumentError(field_name, "must be the same in all rows of a batch")
        if bool(other.params.dimensions) != bool(first.params.dimensions):
            raise InvalidArgumentError("return_embedding", "must be the same in all rows of a batch")
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
    """Outputs of every response, and of the last one.

    A client that names outputs gets exactly these, each time (a step behind the generator in an ensemble
    fails without its inputs). One that names none is sent all by Triton's rules; then every response
    carries what a stream consists of, the last one also what is known once, and the rest comes on request:
    a tensor costs about 10 us of CPU on either side of the stub.
    """
    if requested != all_outputs:
        return requested, requested
    asked = {name.removeprefix("return_") for name, wanted in control.items() if wanted is True} & requested
    if "embedding" in asked:
        only = frozenset({"finish_reason", "num_input_tokens", *asked})
        return only, only
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


def _text(field: str, value: Any) -> Any:
    return _utf8(field, value.decode) if isinstance(value, bytes) else value


def _utf8(field: str, read: Callable[[], Any]) -> Any:
    """Calls `read`, a getter of Triton's or a `bytes.decode`, and returns its result.

    Triton decodes texts only in its getters, and HTTP lets any bytes through.

    Raises:
        InvalidArgumentError: the bytes are not UTF-8; names `field`.
    """
    try:
        return read()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(field, f"invalid UTF-8 at byte {error.start}") from None


def _check_size(field: str, num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise InvalidArgumentError(field, f"at most {most} bytes, got {num_bytes}")
