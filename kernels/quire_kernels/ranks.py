"""Ranks: the processes that compute one model together (tensor parallelism, arXiv 1909.08053). Each computes
a part of most layers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(hours=1)
"""Longest time of a collective. The engine notices a rank that dies, and its watchdog one that hangs. This
limit is for failures that neither notices."""


@dataclass(frozen=True)
class Ranks:
    """Number of processes that compute a model, and this process's rank.

    All ranks must call the same collectives in the same order. These have bitwise equal results on all ranks.
    """

    rank: int = 0
    size: int = 1

    def join(self, store: str, device: torch.device) -> None:
        """Connects this process with the other ranks: by NCCL on GPUs, by gloo elsewhere.

        Args:
            store: path of a file, empty or missing, through which the ranks find each other. Nobody else may
                write it.
            device: device of the collectives' tensors.
        """
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(store, self.size),
            rank=self.rank,
            world_size=self.size,
            timeout=_TIMEOUT,
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Adds up `x` over the ranks, in place, and returns it."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def concat(self, x: torch.Tensor, whole: int) -> torch.Tensor:
        """Concatenates the ranks' parts of a tensor [n, whole]. `x` is this rank's part: the columns of
        `bounds(whole)`."""
        if self.size == 1:
            return x
        widest = -(-whole // self.size)
        padded = torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        widths = [end - begin for begin, end in (self._bounds(rank, whole) for rank in range(self.size))]
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def least(self, number: int, device: torch.device) -> int:
        """Returns the smallest `number` of all ranks, and waits until every rank has called this."""
        if self.size == 1:
            return number
        numbers = torch.tensor([number], device=device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers)

    def bounds(self, whole: int) -> tuple[int, int]:
        """Returns (first index, end index) of this rank's part of `whole` things. The parts' sizes differ by
        at most one."""
        return self._bounds(self.rank, whole)

    def _bounds(self, rank: int, whole: int) -> tuple[int, int]:
        return whole * rank // self.size, whole * (rank + 1) // self.size


ALONE = Ranks()
"""Ranks of a model that one process computes."""
