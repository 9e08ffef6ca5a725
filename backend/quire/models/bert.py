"""BERT, RoBERTa and XLM-RoBERTa: embeddings, cross-encoders (rerankers) and other classifiers.

In each layer, the output of attention is added to attention's input, and the sum is normalised. The same
holds for the feed-forward part. Positions are learned. (arXiv 1810.04805, 1907.11692, 1911.02116.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from quire.layers.classifier import ClassifierHead
from quire.layers.config import DecoderConfig
from quire.layers.embedding import Embedding
from quire.layers.hf_config import HFConfig
from quire.layers.linear import Linear
from quire.models.encoder import FUNCTIONS, EncoderConfig, EncoderModel, LayerNorm, Table, attend
from quire.models.interface import ForwardInputs


class BertLayer(nn.Module):
    """Layer that adds the output of attention to its input and norms the sum, then does the same with the
    feed-forward part."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.shape = 3, config.num_heads, config.head_dim
        self.scale, self.activation = config.attention_scale, FUNCTIONS[config.activation]
        qkv = Linear(config, size, {"query": size, "key": size, "value": size}, parallel=None, bias=True)
        out = Linear(config, size, {"dense": size}, parallel=None, bias=True)
        up = Linear(config, size, {"dense": inner}, parallel=None, bias=True)
        down = Linear(config, inner, {"dense": size}, parallel=None, bias=True)
        norms = LayerNorm(config, size), LayerNorm(config, size)
        self.attention = nn.ModuleDict(
            {
                "self": nn.ModuleDict({"qkv": qkv}),
                "output": nn.ModuleDict({"dense": out, "LayerNorm": norms[0]}),
            }
        )
        self.intermediate = nn.ModuleDict({"dense": up})
        self.output = nn.ModuleDict({"dense": down, "LayerNorm": norms[1]})
        self._linears, self._norms = (qkv, out, up, down), norms

    def forward(self, x: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
        """Maps [num_tokens, hidden_size] to the same shape. `lens`: number of tokens of each sequence."""
        qkv, out, up, down = self._linears
        attention_norm, output_norm = self._norms
        x = attention_norm(x + out(attend(qkv(x).unflatten(1, self.shape), lens, self.scale)))
        y: torch.Tensor = output_norm(x + down(self.activation(up(x))))
        return y


class BertModel(EncoderModel):
    """BERT. In a pair, the tokens from the second text's first one on have token type 1. All others have 0. A
    model with one token type has only 0."""

    prefixes = ("bert.",)
    unused = ("pooler.", "cls.", "embeddings.position_ids")

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> EncoderConfig:
        """See Model."""
        hf = hf.with_defaults(hidden_act="gelu", max_position_embeddings=512)
        kind = hf.get("position_embedding_type", "absolute")
        if kind != "absolute":
            raise hf.error(f"position_embedding_type {kind!r:.40} is not supported; supported: absolute")
        for key in ("is_decoder", "add_cross_attention"):
            if hf.flag(key, False):
                raise hf.error(f"{key} true is not supported: this architecture is served as an encoder")
        config = DecoderConfig.from_hf(hf, dtype)
        offset = cls._position_offset(hf)
        longest = config.max_position_embeddings - offset
        if longest < 1 or config.num_kv_heads != config.num_heads:
            raise hf.error(f"max_position_embeddings={config.max_position_embeddings} leaves no position")
        return EncoderConfig.extending(
            config,
            rms_norm_eps=hf.number("layer_norm_eps", 1e-12),
            max_position_embeddings=longest,
            rope=replace(config.rope, max_position_embeddings=longest),
            position_offset=offset,
            num_token_types=hf.require_int("type_vocab_size", 2),
            tie_word_embeddings=True,
        )

    @staticmethod
    def _position_offset(hf: HFConfig) -> int:
        """Returns the row of the table of positions for a prompt's first token."""
        return 0

    def make_parts(self, config: EncoderConfig, max_model_len: int, device: torch.device) -> None:
        """See EncoderModel."""
        size = config.hidden_size
        words = Embedding(config.vocab_size, size, dtype=config.dtype)
        positions = Table(config, config.position_offset + config.max_position_embeddings)
        types, norm = Table(config, config.num_token_types), LayerNorm(config, size)
        layers = nn.ModuleList(BertLayer(config) for _ in range(config.num_layers))
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": words,
                "position_embeddings": positions,
                "token_type_embeddings": types,
                "LayerNorm": norm,
            }
        )
        self.encoder = nn.ModuleDict({"layer": layers})
        self._embedders, self._layers = (words, positions, types, norm), tuple(layers)
        if config.classifier is not None:
            self._make_head(config, len(config.classifier.labels))

    def _make_head(self, config: EncoderConfig, num_labels: int) -> None:
        size = config.hidden_size
        self.pooler = nn.ModuleDict({"dense": ClassifierHead(size, size, bias=True)})
        self.classifier: nn.Module = ClassifierHead(size, num_labels, bias=True)

    def embed(self, inputs: ForwardInputs) -> torch.Tensor:
        """See Model."""
        words, positions, types, norm = self._embedders
        x = words(inputs.input_ids)
        if inputs.embeds is not None:
            x.index_copy_(0, inputs.embeds[0], inputs.embeds[1].to(x.dtype))
        token_types = inputs.token_types
        has_types = token_types is not None and self.config.num_token_types > 1
        x = x + (types.weight[token_types] if has_types else types.weight[0])
        y: torch.Tensor = norm(x + positions.weight[inputs.positions + self.config.position_offset])
        return y

    def encode(self, x: torch.Tensor, inputs: ForwardInputs, lens: Sequence[int]) -> torch.Tensor:
        """See EncoderModel."""
        for layer in self._layers:
            x = layer(x, lens)
        return x

    def class_logits(self, pooled: torch.Tensor) -> torch.Tensor:
        """See Model."""
        logits: torch.Tensor = self.classifier(self.pooler["dense"](pooled).tanh())
        return logits


class BertForSequenceClassification(BertModel):
    """BERT with a classifier of the first token's hidden state, after a dense layer and tanh."""


class RobertaModel(BertModel):
    """RoBERTa: as BERT, but the first token's position is the one after the padding token's id."""

    prefixes = ("roberta.",)
    unused = ("pooler.", "lm_head.", "embeddings.position_ids")

    @staticmethod
    def _position_offset(hf: HFConfig) -> int:
        return hf.whole("pad_token_id", 1) + 1

    def _make_head(self, config: EncoderConfig, num_labels: int) -> None:
        size = config.hidden_size
        self._parts = ClassifierHead(size, size, bias=True), ClassifierHead(size, num_labels, bias=True)
        self.classifier = nn.ModuleDict(dict(zip(("dense", "out_proj"), self._parts, strict=True)))

    def class_logits(self, pooled: torch.Tensor) -> torch.Tensor:
        """See Model."""
        dense, out = self._parts
        logits: torch.Tensor = out(dense(pooled).tanh())
        return logits


class RobertaForSequenceClassification(RobertaModel):
    """RoBERTa with a classifier of the first token's hidden state."""


class XLMRobertaModel(RobertaModel):
    """XLM-RoBERTa: RoBERTa with another vocabulary."""


class XLMRobertaForSequenceClassification(RobertaForSequenceClassification):
    """XLM-RoBERTa with a classifier, as bge-reranker's."""
