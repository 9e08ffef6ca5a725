"""Pooler: makes embeddings of prompts from the hidden states of steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

from quire.layers.pooling import Pooling
from quire.outputs import RowOutput
from quire.worker.input_batch import PoolRow


@dataclass(frozen=True, slots=True)
class Pooler:
    """Pools each row on its own, so the result does not depend on the other rows of a step."""

    pooling: Pooling

    def pool(self, rows: Iterable[PoolRow], hidden: torch.Tensor) -> tuple[list[int], list[torch.Tensor]]:
        """Pools the hidden states of a step.

        Args:
            hidden: [num_tokens, hidden_size] of all tokens of the step.

        Returns:
            Indices of the rows whose prompts are complete, and their embeddings, float32 [dimensions] each.
        """
        numbers, vectors = [], []
        for row in rows:
            state = row.state
            vector = hidden[row.end - 1].float()
            if self.pooling.is_mean:
                vector = hidden[row.first : row.end].float().sum(dim=0)
                if state.pooled is not None:
                    vector += state.pooled
                state.pooled = vector
            if row.is_last:
                if self.pooling.is_mean:
                    vector = vector / state.num_prompt_tokens
                vector = vector[: state.sampling.params.dimensions]
                numbers.append(row.number)
                vectors.append(functional.normalize(vector, dim=0) if self.pooling.normalizes else vector)
        return numbers, vectors


def embedding_output(vector: torch.Tensor) -> RowOutput:
    """Returns the output of a row with its embedding, or an error if it is not finite. `vector`: float32
    [dimensions], on the host."""
    if not bool(torch.isfinite(vector).all()):
        return RowOutput(error="the model's hidden states are not finite: there is no embedding")
    return RowOutput(embedding=vector.numpy().astype("<f4", copy=False).tobytes())
