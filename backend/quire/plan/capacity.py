"""Capacity: predicts what fits into memory, with the engine's arithmetic and without the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from quire.config import MTP, EngineConfig
from quire.layers.config import DecoderConfig
from quire.loader.load import check_offload, empty_model
from quire.models.interface import Model
from quire.plan.arrival import Arrival
from quire.plan.cost import CostModel
from quire.plan.simulate import Simulator
from quire.worker.adapter_memory import slot_bytes
from quire.worker.draft_model import check_draft, draft_config
from quire.worker.kv_cache import DeviceMemory, KVLayout
from quire.worker.model_runner import check_attention_backend
from quire_kernels.ranks import Ranks

GPU_CONTEXT_BYTES = 2**29
"""Bytes that CUDA is assumed to occupy on a GPU before anything is loaded."""
ENGINE_BYTES = 160 * 2**20
"""Estimated bytes of host memory that an engine's process has and the planning process lacks, beside weights
and cache; from measurements."""
ROUNDS = 8
"""Number of simulated requests per client. The first requests, one per client, do not count in the times to
first token."""


@dataclass(frozen=True)
class Capacity:
    """Memory of an engine, and the sequences that fit; in bytes unless said otherwise."""

    dtype: str
    max_model_len: int
    """Most tokens of prompt and output together."""
    weight_bytes: int
    """Estimated bytes of the weights in memory, including the slots for adapters and the draft model."""
    workspace_bytes: int
    """Estimated memory for the largest step: activations of all its tokens, and logits of all its
    sequences."""
    num_blocks: int
    block_size: int
    """Tokens per block."""
    block_bytes: int
    """Bytes per block, including the draft model's."""
    bytes_per_token: float
    """KV cache bytes per token, in a sequence of `max_model_len` tokens."""
    kv_tokens: int
    """Tokens that the KV cache holds, in sequences of `max_model_len` tokens."""
    concurrency: dict[int, int]
    """Number of sequences that can run at the same time, at most `max_num_seqs`, by their length in
    tokens."""

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "kv_cache_bytes": self.kv_cache_bytes}


def predict(
    config: EngineConfig, device_type: str, free: int, total: int | None = None, lengths: Iterable[int] = ()
) -> Capacity:
    """Predicts the capacity of an engine that was not started.

    With `tensor_parallel_size` above 1, all numbers are those of one rank; every rank has the same number of
    blocks.

    Args:
        config: the engine's configuration; with `load_format` dummy the checkpoint needs no weights.
        device_type: "cpu" or "cuda"; this machine needs no GPU.
        free: bytes of memory that are free before the start, on the host or the GPU.
        total: bytes of the GPU's memory; None: the device is the host.
        lengths: sequence lengths in tokens, for `Capacity.concurrency`. Longer ones count as `max_model_len`,
            which is always among them.

    Raises:
        CheckpointError: the checkpoint is broken or not supported.
        ConfigError: as the engine would, for example if there is too little memory.
    """
    device = torch.device(device_type)
    ranks = Ranks(0, config.model.tensor_parallel_size)
    check_offload(config.model.max_resident_experts, device)
    if total is None:
        free //= ranks.size  # all have their memory of one host
    model = empty_model(
        config.model,
        torch.device("meta"),
        check=lambda shape: check_attention_backend(config, shape, device),
        ranks=ranks,
    ).model
    draft = _empty_draft(config, model.config, device) if config.model.draft_model else None
    layout = KVLayout.from_config(config, model, draft)
    weight_bytes = model.packed_bytes(device_type) + slot_bytes(model, config.adapters)
    if draft is not None:
        weight_bytes += draft.packed_bytes(device_type)
    used = weight_bytes + (ENGINE_BYTES if total is None else GPU_CONTEXT_BYTES)
    num_blocks = layout.num_blocks(config, DeviceMemory(max(0, free - used), total))
    of_longest = layout.blocks_per_sequence(layout.max_model_len)
    lengths = sorted({min(length, layout.max_model_len) for length in (*lengths, layout.max_model_len)})
    return Capacity(
        dtype=str(model.config.dtype).removeprefix("torch."),
        max_model_len=layout.max_model_len,
        weight_bytes=weight_bytes,
        workspace_bytes=_workspace_bytes(config, model.config),
        num_blocks=num_blocks,
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        bytes_per_token=of_longest * layout.block_bytes / layout.max_model_len,
        kv_tokens=num_blocks * layout.max_model_len // of_longest,
        concurrency={
            length: min(config.scheduler.max_num_seqs, num_blocks // layout.blocks_per_sequence(length))
            for length in lengths
        },
    )


def _empty_draft(config: EngineConfig, target: DecoderConfig, device: torch.device) -> Model:
    def check(shape: DecoderConfig) -> None:
        check_draft(shape, target)
        check_attention_backend(config, shape, device)

    own, is_head = draft_config(config.model, target), config.model.draft_model == MTP
    return empty_model(own, torch.device("meta"), check=check, is_head=is_head).model


def _workspace_bytes(config: EngineConfig, shape: DecoderConfig) -> int:
    """Returns an estimate of the bytes of the largest step. Each of its `max_num_batched_tokens` tokens is
    taken to have three vectors of the hidden size, queries and attention outputs, keys and values, and three
    vectors of the inner size. The float32 logits of `max_num_seqs` rows count twice.

    With experts, the estimate includes the inputs and intermediate values of all experts of each token.
    """
    limits = config.scheduler
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    inner = max(shape.inner_sizes.values())
    of_token = (3 * shape.hidden_size + heads + 3 * inner) * shape.dtype.itemsize
    if shape.experts is not None:
        of_token += shape.experts.routing.num_routes * (shape.hidden_size + inner) * shape.dtype.itemsize
    return limits.max_num_batched_tokens * of_token + limits.max_num_seqs * shape.vocab_size * 8


@dataclass(frozen=True)
class Target:
    """A workload of equal requests and its latency limits; None: no limit. The 95th percentile of the times
    to first token must not exceed `ttft_ms`, and that of the gaps between tokens `itl_ms`."""

    prompt_tokens: int
    output_tokens: int
    ttft_ms: float | None = None
    itl_ms: float | None = None


@dataclass(frozen=True)
class Advice:
    """Simulated latencies and throughput of clients that send one request after another. Latencies are 95th
    percentiles in milliseconds."""

    concurrency: int
    """Most clients at a time, up to `max_num_seqs`, for which the target is met; 0: not even one."""
    ttft_ms: float
    itl_ms: float
    tokens_per_s: float


def advise(config: EngineConfig, capacity: Capacity, cost: CostModel, target: Target) -> Advice:
    """Finds the most clients at a time, up to `max_num_seqs`, for which a target is met. The search is a
    bisection; each try runs the real scheduler with a cost model.

    The returned figures are for that number of clients, or for one client if even that misses the target.

    Raises:
        InvalidArgumentError: a prompt of the target does not fit into the cache or the model.
    """
    engine = config.replace(
        num_blocks=max(1, capacity.kv_tokens // config.cache.tokens_per_block),
        max_model_len=capacity.max_model_len,
        max_waiting_requests=2**31,
        max_waiting_tokens=2**62,
        tenants={},
    )
    low, high = 0, config.scheduler.max_num_seqs
    best = _simulated(engine, cost, target, 1)
    while low < high:
        middle = (low + high + 1) // 2
        found = _simulated(engine, cost, target, middle)
        if _keeps(found, target):
            low, best = middle, found
        else:
            high = middle - 1
    return dataclasses.replace(best, concurrency=low)


def _keeps(found: Advice, target: Target) -> bool:
    pairs = ((found.ttft_ms, target.ttft_ms), (found.itl_ms, target.itl_ms))
    return all(limit is None or value <= limit for value, limit in pairs)


def _simulated(engine: EngineConfig, cost: CostModel, target: Target, concurrency: int) -> Advice:
    arrivals = [
        Arrival(
            str(number), 0.0, target.prompt_tokens, target.output_tokens,
            stream=number, block_size=engine.cache.tokens_per_block, max_tokens=target.output_tokens,
        )
        for number in range(ROUNDS * concurrency)
    ]  # fmt: skip
    report = Simulator(engine, arrivals, cost, concurrency=concurrency).run()
    later = report.outcomes[concurrency:]  # the first ones all came at once

    def p95(values: list[float]) -> float:
        return 1000 * sorted(values)[int(0.95 * (len(values) - 1))] if values else 0.0

    return Advice(
        concurrency,
        p95([one.ttft for one in later if one.ttft is not None]),
        p95(report.gaps.tolist()),
        report.as_dict()["output_tokens_per_s"],
    )
