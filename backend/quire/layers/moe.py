"""Mixture of experts: each token is computed by a few of a layer's feed-forward parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from quire.layers.config import DecoderConfig, ExpertsConfig
from quire.layers.context import AdapterStep
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.scheme import LinearScheme
from quire_kernels import ops
from quire_kernels.weights import PackedExperts

SHARED_GATE = "shared_expert_gate"
"""Name of what gates a shared expert, in checkpoints."""


class Routes(NamedTuple):
    """Where tokens go."""

    experts: torch.Tensor
    """int64 [num_tokens, num_routes]."""
    shares: torch.Tensor
    """float32 of that shape: what the experts' results are multiplied by before they are added."""


class Router(Linear):
    """Chooses the experts of each token: those of the largest scores."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, name: str) -> None:
        parts = {name: experts.num_experts}
        if experts.routing.num_gates:
            parts[SHARED_GATE] = experts.routing.num_gates
        super().__init__(config, config.hidden_size, parts, parallel=None, bias=config.mlp_bias)
        self.routing = experts.routing
        self.e_score_correction_bias: nn.Parameter | None = None
        if experts.has_score_bias:
            bias = torch.empty(experts.num_experts, dtype=torch.float32)
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def allocate(self, scheme: LinearScheme, path: str) -> None:
        """See Linear."""
        super().allocate(scheme.of_routers, path)

    def forward(self, x: torch.Tensor) -> Routes:  # type: ignore[override]
        """[num_tokens, hidden_size] to the routes, by logits that are not rounded to x's type."""
        logits = self.packed(x, torch.float32)
        return Routes(*ops.route(logits, self.routing, self.e_score_correction_bias))


class MixtureOfExperts(nn.Module):
    """The weighted sum of what a token's experts make of it; see `ops.pack_experts`.

    A shared expert is one more, whose share is 1 or a gate's.

    Args:
        config: of the model.
        experts: its part about experts.
        names: of an expert's gate, up and down in the checkpoint.
        router_name: of the router in the checkpoint.
    """

    packed: PackedExperts
    """Experts in the form that computes; there are none before `finish`."""

    def __init__(
        self,
        config: DecoderConfig,
        experts: ExpertsConfig,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        router_name: str = "gate",
    ) -> None:
        super().__init__()
        self.gate = Router(config, experts, router_name)
        self.experts = nn.ModuleList(
            GatedMLP(config, experts.intermediate_size, names) for _ in range(experts.num_experts)
        )
        self.shared_experts: GatedMLP | None = None
        if experts.routing.shared is not None:
            self.shared_experts = GatedMLP(config, experts.shared_size, names)

    def finish(self, device_type: str) -> None:
        """Joins the experts, once their layers are packed."""
        gate_up, down = [], []
        for expert in (*self.experts, *filter(None, [self.shared_experts])):
            assert isinstance(expert, GatedMLP)
            gate_up.append(expert.gate_up.packed)
            down.append(expert.down.packed)
        self.packed = ops.pack_experts(gate_up, down, device_type=device_type, dtype=self.gate.dtype)

    def forward(self, x: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same; no adapter changes experts or their router."""
        return self.gate.ranks.sum(self.packed(x, *self.gate(x)))

    @property
    def unread_bytes(self) -> int:
        """Bytes of the packed weights that a step with one token does not read."""
        each = [one.packed.nbytes for one in self.experts[0].modules() if isinstance(one, Linear)]
        return (len(self.experts) - self.gate.routing.num_chosen) * sum(each)
