"""Schemes: what `quire quantize` can make of a decoder layer, and how config.json names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import CheckpointError
from quire.models.config import DecoderConfig
from quire.quantize.calibration import InputStatistics
from quire.quantize.gptq import gptq_codes
from quire.quantize.rounding import FP8, QuantizedMatrix, group_grid, on_grid, round_rows, round_to_groups
from quire.quantize.scaling import Tensors, awq_factors, input_groups, scale, sharing, smoothing_factors

_GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class LayerInputs:
    """What a decoder layer is quantised with."""

    config: DecoderConfig
    dtype: torch.dtype
    """The checkpoint's."""
    statistics: Mapping[str, InputStatistics]
    """Of the inputs, by path of the `Linear`; empty for schemes that need none."""


@dataclass(frozen=True)
class QuantizationScheme:
    """A way to quantise the linear layers of a model."""

    format: str
    """compressed-tensors' name of how tensors are stored."""
    weights: dict[str, Any]
    """compressed-tensors' arguments; the size of groups is added."""
    quantize: Callable[[Tensors, LayerInputs], dict[str, QuantizedMatrix]]
    """Makes matrices of a decoder layer's tensors, by the names of the linear layers in it. What else must
    change is replaced in the tensors."""
    activations: dict[str, Any] | None = None
    is_calibrated: bool = True
    """Whether the inputs have to be known."""

    def config(self, model: DecoderConfig, ignored: list[str]) -> dict[str, Any]:
        """`quantization_config` of config.json, as compressed-tensors writes it.

        Raises:
            CheckpointError: no size of groups divides the inputs.
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
    """Inputs that share a scale of four-bit weights: the most that divide all layers' inputs.

    Raises:
        CheckpointError: there are none.
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
    group, dtype = group_size(inputs.config), inputs.dtype
    importance = {}
    for linears in input_groups(tensors):
        statistics, shared = inputs.statistics[linears.path], sharing(linears, inputs.config)
        factors = awq_factors(
            [tensors[name] for name in linears.weights],
            statistics,
            lambda weight: group_grid(weight, group, dtype, is_symmetric=False),
            shared,
        )
        scale(tensors, linears, factors, inputs.config)
        for name in linears.weights:
            importance[name] = statistics.gram.diagonal() / factors**2
    matrices = {}
    for name, counts in importance.items():
        grid = group_grid(tensors[name], group, dtype, is_symmetric=False, importance=counts)
        matrices[name.removesuffix(".weight")] = round_to_groups(tensors[name], grid, dtype)
    return matrices


def _gptq(tensors: Tensors, inputs: LayerInputs, *, is_packed: bool) -> dict[str, QuantizedMatrix]:
    group, dtype = group_size(inputs.config), inputs.dtype
    matrices = {}
    for linears in input_groups(tensors):
        gram = inputs.statistics[linears.path].gram
        for name in linears.weights:
            grid = group_grid(tensors[name], group, dtype, is_symmetric=True, importance=gram.diagonal())
            codes = gptq_codes(tensors[name], gram, grid)
            matrices[name.removesuffix(".weight")] = on_grid(codes, grid, dtype, is_packed=is_packed)
    return matrices


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
        lambda tensors, inputs: _gptq(tensors, inputs, is_packed=True),
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
        lambda tensors, inputs: _gptq(tensors, inputs, is_packed=False),
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
"""By the names of `--scheme`."""
