"""Token embedding and output head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from quire.layers.linear import empty_parameter


class Embedding(nn.Module):
    """Rows of a table by token id; `logits` uses the same table (or one of its own) as output head."""

    def __init__(self, vocab_size: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab_size, size, dtype=dtype, device=device)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [num_tokens] to [num_tokens, size]; ids are within the vocabulary (checked at admission)."""
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, size] to float32 [n, vocab_size]."""
        return F.linear(hidden, self.weight).float()

    def weights(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, memory it fills)."""
        yield f"{prefix}.weight", self.weight
