"""What vLLM is started with, in process or behind Triton. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peers.workloads import KV_TOKENS, MAX_MODEL_LEN, MAX_RUNNING

BLOCK_SIZE = 128
"""vLLM's own choice for CPUs."""


def engine_arguments(checkpoint: Path) -> dict[str, Any]:
    """Arguments of vLLM's engine for a checkpoint directory, as JSON has them."""
    return {
        "model": str(checkpoint),
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_RUNNING,
        "block_size": BLOCK_SIZE,
        # By itself it takes most of the machine's memory, or refuses to start where others have some.
        "kv_cache_memory_bytes": _kv_bytes(checkpoint),
    }


def _kv_bytes(checkpoint: Path) -> int:
    """Size of the KV cache at 16 bits, with the one block that vLLM keeps for itself."""
    config = json.loads((checkpoint / "config.json").read_text())
    per_token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return int(per_token * (KV_TOKENS + BLOCK_SIZE))
