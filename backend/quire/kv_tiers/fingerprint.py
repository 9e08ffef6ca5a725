"""fingerprint: decides whether this process may use another process's KV blocks.

Two engines have the same fingerprint only if blocks of the same tokens are interchangeable between them.
Every key of the engine's configuration counts unless it is in HARMLESS_KEYS. So an overlooked key at worst
separates equal blocks, which costs recomputation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from quire.config import CacheConfig, EngineConfig

HARMLESS_KEYS = frozenset({
    # What they lead to is part of what the runner says of itself: weights, types, frequencies.
    "device", "dtype", "load_format", "max_model_len", "model",
    "max_resident_experts", "packed_weights_size",
    # Text, randomness after the logits, and by how many threads the same sums are done.
    "classifier_from_token", "logits_processors", "num_threads", "seed", "tokenizer",
    # Where blocks lie and for how long.
    "cache_ttl_s", "cpu_memory_utilization", "disk_cache_directory", "disk_cache_size",
    "enable_prefix_caching", "gpu_memory_utilization", "host_cache_memory",
    "kv_cache_memory",
    "kv_connector", "kv_events", "max_pinned_fraction", "num_blocks", "result_cache", "session_ttl_s",
    # Who is computed when, and with whom: within one engine blocks are shared by requests of all batches.
    "ageing_s", "async_scheduling", "batch_policy", "default_deadline_ms", "default_ttft_deadline_ms",
    "draft_model", "num_draft_tokens",
    "kv_reservation", "max_long_prefills", "max_num_batched_tokens", "max_num_seqs", "max_predicted_ttft_ms",
    "max_prefill_tokens_per_request", "max_waiting_requests", "max_waiting_tokens",
    "preemption_mode", "queue_policy", "tenants", "trace_file", "watchdog_s",
    # Their weights are part of what blocks are found by.
    "lora_modules", "lora_root", "max_cpu_loras", "max_loras",
})  # fmt: skip
"""Configuration keys that the fingerprint leaves out. Some are known not to change a block of given tokens;
the effect of the others is in the runner's `kv_identity`, or in the keys of blocks."""


def needs_fingerprint(cache: CacheConfig) -> bool:
    """Returns whether blocks or results are kept where another process, or the engine's successor, may find
    them."""
    return bool(cache.disk_cache_directory or cache.kv_connector.connector or cache.result_cache.is_on)


def fingerprint(config: EngineConfig, resolved: Mapping[str, Any]) -> str:
    """Returns 32 hex digits: a hash of the configuration without HARMLESS_KEYS, and of `resolved`.

    Args:
        config: the engine's configuration; the frontend's keys do not count.
        resolved: JSON values that say what else decides a block: the runner's `kv_identity`, and the blocks'
            layout.
    """
    keys = {
        key: value
        for part in (config.model, config.cache, config.scheduler, config.adapters)
        for key, value in dataclasses.asdict(part).items()
        if key not in HARMLESS_KEYS
    }
    text = json.dumps([keys, resolved], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
