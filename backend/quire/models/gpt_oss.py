"""gpt-oss: experts in every layer, attention sinks, and biases in routers and experts. By default also
windows in every other layer, and biases in attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from quire.errors import CheckpointError
from quire.layers.config import DecoderConfig, ExpertsConfig, windows_by_layer_type
from quire.layers.hf_config import HFConfig
from quire.layers.moe import MixtureOfExperts
from quire.models.decoder import DecoderLayer, DecoderModel
from quire_common.weight_files import NamedTensor
from quire_kernels.reference.elementwise import SWIGLU_ALPHA, SWIGLU_LIMIT

_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""RoPE parameters for files that state none."""
_ENDS = {
    "": ("weight", 3),
    "_bias": ("bias", 2),
    "_blocks": ("weight_packed", 4),
    "_scales": ("weight_scale", 3),
}
"""Tensors that hold all experts, by what follows the matrix in their names. Each value: how the name of one
expert's tensor ends, and how many dimensions the tensor of all experts has."""


class GptOssLayer(DecoderLayer):
    """gpt-oss's layer: attention and experts."""

    def make_mlp(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer."""
        experts = config.experts
        assert experts is not None
        return MixtureOfExperts(config, experts, router_name="router")


class GptOssForCausalLM(DecoderModel):
    """Every other layer has a window, beginning with the first, unless `layer_types` says otherwise.

    (OpenAI, gpt-oss model card, arXiv 2508.10925.) A checkpoint's tensors of an expert projection hold all
    experts of a layer. In `gate_up_proj` the output features of gate and up alternate.
    """

    layer_class = GptOssLayer

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        for key, known in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
            if hf.number(key, known) != known:
                raise hf.error(f"{key} {hf.get(key)!r:.40} is not supported; supported: {known}")
        hf = hf.with_defaults(head_dim=64, num_key_value_heads=8, rope_theta=150_000.0, rms_norm_eps=1e-5)
        if hf.get("rope_parameters") is None and not hf.get("rope_scaling"):
            hf = hf.replace(rope_parameters={**_ROPE, "rope_theta": hf.get("rope_theta")})
        config = super().parse_config(hf, dtype)
        window = hf.require_int("sliding_window", 128)
        alternating = tuple(None if layer % 2 else window for layer in range(config.num_layers))
        bias = hf.flag("attention_bias", True)
        return dataclasses.replace(
            config,
            activation="clamped_swiglu",
            attention_sinks=True,
            sliding_windows=windows_by_layer_type(hf, config.num_layers, window) or alternating,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=True,
            experts=ExpertsConfig.from_hf(
                hf,
                "num_local_experts",
                "intermediate_size",
                layers=range(config.num_layers),
                renormalizes=True,
            ),
        )

    def split(self, stored: NamedTensor) -> Iterator[NamedTensor]:
        """See Model. Splits a tensor of all experts into the tensors of each expert's layers."""
        prefix, separator, rest = stored.name.partition(".mlp.experts.")
        matrix = next((name for name in ("gate_up_proj", "down_proj") if rest.startswith(name)), None)
        if not separator or matrix is None or rest.removeprefix(matrix) not in _ENDS:
            yield stored
            return
        end, num_dims = _ENDS[rest.removeprefix(matrix)]
        tensor, experts = stored.tensor, self.config.experts
        assert experts is not None
        if tensor.ndim != num_dims or tensor.shape[0] != experts.num_experts:
            raise CheckpointError(
                f"{stored.file}: {stored.name} has shape {list(tensor.shape)}, config.json means "
                f"{experts.num_experts} experts, each of {num_dims - 1} dimensions"
            )
        parts = {"down_proj": slice(None)}
        if matrix == "gate_up_proj":
            parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        for expert, content in enumerate(tensor):
            for part, rows in parts.items():
                name = f"{prefix}.mlp.experts.{expert}.{part}.{end}"
                change = partial(_as_layer, rows=rows, is_transposed=end == "weight")
                one = stored._replace(name=name, tensor=change(content))
                if stored.offset is not None:
                    offset = stored.offset + expert * content.nbytes
                    one = one._replace(offset=offset, change=change, raw=content)
                yield one


def _as_layer(tensor: torch.Tensor, *, rows: slice, is_transposed: bool) -> torch.Tensor:
    """Returns the output features `rows` of one expert's tensor, along the first dimension of the result.
    Three dimensions, of packed weights, become two. `is_transposed`: the tensor is stored as [in_features,
    out_features]."""
    if is_transposed:
        return tensor.T[rows]
    return tensor[rows].flatten(1) if tensor.ndim == 3 else tensor[rows]
