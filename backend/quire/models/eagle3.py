"""EAGLE-3 heads for Llama (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from quire.errors import ConfigError
from quire.layers.attention import Attention
from quire.layers.config import DecoderConfig
from quire.layers.context import LayerContext
from quire.layers.embedding import Embedding
from quire.layers.hf_config import HFConfig
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.models.decoder import DecoderLayer
from quire.models.draft_head import DecoderHead, PlainLinear
from quire.models.interface import Model
from quire.models.llama import LlamaForCausalLM

LEAST_LAYERS = 7
"""Least number of a target's layers, so that the three whose inputs the head reads are different ones."""


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DecoderConfig):
    """Configuration of a head that chooses among some or all of the target's tokens."""

    draft_vocab_size: int
    """Number of tokens that the head knows."""


class _WideAttention(Attention):
    """Attention whose projections read embedding and hidden state side by side."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        parts = self.qkv.parts
        self.qkv = Linear(config, 2 * config.hidden_size, parts, parallel="column", bias=config.qkv_bias)


class _Eagle3Layer(DecoderLayer):
    """Layer whose input is embedding and hidden state side by side, [num_tokens, 2 * hidden_size]. The hidden
    state is the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.hidden_norm = RMSNorm(config, config.hidden_size)

    def make_attention(self, config: DecoderConfig, layer: int) -> nn.Module:
        """See DecoderLayer."""
        return _WideAttention(config, layer)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: LayerContext
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See DecoderLayer."""
        embedding_norm, _, mlp_norm, _ = self._norms
        assert embedding_norm is not None and mlp_norm is not None
        embedded, hidden = x.chunk(2, 1)
        hidden = hidden.contiguous()
        joined = torch.cat((embedding_norm(embedded.contiguous()), self.hidden_norm(hidden)), 1)
        normed, total = mlp_norm.add(self.self_attn(joined, context), hidden)
        return self.mlp(normed, context.adapters), total


class _TokenMap(nn.Module):
    """Maps the head's tokens to the target's: token i of the head is token i + `offsets`[i] of the target."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.empty(size, dtype=torch.int64), requires_grad=False)

    @property
    def ids(self) -> torch.Tensor:
        """int64 [draft_vocab_size]: the target's token of each token of the head."""
        return self.offsets + torch.arange(len(self.offsets), device=self.offsets.device)


class LlamaForCausalLMEagle3(DecoderHead, LlamaForCausalLM):
    """Head of one layer that reads a projection (`fc`) of the residual stream at three layers of the target,
    and has an output head of its own."""

    config: Eagle3Config
    layer_class = _Eagle3Layer

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf, dtype)
        if config.num_layers != 1:
            raise hf.error(f"num_hidden_layers {config.num_layers}: heads of one layer are supported")
        size = hf.require_int("draft_vocab_size", config.vocab_size, most=config.vocab_size)
        return Eagle3Config(**vars(config), draft_vocab_size=size)

    def make_parts(self, config: DecoderConfig) -> None:
        """See DecoderModel."""
        super().make_parts(config)
        assert isinstance(config, Eagle3Config)
        size = config.hidden_size
        self.fc = PlainLinear(config, 3 * size, {"fc": size}, parallel=None, bias=False)
        self.lm_head = Embedding(
            config.draft_vocab_size, size, dtype=config.dtype, is_looked_up=False, is_head=True
        )
        self.d2t = _TokenMap(config.draft_vocab_size)

    def share(self, target: Model) -> None:
        """See DecoderHead. Keeps the head's own output head. Raises ConfigError also if the target has fewer
        than LEAST_LAYERS layers, or if `d2t` names tokens outside the vocabulary."""
        own, num_layers, ids = self.lm_head, target.config.num_layers, self.d2t.ids
        if int(ids.min()) < 0 or int(ids.max()) >= self.config.vocab_size:
            raise ConfigError(
                f"draft_model: d2t names tokens {int(ids.min())} to {int(ids.max())}, the vocabulary has "
                f"{self.config.vocab_size}"
            )
        if num_layers < LEAST_LAYERS:
            raise ConfigError(f"draft_model: an EAGLE-3 head needs {LEAST_LAYERS} layers of the model")
        super().share(target)
        self.lm_head = own
        self.taps = (2, num_layers // 2, num_layers - 3)

    def fed(self, hidden: torch.Tensor, tapped: Sequence[torch.Tensor]) -> torch.Tensor:
        """See HeadModel. Projects `tapped` (`fc`); `hidden` is not used."""
        projected: torch.Tensor = self.fc(torch.cat(tuple(tapped), 1))
        return projected

    def join(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See DecoderHead."""
        return torch.cat((embedded, hidden), 1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model. Tokens that the head does not know have -inf."""
        own = self.lm_head.logits(self.norm(hidden))
        logits = own.new_full((len(own), self.config.vocab_size), -torch.inf)
        logits[:, self.d2t.ids] = own
        return logits

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model."""
        best = self.lm_head.best(self.norm(hidden))
        return torch.where(best < 0, best, self.d2t.ids[best.clamp(min=0)])

    def canonical_name(self, name: str) -> str:
        """See Model."""
        if name == "d2t":
            return "model.d2t.offsets"
        layer = "midlayer."
        return f"model.layers.0.{name.removeprefix(layer)}" if name.startswith(layer) else name

    def ignores(self, name: str) -> bool:
        """See Model. True for the copy of the target's embedding, too, and for `t2d`, which marks the
        target's tokens that the head knows."""
        return name in ("embed_tokens.weight", "t2d") or super().ignores(name)


class Eagle3LlamaForCausalLM(LlamaForCausalLMEagle3):
    """LlamaForCausalLMEagle3 under vLLM's name."""
