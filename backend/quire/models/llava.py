"""LLaVA 1.5, NeXT and OneVision, InternVL, Mistral 3: a vision tower, and a text model of a family in
_TEXT_FAMILIES, which alone is loaded here."""

from __future__ import annotations

import torch

from quire.layers.config import DecoderConfig
from quire.layers.hf_config import HFConfig
from quire.models.registry import model_class
from quire.models.vision_language import VisionLanguageModel

_TEXT_FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class LlavaForConditionalGeneration(VisionLanguageModel):
    """The text part is the model that `text_config.model_type` names."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """Reads the text part as its own family does; raises CheckpointError for a family that is not
        supported."""
        name = hf.get("model_type", "llama")
        if name not in _TEXT_FAMILIES:
            supported = ", ".join(_TEXT_FAMILIES)
            raise hf.error(f"text_config of type {name!r} is not supported; supported: {supported}")
        text = hf.replace(architectures=[_TEXT_FAMILIES[name]])
        return model_class(text).parse_config(text, dtype)


LlavaNextForConditionalGeneration = LlavaForConditionalGeneration
LlavaOnevisionForConditionalGeneration = LlavaForConditionalGeneration
InternVLForConditionalGeneration = LlavaForConditionalGeneration
Mistral3ForConditionalGeneration = LlavaForConditionalGeneration
