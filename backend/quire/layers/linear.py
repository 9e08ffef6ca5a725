"""Linear layers, whose weight may be several checkpoint tensors behind each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from quire_kernels import ops
from quire_kernels.weights import PackedLinear


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter the loader fills: uninitialised memory, no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b, with W of one or several named parts that share the input.

    Merging (q, k, v; gate and up) makes one large product of several small ones. The output holds the parts
    behind each other, in the order given.

    Args:
        in_features: size of the input.
        parts: (checkpoint name relative to the layer's prefix, output features) of each part.
        bias: whether every part has a bias.
        activation: of two parts of one size, gate and up: the result is activation(gate) * up. See
            `ops.pack_linear`.
    """

    packed: PackedLinear | None = None
    """What computes, once the weights are loaded."""

    def __init__(
        self,
        in_features: int,
        parts: Sequence[tuple[str, int]],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        activation: str | None = None,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.activation = activation
        out_features = sum(size for _, size in self.parts)
        self.weight = empty_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in_features] to [num_tokens, sum of the parts], or half of it with an activation."""
        assert self.packed is not None, "pack() comes first"
        return self.packed(x)

    def pack(self, quantization: str | None) -> int:
        """Brings the loaded weights into the form that computes; they are gone then. Returns their bytes."""
        bias = None if self.bias is None else self.bias.data
        self.packed = ops.pack_linear(
            self.weight.data, bias, activation=self.activation, quantization=quantization
        )
        del self.weight, self.bias
        return self.packed.nbytes

    def weights(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, view of the memory it fills), weight and bias of each part."""
        start = 0
        for name, size in self.parts:
            yield f"{prefix}{name}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start : start + size]
            start += size
