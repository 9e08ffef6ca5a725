"""Token embedding and output head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from quire_kernels import ops
from quire_kernels.weights import PackedLinear


class Embedding(nn.Module):
    """Rows of a table by token id; `logits` uses the same table (or one of its own) as output head.

    Args:
        scale: what looked-up rows (not logits) are multiplied by; rounded to `dtype` first.
    """

    packed: PackedLinear
    """The table as output head; there is none before `pack`, nor of a table that is looked up only."""

    def __init__(self, vocab_size: int, size: int, *, dtype: torch.dtype, scale: float | None = None) -> None:
        super().__init__()
        self.scale = None if scale is None else float(torch.tensor(scale, dtype=dtype, device="cpu"))
        self.weight = nn.Parameter(torch.empty(vocab_size, size, dtype=dtype), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [num_tokens] to [num_tokens, size]; ids are within the vocabulary (checked at admission)."""
        if hasattr(self, "weight"):
            rows = F.embedding(token_ids, self.weight)
        else:
            rows = self.packed.rows(token_ids)
        return rows if self.scale is None else rows * self.scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, size] to float32 [n, vocab_size]."""
        return self.packed(hidden, torch.float32)

    def best(self, hidden: torch.Tensor) -> torch.Tensor:
        """int64 [n]: `ops.argmax` of the logits of hidden [n, size]."""
        return self.packed.argmax(hidden)

    def pack(self, quantization: str | None, *, is_looked_up: bool) -> int:
        """Makes an output head of the table, which is gone then unless the head alone is quantised.

        Returns:
            The head's bytes.
        """
        self.packed = ops.pack_linear(self.weight.data, quantization=quantization)
        if quantization is None or not is_looked_up:
            del self.weight
        return self.packed.nbytes
