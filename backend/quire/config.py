"""EngineConfig: everything an engine is told, as frozen dataclasses with one documented field per key.

The keys of `1/quire.json` (and the same keys as `config.pbtxt` parameters) are the field names below, flat.
Unknown keys are refused by name: a typo must not silently become a default.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "safetensors", "bin", "gguf", "dummy")
QUANTIZATIONS = ("int8", "int4", "w8a8", "fp8")
KV_CACHE_DTYPES = ("auto", "int8", "fp8")
EVICTION_POLICIES = ("lru", "lfu")
SCHEDULERS = ("continuous", "static")
BATCH_POLICIES = ("mixed", "prefill_first", "decode_first")
QUEUE_POLICIES = ("fcfs", "priority", "longest_prefix", "shortest_first", "fair")
KV_RESERVATIONS = ("on_demand", "no_evict", "predicted")
PREEMPTION_MODES = ("recompute", "swap", "auto")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The checkpoint, and the device and precision it is computed with."""

    model: str = ""
    """Directory of a Hugging Face checkpoint, or a .gguf file."""
    dtype: str = "auto"
    """Computation and KV type: auto (the checkpoint's `torch_dtype`), float32, bfloat16 or float16."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where a CUDA device is visible."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None: what config.json allows."""
    quantization: str | None = None
    """Weights at load: int8 (one scale per output feature) or int4 (one for 32 input features), with
    activations of `dtype`; w8a8: weights as int8, and the inputs of linear layers quantised as they come, one
    scale for 64 of a row, for products in integers; fp8: weights in e4m3, one scale per output feature (on
    the CPU they are widened at load: its accuracy, not its size); None: as they are. The KV cache is not
    concerned."""
    load_format: str = "auto"
    """auto, safetensors, bin (pickles, read with weights_only), gguf, or dummy: random weights of the shapes
    in config.json, which is all that the directory must hold; for measurements."""
    allow_pickle: bool = False
    """Whether `auto` may fall back to .bin/.pt files (always read with weights_only)."""
    num_threads: int | None = None
    """CPU threads of the engine; None: OMP_NUM_THREADS, else the cores it may use, by affinity and by
    the quota of its control group."""
    seed: int = 0
    """Seed of requests that state none (combined with a counter: such requests do not repeat)."""
    attention_backend: str = "auto"
    """Implementation of attention: auto (the fastest one that can), cuda, flashinfer (if installed), triton,
    reference, or an instruction set of the processor (avx2, avx512, avx512_bf16, amx). One that cannot do
    what the model needs is refused at start, with the reason and what the others can."""
    worker_process: bool = False
    """Whether the model is computed in a process of its own below the engine's; on the CPU only."""
    enforce_eager: bool = False
    """Records no CUDA graphs; on cuda only."""
    max_graph_tokens: int = 512
    """Most tokens of a step, unless all its rows are decodes, that is computed as CUDA graphs between one
    attention and the next; on cuda only. 0: none."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Size of the paged KV cache: `num_blocks`, else `kv_cache_memory`, else a fraction of the memory."""

    block_size: int = 16
    """Tokens per block."""
    num_blocks: int | None = None
    """Blocks in the pool."""
    kv_cache_memory: int | None = None
    """Bytes of the pool; text such as "512MiB" is accepted."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the device's memory for weights, workspace and the pool together; on cuda only."""
    enable_prefix_caching: bool = True
    """Whether requests that begin alike share blocks, also with those that have ended."""
    cpu_memory_utilization: float = 0.25
    """Fraction of the memory free after loading, in the machine and in its control groups, that on cpu the
    pool may take at most; it takes no more than `max_num_seqs` sequences of `max_model_len` need."""
    kv_cache_dtype: str = "auto"
    """auto (the computation's type), int8 or fp8 (e4m3), both with one scale per token and head."""
    eviction_policy: str = "lru"
    """Order of eviction among cached blocks of equal retention priority: lru or lfu."""
    cache_ttl_s: float = 0.0
    """Seconds after which unused cached blocks are forgotten; 0: never."""
    max_pinned_fraction: float = 0.5
    """Most of the pool that pinned prefixes and sessions may hold; 0: nothing is pinned."""
    session_ttl_s: float = 300.0
    """How long the blocks of a conversation are pinned after its last turn."""
    host_cache_memory: int = 0
    """Bytes of the host-memory tier, for evicted prefixes and swapped requests; 0: none."""
    disk_cache_directory: str = ""
    """Directory in which the disk tier keeps blocks across restarts; empty: no disk tier."""
    disk_cache_size: int = 1024**3
    """Most bytes in `disk_cache_directory`."""
    kv_connector: str = ""
    """Further tier as "module:Class", a `quire.kv_tiers.KVConnector`; empty: none."""
    kv_connector_options: str = ""
    """JSON object of keyword arguments for it."""
    kv_events_endpoint: str = ""
    """ZeroMQ address where KV events are published (tcp://127.0.0.1:5557); empty: none."""
    kv_events_replay_endpoint: str = ""
    """ZeroMQ address of a ROUTER that repeats missed events; empty: none."""
    kv_events_topic: str = ""
    """Topic of the events."""
    kv_events_buffer: int = 10_000
    """Batches of events kept for replay."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of the queue."""

    max_num_seqs: int = 64
    """Most requests in one step."""
    max_num_batched_tokens: int = 512
    """Token budget of one step, prefill and decode together."""
    max_waiting_requests: int = 1024
    """Requests that may wait; one more is answered UNAVAILABLE."""
    max_waiting_tokens: int = 4_194_304
    """Prompt tokens that may wait; a request that would exceed them is answered UNAVAILABLE."""
    max_prefill_tokens_per_request: int | None = None
    """Largest chunk of one prompt in a step; None: the whole budget."""
    scheduler: str = "continuous"
    """continuous, or static: the next batch begins when the last request of this one has ended (a baseline
    for measurements)."""
    batch_policy: str = "mixed"
    """mixed: decodes and prompt chunks share a step; prefill_first: prompts have steps of their own, which go
    first; decode_first: prompts are computed when nothing decodes, or when the knobs below say so."""
    schedule_interval: int = 1
    """Waiting requests join every n steps (or when nothing runs)."""
    waiting_running_ratio: float = 0.0
    """Waiting requests join also when there are more than this many per running one; 0: no such rule."""
    queue_policy: str = "fcfs"
    """Order of the queue: fcfs, priority, longest_prefix, shortest_first or fair (over tenants)."""
    ageing_s: float = 10.0
    """Waiting that is worth one class of priority, or 1000 tokens of shortness; 0: no ageing."""
    kv_reservation: str = "on_demand"
    """on_demand: blocks are taken as tokens come, with preemption; no_evict: a request is admitted when its
    longest output fits; predicted: when the outputs expected of all requests fit."""
    preemption_mode: str = "recompute"
    """recompute, swap (to the host tier) or auto: what costs less by measured rates."""
    max_long_prefills: int | None = None
    """Most requests with a long prompt still being computed at a time; None: no limit."""
    long_prefill_threshold: int = 1024
    """Prompt tokens to compute that make a prompt long."""
    tenants: str = ""
    """JSON object of tenant to its limits (weight, tokens_per_minute, max_running, max_waiting); "*" stands
    for each one that is not named."""
    fairness_input_weight: float = 1.0
    fairness_output_weight: float = 2.0
    """Weights of an input and an output token in a tenant's virtual token counter (arXiv 2401.00588)."""
    max_predicted_ttft_ms: int = 0
    """Requests that would wait longer for their first token are answered UNAVAILABLE at once; 0: no limit."""
    default_ttft_deadline_ms: int = 0
    """Deadline of the first token for requests that state none; 0: none."""
    default_deadline_ms: int = 0
    """Deadline of the last token for requests that state none; 0: none."""
    async_scheduling: bool | None = None
    """Whether the next step is launched before the tokens of the present one are known to the host; None: on
    cuda. A request that ends then has one row more, whose result is dropped."""
    trace_file: str = ""
    """File to which the engine writes one JSON line per step; empty: none."""


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """The part of the Triton side: models that differ in these keys alone share an engine."""

    tokenizer: str = ""
    """Directory of the tokenizer; empty: the checkpoint's own."""
    cancel_poll_ms: int = 50
    """How often each open request is asked whether its client has gone."""
    coalesce_ms: int = 20
    """Shortest time between two responses to a request under backlog."""
    stream_interval: int = 1
    """Tokens per streamed response after the first; 1: as they come."""
    startup_timeout_s: float = 600.0
    """How long a frontend waits for the engine to be ready."""
    max_prompt_bytes: int = 16 * 1024 * 1024
    """Longest text_input or messages in bytes; texts that cannot fit `max_model_len` are refused below it.
    The texts of all requests that wait to be tokenized may have four times as many; more are answered
    UNAVAILABLE."""
    max_embeds_bytes: int = 2 * 1024**3
    """Most memory for the image embeddings of all requests of one frontend, on host and device together; more
    are answered UNAVAILABLE."""
    tenant_from_header_only: bool = False
    """Whether a request that names its `tenant` by other means than the forwarded header is refused: for
    gateways that authenticate clients and set the header of every request."""
    allow_cache_control: bool = True
    """Whether clients may look into the cache and empty it (`cache_control`)."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All parts. Built by `from_mapping`, which checks every key."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    frontend: FrontendConfig = FrontendConfig()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Builds a configuration from flat keys.

        Args:
            values: field name to value; numbers and booleans may be text (Triton parameters are).

        Raises:
            ConfigError: unknown key (the nearest known one is suggested), wrong type, value out of range.
        """
        parts: dict[str, dict[str, Any]] = {name: {} for name in _PARTS}
        for key, value in values.items():
            if key not in _FIELDS:
                near = difflib.get_close_matches(key, _FIELDS, n=1)
                hint = (
                    f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(sorted(_FIELDS))}"
                )
                raise ConfigError(f"configuration key {key!r} is unknown{hint}")
            part, field = _FIELDS[key]
            parts[part][key] = _convert(key, str(field.type), value)
        config = cls(**{name: _PARTS[name](**given) for name, given in parts.items()})
        config.check()
        return config

    def to_mapping(self) -> dict[str, Any]:
        """Flat keys that differ from the defaults; `from_mapping` of them gives this configuration."""
        flat: dict[str, Any] = {}
        for name, kind in _PARTS.items():
            part, default = getattr(self, name), kind()
            for field in dataclasses.fields(part):
                if getattr(part, field.name) != getattr(default, field.name):
                    flat[field.name] = getattr(part, field.name)
        return flat

    @property
    def of_engine(self) -> EngineConfig:
        """The part that an engine is made of; frontends of equal ones share it."""
        return dataclasses.replace(self, frontend=FrontendConfig())

    def replace(self, **values: Any) -> EngineConfig:
        """A copy with some flat keys changed."""
        return EngineConfig.from_mapping({**self.to_mapping(), **values})

    def check(self) -> None:
        """Raises ConfigError on the first value out of its range."""
        _one_of("dtype", self.model.dtype, DTYPES)
        _one_of("device", self.model.device, DEVICES)
        _one_of("load_format", self.model.load_format, LOAD_FORMATS)
        if self.model.quantization is not None:
            _one_of("quantization", self.model.quantization, QUANTIZATIONS)
        cache, scheduler = self.cache, self.scheduler
        _one_of("kv_cache_dtype", cache.kv_cache_dtype, KV_CACHE_DTYPES)
        _one_of("eviction_policy", cache.eviction_policy, EVICTION_POLICIES)
        _one_of("scheduler", scheduler.scheduler, SCHEDULERS)
        _one_of("batch_policy", scheduler.batch_policy, BATCH_POLICIES)
        _one_of("queue_policy", scheduler.queue_policy, QUEUE_POLICIES)
        _one_of("kv_reservation", scheduler.kv_reservation, KV_RESERVATIONS)
        _one_of("preemption_mode", scheduler.preemption_mode, PREEMPTION_MODES)
        for key, (part, _) in _FIELDS.items():
            if (value := getattr(getattr(self, part), key)) is not None and key in RANGES:
                RANGES[key].check(key, value)
        if cache.block_size.bit_count() != 1:
            raise ConfigError(f"block_size must be a power of two in [1, 128], got {cache.block_size}")
        if scheduler.preemption_mode == "swap" and not cache.host_cache_memory:
            raise ConfigError("preemption_mode=swap needs host_cache_memory")


@dataclass(frozen=True)
class Range:
    """Values of a numeric key, the ends included; what is not a number is in none."""

    low: float
    high: float
    excludes_low: bool = False

    def check(self, key: str, value: float) -> None:
        """Raises ConfigError for a value outside."""
        if self.low <= value <= self.high and not (self.excludes_low and value == self.low):
            return
        if self.excludes_low or (isinstance(value, float) and not math.isfinite(value)):
            bounds = f"in {'(' if self.excludes_low else '['}{self.low:g}, {self.high:g}]"
        else:
            bounds = f"at least {self.low:g}" if value < self.low else f"at most {self.high:.12g}"
        raise ConfigError(f"{key} must be {bounds}, got {str(value)[:40]}")


_INT32 = 2**31 - 1
"""Largest token position and block id of the kernels, which have them in int32."""
_COUNT = 2**24
_BYTE_COUNT = 2**50
_SECONDS = 1e9
_MILLISECONDS = 10**12

RANGES = {
    "max_model_len": Range(1, _INT32),
    "num_threads": Range(1, 4096),
    "seed": Range(-(2**63), 2**64 - 1),
    "max_graph_tokens": Range(0, _COUNT),
    "block_size": Range(1, 128),
    "num_blocks": Range(1, _INT32),
    "kv_cache_memory": Range(1, _BYTE_COUNT),
    "gpu_memory_utilization": Range(0, 1, excludes_low=True),
    "cpu_memory_utilization": Range(0, 1, excludes_low=True),
    "cache_ttl_s": Range(0, _SECONDS),
    "max_pinned_fraction": Range(0, 1),
    "session_ttl_s": Range(0, _SECONDS),
    "host_cache_memory": Range(0, _BYTE_COUNT),
    "disk_cache_size": Range(0, _BYTE_COUNT),
    "kv_events_buffer": Range(1, _COUNT),
    "max_num_seqs": Range(1, 2**16),
    "max_num_batched_tokens": Range(1, _COUNT),
    "max_waiting_requests": Range(1, 2**31),
    "max_waiting_tokens": Range(1, 2**62),
    "max_prefill_tokens_per_request": Range(1, _INT32),
    "schedule_interval": Range(1, _COUNT),
    "waiting_running_ratio": Range(0, 1e6),
    "ageing_s": Range(0, _SECONDS),
    "max_long_prefills": Range(1, _COUNT),
    "long_prefill_threshold": Range(1, _INT32),
    "fairness_input_weight": Range(0, 1e6),
    "fairness_output_weight": Range(0, 1e6),
    "max_predicted_ttft_ms": Range(0, _MILLISECONDS),
    "default_ttft_deadline_ms": Range(0, _MILLISECONDS),
    "default_deadline_ms": Range(0, _MILLISECONDS),
    "cancel_poll_ms": Range(1, 60_000),
    "coalesce_ms": Range(0, 60_000),
    "stream_interval": Range(1, _COUNT),
    "startup_timeout_s": Range(0, _SECONDS, excludes_low=True),
    "max_prompt_bytes": Range(1, _INT32),
    "max_embeds_bytes": Range(0, _BYTE_COUNT),
}
"""Allowed values of every numeric key."""

_PARTS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "frontend": FrontendConfig,
}
_FIELDS = {f.name: (part, f) for part, kind in _PARTS.items() for f in dataclasses.fields(kind)}


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key} must be one of {', '.join(allowed)}, got {value!r}")


_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


def parse_bytes(key: str, value: Any) -> int:
    """Bytes from a number or from text such as "512MiB", "2GB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f'{key} must be a number of bytes or text such as "512MiB", got {value!r}')
    power = " kmgt".index(match[2].lower() or " ")
    try:
        return int(float(match[1]) * (1024 if match[3] else 1000) ** power)
    except OverflowError:
        raise ConfigError(f"{key} is larger than any memory: {value!r}") from None


_BYTES = ("kv_cache_memory", "host_cache_memory", "disk_cache_size")
_JSON = ("tenants", "kv_connector_options")
"""Text that holds a JSON object; in quire.json it may be the object itself."""


def _convert(key: str, annotation: str, value: Any) -> Any:
    if annotation.endswith("| None"):
        if value is None or value == "":
            return None
        annotation = annotation.removesuffix("| None").strip()
    if key in _BYTES:
        return parse_bytes(key, value)
    if annotation == "str":
        if isinstance(value, str):
            return value
        if key in _JSON and isinstance(value, dict):
            return json.dumps(value)
        raise ConfigError(f"{key} must be text, got {value!r}")
    if annotation == "bool":
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise ConfigError(f"{key} must be true or false, got {value!r}")
    kind = {"int": int, "float": float}[annotation]
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"{key} must be of type {annotation}, got {value!r}")
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise ConfigError(f"{key} must be of type int, got {value!r}")
    try:
        return kind(value)
    except (ValueError, OverflowError):
        raise ConfigError(f"{key} must be of type {annotation}, got {str(value)[:40]}") from None


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
