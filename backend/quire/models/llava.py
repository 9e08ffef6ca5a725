"""LLaVA 1.5, NeXT and OneVision, InternVL, Mistral 3: a vision tower and a text model. Only the text model is
loaded here, and its family must be in _TEXT_FAMILIES."""

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
    """Text part of such a checkpoint: a model of the family that `text_config.model_type` names."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """Reads the text part as its own family does; raises CheckpointError, also for a family that is not
        in _TEXT_FAMILIES."""
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
