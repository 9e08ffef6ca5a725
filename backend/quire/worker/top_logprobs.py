"""TopLogprobs: log-probabilities of one given token and of the most likely ones, for rows of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.outputs import TokenLogprobs
from quire.worker.device import to_device
from quire.worker.input_batch import PromptRow

MAX_PROMPT_LOGITS = 2**24
"""Most logits of prompt tokens that exist at a time: 64 MiB."""
_CHUNK = 256


@dataclass(slots=True)
class TopLogprobs:
    """Still on the device of the logits."""

    token_ids: torch.Tensor
    """int64 [n, most + 1]: the given token of each row, then its most likely ones, in descending order."""
    logprobs: torch.Tensor
    """float32 [n, most + 1]: theirs."""
    ranks: torch.Tensor
    """int64 [n]: of the given token, 1 where no other is more likely; 0: not counted."""

    @classmethod
    def of(cls, logits: torch.Tensor, token_ids: torch.Tensor, most: int) -> TopLogprobs:
        """The numbers of a log-softmax that are wanted.

        Args:
            logits: float32 [n, vocab_size]; left as they are.
            token_ids: int64 [n], the given tokens; a negative one stands for any.
            most: how many of the most likely tokens are wanted; all, if there are fewer.
        """
        ids = token_ids.clamp(min=0)[:, None]
        ranks = _ranks(logits, logits.gather(1, ids))
        if most:
            ids = torch.cat([ids, _top_ids(logits, most)], dim=1)
        # Faster than logsumexp, though it writes all.
        return cls(ids, torch.log_softmax(logits, dim=-1).gather(1, ids), ranks)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.token_ids, self.logprobs, self.ranks


def _ranks(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """int64 [n]: 1 + how many of the logits [n, V] are above `values`, [n, 1]."""
    if logits.device.type != "cpu":
        return (logits > values).sum(dim=-1) + 1
    # A sum of booleans takes torch eight times as long.
    pairs = zip(logits.numpy(), values.numpy(), strict=True)
    return torch.tensor([np.count_nonzero(row > value) + 1 for row, value in pairs])


def _top_ids(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest, descending, int64 [n, at most count]; only chunks with a large maximum are
    looked into, as the largest numbers lie in those with the largest maxima."""
    n, size = logits.shape
    num_chunks = size // _CHUNK
    if num_chunks < 4 * count:
        return logits.topk(min(count, size)).indices
    whole = num_chunks * _CHUNK
    chunks = logits[:, :whole].view(n, num_chunks, _CHUNK).amax(dim=-1).topk(count).indices
    ids = (chunks[:, :, None] * _CHUNK + torch.arange(_CHUNK, device=logits.device)).view(n, -1)
    rest = torch.arange(whole, size, device=logits.device).expand(n, -1)
    ids = torch.cat([ids, rest], dim=1)
    return ids.gather(1, logits.gather(1, ids).topk(count).indices)


def entries(tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> list[TokenLogprobs]:
    """What is told of each row.

    Args:
        tensors: `TopLogprobs.tensors`, on the host.
        counts: how many of the most likely tokens each row wants; [n].
    """
    return [
        TokenLogprobs(ids[: count + 1], values[: count + 1], rank)
        for ids, values, rank, count in zip(*(tensor.tolist() for tensor in tensors), counts, strict=True)
    ]


@dataclass(slots=True)
class PromptLogprobs:
    """What the tokens of prompts follow with, of one step."""

    rows: list[PromptRow]
    found: TopLogprobs
    """The rows' positions behind each other."""

    @classmethod
    def of(
        cls,
        rows: list[PromptRow],
        hidden: torch.Tensor,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
    ) -> PromptLogprobs:
        """Computes logits some positions at a time.

        Args:
            rows: in ascending order, at least one.
            hidden: [num_tokens, hidden_size] of all tokens of the step.
            compute_logits: [n, hidden_size] to float32 [n, vocab_size].
            vocab_size: number of logits.
        """
        flat = [np.arange(row.first, row.first + len(row.targets)) for row in rows]
        positions = to_device(np.concatenate(flat), hidden.device)
        targets = to_device(
            np.concatenate([np.array(row.targets, dtype=np.int64) for row in rows]), hidden.device
        )
        most, size = max(row.most for row in rows), max(1, MAX_PROMPT_LOGITS // vocab_size)
        parts = [
            TopLogprobs.of(compute_logits(hidden[some]), wanted, most).tensors
            for some, wanted in zip(positions.split(size), targets.split(size), strict=True)
        ]
        return cls(rows, TopLogprobs(*(torch.cat(part) for part in zip(*parts, strict=True))))

    def outputs(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, list[TokenLogprobs]]]:
        """Of each row its number in the step and an entry for each of its positions.

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
