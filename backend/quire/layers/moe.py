"""Mixture of experts: a few of a layer's feed-forward parts compute each token."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from quire.errors import ConfigError
from quire.layers.config import DecoderConfig, ExpertsConfig
from quire.layers.context import AdapterStep
from quire.layers.expert_offload import OffloadedExperts
from quire.layers.linear import AsStoredLinear, Linear
from quire.layers.mlp import GatedMLP, SquaredReLU
from quire_kernels import ops
from quire_kernels.weights import PackedExperts, PackedLinear

SHARED_GATE = "shared_expert_gate"
"""Name in checkpoints of the shared expert's gate."""


class Routes(NamedTuple):
    """The experts of each token, and their shares."""

    experts: torch.Tensor
    """int64 [num_tokens, num_routes]: numbers of each token's experts."""
    shares: torch.Tensor
    """float32 [num_tokens, num_routes]: factor of each expert's result in the sum."""


class Router(AsStoredLinear):
    """Router: chooses each token's experts and computes their shares; see `Routing`."""

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

    def forward(self, x: torch.Tensor) -> Routes:  # type: ignore[override]
        """Returns the routes of x [num_tokens, hidden_size]. The logits are float32, and are not rounded to
        x's type."""
        logits = self.packed(x, torch.float32)
        return Routes(*ops.route(logits, self.routing, self.e_score_correction_bias))


class MixtureOfExperts(nn.Module):
    """Mixture-of-experts layer: a token's result is the weighted sum of its experts' results; see
    `ops.pack_experts`.

    A shared expert (`Routing.shared`) counts as one more expert of every token. Its share is 1, or computed
    by a gate. Some subclasses compute shares and shared experts differently.

    Args:
        config: the model's configuration.
        experts: the configuration of its experts.
        names: names of an expert's gate, up and down in the checkpoint.
        router_name: name of the router in the checkpoint.
    """

    packed: PackedExperts | OffloadedExperts
    """Packed experts. They do not exist before `finish`."""

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
            self.make_expert(config, experts, names) for _ in range(experts.num_experts)
        )
        self.shared_experts: nn.Module | None = None
        if experts.routing.shared is not None:
            self.shared_experts = GatedMLP(config, experts.shared_size, names)
        self.offloaded: OffloadedExperts | None = None
        """Experts with a budget of slots; None: there is no budget."""
        if experts.max_resident is not None:
            self._offload(experts.num_experts, experts.max_resident)

    def _offload(self, num_experts: int, num_slots: int) -> None:
        """Has the routed experts moved out of memory as soon as they are packed."""
        self.offloaded = OffloadedExperts(num_experts, num_slots)
        for number, expert in enumerate(self.experts):
            assert isinstance(expert, GatedMLP)
            expert.gate_up.keep = partial(self.offloaded.gate_up.keep, number)
            expert.down.keep = partial(self.offloaded.down.keep, number)

    def make_expert(
        self, config: DecoderConfig, experts: ExpertsConfig, names: tuple[str, str, str]
    ) -> nn.Module:
        """Makes a routed expert."""
        return GatedMLP(config, experts.intermediate_size, names)

    def finish(self, device_type: str) -> None:
        """Makes `packed` from the experts, once their layers are packed."""
        resident = [] if self.offloaded is not None else [*self.experts]
        gate_up, down = [], []
        for expert in (*resident, *filter(None, [self.shared_experts])):
            assert isinstance(expert, GatedMLP)
            gate_up.append(expert.gate_up.packed)
            down.append(expert.down.packed)
        packing: dict[str, Any] = {"device_type": device_type, "dtype": self.gate.dtype}
        if self.offloaded is None:
            self.packed = ops.pack_experts(gate_up, down, **packing)
        else:
            self.offloaded.finish(gate_up, down, **packing)
            self.packed = self.offloaded
            self.experts = nn.ModuleList()  # which have no weights of their own

    def forward(self, x: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        """Maps [num_tokens, hidden_size] to the same shape. Adapters do not change experts or their
        router."""
        return self.gate.ranks.sum(self.packed(x, *self.gate(x)))

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots of offloaded experts; 0: no expert is offloaded."""
        return 0 if self.offloaded is None else self.offloaded.nbytes

    def offloaded_bytes(self, device_type: str) -> int:
        """Estimates the bytes of as many packed experts as will have no slot. Works only before they are
        packed."""
        if self.offloaded is None:
            return 0
        each = [one.packed_bytes(device_type) for one in self.experts[0].modules() if isinstance(one, Linear)]
        return (self.offloaded.num_experts - self.offloaded.num_slots) * sum(each)

    @property
    def unread_bytes(self) -> int:
        """Bytes of the routed experts in memory, less those that a step with a single token reads. Negative
        if the token needs more experts than there are slots."""
        if self.offloaded is not None:
            each_slot = self.slot_bytes // self.offloaded.num_slots
            return self.slot_bytes - self.gate.routing.num_chosen * each_slot
        each = [one.packed.nbytes for one in self.experts[0].modules() if isinstance(one, Linear)]
        return (len(self.experts) - self.gate.routing.num_chosen) * sum(each)


class SquaredUp:
    """Up projection of an expert without a gate, with its activation: relu(up(x)) ** 2.

    It has only those parts of PackedLinear that the PyTorch implementation of `moe` needs. No other
    implementation supports experts without a gate.
    """

    def __init__(self, up: PackedLinear) -> None:
        self.up = up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Maps [num_tokens, in_features] to [num_tokens, inner size]."""
        return self.up(x).relu().square()


class SquaredExperts(MixtureOfExperts):
    """Mixture-of-experts layer whose experts have no gate; see `SquaredReLU`.

    Hidden states may be projected to smaller vectors before the routed experts, and back after them. The
    shared expert reads the hidden states themselves.
    """

    def __init__(self, config: DecoderConfig, experts: ExpertsConfig) -> None:
        if experts.max_resident is not None:
            raise ConfigError("max_resident_experts: experts without a gate stay resident: not supported")
        super().__init__(config, experts)
        size, latent = config.hidden_size, experts.latent_size
        self.shared_experts = SquaredReLU(config, experts.shared_size, size)
        self.to_latent: Linear | None = None
        self.from_latent: Linear | None = None
        if latent is not None:
            self.to_latent = Linear(config, size, {"fc1_latent_proj": latent}, parallel=None, bias=False)
            self.from_latent = Linear(config, latent, {"fc2_latent_proj": size}, parallel=None, bias=False)

    def make_expert(
        self, config: DecoderConfig, experts: ExpertsConfig, names: tuple[str, str, str]
    ) -> nn.Module:
        """See MixtureOfExperts."""
        return SquaredReLU(config, experts.intermediate_size, experts.latent_size or config.hidden_size)

    def finish(self, device_type: str) -> None:
        """See MixtureOfExperts."""
        experts = [expert for expert in self.experts if isinstance(expert, SquaredReLU)]
        self.packed = ops.pack_experts(
            [cast(PackedLinear, SquaredUp(expert.up.packed)) for expert in experts],
            [expert.down.packed for expert in experts],
            device_type=device_type,
            dtype=self.gate.dtype,
        )

    def forward(self, x: torch.Tensor, adapters: AdapterStep | None = None) -> torch.Tensor:
        """See MixtureOfExperts."""
        assert self.shared_experts is not None
        latent = x if self.to_latent is None else self.to_latent(x)
        routed = self.packed(latent, *self.gate(x))
        routed = routed if self.from_latent is None else self.from_latent(routed)
        out: torch.Tensor = routed + self.shared_experts(x)
        return out
