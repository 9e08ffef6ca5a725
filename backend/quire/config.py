"""EngineConfig: everything an engine is told, as frozen dataclasses with one documented field per key.

The keys of `1/quire.json` (and the same keys as `config.pbtxt` parameters) are the field names below, flat.
Unknown keys are refused by name: a typo must not silently become a default.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
LOAD_FORMATS = ("auto", "safetensors", "bin", "gguf")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which checkpoint runs where."""

    model: str = ""
    """Directory of a Hugging Face checkpoint, or a .gguf file."""
    tokenizer: str = ""
    """Directory of the tokenizer; empty: the checkpoint's own."""
    dtype: str = "auto"
    """Computation and KV type: auto (the checkpoint's `torch_dtype`), float32, bfloat16 or float16."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where a CUDA device is visible."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None: what config.json allows."""
    load_format: str = "auto"
    """auto, safetensors, bin (pickles, read with weights_only) or gguf."""
    allow_pickle: bool = False
    """Whether `auto` may fall back to .bin/.pt files (always read with weights_only)."""
    num_threads: int | None = None
    """CPU threads of the engine; None: OMP_NUM_THREADS, else the cores it may use."""
    seed: int = 0
    """Seed of requests that state none (combined with a counter: such requests do not repeat)."""
    enforce_eager: bool = False
    """On cuda: no CUDA graphs."""


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
    """On cuda: fraction of the device's memory for weights, workspace and the pool together."""
    enable_prefix_caching: bool = True
    """Whether requests that begin alike share blocks, also with those that have ended."""
    cpu_memory_utilization: float = 0.25
    """On cpu: fraction of the memory free after loading that the pool may take at most; it takes no
    more than `max_num_seqs` sequences of `max_model_len` need."""


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


@dataclass(frozen=True, kw_only=True)
class FrontendConfig:
    """The part of the Triton side."""

    cancel_poll_ms: int = 50
    """How often each open request is asked whether its client has gone."""
    coalesce_ms: int = 20
    """Under backlog a request gets at most one response per this time."""
    stream_interval: int = 1
    """Tokens per streamed response after the first; 1: as they come."""
    startup_timeout_s: float = 600.0
    """How long a frontend waits for the engine to be ready."""
    engine_restart_limit: int = 5
    """Restarts of a crashed engine within `engine_restart_window_s` before requests are refused for good."""
    engine_restart_window_s: float = 300.0
    max_prompt_bytes: int = 16 * 1024 * 1024
    """Longest text_input or messages in bytes."""
    max_embeds_bytes: int = 2 * 1024**3
    """Most memory for the image embeddings of all requests of one frontend; more are answered UNAVAILABLE."""
    trace_file: str = ""
    """Where the engine writes one JSON line per step; empty: nowhere."""


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

    def replace(self, **values: Any) -> EngineConfig:
        """A copy with some flat keys changed."""
        return EngineConfig.from_mapping({**self.to_mapping(), **values})

    def check(self) -> None:
        """Raises ConfigError on the first value out of its range."""
        _one_of("dtype", self.model.dtype, DTYPES)
        _one_of("device", self.model.device, DEVICES)
        _one_of("load_format", self.model.load_format, LOAD_FORMATS)
        cache, scheduler, frontend = self.cache, self.scheduler, self.frontend
        _at_least("max_model_len", self.model.max_model_len, 1)
        _at_least("num_threads", self.model.num_threads, 1)
        _at_least("num_blocks", cache.num_blocks, 1)
        _at_least("kv_cache_memory", cache.kv_cache_memory, 1)
        if cache.block_size not in (1, 2, 4, 8, 16, 32, 64, 128):
            raise ConfigError(f"block_size must be a power of two in [1, 128], got {cache.block_size}")
        for key in ("gpu_memory_utilization", "cpu_memory_utilization"):
            if not 0.0 < getattr(cache, key) <= 1.0:
                raise ConfigError(f"{key} must be in (0, 1], got {getattr(cache, key)}")
        _at_least("max_num_seqs", scheduler.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", scheduler.max_num_batched_tokens, 1)
        _at_least("max_waiting_requests", scheduler.max_waiting_requests, 1)
        _at_least("max_waiting_tokens", scheduler.max_waiting_tokens, 1)
        _at_least("max_prefill_tokens_per_request", scheduler.max_prefill_tokens_per_request, 1)
        _at_least("cancel_poll_ms", frontend.cancel_poll_ms, 1)
        _at_least("stream_interval", frontend.stream_interval, 1)
        _at_least("coalesce_ms", frontend.coalesce_ms, 0)
        _at_least("max_prompt_bytes", frontend.max_prompt_bytes, 1)
        _at_least("max_embeds_bytes", frontend.max_embeds_bytes, 0)


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


def _at_least(key: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise ConfigError(f"{key} must be at least {low}, got {value}")


_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


def parse_bytes(key: str, value: Any) -> int:
    """Bytes from a number or from text such as "512MiB", "2GB"."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f'{key} must be a number of bytes or text such as "512MiB", got {value!r}')
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _convert(key: str, annotation: str, value: Any) -> Any:
    if annotation.endswith("| None"):
        if value is None or value == "":
            return None
        annotation = annotation.removesuffix("| None").strip()
    if key == "kv_cache_memory":
        return parse_bytes(key, value)
    if annotation == "str":
        if isinstance(value, str):
            return value
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
    except ValueError:
        raise ConfigError(f"{key} must be of type {annotation}, got {value!r}") from None


def load_config_file(path: Path) -> dict[str, Any]:
    """Reads a quire.json.

    Raises:
        ConfigError: the file is not a JSON object; names the file.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a JSON object of configuration keys")
    return {key: value for key, value in values.items() if not key.startswith("//")}
