"""Calibration: what the inputs of a model's linear layers are, one decoder layer after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.errors import CheckpointError
from quire.layers.context import LayerContext
from quire.layers.linear import Linear
from quire.layers.rotary import RotaryEmbedding
from quire.layers.scheme import SCHEMES
from quire.models.decoder import DecoderLayer, DecoderModel
from quire.worker.kv_cache import KVCache
from quire_kernels.metadata import AttentionMetadata

_BATCH = 8
"""Windows that are computed at once."""
_BLOCK_SIZE = 16


@dataclass
class InputStatistics:
    """Statistics of the inputs of one linear layer, or of several that share them."""

    gram: torch.Tensor
    """float32 [in_features, in_features]: the sum of x x^T; by `finish` the mean."""
    sizes: torch.Tensor
    """float32 [in_features]: the sum of each input's size; by `finish` the mean."""
    largest: torch.Tensor
    """float32 [in_features]: of each input's sizes the largest."""
    count: int = 0

    @classmethod
    def empty(cls, in_features: int) -> InputStatistics:
        zeros = torch.zeros(in_features)
        return cls(torch.zeros(in_features, in_features), zeros, zeros.clone())

    def add(self, x: torch.Tensor) -> None:
        """Takes in float32 [num_tokens, in_features]."""
        self.gram.addmm_(x.T, x)
        size = x.abs()
        self.sizes += size.sum(0)
        self.largest = torch.maximum(self.largest, size.amax(0))
        self.count += len(x)

    def finish(self) -> None:
        """Makes means of sums."""
        self.gram /= self.count
        self.sizes /= self.count


class Calibration:
    """Windows of a text on their way through a model: hidden states before the layer that comes next.

    Layers are made for the time that they compute, in float32. A layer behind one that is quantised sees what
    that one gives.

    Args:
        model: of the checkpoint in float32, on the "meta" device: nothing of it is computed.
        embeddings: [vocab_size, hidden_size] of the checkpoint.
        windows: token ids of texts that have nothing to do with each other.
    """

    def __init__(
        self, model: DecoderModel, embeddings: torch.Tensor, windows: Sequence[Sequence[int]]
    ) -> None:
        config = model.config
        self.model = model
        self.lengths = [len(window) for window in windows]
        ids = torch.tensor([token_id for window in windows for token_id in window])
        self.hidden = embeddings[ids].float() * (config.embedding_scale or 1.0)
        """float32 [num_tokens, hidden_size] of all windows."""
        longest, cpu = max(self.lengths), torch.device("cpu")
        self._rotary = RotaryEmbedding(config.rope, longest, cpu)
        other = config.other_rope
        self._other_rotary = None if other is None else RotaryEmbedding(other, longest, cpu)
        num_blocks = _BATCH * -(-longest // _BLOCK_SIZE)
        self._cache = KVCache(num_blocks, model.kv_spec("auto"), 1, _BLOCK_SIZE, cpu)

    def layer(self, index: int, tensors: Mapping[str, torch.Tensor]) -> DecoderLayer:
        """A decoder layer that computes with these tensors, under the names of `DecoderModel.weights`."""
        prefix = f"model.layers.{index}"
        layer = self.model.layer_class(self.model.config, index)
        with torch.no_grad():
            for path, module in layer.named_modules():
                if isinstance(module, Linear):
                    module.allocate(SCHEMES[None], f"{prefix}.{path}")
                    for name, memory, _ in module.weights():
                        memory.copy_(self.model.convert(name, tensors[name]))
                    module.pack()
                for name, parameter in module.named_parameters(path, recurse=False):
                    own = f"{prefix}.{name}"
                    parameter.copy_(self.model.convert(own, tensors[own]))
        return layer

    def statistics(self, index: int, layer: DecoderLayer) -> dict[str, InputStatistics]:
        """Statistics of the inputs of a layer's `Linear` modules, by their paths in the layer."""
        found: dict[str, InputStatistics] = {}
        hooks = []
        for path, module in layer.named_modules():
            if isinstance(module, Linear):
                statistics = found[path] = InputStatistics.empty(module.in_features)
                hooks.append(
                    module.register_forward_pre_hook(lambda _, given, into=statistics: into.add(given[0]))
                )
        self._compute(index, layer)
        for hook in hooks:
            hook.remove()
        for statistics in found.values():
            statistics.finish()
        return found

    def advance(self, index: int, layer: DecoderLayer) -> None:
        """Replaces the hidden states by those behind the layer; raises CheckpointError where they are no
        numbers."""
        self.hidden = self._compute(index, layer)
        if not self.hidden.isfinite().all():
            raise CheckpointError(f"layer {index} computes numbers that are not finite")

    @torch.inference_mode()
    def _compute(self, index: int, layer: DecoderLayer) -> torch.Tensor:
        begin, outputs = 0, []
        for first in range(0, len(self.lengths), _BATCH):
            lengths = self.lengths[first : first + _BATCH]
            positions = torch.cat([torch.arange(length) for length in lengths])
            x = self.hidden[begin : begin + len(positions)]
            begin += len(positions)
            given, residual = layer(x.clone(), None, self._context(layer, positions, lengths))
            outputs.append(given + residual)
        return torch.cat(outputs)

    def _context(self, layer: DecoderLayer, positions: torch.Tensor, lengths: Sequence[int]) -> LayerContext:
        blocks, taken = [], 0
        for length in lengths:
            count = -(-length // _BLOCK_SIZE)
            blocks.append(range(taken, taken + count))
            taken += count
        metadata = AttentionMetadata.build(lengths, lengths, blocks, _BLOCK_SIZE)
        rotary, scaling = self._rotary, self.model.config.query_scaling
        if layer.has_other_rope:
            assert self._other_rotary is not None
            rotary = self._other_rotary
        factors = scaling.factors(positions) if scaling is not None and layer.scales_queries else None
        cos, sin = rotary(positions)
        return LayerContext(cos, sin, self._cache.layer(0), metadata, query_factors=factors)
