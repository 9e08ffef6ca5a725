"""Translates the content of vllm_backend's `1/model.json`, which has vLLM's engine arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.config import QUANTIZATION_KEYS, load_config_file
from quire.errors import ConfigError
from quire_common.errors import shown

logger = logging.getLogger("quire")

FILE = "model.json"
ADAPTERS = "multi_lora.json"
"""File beside `model.json`: directory of each LoRA adapter by its name."""
METRICS = "REPORT_CUSTOM_METRICS"
"""Parameter of config.pbtxt by which vllm_backend shows its metrics."""
_STATS_OFF = "disable_log_stats"
"""Engine argument that turns vllm_backend's metrics off."""

_RENAMED = {"num_gpu_blocks_override": "num_blocks"}
_SAME = frozenset(
    (
        *("model", "tokenizer", "dtype", "load_format", "max_model_len", "seed", "enforce_eager"),
        *("block_size", "gpu_memory_utilization", "kv_cache_dtype", "enable_prefix_caching"),
        *("max_num_seqs", "max_num_batched_tokens", "async_scheduling", "tensor_parallel_size"),
        *("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "model_impl"),
    )
)
"""Arguments whose names are the same here. Their values are checked with the rest of the configuration."""
_VALUES = {
    ("dtype", "half"): "float16",
    ("dtype", "float"): "float32",
    ("kv_cache_dtype", "fp8_e4m3"): "fp8",
    ("load_format", "pt"): "bin",
    ("model_impl", "vllm"): "quire",
}
_EVENTS = "kv_events_config"
"""Argument that is an object, as our key `kv_events` is."""
_EVENTS_ENDPOINT = "tcp://*:5557"
"""Endpoint that vLLM has where `kv_events_config` states none."""
_EVENTS_WITHOUT_EFFECT = frozenset(("buffer_steps", "hwm", "max_queue_size"))
"""Sizes in `kv_events_config`; ours are fixed."""
_ONE = frozenset({"pipeline_parallel_size", "data_parallel_size"})
"""Arguments that must be 1."""
_WITHOUT_EFFECT = frozenset(
    (
        *("disable_log_requests", "enable_log_requests", "disable_log_stats", "max_log_len"),
        *("distributed_executor_backend", "worker_use_ray", "disable_custom_all_reduce", "swap_space"),
        *("trust_remote_code", "tokenizer_mode", "download_dir", "served_model_name"),
        *("enable_chunked_prefill", "max_seq_len_to_capture", "guided_decoding_backend"),
    )
)
"""Arguments that are ignored, as what they adjust is done differently here. A log line names those that a
file states. `disable_log_stats` still turns vllm_backend's metrics off."""


def translated(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Translates vLLM's engine arguments into our configuration, with vllm_backend's dialect.

    `quantization` is left out; see `check_quantization`. Arguments that are null are left out, too.

    Raises:
        ConfigError: names each argument that is unknown, or that must be 1 and is not.
    """
    values: dict[str, Any] = {"dialect": "vllm"}
    problems: list[str] = []
    unused: list[str] = []
    for name, value in arguments.items():
        if value is None or name == "quantization":
            continue
        if name in _WITHOUT_EFFECT:
            unused.append(name)
        elif name in _ONE:
            if value != 1:
                problems.append(f"{FILE}: {name} must be 1, got {shown(value)}")
        elif name == _EVENTS:
            values["kv_events"] = _kv_events(value, unused) if isinstance(value, Mapping) else value
        elif name in _SAME or name in _RENAMED:
            known = isinstance(value, str) and (name, value) in _VALUES
            values[_RENAMED.get(name, name)] = _VALUES[name, value] if known else value
        else:
            problems.append(f"{FILE}: engine argument {name!r:.80} is unknown")
    if problems:
        raise ConfigError(*problems)
    if unused:
        logger.warning("%s: without effect here: %s", FILE, ", ".join(unused))
    return values


def _kv_events(config: Mapping[str, Any], unused: list[str]) -> dict[str, Any]:
    """Returns our `kv_events` for vLLM's `kv_events_config` (empty: no events), and adds to `unused` what has
    no effect. If events are on, the other keys are returned as they are, also unknown ones, which
    `EngineConfig.from_mapping` refuses."""
    unused += [f"{_EVENTS}.{key}" for key in config if key in _EVENTS_WITHOUT_EFFECT]
    given = {
        key: value
        for key, value in config.items()
        if value is not None and key not in _EVENTS_WITHOUT_EFFECT and (key, value) != ("publisher", "zmq")
    }
    if not given.pop("enable_kv_cache_events", False) or given.get("publisher") == "null":
        return {}
    return {"endpoint": _EVENTS_ENDPOINT, **given}


def check_quantization(method: Any, checkpoint: Path) -> None:
    """Refuses vLLM's `quantization` for a checkpoint whose weights are not quantised.

    For others the value is ignored, as the files say how the weights are quantised. GGUF files are accepted.

    Raises:
        ConfigError: the checkpoint's weights are not quantised, so that vLLM would do it at load; or
            config.json cannot be read.
    """
    config = checkpoint / "config.json"
    if method is None or not config.exists():  # a GGUF file
        return
    if not any(load_config_file(config).get(key) for key in QUANTIZATION_KEYS):
        raise ConfigError(
            f"{FILE}: quantization {shown(method)}: the checkpoint's weights are not quantised; the "
            "parameter `quantization` of config.pbtxt does it at load (int8, int4, fp8 and more)"
        )


def shows_metrics(model_config: Mapping[str, Any], arguments: Callable[[], Mapping[str, Any]]) -> bool:
    """Whether vllm_backend would show its metrics.

    Args:
        model_config: Triton's model configuration, as a mapping.
        arguments: returns vLLM's engine arguments; called only if the parameter asks for metrics.
    """
    asked = model_config.get("parameters", {}).get(METRICS, {}).get("string_value", "")
    return asked.lower() == "true" and not arguments().get(_STATS_OFF, False)
