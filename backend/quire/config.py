"""EngineConfig: everything an engine is told, as frozen dataclasses with one documented field per key.

The keys of `1/quire.json` (and the same keys as `config.pbtxt` parameters) are the field names below, flat.
Unknown keys are refused by name: a typo must not silently become a default.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from quire.converters import unless_none
from quire.errors import ConfigError
from quire.request.scheduling_params import MAX_DRAFT_TOKENS
from quire_common.errors import shown

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


def parse_bytes(value: Any) -> Any:
    """Bytes from text such as "512MiB", "2GB"; what is not such text is returned as it is."""
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is None:
        return value
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


MAX_INTERVAL_MS = 60_000
"""Longest time between two responses of a stream that a request or a model may ask for."""

# Token positions and block ids are int32 in the kernels.
_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=1, le=2**24)]
_Bytes = Annotated[int, Meta(ge=0, le=2**50), parse_bytes]
_Share = Annotated[float, Meta(gt=0, le=1)]
_Seconds = Annotated[float, Meta(ge=0, le=10**9)]
_Milliseconds = Annotated[int, Meta(ge=0, le=10**12)]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The checkpoint, and the device and precision it is computed with."""

    model: str = ""
    """Directory of a Hugging Face checkpoint, or a .gguf file."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Computation and KV type; auto: the checkpoint's own, bfloat16 with a GGUF file of quantised weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where a CUDA device is visible."""
    max_model_len: _Tokens | None = None
    """Longest prompt plus output in tokens; None: what config.json allows."""
    quantization: Literal["int8", "int4", "w8a8", "w4a8", "fp8", "dequantized"] | None = None
    """Weights at load: int8 (one scale per output feature) or int4 (one for 32 input features), with
    activations of `dtype`; w8a8: weights as int8, and the inputs of linear layers quantised as they come, one
    scale for 64 of a row, for products in integers; w4a8: the same with weights of four bits, as int4 has
    them, one scale for 32 of a row, and the output head of w8a8; fp8: weights in e4m3, one scale per output
    feature, and on GPUs from compute capability 9.0 on the inputs too, one scale per row, but not those of
    the output head (on the CPU weights are widened at load: its accuracy, not its size, as of w4a8 on a GPU,
    where w8a8 is int8); dequantized: numbers of `dtype`, whatever the checkpoint has; None: as they are,
    quantised ones too. The KV cache is not concerned."""
    load_format: Literal["auto", "safetensors", "bin", "gguf", "dummy"] = "auto"
    """bin: pickles, read with weights_only; dummy: random weights of the shapes in config.json, which is all
    that the directory must hold, for measurements; auto: safetensors or gguf."""
    packed_weights_size: _Bytes = 8 * 1024**3
    """Most bytes below QUIRE_CACHE_DIR of weights as CPU kernels compute with them, for the next start. Those
    that take longer to read than to pack are not kept. 0: none are."""
    num_threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """CPU threads of the engine; None: OMP_NUM_THREADS, else the cores it may use, by affinity and by
    the quota of its control group."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    """Seed of requests that state none (combined with a counter: such requests do not repeat)."""
    tokenizer: str = ""
    """Directory of the tokenizer; empty: the checkpoint's own."""
    draft_model: str = ""
    """Directory or .gguf file of a smaller checkpoint with the same vocabulary, which guesses what
    `num_draft_tokens` allows to be tried; empty: prompt lookup alone guesses."""
    attention_backend: str = "auto"
    """Implementation of attention: auto (the fastest one that can), cuda, flashinfer (if installed), triton,
    reference, or an instruction set of the processor (avx2, avx512, avx512_bf16, amx). One that cannot do
    what the model needs is refused at start, with the reason and what the others can."""
    model_impl: Literal["auto", "quire", "transformers"] = "auto"
    """Whose code computes the model: quire, which has families of its own; transformers, with our attention
    over the KV cache, but without LoRA adapters, quantisation, ranks and CUDA graphs; auto: quire where it
    has the family."""
    model_class: str = ""
    """Code that computes the model, a `quire.models.interface.Model`: "file.py:Class", in the model's version
    directory, or "package.module:Class"; empty: `model_impl` decides. What is not named is not imported."""
    logits_processors: dict[str, str] = field(default_factory=dict)
    """Code that requests may name to change their logits: name to "file.py:Class", in the model's version
    directory, or "package.module:Class". What is not listed is not imported."""
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    """Processes (ranks) that compute the model together, each its part of every layer: on GPUs one on each,
    else with its share of the cores. It must divide the numbers of heads and of inner features."""
    enforce_eager: bool = False
    """Records no CUDA graphs; on cuda only."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Size of the paged KV cache: `num_blocks`, else `kv_cache_memory`, else a fraction of the memory."""

    block_size: Literal[1, 2, 4, 8, 16, 32, 64, 128] = 16
    """Tokens per block. With layers that keep states the default is replaced by the multiple of 64 with
    which the keys and values of a block are as large as a state; other values are used as stated."""
    num_blocks: _Tokens | None = None
    """Blocks in the pool."""
    kv_cache_memory: Annotated[int, Meta(ge=1, le=2**50), parse_bytes] | None = None
    """Bytes of the pool, of each rank's part of it where there are several."""
    gpu_memory_utilization: _Share = 0.9
    """Fraction of the device's memory for weights, workspace and the pool together; on cuda only."""
    enable_prefix_caching: bool = True
    """Whether requests that begin alike share blocks, also with those that have ended."""
    cpu_memory_utilization: _Share | None = None
    """Fraction of the memory free after loading, in the machine and in its control groups, for the pool on
    cpu. It is never larger than `max_num_seqs` sequences of `max_model_len` need. Unset: 2 GiB, or one such
    sequence where that is more, but at most a quarter of the free memory."""
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """auto: the computation's type, which is all that latent attention can have; int8, fp8 (e4m3): with one
    scale per token and head."""
    cache_ttl_s: _Seconds = 0.0
    """Seconds after which unused cached blocks are forgotten; 0: never."""
    max_pinned_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Most of the pool that pinned prefixes and sessions may hold; 0: nothing is pinned."""
    session_ttl_s: _Seconds = 300.0
    """How long the blocks of a conversation are pinned after its last turn."""
    host_cache_memory: _Bytes = 0
    """Bytes of the host-memory tier, for evicted prefixes and swapped requests; 0: none."""
    disk_cache_directory: str = ""
    """Directory in which the disk tier keeps blocks across restarts; empty: no disk tier."""
    disk_cache_size: _Bytes = 1024**3
    """Most bytes in `disk_cache_directory`."""
    kv_connector: str = ""
    """Further tier as "module:Class", a `quire.kv_tiers.KVConnector`; empty: none."""
    kv_connector_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for it."""
    result_cache_memory: _Bytes = 0
    """Bytes per frontend for the results of deterministic requests, which are replayed when they come again;
    0: none."""
    result_cache_ttl_s: _Seconds = 3600.0
    """Seconds after which a result is forgotten; 0: never."""
    result_cache_url: str = ""
    """Redis or Valkey that keeps results too, for all servers of the same weights (redis://host:6379/0);
    empty: none."""
    kv_events_endpoint: str = ""
    """ZeroMQ address where KV events are published (tcp://127.0.0.1:5557); empty: none."""
    kv_events_replay_endpoint: str = ""
    """ZeroMQ address of a ROUTER that repeats missed events; empty: none."""
    kv_events_topic: str = ""
    """Topic of the events."""


@dataclass(frozen=True, kw_only=True)
class TenantLimits:
    """Limits of one tenant; None: no limit."""

    weight: Annotated[float, Meta(gt=0, le=10**9)] = 1.0
    """Share under queue_policy=fair."""
    tokens_per_minute: Annotated[int, Meta(ge=1, le=2**62)] | None = None
    """Input and output tokens; as many at once, refilled continuously."""
    max_running: _Count | None = None
    """Requests that may run at a time; more wait."""
    max_waiting: _Count | None = None
    """Requests that may wait; more are answered UNAVAILABLE."""

    @property
    def needs_account(self) -> bool:
        return (self.tokens_per_minute, self.max_running, self.max_waiting) != (None, None, None)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of the queue."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=2**16)] = 64
    """Most requests in one step."""
    max_num_batched_tokens: _Count = 512
    """Token budget of one step, prefill and decode together."""
    max_waiting_requests: Annotated[int, Meta(ge=1, le=2**31)] = 1024
    """Requests that may wait; one more is answered UNAVAILABLE."""
    max_waiting_tokens: Annotated[int, Meta(ge=1, le=2**62)] = 4_194_304
    """Prompt tokens that may wait; a request that would exceed them is answered UNAVAILABLE."""
    max_prefill_tokens_per_request: _Tokens | None = None
    """Largest chunk of one prompt in a step; None: the whole budget."""
    scheduler: Literal["continuous", "static"] = "continuous"
    """static: the next batch begins when the last request of this one has ended (a baseline
    for measurements)."""
    batch_policy: Literal["mixed", "prefill_first", "decode_first"] = "mixed"
    """mixed: decodes and prompt chunks share a step; prefill_first: prompts have steps of their own, which go
    first; decode_first: prompts are computed when nothing decodes, or when the knobs below say so."""
    schedule_interval: _Count = 1
    """Waiting requests join every n steps (or when nothing runs)."""
    waiting_running_ratio: Annotated[float, Meta(ge=0, le=10**6)] = 0.0
    """Waiting requests join also when there are more than this many per running one; 0: no such rule."""
    queue_policy: Literal["fcfs", "priority", "longest_prefix", "shortest_first", "fair"] = "fcfs"
    """Order of the queue: fcfs, priority, longest_prefix, shortest_first or fair (over tenants)."""
    ageing_s: _Seconds = 10.0
    """Waiting that is worth one class of priority, or 1000 tokens of shortness; 0: no ageing."""
    kv_reservation: Literal["on_demand", "no_evict", "predicted"] = "on_demand"
    """on_demand: blocks are taken as tokens come, with preemption; no_evict: a request is admitted when its
    longest output fits; predicted: when the outputs expected of all requests fit."""
    preemption_mode: Literal["recompute", "swap", "auto"] = "recompute"
    """recompute, swap (to the host tier) or auto: what costs less by measured rates."""
    max_long_prefills: _Count | None = None
    """Most requests at a time with a prompt that needs more than one step; None: no limit."""
    tenants: dict[str, TenantLimits] = field(default_factory=dict)
    """Limits by tenant; "*" stands for each one that is not named."""
    max_predicted_ttft_ms: _Milliseconds = 0
    """Requests that would wait longer for their first token are answered UNAVAILABLE at once; 0: no limit."""
    default_ttft_deadline_ms: _Milliseconds = 0
    """Deadline of the first token for requests that state none; 0: none."""
    default_deadline_ms: _Milliseconds = 0
    """Deadline of the last token for requests that state none; 0: none."""
    async_scheduling: bool | None = None
    """Whether the next step is launched before the tokens of the present one are known to the host; None: on
    cuda. A request that ends then has one row more, whose result is dropped."""
    num_draft_tokens: Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)] = 0
    """Most tokens that a step tries of each request beyond its next one, as they followed the same tokens
    before (prompt lookup) or `draft_model` says; fewer where that would not be faster. The output stays the
    same. 0: none."""
    watchdog_s: Annotated[float, Meta(ge=0, le=10**6)] = 30.0
    """How long the engine may be silent while it has work before it is killed and another takes its place;
    each 1024 tokens of a step prolong it by as much. 0: for ever."""
    trace_file: str = ""
    """File to which the engine writes one JSON line per step; empty: none."""

    def launches_ahead(self, device: str) -> bool:
        """Whether the next step is launched before this one's tokens are known: `async_scheduling`, or where
        that is None, on all devices but the CPU."""
        return device != "cpu" if self.async_scheduling is None else self.async_scheduling

    @property
    def max_row_tokens(self) -> int:
        """Most tokens of one request in a step."""
        return self.max_prefill_tokens_per_request or self.max_num_batched_tokens


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """LoRA adapters: directories as PEFT saves them, which requests name (`lora_name`)."""

    enable_lora: bool = False
    """Whether requests may name adapters. False: nothing is kept ready for them."""
    max_loras: Annotated[int, Meta(ge=1, le=256)] = 4
    """Slots for adapters among the model's weights: most different ones in a step."""
    max_lora_rank: Annotated[int, Meta(ge=1, le=512)] = 16
    """Largest rank of an adapter, for which each slot has memory."""
    max_cpu_loras: _Count = 32
    """Adapters whose weights are kept in host memory, `max_loras` at least; those of others are read again
    from their directories when they are needed."""
    lora_modules: dict[str, str] = field(default_factory=dict)
    """Adapters that are loaded at the start: name to directory."""
    lora_root: str = ""
    """Directory below which adapters may lie that a control command loads; empty: none can be loaded so."""


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """The part of the Triton side: models that differ in these keys alone share an engine."""

    stream_interval: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Tokens per streamed response after the first, for requests that state neither this nor the next. 0 in
    both: one while few streams are open, more where responses would take the time that tokens need."""
    stream_interval_ms: Annotated[int, Meta(ge=0, le=MAX_INTERVAL_MS)] = 0
    """Shortest time between two responses of a stream, unless `stream_interval` tokens came before."""
    tool_parser: Literal["auto", "none", "harmony", "deepseek", "mistral", "glm", "hermes", "llama"] = "auto"
    """How the model writes calls of tools; auto: as its chat template shows; none: they stay text."""
    reasoning_parser: Literal["auto", "none", "harmony", "think", "magistral", "seed"] = "auto"
    """How the model writes reasoning; auto: as its chat template shows; none: it stays in text_output."""
    startup_timeout_s: Annotated[float, Meta(gt=0, le=10**9)] = 600.0
    """How long a frontend waits for the engine to be ready."""
    max_pause_s: Annotated[float, Meta(ge=0, le=10**9)] = 300.0
    """How long requests wait for another engine when theirs has died, to go on in it, before they end with
    UNAVAILABLE; 0: they end at once."""
    drain_s: Annotated[float, Meta(ge=0, le=10**9)] = 20.0
    """How long requests may go on when their model is unloaded: then they end with finish reason shutdown and
    UNAVAILABLE."""
    max_prompt_bytes: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 16 * 1024 * 1024
    """Longest text_input or messages in bytes; texts that cannot fit `max_model_len` are refused below it.
    The texts of all requests that wait to be tokenized may have four times as many; more are answered
    UNAVAILABLE."""
    max_embeds_bytes: _Bytes = 2 * 1024**3
    """Most memory for the image embeddings of all requests of one frontend, on host and device together; more
    are answered UNAVAILABLE."""
    tenant_from_header_only: bool = False
    """Whether a request that names its `tenant` by other means than the forwarded header is refused: for
    gateways that authenticate clients and set the header of every request."""
    dialect: Literal["quire", "vllm", "tensorrt_llm"] = "quire"
    """Whose habits count where a request leaves something open: vllm and tensorrt_llm begin the text of an
    answer that is not streamed with the prompt, unless `exclude_input_in_output` is true. With vllm the
    defaults are temperature 1 and 16 tokens, responses hold text alone and what a `return_*` asks for, and
    `logprobs` and `finish_reason` have vllm_backend's form. The names of all are understood in any case."""
    allow_sleep: bool = False
    """Whether clients may put the engine to sleep, in which it answers nobody, and wake it."""
    allow_cache_control: bool = True
    """Whether clients may look into the cache and empty it (`cache_control`)."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All parts. Built by `from_mapping`, which checks every key."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    adapters: AdapterConfig = AdapterConfig()
    frontend: FrontendConfig = FrontendConfig()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Builds a configuration from flat keys.

        Args:
            values: field name to value; numbers, booleans and objects may be text (Triton parameters are),
                numbers of bytes also such as "512MiB".

        Raises:
            ConfigError: unknown keys (the nearest known one is suggested), wrong types, values out of range:
                all of them at once.
        """
        given = _convert_all("", _KINDS, values)
        config = cls(
            **{
                name: part(**{key: given[key] for key in _kinds(part) if key in given})
                for name, part in _PARTS.items()
            }
        )
        if config.scheduler.preemption_mode == "swap" and not config.cache.host_cache_memory:
            raise ConfigError("preemption_mode=swap needs host_cache_memory")
        adapters = config.adapters
        if (adapters.lora_modules or adapters.lora_root) and not adapters.enable_lora:
            raise ConfigError("lora_modules and lora_root need enable_lora=true")
        if adapters.enable_lora and config.model.tensor_parallel_size > 1:
            raise ConfigError("enable_lora needs tensor_parallel_size=1: ranks do not divide adapters")
        if config.model.draft_model and not config.scheduler.num_draft_tokens:
            raise ConfigError("draft_model needs num_draft_tokens above 0")
        return config

    def to_mapping(self) -> dict[str, Any]:
        """Flat keys that differ from the defaults, as JSON has them; `from_mapping` of them gives this
        configuration."""
        default = _flat(EngineConfig())
        return {key: value for key, value in _flat(self).items() if value != default[key]}

    @property
    def of_engine(self) -> EngineConfig:
        """The part that an engine is made of; frontends of equal ones share it."""
        return dataclasses.replace(self, frontend=FrontendConfig())

    def replace(self, **values: Any) -> EngineConfig:
        """A copy with some flat keys changed."""
        return EngineConfig.from_mapping({**self.to_mapping(), **values})


def _flat(config: EngineConfig) -> dict[str, Any]:
    parts: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    return {key: value for part in parts.values() for key, value in part.items()}


@functools.cache
def _kinds(part: type) -> dict[str, Any]:
    """Annotation of every field."""
    return get_type_hints(part, include_extras=True)


_PARTS = _kinds(EngineConfig)
_KINDS = {key: kind for part in _PARTS.values() for key, kind in _kinds(part).items()}


def problems_by_key(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Problems of single keys of a configuration, by key; keys without any are left out."""
    found = {}
    for key, value in values.items():
        try:
            _convert_all("", _KINDS, {key: value})
        except ConfigError as error:
            found[key] = error.problems
    return found


def choices(key: str) -> tuple[Any, ...]:
    """Values that a key with a list of them may have."""
    return get_args(unless_none(_KINDS[key]))


def _convert_all(where: str, kinds: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as the annotations of their keys want them; `where` precedes a key in complaints.

    Raises:
        ConfigError: has a problem for each key that is wrong.
    """
    converted: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in values.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(kinds))}"
            problems.append(f"{where}configuration key {key!r:.80} is unknown; {hint}")
            continue
        try:
            converted[key] = _convert(where + key, kinds[key], value)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return converted


def _convert(name: str, kind: Any, value: Any) -> Any:
    """A value, or the text of one, as the annotation `kind` wants it."""
    if unless_none(kind) is not kind and (value is None or value == ""):
        return None
    kind = unless_none(kind)
    is_group = dataclasses.is_dataclass(kind)
    is_object = is_group or get_origin(kind) is dict
    given = value
    try:
        if is_object:
            given = json.loads(value or "{}") if isinstance(value, str) else value
        elif parse_bytes in get_args(kind):
            given = parse_bytes(value)
        elif isinstance(value, str) and kind is not str:
            given = value.strip()
        given = msgspec.convert(given, dict[str, Any] if is_object else kind, strict=False)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError):
        raise ConfigError(f"{name} must be {_described(kind)}, got {shown(value)}") from None
    if is_group:
        return kind(**_convert_all(f"{name}: ", _kinds(kind), given))
    if is_object:
        return {
            entry: _convert(f"{name}: {entry!r:.80}", get_args(kind)[1], each)
            for entry, each in given.items()
        }
    return given


def _described(kind: Any) -> str:
    """Values that an annotation allows, in words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    base, *notes = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    words = {str: "text", bool: "true or false", int: "an integer", float: "a number"}.get(
        base, "a JSON object"
    )
    for note in notes:
        if isinstance(note, Meta):
            words += f" in [{note.ge}, {note.le}]" if note.gt is None else f" in ({note.gt}, {note.le}]"
        else:
            words += ' or text such as "512MiB"'
    return words


QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json that say how the weights are quantised; the first one with a value counts."""


def load_config_file(path: Path) -> dict[str, Any]:
    """Reads a quire.json.

    Raises:
        ConfigError: the file is not a JSON object; names the file.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a JSON object of configuration keys")
    return {key: value for key, value in values.items() if not key.startswith("//")}
