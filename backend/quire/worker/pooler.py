"""Pooler: makes embeddings and scores of prompts from the hidden states of steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

from quire.layers.pooling import Pooling
from quire.models.interface import Model
from quire.outputs import RowOutput
from quire.worker.input_batch import PoolRow


@dataclass(frozen=True, slots=True)
class Pooler:
    """Pools rows of steps, and makes embeddings and scores of the results."""

    pooling: Pooling
    model: Model

    def pool(self, rows: Iterable[PoolRow], hidden: torch.Tensor) -> tuple[list[int], list[torch.Tensor]]:
        """Pools the hidden states of a step.

        Args:
            hidden: [num_tokens, hidden_size] of all tokens of the step.

        Returns:
            Indices of the rows whose prompts are complete, and their embeddings, float32 [dimensions] each,
            or scores, float32 [num_scores] each.
        """
        pooled = [(row, self._pooled(row, hidden)) for row in rows]
        complete = [(row.number, row.state.sampling.params, vector) for row, vector in pooled if row.is_last]
        classified = [vector for _, params, vector in complete if params.pooling.task == "classify"]
        logits = iter(self._logits(classified))
        vectors = [
            self._embedding(vector, params.dimensions)
            if params.pooling.task == "embed"
            else self._scores(next(logits), uses_activation=params.pooling.use_activation)
            for _, params, vector in complete
        ]
        return [number for number, _, _ in complete], vectors

    def _pooled(self, row: PoolRow, hidden: torch.Tensor) -> torch.Tensor:
        """Pools a row. The result [hidden_size] is its prompt's if the prompt ends with this row, else it has
        no use. A mean is float32, and is summed up over the rows of a prompt."""
        if self.pooling.mode == "last":
            return hidden[row.end - 1]
        state = row.state
        if self.pooling.mode == "cls":
            state.pooled = hidden[row.first].clone() if state.pooled is None else state.pooled
            return state.pooled
        total = hidden[row.first : row.end].float().sum(dim=0)
        if state.pooled is not None:
            total += state.pooled
        state.pooled = total
        return total / state.num_prompt_tokens

    def _embedding(self, pooled: torch.Tensor, dimensions: int) -> torch.Tensor:
        """Returns the embedding, float32 [dimensions], of a pooled hidden state [hidden_size]."""
        vector = pooled.float()[:dimensions]
        return functional.normalize(vector, dim=0) if self.pooling.normalizes else vector

    def _logits(self, pooled: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the logits, float32 [num_scores] each, of pooled hidden states [hidden_size]."""
        token_ids = self.pooling.token_ids
        if token_ids is None or not pooled:
            return [self.model.class_logits(one) for one in pooled]
        no, yes = self.model.compute_logits(torch.stack(pooled))[:, list(token_ids)].T
        return list((yes - no)[:, None])

    def _scores(self, logits: torch.Tensor, *, uses_activation: bool) -> torch.Tensor:
        """Returns the scores that belong to logits [num_scores], in their shape. Without activation they are
        the logits themselves."""
        classifier = self.pooling.classifier
        assert classifier is not None, "admission refuses requests for scores that there are not"
        if not uses_activation or classifier.activation == "identity":
            return logits
        return logits.sigmoid() if classifier.activation == "sigmoid" else logits.softmax(dim=0)


def embedding_output(vector: torch.Tensor) -> RowOutput:
    """Returns the output of a row with its embedding or scores, or an error if these are not finite.
    `vector`: float32 [dimensions] or [num_scores], on the host."""
    if not bool(torch.isfinite(vector).all()):
        return RowOutput(error="the model's hidden states are not finite: there is nothing to pool")
    return RowOutput(embedding=vector.numpy().astype("<f4", copy=False).tobytes())
