"""The least time a workload can take on a machine: arithmetic only.

Every prompt token passes the layers once at the machine's bf16 matrix rate (a shared prefix once for all, no
LM head); every decode step takes the longer of reading all weights and computing its rows, LM head included.
Attention, sampling and overhead are free, so an engine can come near the limit but not reach it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.checkpoints import Shape
from benchmarks.peers.workloads import Workload


@dataclass(frozen=True)
class Roofline:
    """What the machine's cores can do together."""

    read_gb_s: float
    """Memory read rate, 1e9 bytes per second."""
    matrix_gflop_s: float
    """bf16 matrix product, 1e9 operations per second (a multiply-add is two)."""

    def seconds(self, num_bytes: float, flop: float) -> float:
        """The longer of reading so many bytes and computing so many operations."""
        return max(num_bytes / (self.read_gb_s * 1e9), flop / (self.matrix_gflop_s * 1e9))

    @classmethod
    def best(cls, measurements: Sequence[Mapping[str, Any]]) -> Roofline:
        """The highest rates of several measurements (`roofline.measure`)."""
        return cls(
            max(rate for one in measurements for rate in one["read_gb_s"].values()),
            max(one["matrix_gflop_s"] for one in measurements),
        )


def decode_rows(num_outputs: Sequence[int], running: int) -> list[int]:
    """Rows of each decode step when the next request takes a place as soon as one is free.

    The first token of a request comes with its prompt, so `n` tokens need n - 1 steps.
    """
    waiting = deque(n - 1 for n in num_outputs if n > 1)
    left: list[int] = []
    rows = []
    while waiting or left:
        while waiting and len(left) < running:
            left.append(waiting.popleft())
        rows.append(len(left))
        left = [n - 1 for n in left if n > 1]
    return rows


def step_seconds(shape: Shape, rows: int, roofline: Roofline, precision: str = "bf16") -> float:
    """The limit of one decode step of n rows."""
    return roofline.seconds(shape.weight_bytes(precision), rows * 2 * shape.params)


def limit_seconds(workload: Workload, shape: Shape, roofline: Roofline, precision: str = "bf16") -> float:
    """The limit of a whole workload.

    Args:
        precision: of the weights read (bf16, int8, int4). The matrix rate stays bf16's.
    """
    prompts = workload.num_distinct_prompt_tokens * 2 * shape.layer_params / (roofline.matrix_gflop_s * 1e9)
    steps = decode_rows([num_output for _, num_output in workload.lengths], workload.running)
    return prompts + sum(step_seconds(shape, rows, roofline, precision) for rows in steps)
