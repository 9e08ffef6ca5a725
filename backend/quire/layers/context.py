"""LayerContext: a layer's inputs in one step, besides hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer


class AdapterStep(NamedTuple):
    """Adapters of the tokens of a step."""

    slots: torch.Tensor
    """int32 [num_tokens]: slot of each token's adapter; -1: the token has no adapter."""
    used: frozenset[int] | None
    """Slots that occur in `slots`; None: any may occur, because the step is recorded as a CUDA graph."""


class LayerContext(NamedTuple):
    """One layer's inputs in a step besides hidden states. A layer ignores those that it does not need."""

    cos: torch.Tensor
    """float32 [num_tokens, rotary_dim // 2]: cosines of the layer's rotary embedding, times its attention
    factor. `sin` holds the sines."""
    sin: torch.Tensor
    kv_layer: KVLayer
    """View of the KV cache for the layer. For a layer with a state: uint8 [num_blocks, at least state_bytes],
    the states."""
    meta: AttentionMetadata
    """Metadata of the layer's KV group: each sequence's new tokens, and the blocks with its past. For a
    chunked layer, see `AttentionMetadata.chunked`. For a layer with a state, `block_table` [num_seqs, 1]
    names the block whose state the layer reads and then overwrites. If a sequence has new tokens only, the
    layer starts from zeros and ignores the block's content."""
    adapters: AdapterStep | None = None
    query_factors: torch.Tensor | None = None
    """float32 [num_tokens]: factors of the queries, see `QueryScaling`; None: queries are not scaled."""
    per_layer: torch.Tensor | None = None
    """[num_tokens, per_layer_size]: the layer's additional input; None: the model has none."""
