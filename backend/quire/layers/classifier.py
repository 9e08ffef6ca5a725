"""ClassifierHead: a linear layer of a sequence classifier, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class ClassifierHead(nn.Module):
    """Linear layer of a sequence classifier, in float32. It computes the labels' logits, or it is a dense
    layer before that one.

    Args:
        in_features: size of the input.
        num_labels: size of the output: number of logits, or output features of a dense layer.
        bias: whether there is a bias.
    """

    def __init__(self, in_features: int, num_labels: int, *, bias: bool) -> None:
        super().__init__()
        weight = torch.empty((num_labels, in_features), dtype=torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(weight.new_empty(num_labels), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [..., in_features] of any floating-point type to float32 [..., num_labels]."""
        return F.linear(x.float(), self.weight, self.bias)
