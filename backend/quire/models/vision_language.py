"""The text part of a vision-language checkpoint; its vision part is a Triton model of its own."""

from __future__ import annotations

from quire.models.decoder import DecoderModel

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
