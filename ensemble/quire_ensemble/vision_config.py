"""VisionConfig: what config.json says of a vision part, for both vision models; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire_ensemble.checkpoint_files import check_directory
from quire_ensemble.errors import VisionError, one_line

_MODEL_TYPES = ("llava", "qwen2_vl", "qwen2_5_vl")
"""Values of `model_type` that are known."""
_CLASS_ROWS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Vision towers of LLaVA, and how many rows they put before those of the patches."""


@dataclass(frozen=True)
class VisionConfig:
    """The configuration of a checkpoint with a vision part, and the geometry of its images."""

    hf: Any
    """transformers' configuration, defaults filled in."""
    patch: int
    """Pixels of a patch's side."""
    merge: int = 1
    """Patches of a side that make one row of embeddings."""
    extra_rows: int = 0
    """Rows of an image beside those of its patches."""

    @property
    def is_llava(self) -> bool:
        """Whether images have one size and positions one axis; else any size, and M-RoPE."""
        return bool(self.hf.model_type == "llava")

    def tokens(self, t: int, h: int, w: int) -> int:
        """Rows of embeddings that an image of a grid in patches gives."""
        return t * h * w // self.merge**2 + self.extra_rows


def read_vision_config(path: Path) -> VisionConfig:
    """Reads a checkpoint's config.json.

    Raises:
        VisionError: missing, broken, or without a vision part that is known; one line that names the file.
    """
    from transformers import AutoConfig

    file = path / "config.json"
    if not file.is_file():
        raise VisionError(f"{file}: not found")
    check_directory(path, VisionError)
    try:
        hf = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever the file makes it raise
        raise VisionError(f"{file}: cannot be read: {one_line(error)}") from None
    if hf.model_type not in _MODEL_TYPES:
        known = ", ".join(_MODEL_TYPES)
        raise VisionError(f"{file}: model_type {hf.model_type!r} has no known vision part; known are {known}")
    vision = hf.vision_config

    def size(name: str) -> int:
        value = getattr(vision, name)
        if not isinstance(value, int) or value < 1:
            raise VisionError(f"{file}: {name} of the vision tower must be an integer of at least 1")
        return value

    if hf.model_type != "llava":
        return VisionConfig(hf, size("patch_size"), size("spatial_merge_size"))
    if vision.model_type not in _CLASS_ROWS:
        known = ", ".join(_CLASS_ROWS)
        raise VisionError(f"{file}: vision tower {vision.model_type!r} is not supported; supported: {known}")
    size("image_size")
    # "default" drops the first row, whatever it is.
    dropped = int(hf.vision_feature_select_strategy == "default")
    return VisionConfig(hf, size("patch_size"), extra_rows=_CLASS_ROWS[vision.model_type] - dropped)
