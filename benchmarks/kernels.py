"""Each operator on each of its implementations: time, rates, share of the device's limit, error.

    python -m benchmarks.kernels                 # shapes of Qwen3-0.6B on the CPU
    python -m benchmarks.kernels --shape tiny    # does it run?

Rates count what a kernel must read and write and what it must multiply; the share is of the limit that is
nearer (bytes at the read rate, or products at the matrix rate, both measured before and after). Caches are
emptied before every call. Implementations take turns; `eager` is PyTorch's operators in bf16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import click
import torch

from benchmarks import machine, report
from benchmarks.device import recorded, seconds, typical
from benchmarks.peers import roofline
from benchmarks.peers.checkpoints import SHAPES, Shape
from benchmarks.peers.limits import Roofline
from quire_kernels import ops, registry
from quire_kernels.cpu.native import set_num_threads
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer, QuantizedKV, piece_bytes
from quire_kernels.sampling import LogitEdits, SamplingTensors

BLOCK_SIZE = 16
NUM_PENALISED = 500
"""Distinct tokens of a row that penalties are measured with."""
BITS = {"int8": 8.0, "w8a8": 8.0, "fp8": 8.0, "int4": 5.0}
"""Bits of a quantised weight, with its share of the scales."""
LORA_RANK, LORA_SLOTS, LORA_LAYERS = 16, 4, 16
"""Layers whose adapters are applied in turn: one alone takes less time than threads to wake up."""
Work = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One operator on operands of one size."""

    name: str
    operator: str
    prepare: Callable[[], Work]
    """Makes what is timed, for the implementation that is forced then."""
    num_bytes: float
    """Bytes read and written, each once."""
    flop: float = 0.0
    detail: str = ""
    """Precision; among cases of one name, the one without is what the others are compared with."""


def cases(device: torch.device, shape: Shape) -> Iterator[Case]:
    """Cases of a model of this shape; of `tiny`, few and small ones."""
    yield from _attention_cases(device, shape)
    yield from _linear_cases(device, shape)
    yield from _lora_cases(device, shape)
    yield from _other_cases(device, shape)


def _sequences(device: torch.device, shape: Shape) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Names of batches, and (query length, length) of each of their sequences."""
    decodes, prompts = [(1, 4096), (16, 1024), (64, 256)], [(1, 2048), (8, 512)]
    if device.type == "cuda":
        decodes, prompts = [(1, 8192), (16, 1024), (16, 8192), (64, 1024), (256, 1024)], [(1, 8192)]
        yield "decode 31 x 1k + 1 x 64k", [(1, 65536), *[(1, 1024)] * 31]
        yield "chunk of 2048 behind 6144", [(2048, 8192)]
        yield "mixed 1024 + 63 decodes of 2k", [(1024, 1024), *[(1, 2048)] * 63]
    if shape.name == "tiny":
        decodes, prompts = [(3, 70)], [(1, 90)]
    for count, length in decodes:
        yield f"decode {count} x {length}", [(1, length)] * count
    for count, length in prompts:
        yield f"prefill {count} x {length}", [(length, length)] * count


def _attention_cases(device: torch.device, shape: Shape) -> Iterator[Case]:
    heads, size = shape.num_heads, shape.head_dim
    for name, sequences in _sequences(device, shape):
        for kv_dtype, detail in ((None, ""), (torch.int8, "KV int8"), (torch.float8_e4m3fn, "KV fp8")):
            meta, kv_layer, kv_bytes = _paged(sequences, shape, kv_dtype, device)
            query = torch.randn(meta.num_tokens, heads, size, device=device).bfloat16()

            def work(q: torch.Tensor = query, k: KVLayer = kv_layer, m: Any = meta) -> torch.Tensor:
                return ops.paged_attention(q, k, m, scale=size**-0.5)

            seen = sum(q * s - q * (q - 1) / 2 for q, s in sequences)
            yield Case(
                f"attention, {name}",
                "paged_attention",
                lambda work=work: work,
                kv_bytes + 2 * query.nbytes,
                4.0 * heads * size * seen,
                detail,
            )


def _paged(
    sequences: list[tuple[int, int]], shape: Shape, kv_dtype: torch.dtype | None, device: torch.device
) -> tuple[AttentionMetadata, KVLayer, float]:
    kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
    counts = [-(-length // BLOCK_SIZE) for _, length in sequences]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    query_lens, seq_lens = zip(*sequences, strict=True)
    meta = AttentionMetadata.build(query_lens, seq_lens, tables, BLOCK_SIZE, device)
    size = (sum(counts), 2, kv_heads, BLOCK_SIZE, head_dim)
    tokens = sum(seq_lens)
    if kv_dtype is None:
        return meta, torch.randn(size, device=device).bfloat16(), 4.0 * tokens * kv_heads * head_dim
    pool = torch.zeros((*size[:3], piece_bytes(BLOCK_SIZE, head_dim)), dtype=torch.uint8, device=device)
    layer = QuantizedKV.from_pieces(pool, kv_dtype, BLOCK_SIZE)
    slots = torch.arange(size[0] * BLOCK_SIZE, device=device)
    keys, values = (torch.randn(len(slots), kv_heads, head_dim, device=device).bfloat16() for _ in range(2))
    ops.write_kv(keys, values, layer, slots)
    return meta, layer, 2.0 * tokens * kv_heads * (head_dim + 2)


def _linear_cases(device: torch.device, shape: Shape) -> Iterator[Case]:
    query, kv = (count * shape.head_dim for count in (shape.num_heads, shape.num_kv_heads))
    matrices = {
        "qkv": (shape.hidden, query + 2 * kv),
        "out": (query, shape.hidden),
        "gate_up": (shape.hidden, 2 * shape.inner),
        "down": (shape.inner, shape.hidden),
    }
    quantizations, rows = ("int8", "w8a8", "int4"), (1, 16, 512)
    if device.type == "cuda":
        quantizations, rows = ("int8", "fp8", "int4"), (1, 4, 16, 32, 64, 256)
    if shape.name == "tiny":
        matrices, rows = {"qkv": matrices["qkv"]}, rows[:2]
    for name, (size, out) in matrices.items():
        weight = torch.randn(out, size, device=device).bfloat16() * size**-0.5
        for count in rows:
            x = torch.randn(count, size, device=device).bfloat16()
            for quantization in (None, *quantizations):

                def prepare(
                    x: torch.Tensor = x, w: torch.Tensor = weight, quantization: str | None = quantization
                ) -> Work:
                    packed = ops.pack_linear(w.clone(), quantization=quantization)
                    return lambda: packed(x)

                bits = 16.0 if quantization is None else BITS[quantization]
                yield Case(
                    f"linear {name}, {count} rows, {size} to {out}",
                    "linear",
                    prepare,
                    bits / 8 * size * out + 2 * count * (size + out),
                    2.0 * count * size * out,
                    quantization or "",
                )


def _lora_cases(device: torch.device, shape: Shape) -> Iterator[Case]:
    size, out = shape.hidden, shape.inner

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(LORA_LAYERS, *sizes, device=device).bfloat16()

    a, b = draw(LORA_SLOTS, LORA_RANK, size) * size**-0.5, draw(LORA_SLOTS, out, LORA_RANK)
    for rows, used in ((16, LORA_SLOTS), (3 if shape.name == "tiny" else 512, 1)):
        x, y = draw(rows, size), draw(rows, out)
        slots = torch.arange(rows, dtype=torch.int32, device=device) % used

        def prepare(x: torch.Tensor = x, y: torch.Tensor = y, slots: torch.Tensor = slots) -> Work:
            total = y.clone()
            layers = list(zip(total, x, a, b, strict=True))

            def work() -> torch.Tensor:
                for layer in layers:
                    ops.add_lora(*layer, slots)
                return total

            return work

        yield Case(
            f"LoRA, {rows} rows of {used} adapters of rank {LORA_RANK}, {LORA_LAYERS} times {size} to {out}",
            "add_lora",
            prepare,
            LORA_LAYERS * 2.0 * (used * LORA_RANK * (size + out) + rows * (size + 2 * out)),
            LORA_LAYERS * 2.0 * rows * LORA_RANK * (size + out),
        )


def _other_cases(device: torch.device, shape: Shape) -> Iterator[Case]:
    rows, count, size, vocab = 2048, 16, shape.hidden, shape.vocab_size
    if device.type == "cuda":
        count = 256
    if shape.name == "tiny":
        rows = count = 3
    x, residual = (torch.randn(rows, size, device=device).bfloat16() for _ in range(2))
    weight = torch.ones(size, device=device).bfloat16()
    gate_up = torch.randn(rows, 2 * shape.inner, device=device).bfloat16()
    logits = 4 * torch.randn(count, vocab, device=device)
    sampling = SamplingTensors(
        temperature=torch.full((count,), 0.8, device=device),
        top_k=torch.full((count,), 50, dtype=torch.int32, device=device),
        top_p=torch.full((count,), 0.95, device=device),
        min_p=torch.zeros(count, device=device),
        seeds=torch.arange(count, device=device),
        positions=torch.zeros(count, dtype=torch.int64, device=device),
    )
    penalised = replace(sampling, edits=_neutral_edits(count, vocab, device))
    works: list[tuple[str, str, float, Work]] = [
        (
            f"RMSNorm with residual, {rows} x {size}",
            "rms_norm",
            4.0 * x.nbytes,
            lambda: ops.add_rms_norm(x, residual, weight, 1e-5)[0],
        ),
        (
            f"SiLU-mul, {rows} x {gate_up.shape[1]}",
            "gate_mul",
            1.5 * gate_up.nbytes,
            lambda: ops.gate_mul(gate_up, "silu"),
        ),
        (f"argmax, {count} x {vocab}", "argmax", float(logits.nbytes), lambda: ops.argmax(logits)),
        (f"sample, {count} x {vocab}", "sample", float(logits.nbytes), lambda: ops.sample(logits, sampling)),
        (
            f"sample with {NUM_PENALISED} penalties, {count} x {vocab}",
            "sample",
            float(logits.nbytes),
            lambda: ops.sample(logits, penalised),
        ),
    ]
    for name, operator, num_bytes, work in works:
        yield Case(name, operator, lambda work=work: work, num_bytes)


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


def measure(device: torch.device, listed: Iterable[Case], turns: int) -> list[dict[str, Any]]:
    """One record per case and implementation; a failed one says how it failed."""
    records = []
    for case in listed:
        expected: torch.Tensor | None = None
        names = [one.name for one in reversed(registry.implementations(case.operator))]
        found: dict[str, dict[str, Any]] = {}
        works: dict[str, tuple[Work, list[float]]] = {}
        for name in sorted(names, key=lambda name: name != "reference"):
            record = found[name] = {"case": case.name, "detail": case.detail, "implementation": name}
            try:
                with registry.forced({case.operator: name}):
                    work = case.prepare()
                    result = work().float()
                    works[name] = recorded(device, work), []
                expected = result if expected is None else expected
                record["error"] = float(
                    (result - expected).abs().max() / expected.abs().max().clamp(min=1e-9)
                )
            except registry.KernelError:
                del found[name]  # not for this device or these operands
            except Exception as error:
                record["failed"] = f"{type(error).__name__}: {error}"[:500]
        for _ in range(turns):
            for name, (work, times) in works.items():
                with registry.forced({case.operator: name}):
                    times.append(seconds(device, work))
        for name, (_, times) in works.items():
            taken = typical(device, times)
            found[name] |= {
                "us": taken * 1e6,
                "gb_s": case.num_bytes / taken / 1e9,
                "gflop_s": case.flop / taken / 1e9,
            }
        records += found.values()
    return records


def judge(records: list[dict[str, Any]], limits: Roofline) -> None:
    """Adds to every record its share of the limit, and the time of eager PyTorch over its own."""
    eager = {
        one["case"]: one["us"]
        for one in records
        if one["implementation"] == "reference" and not one["detail"] and "us" in one
    }
    for one in records:
        if "us" in one:
            one["of_limit"] = max(one["gb_s"] / limits.read_gb_s, one["gflop_s"] / limits.matrix_gflop_s)
            one["eager"] = eager[one["case"]] / one["us"] if one["case"] in eager else None


def table(records: list[dict[str, Any]]) -> str:
    """Markdown."""
    return report.table(
        ("kernel", "by", "us", "GB/s", "GFLOP/s", "of the limit", "eager / this", "error"),
        [
            [
                f"{one['case']} {one['detail']}".strip(),
                one["implementation"],
                f"{one['us']:.0f}",
                f"{one['gb_s']:.1f}",
                f"{one['gflop_s']:.0f}" if one["gflop_s"] else "",
                f"{100 * one['of_limit']:.0f} %",
                "" if one["eager"] is None else f"{one['eager']:.1f}",
                f"{one['error']:.4f}",
            ]
            if "us" in one
            else [f"{one['case']} {one['detail']}".strip(), one["implementation"], one["failed"], *[""] * 5]
            for one in records
        ],
    )


@click.command()
@click.option("--shape", type=click.Choice(sorted(SHAPES)), default="qwen3-0.6b", show_default=True)
@click.option("--turns", default=20, show_default=True)
@click.option("--threads", type=int, help="Default: all cores.")
def main(shape: str, turns: int, threads: int | None) -> None:
    """Measures on the CPU, writes JSON under benchmarks/out, prints a table."""
    set_num_threads(threads or len(machine.usable_cores()))
    torch.manual_seed(0)
    device = torch.device("cpu")
    rooflines = [roofline.measure()]
    with torch.inference_mode():
        records = measure(device, cases(device, SHAPES[shape]), turns)
    rooflines.append(roofline.measure())
    limits = Roofline.best(rooflines)
    judge(records, limits)
    folder = report.output_directory()
    document = {"environment": machine.environment(), "roofline": rooflines, "records": records}
    (folder / "kernels.json").write_text(json.dumps(document, indent=1))
    click.echo(f"read {limits.read_gb_s:.1f} GB/s, matrix {limits.matrix_gflop_s:.0f} GFLOP/s\n")
    click.echo(f"{table(records)}\n\n{folder}")


if __name__ == "__main__":
    main()
