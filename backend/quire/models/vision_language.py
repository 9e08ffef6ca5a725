"""The text part of a vision-language checkpoint; its vision part is a Triton model of its own."""

from __future__ import annotations

import torch

from quire.models.config import DecoderConfig
from quire.models.decoder import DecoderModel
from quire.models.hf_config import HFConfig

_VISION_PARTS = ("vision_tower.", "multi_modal_projector.", "visual.", "image_newline")
_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""Prefixes that writers of different times gave the text model's tensors, each with ours."""


class VisionLanguageModel(DecoderModel):
    """A decoder whose prompt may hold image embeddings in the place of placeholder tokens."""

    def canonical_name(self, name: str) -> str:
        """See DecoderModel."""
        for prefix, own in _TEXT_PREFIXES:
            if name.startswith(prefix):
                return own + name.removeprefix(prefix)
        return name

    def ignores(self, name: str) -> bool:
        """See DecoderModel; the vision part too."""
        return name.removeprefix("model.").startswith(_VISION_PARTS) or super().ignores(name)


def parse_text_config(hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
    """The text part read as its own family does; raises CheckpointError for one that is not supported."""
    from quire.models.llama import LlamaForCausalLM
    from quire.models.mistral import MistralForCausalLM
    from quire.models.qwen2 import Qwen2ForCausalLM
    from quire.models.qwen3 import Qwen3ForCausalLM

    families: dict[str, type[DecoderModel]] = {
        "llama": LlamaForCausalLM,
        "mistral": MistralForCausalLM,
        "qwen2": Qwen2ForCausalLM,
        "qwen3": Qwen3ForCausalLM,
    }
    name = hf.get("model_type", "llama")
    if name not in families:
        raise hf.error(f"text_config of type {name!r} is not supported; supported: {', '.join(families)}")
    return families[name].parse_config(hf, dtype)
