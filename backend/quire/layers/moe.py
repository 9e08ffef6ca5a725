"""Mixture of experts: each token is computed by a few of a layer's feed-forward parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from quire.layers.linear import Linear
from quire.layers.scheme import LinearScheme
from quire.models.config import DecoderConfig, ExpertsConfig


class Routes(NamedTuple):
    """Where tokens go."""

    experts: torch.Tensor
    """int64 [num_tokens, num_chosen]."""
    weights: torch.Tensor
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
        chosen, experts = logits.topk(self.num_chosen)
        if self.renormalizes:
            return Routes(experts, chosen.softmax(-1))
        return Routes(experts, (chosen - logits.logsumexp(-1, keepdim=True)).exp())


class MixtureOfExperts(nn.Module):
    """The weighted sum of what a token's experts make of it. Experts without tokens are not read.

    A token's results are added in the order of its experts, in float32, so that other tokens of the batch
    change nothing. (Shazeer et al., 2017, arXiv 1701.06538; Fedus et al., 2021, arXiv 2101.03961.)

    Args:
        config: of the model.
        experts: its part about experts.
        make_expert: an expert, [n, hidden_size] to the same; a GatedMLP for example.
        router_name: of the router in the checkpoint.
    """

    def __init__(
        self,
        config: DecoderConfig,
        experts: ExpertsConfig,
        make_expert: Callable[[], nn.Module],
        router_name: str = "gate",
    ) -> None:
        super().__init__()
        self.router = Router(config, experts, router_name)
        self.experts = nn.ModuleList(make_expert() for _ in range(experts.num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] to the same."""
        routes = self.router(x)
        chosen, weights = routes.experts.flatten(), routes.weights.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=len(self.experts)).tolist()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, places in zip(self.experts, order.split(counts), strict=True):
            if len(places):
                tokens = places // self.router.num_chosen
                result = expert(x.index_select(0, tokens)).float()
                out.index_add_(0, tokens, result * weights.index_select(0, places).unsqueeze(1))
        return out.to(x.dtype)

    @property
    def unread_bytes(self) -> int:
        """Of the packed weights, what a step with one token does not read."""
        each = [one.packed.nbytes for one in self.experts[0].modules() if isinstance(one, Linear)]
        return (len(self.experts) - self.router.num_chosen) * sum(each)
