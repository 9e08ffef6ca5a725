"""Each operator on each of its implementations: time, share of the device's limit, error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.device import median_seconds
from quire_kernels import ops, registry
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer, QuantizedKV, piece_bytes
from quire_kernels.sampling import LogitEdits, SamplingTensors

NUM_PENALISED = 500
"""Distinct tokens of a row that penalties are measured with."""


@dataclass(frozen=True)
class Case:
    """One operator on operands of one size."""

    name: str
    operator: str
    work: Callable[[], torch.Tensor]
    num_bytes: float
    """Bytes read and written, each once."""
    flop: float = 0.0


def cases(device: torch.device, small: bool) -> Iterator[Case]:
    """Cases of a model with the shape of Llama-3-8B; `small`: to see that they run."""
    yield from _attention_cases(device, small)
    yield from _linear_cases(device, small)
    yield from _other_cases(device, small)


def _attention_cases(device: torch.device, small: bool) -> Iterator[Case]:
    heads, kv_heads, head_dim, block_size = 32, 8, 128, 16
    shapes = [(1, 8192), (16, 1024), (16, 8192), (64, 1024), (256, 1024)]
    lengths = [(f"decode {n} x {length}", [(1, length)] * n) for n, length in shapes]
    lengths.append(("decode 31 x 1k + 1 x 64k", [(1, 65536), *[(1, 1024)] * 31]))
    lengths += [
        ("prefill 1 x 8192", [(8192, 8192)]),
        ("chunk of 2048 behind 6144", [(2048, 8192)]),
        ("mixed 1024 + 63 decodes of 2k", [(1024, 1024), *[(1, 2048)] * 63]),
    ]
    if small:
        lengths = [("decode 3 x 70", [(1, 70)] * 3), ("prefill 1 x 90", [(90, 90)])]
    for name, sequences in lengths:
        for kv_dtype in (None, torch.float8_e4m3fn):
            meta, kv_layer, kv_bytes = _paged(sequences, kv_heads, head_dim, block_size, kv_dtype, device)
            query = torch.randn(meta.num_tokens, heads, head_dim, device=device).bfloat16()
            seen = sum(q * s - q * (q - 1) / 2 for q, s in sequences)
            yield Case(
                f"attention, {name}, KV {'bf16' if kv_dtype is None else 'fp8'}",
                "paged_attention",
                lambda q=query, k=kv_layer, m=meta: ops.paged_attention(q, k, m, scale=head_dim**-0.5),
                kv_bytes + 2 * query.nbytes,
                4.0 * heads * head_dim * seen,
            )


def _paged(
    sequences: list[tuple[int, int]],
    kv_heads: int,
    head_dim: int,
    block_size: int,
    kv_dtype: torch.dtype | None,
    device: torch.device,
) -> tuple[AttentionMetadata, KVLayer, float]:
    counts = [-(-length // block_size) for _, length in sequences]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    query_lens, seq_lens = zip(*sequences, strict=True)
    meta = AttentionMetadata.build(query_lens, seq_lens, tables, block_size, device)
    shape = (sum(counts), 2, kv_heads, block_size, head_dim)
    tokens = sum(seq_lens)
    if kv_dtype is None:
        return meta, torch.randn(shape, device=device).bfloat16(), 4.0 * tokens * kv_heads * head_dim
    piece = piece_bytes(block_size, head_dim)
    pool = torch.zeros((*shape[:3], piece), dtype=torch.uint8, device=device)
    layer = QuantizedKV.from_pieces(pool, kv_dtype, block_size)
    keys, values = (torch.randn(shape[0] * block_size, kv_heads, head_dim, device=device) for _ in range(2))
    ops.write_kv(
        keys.bfloat16(), values.bfloat16(), layer, torch.arange(shape[0] * block_size, device=device)
    )
    return meta, layer, 2.0 * tokens * kv_heads * (head_dim + 2)


def _linear_cases(device: torch.device, small: bool) -> Iterator[Case]:
    shapes = {"qkv": (4096, 6144), "out": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}
    rows = (1, 4, 16, 64, 256)
    if small:
        shapes, rows = {"qkv": (64, 96)}, (1, 4)
    for name, (size, out) in shapes.items():
        weight = torch.randn(out, size, device=device).bfloat16() * size**-0.5
        for quantization in (None, "int8", "fp8"):
            for count in rows:
                x = torch.randn(count, size, device=device).bfloat16()
                item = 2 if quantization is None else 1
                yield Case(
                    f"linear {name} {quantization or 'bf16'}, {count} rows",
                    "linear",
                    _packed(weight, quantization, x),
                    float(item * size * out + 2 * count * (size + out)),
                    2.0 * count * size * out,
                )


def _packed(weight: torch.Tensor, quantization: str | None, x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The product; packed when it is first asked for, by the implementation that is forced then."""
    made: dict[str, Any] = {}

    def work() -> torch.Tensor:
        name = registry.pick("linear", x.device.type, x.dtype, **_facts(weight, quantization)).name
        if name not in made:
            made.clear()
            made[name] = ops.pack_linear(weight, quantization=quantization)
        result: torch.Tensor = made[name](x)
        return result

    return work


def _facts(weight: torch.Tensor, quantization: str | None) -> dict[str, Any]:
    out, size = weight.shape
    return {"in_features": size, "out_features": out, "activation": None, "quantization": quantization}


def _other_cases(device: torch.device, small: bool) -> Iterator[Case]:
    count, size, vocab = (3, 64, 1000) if small else (256, 4096, 128256)
    x, residual = (torch.randn(count, size, device=device).bfloat16() for _ in range(2))
    weight = torch.ones(size, device=device).bfloat16()
    yield Case(
        f"RMSNorm with residual, {count} x {size}",
        "rms_norm",
        lambda: ops.add_rms_norm(x, residual, weight, 1e-5)[0],
        4.0 * x.nbytes,
    )
    gate_up = torch.randn(count, 7 * size, device=device).bfloat16()
    yield Case(
        f"SiLU-mul, {count} x {gate_up.shape[1]}",
        "gate_mul",
        lambda: ops.gate_mul(gate_up, "silu"),
        1.5 * gate_up.nbytes,
    )
    logits = 4 * torch.randn(count, vocab, device=device)
    yield Case(f"argmax, {count} x {vocab}", "argmax", lambda: ops.argmax(logits), float(logits.nbytes))
    rows = SamplingTensors(
        temperature=torch.full((count,), 0.8, device=device),
        top_k=torch.full((count,), 50, dtype=torch.int32, device=device),
        top_p=torch.full((count,), 0.95, device=device),
        min_p=torch.zeros(count, device=device),
        seeds=torch.arange(count, device=device),
        positions=torch.zeros(count, dtype=torch.int64, device=device),
    )
    yield Case(f"sample, {count} x {vocab}", "sample", lambda: ops.sample(logits, rows), float(logits.nbytes))
    penalised = replace(rows, edits=_neutral_edits(count, vocab, device))
    yield Case(
        f"sample with {NUM_PENALISED} penalties, {count} x {vocab}",
        "sample",
        lambda: ops.sample(logits, penalised),
        float(logits.nbytes),
    )


def _neutral_edits(count: int, vocab: int, device: torch.device) -> LogitEdits:
    """Penalties that leave logits as they are, since they are made in place, again and again."""
    none = torch.zeros(0, dtype=torch.int32, device=device)
    starts = torch.zeros((3, count + 1), dtype=torch.int32, device=device)
    starts[0] = torch.arange(count + 1, device=device) * NUM_PENALISED
    token_ids = torch.arange(NUM_PENALISED, device=device) * (vocab // NUM_PENALISED)
    return LogitEdits(
        starts=starts,
        factors=torch.tensor([[1.0], [0.0], [0.0]], device=device).repeat(1, count),
        penalty_ids=token_ids.int().repeat(count),
        output_counts=torch.ones(count * NUM_PENALISED, device=device),
        bias_ids=none,
        biases=none.float(),
        ban_ids=none,
    )


def measure(device: torch.device, limits: dict[str, float], small: bool) -> list[dict[str, Any]]:
    """One record per case and implementation."""
    records = []
    for case in cases(device, small):
        expected: torch.Tensor | None = None
        names = [one.name for one in reversed(registry.implementations(case.operator))]
        names.sort(key=lambda name: name != "reference")
        for name in names:
            record: dict[str, Any] = {"case": case.name, "implementation": name}
            try:
                with registry.forced({case.operator: name}):
                    result = case.work().float()
                    if expected is None:
                        expected = result
                    error = (result - expected).abs().max() / expected.abs().max().clamp(min=1e-9)
                    seconds = median_seconds(device, case.work)
                    record |= {
                        "us": seconds * 1e6,
                        "bytes_per_s": case.num_bytes / seconds,
                        "flop_per_s": case.flop / seconds,
                        "of_limit": max(
                            case.num_bytes / limits["read_bytes_per_s"], case.flop / limits["bf16_flop_per_s"]
                        )
                        / seconds,
                        "error": float(error),
                    }
            except registry.KernelError:
                continue  # not for this device or these operands
            except Exception as error:
                record["failed"] = f"{type(error).__name__}: {error}"[:500]
            records.append(record)
    return records
