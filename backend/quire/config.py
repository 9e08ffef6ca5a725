"""EngineConfig: the configuration of an engine and its frontends, as frozen dataclasses with a field per key.

Keys, in `1/quire.json` or as parameters in `config.pbtxt`, are the names of the fields of ModelConfig,
CacheConfig, SchedulerConfig, AdapterConfig and FrontendConfig, flat. The other dataclasses describe keys
whose values are objects. Unknown keys are refused by name: a typo must not silently become a default.
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
    """Returns the number of bytes that a text such as "512MiB" or "2GB" states; other values unchanged."""
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is None:
        return value
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


MAX_INTERVAL_MS = 60_000
"""Largest `stream_interval_ms` that a request or a model may state, in milliseconds."""

DEFAULT_BLOCK_SIZE = 16
"""Tokens per block where `block_size` is unset; in models whose layers keep states, there may be more."""

# Token positions and block ids are int32 in the kernels.
_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Count = Annotated[int, Meta(ge=1, le=2**24)]
_Bytes = Annotated[int, Meta(ge=0, le=2**50), parse_bytes]
_Share = Annotated[float, Meta(gt=0, le=1)]
_Seconds = Annotated[float, Meta(ge=0, le=10**9)]
_Milliseconds = Annotated[int, Meta(ge=0, le=10**12)]


MTP = "mtp"
"""Value of `draft_model` for the checkpoint's own head for multi-token prediction."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Keys of the model: its checkpoint, and how it is computed (device, precision, quantisation, ranks and
    more)."""

    model: str = ""
    """Directory of a checkpoint, or a .gguf file. A model's quire.json or config.pbtxt may also name a
    repository of Hugging Face's hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of activations, and of keys and values unless `kv_cache_dtype` says otherwise. auto: the
    checkpoint's own; bfloat16 with a GGUF file of quantised weights, and on the CPU with quantised weights of
    a float16 checkpoint. If the checkpoint states none: float32, or bfloat16 with quantised weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the device of an instance of KIND_CPU or KIND_GPU; otherwise cuda if a CUDA device is visible,
    else cpu."""
    max_model_len: _Tokens | None = None
    """Longest prompt plus output in tokens; None: what the checkpoint allows, for an encoder no more than a
    step can compute."""
    quantization: Literal["int8", "int4", "w8a8", "w4a8", "fp8", "dequantized"] | None = None
    """How the weights of linear layers are quantised at load; some layers, such as routers, are left as they
    are. int8: one scale per output feature. int4: in each output feature one scale per 32 input features; the
    output head is int8. w8a8: int8 weights; the inputs are also quantised, at run time, with one scale per 64
    numbers of a row, so that products are of integers. w4a8: weights as in int4, inputs with one scale per 32
    numbers of a row; the output head is w8a8. fp8: weights in e4m3 with one scale per output feature; on GPUs
    from compute capability 9.0 on usually the inputs too, with one scale per row, except those of the output
    head. dequantized: numbers of `dtype`, whatever the checkpoint has. None: as the checkpoint has them,
    quantised or not, or numbers of `dtype` where there is no kernel for that. With fp8 on the CPU and w4a8 on
    a GPU, weights are rounded to that type and then kept in `dtype`, which saves no memory; w8a8 on a GPU is
    int8. The KV cache is not affected."""
    load_format: Literal["auto", "safetensors", "bin", "gguf", "dummy"] = "auto"
    """auto: safetensors or gguf; bin: pickles, read with weights_only; dummy: random weights of the shapes in
    config.json, for measurements (the directory needs no other file)."""
    packed_weights_size: _Bytes = 8 * 1024**3
    """Most bytes of packed weights, in the CPU kernels' form and of all models together, that are kept on
    disk for later starts, in the cache folder (QUIRE_CACHE_DIR, usually ~/.cache/quire). A model's packed
    weights are kept only if packing took more than a second, and longer than the rest of loading. 0: packed
    weights are neither kept nor read."""
    num_threads: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Threads that compute steps on the CPU; with several ranks, those of each rank. None: OMP_NUM_THREADS,
    else one for each core that affinity and the control group's quota allow; several ranks share them."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    """Seed of requests that state none. It is combined with a counter, so such requests differ. 0: at each
    start a random seed takes its place."""
    tokenizer: str = ""
    """Directory of the tokenizer, or a .gguf file; empty: the checkpoint's own."""
    draft_model: str = ""
    """Directory or .gguf file of a smaller checkpoint with a vocabulary of the same size, or of an EAGLE
    head, which proposes draft tokens (see `num_draft_tokens`). mtp: the checkpoint's own head for multi-token
    prediction proposes them. Empty: only prompt lookup does."""
    attention_backend: str = "auto"
    """Implementation of attention: auto (usually the fastest one that supports the model), cuda, flashinfer
    (if installed), triton, reference, or an instruction set of the processor (avx2, avx512, avx512_bf16,
    amx). One that does not support the model is refused at start, with the reason and what the others
    support."""
    model_impl: Literal["auto", "quire", "transformers"] = "auto"
    """Whose code computes the model, unless `model_class` or an entry point decides. quire: our code for the
    model's family. transformers: its code with our attention over the KV cache, without LoRA adapters,
    quantisation, ranks and CUDA graphs. auto: quire if it has the family, else transformers."""
    model_class: str = ""
    """Code that computes the model, a `quire.models.interface.Model`: "file.py:Class", in the model's version
    directory, or "package.module:Class". Empty: for an architecture without code of ours, an entry point
    that an installed package has for it, if there is one; else `model_impl` decides."""
    logits_processors: dict[str, str] = field(default_factory=dict)
    """Logits processors that requests may name: name to "file.py:Class", in the model's version directory, or
    "package.module:Class". Requests can name no others."""
    classifier_from_token: str = ""
    """Two tokens, no and yes, of a reranker that answers with one of them, such as "no,yes" of
    Qwen3-Reranker. The score of a prompt is then the probability that the next token is yes, given that it is
    one of the two, or its logit if the request wants that. Empty: scores, if any, are the checkpoint's."""
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of processes (ranks) that compute the model together, each a part of every layer. On GPUs each
    rank has a GPU of its own; on the CPU they share the cores. It must divide the numbers of query heads and
    of inner features. It must also divide the number of KV heads, or be a multiple of it."""
    max_resident_experts: Annotated[int, Meta(ge=1, le=2**16)] | None = None
    """Most routed experts of a layer that are in memory at a time; on cpu only. The others are read from
    files in the cache folder (QUIRE_CACHE_DIR, usually ~/.cache/quire) when a token needs them, usually in
    place of those that were not used for longest. Tokens are the same. None: all experts are in memory."""
    enforce_eager: bool = False
    """Whether all steps run without CUDA graphs; on cuda only. False: some steps run as graphs, where the
    model allows it."""

    @property
    def draft_checkpoint(self) -> str:
        """Path of the draft model's checkpoint; empty: there is none beside the model's."""
        return "" if self.draft_model == MTP else self.draft_model


@dataclass(frozen=True, kw_only=True)
class KVConnectorConfig:
    """A tier of the KV cache that is a plug-in."""

    connector: str = ""
    """Class of the tier as "module:Class", a `quire.kv_tiers.KVConnector`; empty: there is none."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for the class, in addition to `block_bytes` and `fingerprint`."""


@dataclass(frozen=True, kw_only=True)
class ResultCacheConfig:
    """Cache of whole results; it is on with `memory` or `url`."""

    memory: _Bytes = 0
    """Bytes of memory in each frontend for results; 0: none are kept there."""
    ttl_s: _Seconds = 3600.0
    """Seconds after which a result expires, counted in memory and in Redis separately; 0: it does not."""
    url: str = ""
    """URL of a Redis or Valkey that keeps results, for all servers with equal weights and settings
    (redis://host:6379/0); empty: none."""

    @property
    def is_on(self) -> bool:
        return bool(self.memory or self.url)


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Addresses and topic of KV events."""

    endpoint: str = ""
    """ZeroMQ address where events are published (tcp://127.0.0.1:5557); empty: none are."""
    replay_endpoint: str = ""
    """ZeroMQ address of a ROUTER that repeats recent events on request; empty: there is none."""
    topic: str = ""
    """Topic of the events."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache, its tiers and events, and the result cache. The size of the KV cache is
    `num_blocks`, else `kv_cache_memory`, else it depends on the memory. (For an encoder, only `num_blocks`
    counts.)"""

    block_size: Literal[1, 2, 4, 8, 16, 32, 64, 128] | None = None
    """Tokens per block. None: 16; in a model that has attention as well as states larger than a layer's keys
    and values of 16 tokens, the smallest multiple of 64 tokens whose keys and values are at least as large as
    a state."""
    num_blocks: _Tokens | None = None
    """Blocks in the pool."""
    kv_cache_memory: Annotated[int, Meta(ge=1, le=2**50), parse_bytes] | None = None
    """Bytes of the pool, a draft model's pool included; with several ranks, of each rank's part. It does not
    count if `num_blocks` is set."""
    gpu_memory_utilization: _Share = 0.9
    """Fraction of the device's memory for the pool and all that is in use when the pool is made, also by
    other processes; on cuda only, if neither `num_blocks` nor `kv_cache_memory` is set."""
    enable_prefix_caching: bool = True
    """Whether requests that begin alike can share blocks, also with requests that have ended."""
    cpu_memory_utilization: _Share | None = None
    """Fraction of the memory free after loading, in the machine and in its control groups, for the pool on
    cpu, if neither `num_blocks` nor `kv_cache_memory` is set. The pool is then not larger than `max_num_seqs`
    sequences of `max_model_len` need. Unset: 2 GiB, or one such sequence where that is more, but at most a
    quarter of the free memory."""
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """Type of keys and values. auto: the computation's type; int8, fp8 (e4m3): with one scale per token and
    head. Models with latent attention, encoders and some models in transformers' code allow auto only."""
    cache_ttl_s: _Seconds = 0.0
    """Seconds without use after which blocks cached in the pool are forgotten, for requests that state no
    time of their own; 0: there is no limit."""
    max_pinned_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Largest fraction of the pool for pinned prefixes and sessions; 0: nothing is pinned."""
    session_ttl_s: _Seconds = 300.0
    """Most seconds for which the blocks of a conversation stay pinned after its latest turn."""
    host_cache_memory: _Bytes = 0
    """Bytes of the host-memory tier, for copies of cached blocks and for swapped requests; 0: there is no
    such tier."""
    disk_cache_directory: str = ""
    """Directory in which the disk tier keeps blocks across restarts; empty: no disk tier."""
    disk_cache_size: _Bytes = 1024**3
    """Most bytes of blocks in `disk_cache_directory`; several engines that write there may exceed it a
    little."""
    kv_connector: KVConnectorConfig = KVConnectorConfig()
    """A further tier, which is a plug-in."""
    result_cache: ResultCacheConfig = ResultCacheConfig()
    """Cache of results of deterministic requests, with which the same requests are answered again."""
    kv_events: KVEventsConfig = KVEventsConfig()
    """Events of stored and removed blocks, for routers."""

    @property
    def tokens_per_block(self) -> int:
        """Tokens per block: `block_size`, or DEFAULT_BLOCK_SIZE if it is unset. In `EngineCore.config`,
        `block_size` is always set, to the number in use."""
        return DEFAULT_BLOCK_SIZE if self.block_size is None else self.block_size


@dataclass(frozen=True, kw_only=True)
class TenantLimits:
    """Limits and weight of one tenant; a limit that is None does not apply."""

    weight: Annotated[float, Meta(gt=0, le=10**9)] = 1.0
    """Share of the service under queue_policy=fair, relative to the weights of the other tenants."""
    tokens_per_minute: Annotated[int, Meta(ge=1, le=2**62)] | None = None
    """Input and output tokens per minute: the size of a bucket that is refilled continuously. While it holds
    less than one token, new requests are refused."""
    max_running: _Count | None = None
    """Number of running requests at which further ones of the tenant wait. Each choice counts once it has
    forked; a request may fork beyond the limit."""
    max_waiting: _Count | None = None
    """Number of waiting requests at which new ones of the tenant are answered UNAVAILABLE."""

    @property
    def needs_account(self) -> bool:
        return (self.tokens_per_minute, self.max_running, self.max_waiting) != (None, None, None)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Keys of the scheduler: limits of a step and of the queue, policies, deadlines, drafts and more."""

    max_num_seqs: Annotated[int, Meta(ge=1, le=2**16)] = 64
    """Most sequences in one step; each choice of a request is a sequence."""
    max_num_batched_tokens: _Count = 512
    """Token budget of one step, prefill and decode together."""
    max_waiting_requests: Annotated[int, Meta(ge=1, le=2**31)] = 1024
    """Requests that may wait; one more is answered UNAVAILABLE."""
    max_waiting_tokens: Annotated[int, Meta(ge=1, le=2**62)] = 4_194_304
    """Most tokens of all waiting requests together when a new request is accepted, including its own. A
    request that would exceed this is answered UNAVAILABLE."""
    max_prefill_tokens_per_request: _Tokens | None = None
    """Largest chunk of one prompt in a step; None: the whole budget."""
    batch_policy: Literal["mixed", "prefill_first", "decode_first", "static"] = "mixed"
    """mixed: decodes and prompt chunks share a step; prefill_first: prompts have steps of their own, which go
    first; decode_first: prompts are computed when nothing decodes, and in every 16th step; static: the next
    batch begins when the last request of this one has ended (a baseline for measurements)."""
    queue_policy: Literal["fcfs", "priority", "longest_prefix", "shortest_first", "fair"] = "fcfs"
    """Order of the queue: fcfs, priority, longest_prefix, shortest_first or fair (over tenants)."""
    ageing_s: _Seconds = 10.0
    """Seconds of waiting that count as much as one class in priority, or as 1000 tokens in shortest_first. In
    longest_prefix, seconds of waiting after which a request goes before those that have waited less than
    that. 0: waiting does not count."""
    kv_reservation: Literal["on_demand", "no_evict", "predicted"] = "on_demand"
    """Room that the pool must have before a waiting request is admitted beside running ones, in addition to
    that for its known tokens. on_demand: for one more token; blocks for its output are allocated as tokens
    come, with preemption. no_evict: for its longest output. predicted: for the outputs that are expected of
    all requests."""
    preemption_mode: Literal["recompute", "swap", "auto"] = "recompute"
    """Treatment of a preempted request: recompute, swap (to the host tier, if that has room), or auto, the
    one that seems to cost less by measured rates."""
    max_long_prefills: _Count | None = None
    """Number of requests that are computing a prompt of more than `max_num_batched_tokens` tokens at which
    another request with so many uncached tokens waits, unless it is urgent and preempts. None: no limit."""
    tenants: dict[str, TenantLimits] = field(default_factory=dict)
    """Limits by tenant; "*" stands for each tenant that is not named."""
    max_predicted_ttft_ms: _Milliseconds = 0
    """Most milliseconds predicted until the first token of a new request. A request that would take longer is
    answered UNAVAILABLE at once. 0: no limit."""
    default_ttft_deadline_ms: _Milliseconds = 0
    """Deadline of the first token, in milliseconds after arrival, for requests that state none; 0: none."""
    default_deadline_ms: _Milliseconds = 0
    """Deadline of the last token, in milliseconds after arrival, for requests that state none; 0: none."""
    async_scheduling: bool | None = None
    """Whether the next step is launched before the tokens of the present one are known to the host; None: on
    cuda. A request that ends by a stop token may then have one row more, whose result is dropped."""
    num_draft_tokens: Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)] = 0
    """Most draft tokens of a request in a step (speculative decoding). They are proposed by prompt lookup, or
    by `draft_model`. Fewer are tried if that is faster. The output stays the same, except for rounding that
    depends on the batch. 0: none."""
    watchdog_s: Annotated[float, Meta(ge=0, le=10**6)] = 30.0
    """Seconds for which an engine with work, or with an unread message, may be silent. Then it is killed and
    replaced by another one. Each 1024 tokens of the steps in flight prolong the time by as much. 0: no
    limit."""
    trace_file: str = ""
    """File to which the engine appends its trace: JSON lines, one per step, besides a header and events;
    empty: none."""

    def launches_ahead(self, device: str) -> bool:
        """Whether the next step is launched before this one's tokens are known: `async_scheduling`, or if
        that is None, on all devices but the CPU."""
        return device != "cpu" if self.async_scheduling is None else self.async_scheduling

    @property
    def max_row_tokens(self) -> int:
        """Most tokens of one request in a step, drafts aside."""
        return self.max_prefill_tokens_per_request or self.max_num_batched_tokens


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """LoRA adapters: directories in PEFT's format; a request names its adapter by `lora_name`."""

    enable_lora: bool = False
    """Whether requests may name adapters. False: no memory is reserved for them."""
    max_loras: Annotated[int, Meta(ge=1, le=256)] = 4
    """Slots for adapters beside the model's weights: the most different adapters in a step."""
    max_lora_rank: Annotated[int, Meta(ge=1, le=512)] = 16
    """Largest rank of an adapter, for which each slot has memory."""
    max_cpu_loras: _Count = 32
    """Most adapters whose weights are kept in host memory; `max_loras` counts if it is larger. Other weights
    are read again from their directories when they are needed."""
    lora_modules: dict[str, str] = field(default_factory=dict)
    """Adapters that are loaded at the start: name to directory."""
    lora_root: str = ""
    """Directory that must contain every adapter that a cache command loads; empty: commands load none."""


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """Keys of the frontends in Triton. Models of one server whose configurations differ only in these can
    share an engine."""

    stream_interval: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """Number of tokens at which the next response of a stream is due, for requests that state neither
    `stream_interval` nor `stream_interval_ms`; the first token and the end are sent at once. 0 here and in
    `stream_interval_ms`: a response for each step while few streams are open, fewer if sending would slow
    down the rest."""
    stream_interval_ms: Annotated[int, Meta(ge=0, le=MAX_INTERVAL_MS)] = 0
    """Milliseconds from a response of a stream until the next one is due, unless `stream_interval` tokens or
    the end come before, for requests that state neither of the two keys. 0: `stream_interval` decides."""
    tool_parser: Literal["auto", "none", "harmony", "deepseek", "mistral", "glm", "hermes", "llama"] = "auto"
    """Format in which the model writes tool calls; auto: as its chat template shows; none: calls stay in
    text_output."""
    reasoning_parser: Literal["auto", "none", "harmony", "think", "magistral", "seed"] = "auto"
    """Format in which the model writes reasoning; auto: as its chat template shows; none: it stays in
    text_output."""
    startup_timeout_s: Annotated[float, Meta(gt=0, le=10**9)] = 600.0
    """Seconds that a frontend waits for the engine to be ready."""
    max_pause_s: Annotated[float, Meta(ge=0, le=10**9)] = 300.0
    """Most seconds that requests wait for another engine when theirs has died, to go on in it, before they
    end with UNAVAILABLE; 0: they end at once."""
    drain_s: Annotated[float, Meta(ge=0, le=10**9)] = 20.0
    """Seconds that requests may go on once the frontend has noticed that their model is being unloaded. Then
    they end with finish reason shutdown and UNAVAILABLE."""
    max_prompt_bytes: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 16 * 1024 * 1024
    """Most bytes of a request's text_input or messages, all texts together. Shorter texts are refused too if
    they cannot fit `max_model_len`. The texts of all requests that wait to be tokenized in a frontend may
    have four times as many bytes; a request that would exceed this is answered UNAVAILABLE."""
    max_embeds_bytes: _Bytes = 2 * 1024**3
    """Most bytes of the embeddings (of images or prompts) of all requests of one frontend, on host and device
    together. A request whose embeddings would exceed it is answered UNAVAILABLE."""
    tenant_from_header_only: bool = False
    """Whether a request that names its `tenant` by other means than the forwarded header is refused: for
    gateways that authenticate clients and set the header of every request."""
    dialect: Literal["quire", "vllm", "tensorrt_llm"] = "quire"
    """The backend whose defaults are used for what a request does not state. vllm and tensorrt_llm begin the
    text of an answer that is not streamed with the prompt, unless `exclude_input_in_output` is true. With
    vllm the defaults are temperature 1 and 16 tokens, and responses to clients that name no outputs have text
    and the outputs that a `return_*` input asks for; `logprobs` and `finish_reason` have vllm_backend's form,
    except on models with a batch dimension. The names of all backends' inputs are understood in each
    dialect."""
    allow_sleep: bool = False
    """Whether clients may put the engine to sleep, so that it refuses requests, and wake it."""
    allow_cache_control: bool = True
    """Whether clients may give the commands of `cache_control` that look into the cache or empty it, list
    other tenants' requests, load or unload adapters, or record profiles."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The whole configuration of an engine and its frontends. `from_mapping` builds it and checks the
    keys."""

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
            ConfigError: unknown keys (known ones are suggested), wrong types or values out of range, all of
                them at once; or keys that contradict each other.
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
        if config.model.draft_model == MTP and config.model.tensor_parallel_size > 1:
            raise ConfigError("draft_model=mtp needs tensor_parallel_size=1: ranks do not divide the head")
        return config

    def to_mapping(self) -> dict[str, Any]:
        """Returns the flat keys that differ from the defaults, as JSON values; `from_mapping` makes this
        configuration of them again, if keys may have these values (`block_size` in `EngineCore.config` may be
        another number)."""
        default = _flat(EngineConfig())
        return {key: value for key, value in _flat(self).items() if value != default[key]}

    @property
    def of_engine(self) -> EngineConfig:
        """Returns this configuration with the default FrontendConfig. Frontends can share an engine only if
        these results are equal."""
        return dataclasses.replace(self, frontend=FrontendConfig())

    def replace(self, **values: Any) -> EngineConfig:
        """Returns a copy with some flat keys changed; raises as `from_mapping`."""
        return EngineConfig.from_mapping({**self.to_mapping(), **values})


def _flat(config: EngineConfig) -> dict[str, Any]:
    parts: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    return {key: value for part in parts.values() for key, value in part.items()}


@functools.cache
def _kinds(part: type) -> dict[str, Any]:
    """Returns the annotation of each field of a dataclass, by name."""
    return get_type_hints(part, include_extras=True)


_PARTS = _kinds(EngineConfig)
_KINDS = {key: kind for part in _PARTS.values() for key, kind in _kinds(part).items()}


def problems_by_key(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Checks each key of a configuration by itself; returns the problems of those that have any, by key."""
    found = {}
    for key, value in values.items():
        try:
            _convert_all("", _KINDS, {key: value})
        except ConfigError as error:
            found[key] = error.problems
    return found


def choices(key: str) -> tuple[Any, ...]:
    """Returns the values in the Literal annotation of a key; None, which an optional key may also have, is
    left out."""
    return get_args(unless_none(_KINDS[key]))


def _convert_all(where: str, kinds: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts values to the types in their keys' annotations; `where` precedes a key in error messages.

    Raises:
        ConfigError: its `problems` have at least one entry for each wrong key.
    """
    converted: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in values.items():
        if key not in kinds:
            objects = [name for name, kind in kinds.items() if dataclasses.is_dataclass(kind)]
            holders = [name for name in objects if key.startswith(f"{name}_")]
            near = holders or difflib.get_close_matches(key, kinds, n=1)
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
    """Converts a value, or its text, to the type in the annotation `kind`; raises ConfigError. For an
    optional type, None and empty text give None."""
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
    """Describes in words the values that an annotation allows."""
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
    """Reads a JSON file such as quire.json. Outermost keys that begin with // are comments and left out.

    Raises:
        ConfigError: the file cannot be read, or is not a JSON object; names the file.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a JSON object of configuration keys")
    return {key: value for key, value in values.items() if not key.startswith("//")}
