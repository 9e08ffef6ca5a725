"""LLaVA 1.5 and its kin: any supported text model behind a CLIP or SigLIP tower."""

from __future__ import annotations

import torch

from quire.models.config import DecoderConfig
from quire.models.hf_config import HFConfig
from quire.models.vision_language import VisionLanguageModel, parse_text_config


class LlavaForConditionalGeneration(VisionLanguageModel):
    """The text part is what `text_config.model_type` says."""

    @classmethod
    def parse_config(cls, hf: HFConfig, dtype: torch.dtype) -> DecoderConfig:
        """See DecoderModel."""
        return parse_text_config(hf, dtype)
