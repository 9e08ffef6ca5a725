"""EAGLE heads for Llama (arXiv 2401.15077; the same checkpoints serve EAGLE-2, arXiv 2406.16858)."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.layers.config import DecoderConfig, NormNames
from quire.layers.hf_config import HFConfig
from quire.models.draft_head import DecoderHead, PlainLinear
from quire.models.llama import LlamaForCausalLM

_SHARED = ("embed_tokens.weight", "model.embed_tokens.weight", "lm_head.weight")
"""Names of the copies of the target's tensors that checkpoints may hold."""


class LlamaForCausalLMEagle(DecoderHead, LlamaForCausalLM):
    """Head of one Llama layer without input norm, behind a projection (`fc`) of embedding and hidden state.
    Its output stands for the target's hidden state, so the target's output head follows it directly."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        config = super().parse_config(hf, dtype)
        if config.num_layers != 1:
            raise hf.error(f"num_hidden_layers {config.num_layers}: heads of one layer are supported")
        return replace(config, norms=NormNames(None, None, "post_attention_layernorm", None))

    def make_parts(self, config: DecoderConfig) -> None:
        """See DecoderModel. There is no final norm."""
        super().make_parts(config)
        del self.norm
        size = config.hidden_size
        self.fc = PlainLinear(config, 2 * size, {"fc": size}, parallel=None, bias=False)

    def join(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See DecoderHead."""
        joined: torch.Tensor = self.fc(torch.cat((embedded, hidden), 1))
        return joined

    def ignores(self, name: str) -> bool:
        """See Model. True for copies of the target's tensors, too."""
        return name in _SHARED or super().ignores(name)


class EagleLlamaForCausalLM(LlamaForCausalLMEagle):
    """LlamaForCausalLMEagle under vLLM's name."""
