"""EncoderModel: base of models whose tokens see those after them, too. Nothing of a prompt is cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quire.errors import ConfigError
from quire.layers.config import DecoderConfig
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear, Weight
from quire.layers.pooling import PoolingMode
from quire.models.interface import ForwardInputs, Model
from quire.models.kv_groups import KVGroup
from quire.models.kv_spec import AttentionKV

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
"""Activations by their operators' names, the values of ACTIVATIONS."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(DecoderConfig):
    """Shape and switches of an encoder. `rms_norm_eps` is the epsilon of its LayerNorms. In
    `sliding_windows`, a window is the largest distance of two tokens that see each other."""

    position_offset: int = 0
    """Row of the table of positions for a prompt's first token."""
    num_token_types: int = 0
    classifier_mode: PoolingMode = "cls"
    """How the classifier pools a prompt."""
    norm_bias: bool = True
    """Whether LayerNorms have a bias."""
    head_bias: bool = True
    """Whether the dense layer before the classifier has a bias."""
    head_activation: str = "gelu"
    """Activation after the dense layer before ModernBERT's classifier: one of FUNCTIONS' names. Other
    families do not read this; BERT has tanh there."""

    @classmethod
    def extending(cls, config: DecoderConfig, **values: Any) -> EncoderConfig:
        """Returns an encoder's configuration with the values of `config`, except for those in `values`."""
        return cls(**{**{one.name: getattr(config, one.name) for one in fields(config)}, **values})

    @property
    def _undivided(self) -> dict[str, bool]:
        return {"encoders": True}


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimension.

    Args:
        size: size of that dimension.
        has_bias: whether there is a bias beside the scale.
        dtype: type of scale and bias; None: that of the model.
    """

    def __init__(
        self, config: EncoderConfig, size: int, *, has_bias: bool = True, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        weight = torch.empty(size, dtype=dtype or config.dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(torch.empty_like(weight), requires_grad=False) if has_bias else None
        self.eps = config.rms_norm_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalised x, in its shape and type."""
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class Table(nn.Module):
    """Table whose rows are added to the embeddings of tokens: [num_rows, hidden_size]."""

    def __init__(self, config: EncoderConfig, num_rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty((num_rows, config.hidden_size), dtype=config.dtype), requires_grad=False
        )


def attend(heads: torch.Tensor, lens: Sequence[int], scale: float, window: int | None = None) -> torch.Tensor:
    """Computes attention among the tokens of each sequence, in both directions.

    Sequences are computed one by one, so a sequence's result does not depend on the others.

    Args:
        heads: [num_tokens, 3, num_heads, head_dim]: queries, keys and values.
        lens: number of tokens of each sequence; the sum is num_tokens.
        scale: factor of the products of queries and keys.
        window: largest distance of two tokens that see each other; None: all do.

    Returns:
        [num_tokens, num_heads * head_dim].
    """
    attended = torch.empty_like(heads[:, 0])
    for own, out in zip(heads.split(list(lens)), attended.split(list(lens)), strict=True):
        query, key, value = own.permute(1, 2, 0, 3).unsqueeze(1)
        mask = None
        if window is not None and own.shape[0] > window + 1:
            positions = torch.arange(own.shape[0], device=own.device)
            mask = (positions[:, None] - positions).abs() <= window
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        out.copy_(found[0].transpose(0, 1))
    return attended.flatten(1)


class EncoderModel(nn.Module, Model):
    """Encoder. A family makes its modules in `make_parts` under their names in checkpoints, and overrides
    `embed` and `encode`.

    The engine keeps account of prompts in blocks as for decoders, but no layer writes to them. For each token
    a block has room for one number as key and one as value.
    """

    config: EncoderConfig
    accepts_image_embeds = False
    prefixes: tuple[str, ...] = ()
    """Beginnings of tensors' names, of which a checkpoint may have any one; they are dropped."""
    unused: tuple[str, ...] = ()
    """Beginnings of the names, without `prefixes`, of tensors that a checkpoint may hold and that are ignored
    if the model has no use for them: heads for training, for example. A classifier uses some of them."""

    def __init__(self, config: EncoderConfig, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        self.config, self.kv_groups = config, (KVGroup(None, (0,)),)
        with device:
            self.make_parts(config, max_model_len, device)
            for name, module in self.named_modules():
                if isinstance(module, Linear | Embedding):
                    module.allocate(config.scheme, name)

    def make_parts(self, config: EncoderConfig, max_model_len: int, device: torch.device) -> None:
        """Makes the model's modules."""
        raise NotImplementedError

    def encode(self, x: torch.Tensor, inputs: ForwardInputs, lens: Sequence[int]) -> torch.Tensor:
        """Computes all layers, and the final norm if there is one, from the result `x` [num_tokens,
        hidden_size] of `embed`. Returns the same shape. `lens`: number of tokens of each sequence."""
        raise NotImplementedError

    @property
    def is_encoder(self) -> bool:
        """See Model."""
        return True

    @property
    def is_recordable(self) -> bool:
        """See Model."""
        return False

    @property
    def pooling_mode(self) -> PoolingMode:
        """See Model."""
        return self.config.classifier_mode if self.config.classifier is not None else "cls"

    def kv_spec(self, kv_cache_dtype: str) -> AttentionKV:
        """See Model."""
        if kv_cache_dtype != "auto":
            raise ConfigError(f"kv_cache_dtype={kv_cache_dtype}: an encoder keeps no keys and values")
        return AttentionKV(1, 1, self.config.dtype)

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """See Model."""
        return self.compute(self.embed(inputs), inputs)

    def compute(self, x: torch.Tensor, inputs: ForwardInputs) -> torch.Tensor:
        """See Model."""
        meta = inputs.metas[0]
        lens = meta.query_lens
        assert lens == meta.seq_lens_list, "an encoder computes whole prompts"
        hidden = self.encode(x, inputs, lens)
        return hidden if inputs.rows is None else hidden[inputs.rows]

    def take_slots(self) -> None:
        """See Model. Raises ConfigError: adapters of encoders are not supported."""
        raise ConfigError("enable_lora: adapters of encoders are not supported")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raises NotImplementedError. Requests for tokens do not get here: admission refuses them."""
        raise NotImplementedError

    def weights(self) -> Iterator[Weight]:
        """See Model."""
        for path, module in self.named_modules():
            if isinstance(module, Linear | Embedding):
                yield from module.weights()
            for name, parameter in module.named_parameters(recurse=False):
                yield Weight(f"{path}.{name}", parameter)

    def packed_modules(self) -> Iterator[tuple[str, Linear | Embedding]]:
        """See Model."""
        for name, module in self.named_modules():
            if isinstance(module, Linear | Embedding):
                yield name, module

    def finish(self) -> int:
        """See Model."""
        num_bytes = sum(module.nbytes for _, module in self.packed_modules())
        return num_bytes + sum(parameter.nbytes for parameter in self.parameters())

    def packed_bytes(self, device_type: str) -> int:
        """See Model."""
        num_bytes = sum(module.packed_bytes(device_type) for _, module in self.packed_modules())
        return num_bytes + sum(parameter.nbytes for parameter in self.parameters())

    def canonical_name(self, name: str) -> str:
        """See Model. Old files call scale and bias of a LayerNorm gamma and beta."""
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        stem, found, last = name.rpartition("LayerNorm.")
        return stem + found + {"gamma": "weight", "beta": "bias"}.get(last, last)

    def ignores(self, name: str) -> bool:
        """See Model."""
        return name.startswith(self.unused)
