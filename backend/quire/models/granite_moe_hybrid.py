"""Granite 4: each layer has Mamba-2 or attention, and a feed-forward part for all tokens. In some models
there are experts beside that part."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.layers.config import MAX_EXPERTS, DecoderConfig, ExpertsConfig
from quire.layers.hf_config import MAX_HEADS, HFConfig
from quire.layers.mamba import Mamba2, MambaShape, step_limit
from quire.layers.states import LAYER_TYPES, MAX_TAPS, StatesConfig, layer_kinds
from quire.models.decoder import DecoderLayer
from quire.models.granite import GraniteForCausalLM
from quire.models.granite_moe import split_stacked
from quire.models.states import StatesModel
from quire_common.weight_files import NamedTensor
from quire_kernels.routing import Routing

_PARTS = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}


class GraniteHybridLayer(DecoderLayer):
    """Layer with Mamba-2 or attention."""

    def make_attention(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer."""
        assert isinstance(config, StatesConfig)
        return Mamba2(config) if layer in config.state_layers else super().make_attention(config, layer)


class GraniteMoeHybridForCausalLM(StatesModel, GraniteForCausalLM):
    """`shared_intermediate_size` is the inner size of the part for all tokens, `intermediate_size` that of an
    expert. With `num_local_experts` 0 there are no experts."""

    layer_class = GraniteHybridLayer
    state_name = "mamba"

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> StatesConfig:
        """See DecoderModel."""
        shared_size = hf.require_int("shared_intermediate_size", 1024)
        num_experts = hf.whole("num_local_experts", 8, most=MAX_EXPERTS)
        base = super().parse_config(hf.replace(intermediate_size=shared_size, mlp_bias=False), dtype)
        experts = None
        if num_experts:
            experts = ExpertsConfig(
                layers=tuple(range(base.num_layers)),
                num_experts=num_experts,
                intermediate_size=hf.require_int("intermediate_size"),
                routing=Routing(
                    num_chosen=hf.require_int("num_experts_per_tok", 2, most=num_experts),
                    renormalizes=True,
                    shared="whole",
                ),
                shared_size=shared_size,
            )
        kinds = ["linear_attention"] * base.num_layers
        key = "layer_types" if hf.get("layer_types") else "layers_block_type"
        if hf.get(key):
            kinds = layer_kinds(hf, key, base.num_layers, LAYER_TYPES)
        if base.activation != "silu" and "linear_attention" in kinds:
            act = hf.get("hidden_act")
            raise hf.error(f"hidden_act {act!r:.40} is not supported with Mamba-2; supported: silu")
        positions = hf.get("position_embedding_type", "nope")
        if positions not in ("rope", "nope"):
            raise hf.error(
                f"position_embedding_type {positions!r:.40} is not supported; supported: rope, nope"
            )
        rope = base.rope if positions == "rope" else base.rope.without_rotation()
        return StatesConfig(
            **vars(base) | {"rope": rope, "experts": experts, "fused_gate_up": True},
            state=_mamba_shape(hf, base.hidden_size),
            state_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
        )

    def split(self, stored: NamedTensor) -> Iterator[NamedTensor]:
        """See Model. Splits stacked experts."""
        yield from split_stacked(stored, self.config, {name: (part,) for name, part in _PARTS.items()})

    def canonical_name(self, name: str) -> str:
        """See Model."""
        name = name.replace(".block_sparse_moe.router.layer.", ".mlp.gate.")
        mlp = ".mlp." if self.config.experts is None else ".mlp.shared_experts."
        for theirs, ours in _PARTS.items():
            name = name.replace(f".shared_mlp.{theirs}.", f"{mlp}{ours}.")
        return name


def _mamba_shape(hf: HFConfig, hidden_size: int) -> MambaShape:
    """Reads the keys `mamba_*` and `time_step_limit`; raises CheckpointError."""
    num_heads = hf.require_int("mamba_n_heads", 128, most=MAX_HEADS)
    inner = hf.require_int("mamba_expand", 2) * hidden_size
    size = hf.get("mamba_d_head", "auto")
    size = inner // num_heads if size == "auto" else hf.require_int("mamba_d_head", most=MAX_HEADS)
    if size * num_heads != inner:
        raise hf.error(
            f"mamba_n_heads={num_heads} of mamba_d_head={size} do not make mamba_expand * hidden_size"
        )
    shape = MambaShape(
        num_heads=num_heads,
        head_dim=size,
        num_groups=hf.require_int("mamba_n_groups", 1, most=MAX_HEADS),
        state_dim=hf.require_int("mamba_d_state", 256, most=MAX_HEADS),
        num_taps=hf.require_int("mamba_d_conv", 4, most=MAX_TAPS),
        conv_bias=hf.flag("mamba_conv_bias", True),
        proj_bias=hf.flag("mamba_proj_bias", False),
        step_limit=step_limit(hf),
    )
    shape.check(hf, "mamba_n_heads", "mamba_n_groups", "mamba_d_conv")
    return shape
