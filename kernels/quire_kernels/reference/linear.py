"""Linear layers, for any device and floating type."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F

from quire_kernels import registry
from quire_kernels.block_weights import BlockWeight
from quire_kernels.grouped_weights import GroupedWeight
from quire_kernels.reference.elementwise import argmax, gate_mul
from quire_kernels.registry import implementation
from quire_kernels.weights import (
    W8A8_GROUP,
    PackedLinear,
    QuantizedRows,
    dequantize_weight,
    quantize_rows,
    quantize_weight,
)


@implementation("linear", "reference")
class TorchLinear:
    """See `ops.pack_linear`. Quantisation saves no memory: the layer keeps a matrix in the input's type, and
    with "w8a8" the codes as float32 besides."""

    def __init__(
        self,
        weight: torch.Tensor | QuantizedRows,
        bias: torch.Tensor | None,
        activation: str | None,
        quantization: str | None,
    ) -> None:
        self.codes: torch.Tensor | None = None
        """float32 [groups, W8A8_GROUP, rows of W]: codes of w8a8; None: another quantisation, or none."""
        if quantization == "w8a8":
            codes, self.scales = quantize_weight(weight, quantization)
            self.codes = codes.float().unflatten(1, (-1, W8A8_GROUP)).permute(1, 2, 0).contiguous()
        if isinstance(weight, QuantizedRows):
            weight = weight.dequantize().to(weight.dtype)
        elif quantization not in (None, "w8a8"):
            # In rows, so that no second matrix of float32 is needed at once.
            weight = torch.cat(
                [
                    dequantize_weight(*quantize_weight(rows, quantization)).to(weight.dtype)
                    for rows in weight.split(1024)
                ]
            )
        self.weight, self.bias, self.activation = weight, bias, activation
        self.in_features = weight.shape[1]
        self.out_features = weight.shape[0] if activation is None else weight.shape[0] // 2
        self.nbytes = weight.nbytes

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        return F.embedding(indices, self.weight)

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        return argmax(self(x, torch.float32))

    def ungated(self) -> PackedLinear:
        """See PackedLinear."""
        out = copy.copy(self)
        out.activation, out.out_features = None, self.weight.shape[0]
        return out

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See PackedLinear."""
        out = F.linear(x, self.weight, self.bias) if self.codes is None else self._integer_product(x)
        if self.activation is not None:
            out = gate_mul(out, self.activation)
        return out if dtype is None else out.to(dtype)

    def _integer_product(self, x: torch.Tensor) -> torch.Tensor:
        """Computes w8a8. A group's sum is an integer that float32 holds exactly; groups are added in
        order."""
        assert self.codes is not None
        codes, scales = quantize_rows(x.reshape(-1, self.in_features))
        total = torch.zeros((codes.shape[0], self.codes.shape[2]), device=x.device)
        for group, weights in enumerate(self.codes):
            total += codes[:, group].float() @ weights * scales[:, group]
        total *= self.scales.view(1, -1)
        if self.bias is not None:
            total += self.bias
        return total.to(x.dtype).view(*x.shape[:-1], total.shape[1])


@implementation("grouped_linear", "reference")
def dequantized_linear(
    weight: GroupedWeight | BlockWeight,
    bias: torch.Tensor | None,
    activation: str | None,
    dtype: torch.dtype,
) -> PackedLinear:
    """See `ops.pack_linear`. Makes a layer of the dequantised weights, without the size or speed of quantised
    ones."""
    # In rows, so that no second matrix of float32 is needed at once.
    parts = [
        weight.rows(slice(first, first + 1024)).dequantize().to(dtype)
        for first in range(0, weight.shape[0], 1024)
    ]
    whole = torch.cat(parts)
    out: PackedLinear = registry.select(
        "linear",
        whole.device.type,
        dtype,
        in_features=whole.shape[1],
        out_features=whole.shape[0],
        activation=activation,
        quantization=None,
    )(whole, bias, activation, None)
    return out
