"""Mixture of experts, for any device and floating type."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quire_kernels.registry import implementation
from quire_kernels.routing import Routing
from quire_kernels.weights import PackedLinear


@implementation("route", "reference")
def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.route`."""
    num_experts = logits.shape[1] - routing.num_gates
    logits, gates = logits.split([num_experts, routing.num_gates], dim=1)
    is_sigmoid, has_groups = routing.scoring == "sigmoid", routing.num_chosen_groups < routing.num_groups
    # Softmax keeps the order of logits. Biases and sums of groups may change it.
    is_plain = not (is_sigmoid or has_groups or bias is not None)
    scores = logits if is_plain else logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if has_groups:
        groups = choice.unflatten(1, (routing.num_groups, -1))
        best = _largest(groups.topk(routing.group_best).values.sum(-1), routing.num_chosen_groups)
        is_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, False)
        choice = groups.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(1)
    experts = _largest(choice, routing.num_chosen)
    if is_sigmoid:
        shares = scores.gather(1, experts)
        if routing.renormalizes:
            shares = shares / (shares.sum(-1, keepdim=True) + routing.epsilon)
    else:
        chosen, whole = logits.gather(1, experts), logits.logsumexp(-1, keepdim=True)
        if routing.renormalizes:
            least = math.log(routing.least_sum) if routing.least_sum else -math.inf
            whole = torch.maximum(chosen.logsumexp(-1, keepdim=True), whole + least)
        shares = (chosen - whole).exp()
    shares = shares * routing.scale
    if routing.shared is not None:
        last = gates.sigmoid() if routing.num_gates else torch.ones_like(shares[:, :1])
        experts = torch.cat((experts, torch.full_like(experts[:, :1], num_experts)), 1)
        shares = torch.cat((shares, last), 1)
    return experts, shares


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the indices of the largest numbers of each row, in descending order; of equal numbers, the
    first comes first. (`topk` gives equal numbers in any order.)"""
    return values.argsort(dim=1, descending=True, stable=True)[:, :count]


@implementation("moe", "reference")
class LoopedExperts:
    """See `ops.pack_experts`. It computes one expert after the other."""

    def __init__(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> None:
        self.gate_up, self.down = list(gate_up), list(down)

    def replace(self, expert: int, gate_up: PackedLinear, down: PackedLinear) -> None:
        """See PackedExperts."""
        self.gate_up[expert], self.down[expert] = gate_up, down

    def __call__(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        shares: torch.Tensor,
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See PackedExperts."""
        num_chosen, chosen, factors = experts.shape[1], experts.flatten(), shares.flatten()
        counts = (chosen + 1).bincount(minlength=len(self.down) + 1)
        places = chosen.argsort(stable=True).split(counts.tolist())[1:]
        out = sums
        if out is None:
            out = torch.zeros((x.shape[0], self.down[0].out_features), dtype=torch.float32, device=x.device)
        for gate_up, down, own in zip(self.gate_up, self.down, places, strict=True):
            if len(own):
                tokens = own // num_chosen
                result = down(gate_up(x.index_select(0, tokens)), torch.float32)
                out.index_add_(0, tokens, result * factors.index_select(0, own).unsqueeze(1))
        return out.to(x.dtype)
