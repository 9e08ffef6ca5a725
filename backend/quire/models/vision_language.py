"""The text part of a vision-language checkpoint. The vision part is left to another Triton model."""

from __future__ import annotations

from quire.layers.hf_config import HFConfig
from quire.layers.rotary import RopeConfig
from quire.models.decoder import DecoderModel

_VISION_PARTS = ("vision_tower.", "multi_modal_projector.", "visual.", "image_newline")
_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""Prefixes of the text model's tensors in checkpoints of different versions, each with the prefix used
here."""


class VisionLanguageModel(DecoderModel):
    """A decoder from a checkpoint that also has a vision part, which is not loaded. If the family accepts
    image embeddings (`accepts_image_embeds`), prompts may have them in place of placeholder tokens."""

    def canonical_name(self, name: str) -> str:
        """See Model."""
        for prefix, own in _TEXT_PREFIXES:
            if name.startswith(prefix):
                name = own + name.removeprefix(prefix)
                break
        return super().canonical_name(name)

    def ignores(self, name: str) -> bool:
        """See DecoderModel. Tensors of the vision part are ignored too."""
        return name.removeprefix("model.").startswith(_VISION_PARTS) or super().ignores(name)


def check_interleaved_mrope(hf: HFConfig, rope: RopeConfig) -> None:
    """Raises CheckpointError unless the rope has interleaved M-RoPE."""
    if rope.mrope_section is None or not rope.mrope_interleaved:
        raise hf.error("rope parameters have no mrope_section that is interleaved (mrope_interleaved)")
