"""Mixture of experts: each token is computed by a few of a layer's feed-forward parts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from quire.layers.context import AdapterStep
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.scheme import LinearScheme
from quire.models.config import DecoderConfig, ExpertsConfig
from quire_kernels import ops
from quire_kernels.weights import PackedExperts


class Routes(NamedTuple):
    """Where tokens go."""

    experts: torch.Tensor
    """int64 [num_tokens, num_chosen]."""
    shares: torch.Tensor
    """float32 of that shape: what the experts' results are multiplied by before they are added."""


class Router(Linear):
    """Chooses the experts of each token: those of the largest logits."""

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig, name: str) -> None:
        super().__init__(
            config, config.hidden_size, {name: experts.num_experts}, parallel=None, bias=config.mlp_bias
        )
        self.num_chosen, self.renormalizes = experts.num_chosen, experts.renormalizes

    def allocate(self, scheme: LinearScheme, path: str) -> None:
        """See Linear."""
        super().allocate(scheme.of_routers, path)

    def forward(self, x: torch.Tensor) -> Routes:  # type: ignore[override]
        """[num_tokens, hidden_size] to the routes, by logits that are not rounded to x's type."""
        logits = self.packed(x, torch.float32)
        return Routes(*ops.route(logits, self.num_chosen, renormalizes=self.renormalizes))


class MixtureOfExperts(nn.Module):
    """The weighted sum of what a token's experts make of it; see `ops.pack_experts`.

    Args:
        config: of the model.
        experts: its part about experts.
        names: of an expert's gate, up and down in the checkpoint.
        router_name: of the router in the checkpoint.
    """

    packed: PackedExperts
    """What computes the experts; there is none before `finish`."""

    def __init__(
        self,
        config: DecoderConfig,
        experts: ExpertsConfig,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        router_name: str = "gate",
    ) -> None:
        super().__init__()
        self.router = Router(config, experts, router_name)
        self.experts = nn.ModuleList(
            GatedMLP(config, experts.intermediate_size, names) for _ in range(experts.num_experts)
        )

    def finish(self, device_type: str) -> None:
        """Joins the experts, once their layers are packed."""
        gate_up, down = [], []
        for expert in self.experts:
            assert isinstance(expert, GatedMLP)
            gate_up.append(expert.gate_up.packed)
            down.append(expert.down.packed)
        self.packed = ops.pack_experts(gate_up, down, device_type=device_type, dtype=self.router.dtype)

    def forward(self, x: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same; no adapter changes experts or their router."""
        return self.packed(x, *self.router(x))

    @property
    def unread_bytes(self) -> int:
        """Of the packed weights, what a step with one token does not read."""
        each = [one.packed.nbytes for one in self.experts[0].modules() if isinstance(one, Linear)]
        return (len(self.experts) - self.router.num_chosen) * sum(each)
