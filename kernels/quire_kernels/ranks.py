"""Ranks: the processes that compute one model together, each its part of every layer (tensor parallelism,
arXiv 1909.08053)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(hours=1)
"""Longest time of a collective. A rank that dies is noticed by its engine, one that stands still by the
engine's watchdog. This limit is for failures that neither sees."""


@dataclass(frozen=True)
class Ranks:
    """How many processes compute a model, and which of them this one is.

    Every rank calls the same collectives in the same order; the results have the same bits on each.
    """

    rank: int = 0
    size: int = 1

    def join(self, store: str, device: torch.device) -> None:
        """Connects this process with the others: by NCCL on GPUs, by gloo elsewhere.

        Args:
            store: path of a file that all ranks, and nobody else, can write; it is made by the first.
            device: on which the tensors of collectives lie.
        """
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(store, self.size),
            rank=self.rank,
            world_size=self.size,
            timeout=_TIMEOUT,
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """`x` added up over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def concat(self, x: torch.Tensor, whole: int) -> torch.Tensor:
        """The ranks' parts of a tensor of [n, whole], of which this one has `x`, columns as of `bounds`."""
        if self.size == 1:
            return x
        widest = -(-whole // self.size)
        padded = torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        widths = [end - begin for begin, end in (self._bounds(rank, whole) for rank in range(self.size))]
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def least(self, number: int, device: torch.device) -> int:
        """The smallest of the ranks' numbers; returns when all ranks are here."""
        if self.size == 1:
            return number
        numbers = torch.tensor([number], device=device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)

    def bounds(self, whole: int) -> tuple[int, int]:
        """First index of this rank's part of `whole` things, and that behind it; parts differ by one at
        most."""
        return self._bounds(self.rank, whole)

    def _bounds(self, rank: int, whole: int) -> tuple[int, int]:
        return whole * rank // self.size, whole * (rank + 1) // self.size


ALONE = Ranks()
"""The only rank of a model that one process computes."""
