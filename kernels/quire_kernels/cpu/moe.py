"""Mixture of experts on the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure, addressof, byref
from typing import Any

import torch

from quire_kernels.cpu.linear import BLOCK_COLUMNS, NativeLinear
from quire_kernels.cpu.native import TYPES, Activation, as_rows, declarations
from quire_kernels.routing import Routing
from quire_kernels.weights import PackedLinear

_SCORING = {"softmax": 0, "sigmoid": 1}
"""Codes of `Scoring` in moe.h. `_SHARED` has those of `Shared`."""
_SHARED = {None: 0, "whole": 1, "gated": 2}


def why_not_join(
    isa: str, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], **_: object
) -> str | None:
    """Returns why the kernels cannot join these experts; None: they can. Experts may have different inner
    sizes, but not different hidden sizes or formats."""
    layers = []
    for linears in (gate_up, down):
        layers.append([one.struct for one in linears if isinstance(one, NativeLinear) and one.isa == isa])
        forms = {(one.format, one.activation) for one in layers[-1]}
        if len(layers[-1]) < len(linears) or len(forms) != 1:
            return "experts have other implementations, or different forms"
    activations = [one[0].activation for one in layers]
    if activations[0] == Activation.NONE or activations[1] != Activation.NONE:
        return "gate_up alone must be gated"
    hidden = {one.num_inputs for one in layers[0]} | {one.num_columns for one in layers[1]}
    if len(hidden) != 1 or hidden.pop() % BLOCK_COLUMNS != 0:
        return f"all experts must have one hidden size, a multiple of {BLOCK_COLUMNS}"
    return None


class NativeExperts:
    """See `ops.pack_experts`."""

    def __init__(
        self, library: ctypes.CDLL, gate_up: Sequence[NativeLinear], down: Sequence[NativeLinear]
    ) -> None:
        self.library, self.isa, self.dtype = library, down[0].isa, down[0].dtype
        self.num_experts, self.hidden_size = len(down), down[0].out_features
        make = declarations().structure("Weight") * self.num_experts
        self._owned = (list(gate_up), list(down))  # what the structures point into
        self._arrays = [make(*(one.struct for one in linears)) for linears in self._owned]
        self._pointers = [addressof(array) for array in self._arrays]

    def struct(self, num_chosen: int) -> Any:
        """Returns the C++ structure for `num_chosen` experts per token. It is valid as long as this object
        lives."""
        return declarations().structure("Experts")(*self._pointers, self.num_experts, num_chosen)

    def replace(self, expert: int, gate_up: PackedLinear, down: PackedLinear) -> None:
        """See PackedExperts."""
        for linears, array, one in zip(self._owned, self._arrays, (gate_up, down), strict=True):
            assert isinstance(one, NativeLinear) and one.struct.format == array[expert].format, one
            linears[expert], array[expert] = one, one.struct

    def __call__(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        shares: torch.Tensor,
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
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
            None if sums is None else sums.data_ptr(),
        )
        return out


def routing_struct(routing: Routing, num_experts: int, bias: torch.Tensor | None) -> Structure:
    """Returns the C++ structure for a routing. `num_experts` does not count the shared expert. `bias` must
    live as long as the structure."""
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()), bias
    struct: Structure = declarations().structure("Routing")(
        None if bias is None else bias.data_ptr(),
        _SCORING[routing.scoring],
        _SHARED[routing.shared],
        num_experts,
        routing.num_chosen,
        routing.num_groups,
        routing.num_chosen_groups,
        routing.group_best,
        routing.renormalizes,
        routing.least_sum,
        routing.scale,
        routing.epsilon,
    )
    return struct


def route(
    library: ctypes.CDLL, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.route`."""
    logits = logits.contiguous()
    num_tokens, num_logits = logits.shape
    experts = torch.empty((num_tokens, routing.num_routes), dtype=torch.int64)
    shares = torch.empty((num_tokens, routing.num_routes))
    library.quire_route(
        logits.data_ptr(),
        num_tokens,
        byref(routing_struct(routing, num_logits - routing.num_gates, bias)),
        experts.data_ptr(),
        shares.data_ptr(),
    )
    return experts, shares
