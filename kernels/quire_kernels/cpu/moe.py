"""Mixture of experts on the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof, byref
from typing import Any

import torch

from quire_kernels.cpu.linear import BLOCK_COLUMNS, NativeLinear
from quire_kernels.cpu.native import TYPES, Activation, as_rows, declarations
from quire_kernels.weights import PackedLinear


def can_join(isa: str, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], **_: object) -> bool:
    """Whether these are experts of one shape and form for the kernels."""
    forms: list[tuple[int, int, int, int]] = []
    for linears in (gate_up, down):
        structs = [one.struct for one in linears if isinstance(one, NativeLinear) and one.isa == isa]
        found = {(one.format, one.activation, one.num_columns, one.num_inputs) for one in structs}
        if len(structs) < len(linears) or len(found) != 1:
            return False
        forms += found
    first, second = forms
    is_gated = first[1] != Activation.NONE and second[1] == Activation.NONE
    return is_gated and first[3] == second[2] and first[3] % BLOCK_COLUMNS == 0


class NativeExperts:
    """See `ops.pack_experts`."""

    def __init__(
        self, library: ctypes.CDLL, gate_up: Sequence[NativeLinear], down: Sequence[NativeLinear]
    ) -> None:
        self.library, self.isa, self.dtype = library, down[0].isa, down[0].dtype
        self.num_experts, self.hidden_size = len(down), down[0].out_features
        make = declarations().structure("Weight") * self.num_experts
        arrays = [make(*(one.struct for one in linears)) for linears in (gate_up, down)]
        self._owned = (list(gate_up), list(down), arrays)  # what the structures point into
        self._pointers = [addressof(array) for array in arrays]

    def struct(self, num_chosen: int) -> Any:
        """The structure for tokens with so many experts, for as long as this object lives."""
        return declarations().structure("Experts")(*self._pointers, self.num_experts, num_chosen)

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """See PackedExperts."""
        assert x.dtype == self.dtype and x.shape[1] == self.hidden_size, (x.dtype, x.shape)
        assert experts.dtype == torch.int64 and shares.dtype == torch.float32, (experts.dtype, shares.dtype)
        x, experts, shares = as_rows(x), experts.contiguous(), shares.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        self.library.quire_moe(
            TYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            experts.data_ptr(),
            shares.data_ptr(),
            byref(self.struct(experts.shape[1])),
            out.data_ptr(),
            out.stride(0),
        )
        return out


def route(
    library: ctypes.CDLL, logits: torch.Tensor, num_chosen: int, renormalizes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.route`."""
    logits = logits.contiguous()
    num_tokens, num_experts = logits.shape
    experts = torch.empty((num_tokens, num_chosen), dtype=torch.int64)
    shares = torch.empty((num_tokens, num_chosen))
    library.quire_route(
        logits.data_ptr(),
        num_tokens,
        num_experts,
        num_chosen,
        renormalizes,
        experts.data_ptr(),
        shares.data_ptr(),
    )
    return experts, shares
