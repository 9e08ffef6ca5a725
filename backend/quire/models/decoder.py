"""The decoder of the Llama family: everything that differs between its members is in DecoderConfig."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.layers.attention import Attention
from quire.layers.embedding import Embedding
from quire.layers.mlp import GatedMLP
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.config import DecoderConfig
from quire.models.hf_config import HFConfig
from quire_kernels.metadata import AttentionMetadata


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int, device: torch.device) -> None:
        super().__init__()
        size, eps, dtype = config.hidden_size, config.rms_norm_eps, config.dtype
        self.input_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.attention = Attention(config, layer, device)
        self.post_attention_norm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(config, device)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_layer: torch.Tensor,
        meta: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output of this layer, residual stream it is still to be added to), both [num_tokens, hidden_size].

        Each addition is done by the norm that follows it, in one operator.
        """
        if residual is None:
            normed, residual = self.input_norm(x), x
        else:
            normed, residual = self.input_norm.add(x, residual)
        attended = self.attention(normed, cos, sin, kv_layer, meta)
        normed, residual = self.post_attention_norm.add(attended, residual)
        return self.mlp(normed), residual

    def weights(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, memory it fills)."""
        yield from self.input_norm.weights(f"{prefix}input_layernorm")
        yield from self.attention.weights(f"{prefix}self_attn.")
        yield from self.post_attention_norm.weights(f"{prefix}post_attention_layernorm")
        yield from self.mlp.weights(f"{prefix}mlp.")


class DecoderModel(nn.Module):
    """Token ids to hidden states to logits, over a paged KV cache.

    A family subclasses this and overrides `parse_config` (and whatever else differs). Weights are
    uninitialised until the loader has filled all of `weights()`.

    Args:
        config: of the checkpoint.
        max_model_len: longest sequence served; matters to some rope types only.
        device: where the weights are made.
    """

    def __init__(self, config: DecoderConfig, max_model_len: int, device: torch.device) -> None:
        super().__init__()
        self.config = config
        size, dtype = config.hidden_size, config.dtype
        self.embedding = Embedding(config.vocab_size, size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(config.rope, max_model_len, device)
        self.layers = nn.ModuleList(DecoderLayer(config, i, device) for i in range(config.num_layers))
        self.norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)
        self.head = (
            self.embedding
            if config.tie_word_embeddings
            else Embedding(config.vocab_size, size, dtype=dtype, device=device)
        )

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """The family's reading of config.json; raises CheckpointError."""
        return DecoderConfig.from_hf(hf, dtype)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMetadata,
        embeds: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Computes the new tokens of a ragged batch and stores their keys and values.

        Args:
            input_ids: int64 [num_tokens].
            positions: int64 [num_tokens] (or [3, num_tokens] for M-RoPE).
            kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], written in place.
            meta: which tokens belong together, and where their context is.
            embeds: (int64 [n], [n, hidden_size]): batch rows whose embedding is given, not looked up.

        Returns:
            [num_tokens, hidden_size], the final norm applied.
        """
        x = self.embedding(input_ids)
        if embeds is not None:
            x.index_copy_(0, *embeds)
        cos, sin = self.rotary(positions)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, residual = layer(x, residual, cos, sin, kv_cache[:, index], meta)
        assert residual is not None, "a decoder has at least one layer"
        return self.norm.add(x, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] of `forward` to float32 [n, vocab_size]."""
        return self.head.logits(hidden)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, view of the memory it fills) of every tensor the model needs."""
        yield from self.embedding.weights("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            yield from layer.weights(f"model.layers.{index}.")
        yield from self.norm.weights("model.norm")
        if self.head is not self.embedding:
            yield from self.head.weights("lm_head")

    def canonical_name(self, name: str) -> str:
        """The name in `weights()` of a checkpoint's tensor."""
        return name

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model has no use for it.

        Old Llama checkpoints store the rotary frequencies; tied ones may repeat the embedding as head.
        """
        return name.endswith("rotary_emb.inv_freq") or (
            name == "lm_head.weight" and self.config.tie_word_embeddings
        )
