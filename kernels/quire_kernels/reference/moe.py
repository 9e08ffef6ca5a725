"""Mixture of experts, for any device and floating type."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire_kernels.registry import implementation
from quire_kernels.weights import PackedLinear


@implementation("route", "reference")
def route(logits: torch.Tensor, num_chosen: int, renormalizes: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.route`."""
    chosen, experts = logits.topk(num_chosen)
    if renormalizes:
        return experts, chosen.softmax(-1)
    return experts, (chosen - logits.logsumexp(-1, keepdim=True)).exp()


@implementation("moe", "reference")
class LoopedExperts:
    """See `ops.pack_experts`: one expert after the other."""

    def __init__(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """See PackedExperts."""
        num_chosen, chosen, factors = experts.shape[1], experts.flatten(), shares.flatten()
        places = chosen.argsort(stable=True).split(chosen.bincount(minlength=len(self.down)).tolist())
        out = torch.zeros((x.shape[0], self.down[0].out_features), dtype=torch.float32, device=x.device)
        for gate_up, down, own in zip(self.gate_up, self.down, places, strict=True):
            if len(own):
                tokens = own // num_chosen
                result = down(gate_up(x.index_select(0, tokens)), torch.float32)
                out.index_add_(0, tokens, result * factors.index_select(0, own).unsqueeze(1))
        return out.to(x.dtype)
