"""Schemes: how `quire quantize` can quantise a decoder layer, and how config.json describes the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import CheckpointError
from quire.layers.config import DecoderConfig
from quire_quantize.calibration import InputStatistics
from quire_quantize.gptq import gptq_codes
from quire_quantize.rounding import FP8, QuantizedMatrix, group_grid, on_grid, round_rows
from quire_quantize.scaling import Tensors, awq_factors, input_groups, scale, sharing, smoothing_factors

_GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class LayerInputs:
    """Information that quantising a decoder layer needs besides its tensors."""

    config: DecoderConfig
    dtype: torch.dtype
    """Type of the weights that the checkpoint's configuration states. Stored scales have it."""
    statistics: Mapping[str, InputStatistics]
    """Statistics of the inputs, by path of the `Linear`; empty for a scheme that needs none."""


@dataclass(frozen=True)
class QuantizationScheme:
    """A way to quantise the linear layers of a model."""

    format: str
    """Name of compressed-tensors' storage format."""
    weights: dict[str, Any]
    """compressed-tensors' arguments for the weights. The method `config` adds the group size."""
    quantize: Callable[[Tensors, LayerInputs], dict[str, QuantizedMatrix]]
    """Function that quantises a decoder layer's tensors. It returns a matrix for each linear layer, by the
    linear layer's name in the decoder layer. In the dict of tensors that it gets, it replaces those that must
    change."""
    activations: dict[str, Any] | None = None
    is_calibrated: bool = True
    """Whether the scheme needs statistics of the inputs."""

    def config(self, model: DecoderConfig, ignored: list[str]) -> dict[str, Any]:
        """Returns the `quantization_config` for config.json in compressed-tensors' format.

        Raises:
            CheckpointError: the scheme has groups, and no supported group size divides the numbers of inputs.
        """
        weights = {**self.weights, "group_size": None}
        if weights["strategy"] == "group":
            weights["group_size"] = group_size(model)
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": self.activations,
            "output_activations": None,
        }
        return {
            "config_groups": {"group_0": group},
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": None,
            "format": self.format,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": ignored,
        }


def group_size(config: DecoderConfig) -> int:
    """Returns the number of inputs that share a scale of four-bit weights: the largest supported one that
    divides all layers' inputs.

    Raises:
        CheckpointError: none divides them.
    """
    sizes = {config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim}
    for group in _GROUPS:
        if all(size % group == 0 for size in sizes):
            return group
    raise CheckpointError(
        f"four-bit weights have groups of {_GROUPS[-1]} inputs or more, which do not divide the layers' "
        f"{', '.join(map(str, sorted(sizes)))}: use w8a8 or fp8"
    )


def _awq(tensors: Tensors, inputs: LayerInputs) -> dict[str, QuantizedMatrix]:
    """Multiplies the columns by AWQ's factors, then rounds with GPTQ. AWQ only chooses the factors, so any
    rounding may follow."""
    group, dtype = group_size(inputs.config), inputs.dtype
    grams = {}
    for linears in input_groups(tensors):
        statistics = inputs.statistics[linears.path]
        factors = awq_factors(
            [tensors[name] for name in linears.weights],
            statistics,
            lambda weight: group_grid(weight, group, dtype, is_symmetric=False),
            sharing(linears, inputs.config),
        )
        scale(tensors, linears, factors, inputs.config)
        for name in linears.weights:
            grams[name] = statistics.gram / torch.outer(factors, factors)
    return {
        name.removesuffix(".weight"): _groups(tensors[name], gram, inputs, False)
        for name, gram in grams.items()
    }


def _gptq(tensors: Tensors, inputs: LayerInputs) -> dict[str, QuantizedMatrix]:
    return {
        name.removesuffix(".weight"): _groups(
            tensors[name], inputs.statistics[linears.path].gram, inputs, True
        )
        for linears in input_groups(tensors)
        for name in linears.weights
    }


def _groups(
    weight: torch.Tensor, gram: torch.Tensor, inputs: LayerInputs, is_symmetric: bool
) -> QuantizedMatrix:
    group, dtype = group_size(inputs.config), inputs.dtype
    grid = group_grid(weight, group, dtype, is_symmetric=is_symmetric, importance=gram.diagonal())
    return on_grid(gptq_codes(weight, gram, grid), grid, dtype)


def _w8a8(tensors: Tensors, inputs: LayerInputs) -> dict[str, QuantizedMatrix]:
    for linears in input_groups(tensors):
        weights = [tensors[name] for name in linears.weights]
        if linears.source.endswith("norm"):
            factors = smoothing_factors(weights, inputs.statistics[linears.path])
            scale(tensors, linears, factors, inputs.config)
    return _rows(tensors, inputs, torch.int8)


def _rows(tensors: Tensors, inputs: LayerInputs, stored: torch.dtype) -> dict[str, QuantizedMatrix]:
    return {
        name.removesuffix(".weight"): round_rows(tensors[name], stored, inputs.dtype)
        for linears in input_groups(tensors)
        for name in linears.weights
    }


def _arguments(bits: int, kind: str, strategy: str, **others: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "group_size": None,
        "strategy": strategy,
        "dynamic": False,
        **others,
    }


SCHEMES = {
    "awq": QuantizationScheme("pack-quantized", _arguments(4, "int", "group", symmetric=False), _awq),
    "gptq": QuantizationScheme(
        "pack-quantized",
        _arguments(4, "int", "group"),
        _gptq,
    ),
    "w8a8": QuantizationScheme(
        "int-quantized",
        _arguments(8, "int", "channel"),
        _w8a8,
        _arguments(8, "int", "token", dynamic=True),
    ),
    "w4a8": QuantizationScheme(
        "int-quantized",
        _arguments(4, "int", "group"),
        _gptq,
        _arguments(8, "int", "token", dynamic=True),
    ),
    "fp8": QuantizationScheme(
        "float-quantized",
        _arguments(8, "float", "channel"),
        lambda tensors, inputs: _rows(tensors, inputs, FP8),
        _arguments(8, "float", "token", dynamic=True),
        is_calibrated=False,
    ),
}
"""Schemes by the names that `--scheme` accepts."""
