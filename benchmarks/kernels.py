"""Every CPU kernel against the machine's limits, and against PyTorch's eager operators.

    python -m benchmarks.kernels                 # shapes of Qwen3-0.6B, bf16

Rates count what a kernel must read and write and what it must multiply; the share is of the limit that is
nearer (bytes at the read rate, or products at the matrix rate, both measured before and after). Weights and
caches are cycled through more memory than the last-level cache holds, as a model's layers do. Ours and
PyTorch's take turns; times are the best, as other guests of a shared machine only ever take away.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch
import torch.nn.functional as F

from benchmarks.peers import machine, roofline
from benchmarks.report import output_directory
from quire_kernels import ops
from quire_kernels.cpu.native import set_num_threads
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.reference.attention import paged_attention as reference_attention

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 1024, 3072, 16, 8, 128, 16
CYCLE_BYTES = 400e6
BITS = {None: 16.0, "int8": 8.0, "w8a8": 8.0, "int4": 5.0}
"""Bits of a weight, with its share of the scales."""


@dataclass(frozen=True)
class Case:
    """A kernel and its eager counterpart on the same numbers."""

    name: str
    run: Callable[[], Any]
    eager: Callable[[], Any] | None
    """The same in eager PyTorch; None: it has no such operator."""
    num_bytes: float
    num_flops: float


@dataclass(frozen=True)
class Rate:
    """One row of the report; times in microseconds."""

    name: str
    us: float
    eager_us: float | None
    gb_s: float
    gflop_s: float
    share: float


def cycled(make: Callable[[], Any], num_bytes: float) -> Iterator[Any]:
    """Enough different ones that none is still cached when its turn comes again, at most 64."""
    return itertools.cycle([make() for _ in range(max(1, min(64, int(CYCLE_BYTES / num_bytes))))])


def linear_cases() -> Iterator[Case]:
    columns = 2 * INNER
    for quantization, rows in itertools.product(BITS, (1, 16, 512)):
        size = columns * HIDDEN * BITS[quantization] / 8
        weights = [
            torch.randn(columns, HIDDEN, dtype=torch.bfloat16) for _ in range(int(CYCLE_BYTES / 12.6e6))
        ]
        packed = itertools.cycle([ops.pack_linear(w.clone(), quantization=quantization) for w in weights])
        plain = itertools.cycle(weights)
        x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16)
        yield Case(
            f"linear {quantization or 'bf16'}, {rows} rows, {HIDDEN} to {columns}",
            lambda x=x, packed=packed: next(packed)(x),
            lambda x=x, plain=plain: F.linear(x, next(plain)),
            size + 2 * rows * (HIDDEN + columns),
            2.0 * rows * HIDDEN * columns,
        )


def attention_cases() -> Iterator[Case]:
    for name, count, context, new in (
        ("decode", 1, 4096, 1),
        ("decode", 16, 1024, 1),
        ("decode", 64, 256, 1),
        ("prefill", 1, 2048, 2048),
        ("prefill", 8, 512, 512),
    ):
        blocks = -(-context // BLOCK_SIZE)
        ids = [list(range(i * blocks, (i + 1) * blocks)) for i in range(count)]
        meta = AttentionMetadata.build([new] * count, [context] * count, ids, BLOCK_SIZE)
        size = 2 * 2 * count * context * KV_HEADS * HEAD_DIM
        shape = (count * blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        caches = cycled(lambda shape=shape: torch.randn(shape).to(torch.bfloat16), size)
        query = torch.randn(count * new, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        scale = HEAD_DIM**-0.5
        seen = new * (context - new) + new * (new + 1) / 2
        yield Case(
            f"attention, {name}, {count} x {context}",
            lambda q=query, c=caches, m=meta, s=scale: ops.paged_attention(q, next(c), m, scale=s),
            lambda q=query, c=caches, m=meta, s=scale: reference_attention(q, next(c), m, s, None, None),
            size + 2.0 * 2 * query.numel(),
            4.0 * count * seen * HEADS * HEAD_DIM,
        )


def elementwise_cases() -> Iterator[Case]:
    rows = 2048
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16)
    x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16)
    residual = torch.randn_like(x)

    def eager_norm() -> torch.Tensor:
        total = (x + residual).float()
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
        return normed.to(x.dtype) * weight

    yield Case(
        f"RMSNorm with residual, {rows} x {HIDDEN}",
        lambda: ops.add_rms_norm(x, residual, weight, 1e-6),
        eager_norm,
        4 * 2.0 * x.numel(),
        0,
    )
    logits = torch.randn(16, 151_936)
    yield Case(
        "argmax, 16 x 151936", lambda: ops.argmax(logits), lambda: logits.argmax(1), 4.0 * logits.numel(), 0
    )


def best_times(case: Case, turns: int) -> tuple[float, float | None]:
    """Seconds of one call, ours and eager's."""
    best = [float("inf"), float("inf")]
    for _ in range(turns):
        for index, call in enumerate((case.run, case.eager)):
            if call is not None:
                began = time.perf_counter()
                call()
                best[index] = min(best[index], time.perf_counter() - began)
    return best[0], None if case.eager is None else best[1]


def table(rates: list[Rate]) -> str:
    """Markdown."""
    lines = [
        "| kernel | us | GB/s | GFLOP/s | of the limit | eager / ours |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for rate in rates:
        against = "" if rate.eager_us is None else f"{rate.eager_us / rate.us:.1f}"
        products = f"{rate.gflop_s:.0f}" if rate.gflop_s else ""
        share = f"{100 * rate.share:.0f} %"
        lines.append(f"| {rate.name} | {rate.us:.0f} | {rate.gb_s:.1f} | {products} | {share} | {against} |")
    return "\n".join(lines)


@click.command()
@click.option("--turns", default=40, show_default=True)
@click.option("--threads", type=int, help="Default: all cores.")
def main(turns: int, threads: int | None) -> None:
    """Measures, writes JSON under benchmarks/out, prints a table."""
    set_num_threads(threads or len(machine.usable_cores()))
    torch.manual_seed(0)
    limits = [roofline.measure()]
    times = []
    with torch.inference_mode():
        for case in itertools.chain(linear_cases(), attention_cases(), elementwise_cases()):
            times.append((case.name, case.num_bytes, case.num_flops, *best_times(case, turns)))
            click.echo(f"kernels: {times[-1]}", err=True)
    limits.append(roofline.measure())
    read = max(max(limit["read_gb_s"].values()) for limit in limits) * 1e9
    matrix = max(limit["matrix_gflop_s"] for limit in limits) * 1e9
    rates = [
        Rate(
            name,
            1e6 * ours,
            None if eager is None else 1e6 * eager,
            num_bytes / ours / 1e9,
            num_flops / ours / 1e9,
            max(num_bytes / read, num_flops / matrix) / ours,
        )
        for name, num_bytes, num_flops, ours, eager in times
    ]
    folder = output_directory()
    document = {
        "environment": machine.describe(),
        "roofline": limits,
        "rates": [asdict(rate) for rate in rates],
    }
    (folder / "kernels.json").write_text(json.dumps(document, indent=1))
    click.echo(f"read {read / 1e9:.1f} GB/s, matrix {matrix / 1e9:.0f} GFLOP/s\n\n{table(rates)}\n\n{folder}")


if __name__ == "__main__":
    main()
