"""LayerContext: what a layer computes a step with, besides hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer


class AdapterStep(NamedTuple):
    """The adapters of a step in which some token has one."""

    slots: torch.Tensor
    """int32 [num_tokens]: where each token's adapter lies, -1: it has none."""
    used: frozenset[int] | None
    """The slots among them; None: they may be any, as the step is recorded."""


class LayerContext(NamedTuple):
    """One layer's part of a step; layers ignore what they have no use for."""

    cos: torch.Tensor
    """float32 [num_tokens, rotary_dim // 2] of the layer's kind of rotary embedding, as is `sin`."""
    sin: torch.Tensor
    kv_layer: KVLayer
    """View of the layer's KV cache: written for the new tokens, read for all. A layer with a state gets the
    bytes of all states, uint8 [num_blocks, at least state_bytes]."""
    meta: AttentionMetadata
    """Metadata of the layer's KV group: which tokens belong together, and where their past is. A layer with a
    state finds it in the blocks `block_table` [num_seqs, 1], and leaves it there as it is after the new
    tokens. Where a sequence has no other tokens the layer begins with zeros, whatever is there."""
    adapters: AdapterStep | None = None
    query_factors: torch.Tensor | None = None
    """float32 [num_tokens]; see `QueryScaling`. None: queries are not scaled."""
    per_layer: torch.Tensor | None = None
    """[num_tokens, per_layer_size], where the model has such."""
