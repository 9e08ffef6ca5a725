"""Heads for multi-token prediction (MTP), which checkpoints of DeepSeek V3's kind may hold after the last
layer.

The head is one more decoder layer (DeepSeek-V3, arXiv 2412.19437, section 2.2). It reads the embedding of a
token beside the model's hidden state before that token, each normed, through one projection (`eh_proj`). The
embedding and the output head are the model's.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.errors import ConfigError
from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.layers.norm import RMSNorm
from quire.models.decoder import DecoderModel
from quire.models.draft_head import DecoderHead, PlainLinear
from quire.models.interface import Model
from quire_kernels import ops

_KEY = "num_nextn_predict_layers"
_OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight")
"""Names, within the head's layer in the checkpoint, of the scales of the two input norms, and of the
projection's weight."""
_SHARED = ("embed_tokens.", "shared_head.head.")
"""Beginnings of the names, within the head's layer in the checkpoint, of copies of the model's embedding and
output head."""
_UNUSED = "target."
"""Beginning of the canonical names of tensors that the head does not load."""


class MTPHead(DecoderHead):
    """Head for multi-token prediction; `head_class` combines it with a family's class."""

    layer_index: int
    """Index of the head's layer in the checkpoint."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """Returns the configuration of the head's one layer. It has experts if the model's configuration
        does."""
        config = super().parse_config(hf, dtype)
        experts = config.experts and replace(config.experts, layers=(0,))
        return replace(config, num_layers=1, sliding_windows=config.sliding_windows[:1], experts=experts)

    def make_parts(self, config: DecoderConfig) -> None:
        """See DecoderModel."""
        super().make_parts(config)
        size = config.hidden_size
        self.enorm, self.hnorm = RMSNorm(config, size), RMSNorm(config, size)
        self.eh_proj = PlainLinear(config, 2 * size, {"eh_proj": size}, parallel=None, bias=False)

    def join(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See DecoderHead."""
        joined: torch.Tensor = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), 1))
        return joined

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model."""
        return super().compute_logits(self.norm(hidden))

    def best_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """See Model."""
        return ops.argmax(self.compute_logits(hidden))

    def canonical_name(self, name: str) -> str:
        """See Model."""
        own, prefix = super().canonical_name(name), f"model.layers.{self.layer_index}."
        if not own.startswith(prefix):
            return _UNUSED + own
        rest = own.removeprefix(prefix)
        if rest.startswith(_SHARED):
            return _UNUSED + own
        if rest in _OWN:
            return f"model.{rest}"
        return "model.norm.weight" if rest == "shared_head.norm.weight" else f"model.layers.0.{rest}"

    def ignores(self, name: str) -> bool:
        """See Model. True for the tensors of the model, and for copies of them in the head's layer."""
        return name.startswith(_UNUSED) or super().ignores(name)


def head_class(hf: HFConfig, family: type[Model]) -> type[MTPHead]:
    """Returns the class of the first MTP head in a checkpoint whose model has class `family`.

    Raises:
        ConfigError: the checkpoint states no head, or no head of the family is known.
        CheckpointError: `num_hidden_layers` is missing or wrong.
    """
    if not (issubclass(family, DecoderModel) and family.has_layers_behind):
        raise ConfigError(f"draft_model=mtp: no head of {hf.architecture} is known")
    if not hf.get(_KEY, 0):
        raise ConfigError(f"draft_model=mtp: {hf.path} states no {_KEY}, so the checkpoint has no head")
    index = hf.require_int("num_hidden_layers")
    return type(f"{family.__name__}MTP", (MTPHead, family), {"layer_index": index})
