"""AdapterMemory: holds the weights of adapters for a model's steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.adapters import AdapterLoad, AdapterTarget
from quire.config import AdapterConfig
from quire.errors import ConfigError
from quire.layers.linear import AsStoredLinear, Linear
from quire.layers.moe import MixtureOfExperts
from quire.models.interface import Model


class AdapterMemory:
    """Memory of a model's adapter slots: `max_loras` adapters of ranks up to `max_lora_rank` in each
    adaptable layer. Raises ConfigError if the model does not support adapters or no layer is adaptable."""

    def __init__(self, model: Model, config: AdapterConfig, device: torch.device) -> None:
        self._model, self._dtype = model, model.config.dtype
        layers = dict(adaptable(model))
        for linear in layers.values():
            linear.make_slots(config.max_loras, config.max_lora_rank, device)
        model.take_slots()
        self.targets = targets_of(model)
        if not self.targets:
            raise ConfigError("enable_lora: this model has no layers that adapters may change")
        self._parts = [part for linear in layers.values() for part in linear.slots]

    def load(self, load: AdapterLoad) -> None:
        """Loads an adapter into a slot for all steps launched from now on."""
        for part in self._parts:
            part.clear(load.slot)
        values = torch.from_numpy(load.weights.data).view(self._dtype)
        begin = 0
        for index, rank in load.weights.parts:
            _, in_features, out_features = self.targets[index]
            middle, end = begin + rank * in_features, begin + rank * (in_features + out_features)
            b = self._model.convert(f"{self.targets[index].name}.weight", values[middle:end].view(-1, rank))
            self._parts[index].fill(load.slot, values[begin:middle].view(rank, -1), b)
            begin = end


def adaptable(model: Model) -> Iterator[tuple[str, Linear]]:
    """Yields the layers that adapters may change, by their names in the model. Leaves out mixtures of
    experts with all that is in them, the layers that latent attention absorbs, and indexers."""
    outside = [f"{name}." for name, module in model.named_modules() if isinstance(module, MixtureOfExperts)]
    for name, module in model.named_modules():
        is_fixed = isinstance(module, AsStoredLinear)
        if isinstance(module, Linear) and not is_fixed and not name.startswith(tuple(outside)):
            yield name, module


def targets_of(model: Model) -> tuple[AdapterTarget, ...]:
    """Returns the parts of the `adaptable` layers as targets."""
    return tuple(
        AdapterTarget(f"{name.rpartition('.')[0]}.{part}", linear.in_features, size)
        for name, linear in adaptable(model)
        for part, size in linear.parts.items()
    )


def slot_bytes(model: Model, config: AdapterConfig) -> int:
    """Returns the bytes of a model's `AdapterMemory`, 0 without `enable_lora`. The model may be on torch's
    "meta" device."""
    if not config.enable_lora:
        return 0
    sizes = sum(target.in_features + target.out_features for target in targets_of(model))
    return config.max_loras * config.max_lora_rank * sizes * model.config.dtype.itemsize
