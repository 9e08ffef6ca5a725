"""Calibration: collects statistics of the inputs of a model's linear layers, one decoder layer at a time."""

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
"""Most windows that are computed at once."""
_BLOCK_SIZE = 16


@dataclass
class InputStatistics:
    """Statistics of the input of one linear layer, or of several with the same input."""

    gram: torch.Tensor
    """float32 [in_features, in_features]: the sum of x x^T over the tokens' inputs x; after `finish`, the
    mean."""
    sizes: torch.Tensor
    """float32 [in_features]: the sum of each input feature's magnitudes; after `finish`, the mean."""
    largest: torch.Tensor
    """float32 [in_features]: the largest magnitude of each input feature."""
    count: int = 0

    @classmethod
    def empty(cls, in_features: int) -> InputStatistics:
        zeros = torch.zeros(in_features)
        return cls(torch.zeros(in_features, in_features), zeros, zeros.clone())

    def add(self, x: torch.Tensor) -> None:
        """Adds inputs, float32 [num_tokens, in_features]."""
        self.gram.addmm_(x.T, x)
        size = x.abs()
        self.sizes += size.sum(0)
        self.largest = torch.maximum(self.largest, size.amax(0))
        self.count += len(x)

    def finish(self) -> None:
        """Turns the sums into means over the tokens."""
        self.gram /= self.count
        self.sizes /= self.count


class Calibration:
    """Passes windows of a text through a model, layer by layer. It holds the hidden states before the next
    layer.

    `layer` makes one decoder layer in float32. If a layer with rounded weights is passed to `advance`, the
    statistics of later layers include the effect of the rounding.

    Args:
        model: the checkpoint's model in float32 on the "meta" device; its weights are not used.
        embeddings: embedding table [vocab_size, hidden_size] of the checkpoint.
        windows: token ids of each window. Windows do not see each other.
    """

    def __init__(
        self, model: DecoderModel, embeddings: torch.Tensor, windows: Sequence[Sequence[int]]
    ) -> None:
        config = model.config
        self.model = model
        self.lengths = [len(window) for window in windows]
        ids = torch.tensor([token_id for window in windows for token_id in window])
        self.hidden = embeddings[ids].float() * (config.embedding_scale or 1.0)
        """Hidden states before the next layer, of all windows: float32 [num_tokens, hidden_size]."""
        longest, cpu = max(self.lengths), torch.device("cpu")
        self._rotary = RotaryEmbedding(config.rope, longest, cpu)
        other = config.other_rope
        self._other_rotary = None if other is None else RotaryEmbedding(other, longest, cpu)
        num_blocks = _BATCH * -(-longest // _BLOCK_SIZE)
        self._cache = KVCache(num_blocks, model.kv_spec("auto"), 1, _BLOCK_SIZE, cpu)

    def layer(self, index: int, tensors: Mapping[str, torch.Tensor]) -> DecoderLayer:
        """Makes a decoder layer with the given tensors, which have the names of `DecoderModel.weights`."""
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
        """Returns statistics of the inputs of a layer's `Linear` modules, by their paths in the layer."""
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
        """Replaces the hidden states by the layer's output; raises CheckpointError if that is not finite."""
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
