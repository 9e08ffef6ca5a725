"""ModernBERT: rotary embedding, norms before attention and feed-forward part, and layers with a window.

(arXiv 2412.13663.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from quire.layers.classifier import ClassifierHead
from quire.layers.config import ACTIVATIONS, DecoderConfig, ropes_by_layer_type, windows_by_layer_type
from quire.layers.embedding import Embedding
from quire.layers.hf_config import HFConfig
from quire.layers.linear import Linear
from quire.layers.rotary import RopeConfig, RotaryEmbedding
from quire.models.encoder import FUNCTIONS, EncoderConfig, EncoderModel, LayerNorm, attend
from quire.models.interface import ForwardInputs
from quire_kernels import ops

_MODES = ("cls", "mean")


class ModernBertLayer(nn.Module):
    """Layer that adds the outputs of attention and of a gated feed-forward part to the residual stream."""

    def __init__(self, config: EncoderConfig, layer: int, *, norm_bias: bool) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.shape = 3, config.num_heads, config.head_dim
        self.scale, self.window = config.attention_scale, config.sliding_windows[layer]
        qkv = Linear(config, size, {"Wqkv": 3 * size}, parallel=None, bias=config.qkv_bias)
        out = Linear(config, size, {"Wo": size}, parallel=None, bias=config.out_bias)
        gated = Linear(
            config, size, {"Wi": 2 * inner}, parallel=None, bias=bias, activation=config.activation
        )
        down = Linear(config, inner, {"Wo": size}, parallel=None, bias=bias)
        # The embeddings' norm is right before the first layer.
        self.attn_norm = LayerNorm(config, size, has_bias=norm_bias) if layer else nn.Identity()
        self.mlp_norm = LayerNorm(config, size, has_bias=norm_bias)
        self.attn = nn.ModuleDict({"Wqkv": qkv, "Wo": out})
        self.mlp = nn.ModuleDict({"Wi": gated, "Wo": down})

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lens: Sequence[int]
    ) -> torch.Tensor:
        """Maps [num_tokens, hidden_size] to the same shape.

        Args:
            cos: float32 [num_tokens, rotary_dim / 2], of the layer's rotary embedding; `sin` likewise.
            lens: number of tokens of each sequence.
        """
        heads = self.attn["Wqkv"](self.attn_norm(x)).unflatten(1, self.shape)
        query, key, value = heads.unbind(1)
        query, key = (ops.rope(one.contiguous(), cos, sin) for one in (query, key))
        attended = attend(torch.stack([query, key, value], 1), lens, self.scale, self.window)
        x = x + self.attn["Wo"](attended)
        y: torch.Tensor = x + self.mlp["Wo"](self.mlp["Wi"](self.mlp_norm(x)))
        return y


class ModernBertModel(EncoderModel):
    """ModernBERT: in every third layer, beginning with the first, a token sees all tokens, in the others
    those near by, unless the file says otherwise."""

    prefixes = ("model.",)
    unused = ("head.", "decoder.")

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> EncoderConfig:
        """See Model."""
        ropes = ropes_by_layer_type(
            hf, hf.get("global_rope_theta", 160_000.0), hf.get("local_rope_theta", 10_000.0)
        )
        activation = hf.get("hidden_activation", "gelu")
        hf = hf.with_defaults(max_position_embeddings=8192).replace(hidden_act=activation)
        config = DecoderConfig.from_hf(hf.replace(rope_parameters=ropes[0], rope_scaling=None), dtype)
        local = RopeConfig.from_hf(hf.replace(rope_parameters=ropes[1], rope_scaling=None), config.head_dim)
        window = hf.require_int("local_attention", 128) // 2
        windows = windows_by_layer_type(hf, config.num_layers, window)
        if windows is None:
            every = hf.require_int("global_attn_every_n_layers", 3)
            windows = tuple(window if layer % every else None for layer in range(config.num_layers))
        mode = hf.get("classifier_pooling", "cls")
        if mode not in _MODES:
            raise hf.error(f"classifier_pooling must be one of {', '.join(_MODES)}, got {mode!r:.40}")
        head = hf.get("classifier_activation", "gelu")
        if head not in ACTIVATIONS:
            raise hf.error(f"classifier_activation {head!r:.40} is not supported")
        bias = hf.flag("attention_bias", False)
        return EncoderConfig.extending(
            config.with_sliding_rope(windows, local),
            rms_norm_eps=hf.number("norm_eps", 1e-5),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=hf.flag("mlp_bias", False),
            classifier_mode=mode,
            tie_word_embeddings=True,
            norm_bias=hf.flag("norm_bias", False),
            head_bias=hf.flag("classifier_bias", False),
            head_activation=ACTIVATIONS[head],
        )

    def make_parts(self, config: EncoderConfig, max_model_len: int, device: torch.device) -> None:
        """See EncoderModel."""
        size, has_bias = config.hidden_size, config.norm_bias
        self.rotary = RotaryEmbedding(config.rope, max_model_len, device)
        assert config.other_rope is not None
        self.other_rotary = RotaryEmbedding(config.other_rope, max_model_len, device)
        self.embeddings = nn.ModuleDict(
            {
                "tok_embeddings": Embedding(config.vocab_size, size, dtype=config.dtype),
                "norm": LayerNorm(config, size, has_bias=has_bias),
            }
        )
        self.layers = nn.ModuleList(
            ModernBertLayer(config, layer, norm_bias=has_bias) for layer in range(config.num_layers)
        )
        self.final_norm = LayerNorm(config, size, has_bias=has_bias)
        if config.classifier is not None:
            dense = ClassifierHead(size, size, bias=config.head_bias)
            norm = LayerNorm(config, size, has_bias=has_bias, dtype=torch.float32)
            self.head = nn.ModuleDict({"dense": dense, "norm": norm})
            self.classifier = ClassifierHead(size, len(config.classifier.labels), bias=True)

    def embed(self, inputs: ForwardInputs) -> torch.Tensor:
        """See Model."""
        x = self.embeddings["tok_embeddings"](inputs.input_ids)
        if inputs.embeds is not None:
            x.index_copy_(0, inputs.embeds[0], inputs.embeds[1].to(x.dtype))
        y: torch.Tensor = self.embeddings["norm"](x)
        return y

    def encode(self, x: torch.Tensor, inputs: ForwardInputs, lens: Sequence[int]) -> torch.Tensor:
        """See EncoderModel."""
        angles, other = self.rotary(inputs.positions), self.other_rotary(inputs.positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, *(other if index in self.config.other_rope_layers else angles), lens)
        y: torch.Tensor = self.final_norm(x)
        return y

    def class_logits(self, pooled: torch.Tensor) -> torch.Tensor:
        """See Model."""
        activation = FUNCTIONS[self.config.head_activation]
        logits: torch.Tensor = self.classifier(self.head["norm"](activation(self.head["dense"](pooled))))
        return logits


class ModernBertForSequenceClassification(ModernBertModel):
    """ModernBERT with a classifier of the first token's hidden state, or of the mean of all tokens', as
    `classifier_pooling` says."""
