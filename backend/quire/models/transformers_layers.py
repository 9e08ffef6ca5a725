"""pack_layers: replaces a transformers model's layers by faster equivalents.

Plain linear layers are packed. Norms and gated feed-forward layers are found by the names of their classes or
parts. Such a norm or feed-forward layer is replaced only if the faster module gives the same numbers for
random inputs, except for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire_kernels import ops
from quire_kernels.weights import PackedLinear

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_ROUNDING = 16
"""Largest difference between two results that counts as rounding: the norm of a row's difference, divided by
the norm of the row and by the type's epsilon."""


class PackedLayer(nn.Module):
    """A linear layer with packed weights."""

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.packed, self.nbytes = packed, packed.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class PackedTable(nn.Module):
    """Embedding that looks up rows of a packed output head by token id."""

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.packed.rows(token_ids)


class GatedLayer(nn.Module):
    """A gated feed-forward layer computed as two packed products."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear) -> None:
        super().__init__()
        self.gate_up, self.down, self.nbytes = gate_up, down, gate_up.nbytes + down.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up(x.reshape(-1, x.shape[-1]))).view(x.shape)


class Norm(nn.Module):
    """RMSNorm computed by one operator."""

    nbytes = 0  # its weight is a parameter

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, requires_grad=False), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x.reshape(-1, x.shape[-1]), self.weight.data, self.eps).view(x.shape)


@torch.no_grad()
def pack_layers(base: Any, head: nn.Module) -> int:
    """Replaces, in place, layers of a headless model and of its head; see the module's docstring. A plain
    embedding that is tied to the head then looks rows up in the packed head. Returns the bytes of the packed
    weights."""
    table = base.get_input_embeddings()
    weight = table.weight if type(table) is nn.Embedding else None
    num_bytes = 0
    for parent, name, module in chain(_layers(base), _layers(head)):
        made = _gated(module) or _norm(module) or _linear(module)
        if made is not None:
            setattr(parent, name, made)
            num_bytes += made.nbytes
            if isinstance(made, PackedLayer) and weight is not None and module.weight is weight:
                base.set_input_embeddings(PackedTable(made.packed))
    return num_bytes


def _layers(parent: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yields (direct parent, name, module) for each module below `parent`. It does not enter modules that the
    caller replaced."""
    for name, module in list(parent.named_children()):
        yield parent, name, module
        if getattr(parent, name) is module:
            yield from _layers(module)


def _linear(module: nn.Module) -> PackedLayer | None:
    return PackedLayer(_packed(module)) if type(module) is nn.Linear else None


def _packed(*linears: nn.Linear, activation: str | None = None) -> PackedLinear:
    """Joins linear layers with a common input into one packed layer. For `activation` see
    `ops.pack_linear`."""
    weights, biases = [one.weight.data for one in linears], [one.bias for one in linears]
    bias = None if biases[0] is None else torch.cat([one.data for one in biases])
    return ops.pack_linear(
        weights[0] if len(weights) == 1 else torch.cat(weights), bias, activation=activation
    )


def _gated(module: Any) -> GatedLayer | None:
    """Returns a GatedLayer that computes the same as `module`, except for rounding; None: `module` is no
    gated feed-forward layer of a known form."""
    parts: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    function = getattr(module, "act_fn", None)
    if function is None or any(type(part) is not nn.Linear for part in parts):
        return None
    gate, up, down = parts
    x = torch.linspace(-8, 8, 512, device=gate.weight.device)
    named = [name for name, one in _ACTIVATIONS.items() if torch.equal(function(x), one(x))]
    if not named or (gate.bias is None) != (up.bias is None) or gate.weight.shape != up.weight.shape:
        return None
    made = GatedLayer(_packed(gate, up, activation=named[0]), _packed(down))
    return made if _is_same(module, made, gate.weight) else None


def _norm(module: Any) -> Norm | None:
    """Returns a Norm that computes the same as `module`, except for rounding; None: `module` is no RMSNorm of
    a known form."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float) or weight is None:
        return None
    if weight.ndim != 1:
        return None
    made = Norm(weight.data, eps)
    return made if _is_same(module, made, weight) else None


def _is_same(module: nn.Module, made: nn.Module, weight: torch.Tensor) -> bool:
    """Whether two modules give the same results for three random rows as wide as the weight, except for
    rounding. One row is small, so that an epsilon matters, and one is large, so that a limit would cut it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, 3, weight.shape[-1]), generator=generator) * torch.tensor([[1e-3], [1.0], [1e2]])
    expected, found = (one(x.to(weight)).float() for one in (module, made))
    limits = _ROUNDING * torch.finfo(weight.dtype).eps * expected.norm(dim=-1)
    return expected.shape == found.shape and bool(((expected - found).norm(dim=-1) <= limits).all())
