"""TopLogprobs: log-probabilities of one given token and of the most likely ones, for each row of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.outputs import TokenLogprobs
from quire.worker.device import to_device
from quire.worker.input_batch import PromptRow
from quire_kernels import ops

MAX_PROMPT_LOGITS = 2**24
"""Most logits of prompt tokens that are computed at a time (64 MiB), but at least those of one token."""


@dataclass(slots=True)
class TopLogprobs:
    """Log-probabilities of rows, still on the device of the logits."""

    token_ids: torch.Tensor
    """int64 [n, most + 1]: the given token of each row, then its most likely ones, the likeliest first."""
    logprobs: torch.Tensor
    """float32 [n, most + 1]: log-probabilities of `token_ids`."""
    ranks: torch.Tensor
    """int64 [n]: rank of the given token, 1: no other is more likely; 0: not counted."""

    @classmethod
    def compute(cls, logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> TopLogprobs:
        """Computes log-probabilities of each row's given token and its `most` most likely ones; see
        `ops.top_logprobs`."""
        return cls(*ops.top_logprobs(logits, token_ids, most))

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.token_ids, self.logprobs, self.ranks


def entries(tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Returns the log-probabilities to report for each row, as lists.

    Args:
        tensors: `TopLogprobs.tensors`, on the host.
        counts: [n], number of most likely tokens that each row wants.
    """
    return [
        TokenLogprobs(ids[: count + 1], values[: count + 1], rank)
        for ids, values, rank, count in zip(*(tensor.tolist() for tensor in tensors), counts, strict=True)
    ]


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of the wanted prompt tokens that follow the positions which one step computed."""

    rows: list[PromptRow]
    found: TopLogprobs
    """Log-probabilities at the positions of all rows, one row after another."""

    @classmethod
    def compute(
        cls,
        rows: list[PromptRow],
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
    ) -> PromptLogprobs:
        """Computes the log-probabilities. If there are many positions, their logits are computed in parts.

        Args:
            rows: in ascending order, at least one.
            hidden: [num_tokens, hidden_size] of all tokens of the step.
            compute_logits: [n, hidden_size] to float32 [n, vocab_size].
            vocab_size: number of logits of a position.
        """
        flat = [np.arange(row.first, row.first + len(row.targets)) for row in rows]
        positions = to_device(np.concatenate(flat), hidden.device)
        targets = to_device(
            np.concatenate([np.array(row.targets, dtype=np.int64) for row in rows]), hidden.device
        )
        most, size = max(row.most for row in rows), max(1, MAX_PROMPT_LOGITS // vocab_size)
        parts = [
            TopLogprobs.compute(compute_logits(hidden[some]), wanted, most).tensors
            for some, wanted in zip(positions.split(size), targets.split(size), strict=True)
        ]
        return cls(rows, TopLogprobs(*(torch.cat(part) for part in zip(*parts, strict=True))))

    def outputs(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, list[TokenLogprobs]]]:
        """Returns for each row its index in the step and an entry for each of its positions.

        Args:
            tensors: copies of `found.tensors` on the host.
        """
        counts = [row.most for row in self.rows for _ in row.targets]
        flat, outputs, start = entries(tensors, counts), [], 0
        for row in self.rows:
            end = start + len(row.targets)
            outputs.append((row.number, flat[start:end]))
            start = end
        return outputs
