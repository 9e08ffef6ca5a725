"""The vision parts of the supported model families: their modules, names, and the geometry of their images.

Each builds on the family's model class in transformers and leaves the language model out, so that
`get_image_features` is transformers' own.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModel
from transformers.models.llava import modeling_llava
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl

from quire_ensemble.errors import InputError
from quire_ensemble.vision_config import VisionConfig

GRID = "image_grid"

Grid = Sequence[tuple[int, int, int]]
"""(t, h, w) of each image, in patches before merging."""


class UnsupportedConfig(ValueError):
    """The configuration asks for something there is no code for; the message says what."""


class VisionFamily(ABC):
    """A vision part of one kind.

    Attributes:
        module: parameters are uninitialised until they are filled.
        row_size: values in one row of `pixel_values`.
        hidden_size: values in one row of the output.
        sample_grid: of an image of a usual size, or a smaller one.
    """

    module: Any
    row_size: int
    hidden_size: int
    sample_grid: tuple[int, int, int]

    @abstractmethod
    def __init__(self, config: VisionConfig) -> None:
        """Builds the module in torch's default dtype; changes `config.hf`.

        Raises:
            UnsupportedConfig: of this configuration's vision part.
        """

    @abstractmethod
    def name_of(self, stored: str) -> str | None:
        """One name for all spellings of a parameter in checkpoints and in transformers' own versions.

        None for what does not belong to the vision part, or is not computed here.
        """

    @abstractmethod
    def check_image(self, t: int, h: int, w: int) -> None:
        """Raises InputError of field `image_grid` for a grid that no image of this model has."""

    @abstractmethod
    def rows(self, t: int, h: int, w: int) -> int:
        """Rows of `pixel_values` that an image takes."""

    @abstractmethod
    def features(self, pixel_values: torch.Tensor, grid: Grid) -> Sequence[torch.Tensor]:
        """One [tokens, hidden_size] tensor per image, of the module's dtype.

        Args:
            pixel_values: float32 [rows of all images, row_size] on the module's device.
            grid: of the images.
        """


class LlavaVision(VisionFamily):
    """CLIP or SigLIP tower and projector. Images of one size; one row is a whole image, [C, H, W]."""

    def __init__(self, config: VisionConfig) -> None:
        vision = config.hf.vision_config
        self.layers = _stop_at_features(config.hf)
        if vision.model_type == "siglip_vision_model":
            vision.vision_use_head = False  # pools the image to one row, which LLaVA does not use
        self.module = _LlavaModel(config.hf)
        self.image_size, self.channels = vision.image_size, vision.num_channels
        # A size that the patches do not divide (SigLIP: 384 by 14) leaves a border that is in no patch.
        self.side = vision.image_size // config.patch
        self.row_size = self.channels * self.image_size**2
        self.sample_grid = 1, self.side, self.side
        self.hidden_size = config.hf.text_config.hidden_size

    def name_of(self, stored: str) -> str | None:
        name = stored.removeprefix("model.")
        if name.startswith("multi_modal_projector."):
            return name
        if not name.startswith("vision_tower."):
            return None
        # transformers 4 wrapped the tower once more.
        name = "vision_tower." + name.removeprefix("vision_tower.").removeprefix("vision_model.")
        layer = re.match(r"vision_tower\.encoder\.layers\.(\d+)\.", name)
        beyond = layer is not None and int(layer[1]) >= self.layers
        head = name.startswith("vision_tower.head.")
        return None if beyond or head or name.endswith(".position_ids") else name

    def check_image(self, t: int, h: int, w: int) -> None:
        if (t, h, w) != (1, self.side, self.side):
            raise InputError(GRID, f"must be [1, {self.side}, {self.side}] for this model, got {[t, h, w]}")

    def rows(self, t: int, h: int, w: int) -> int:
        return 1

    def features(self, pixel_values: torch.Tensor, grid: Grid) -> Sequence[torch.Tensor]:
        pixels = pixel_values.view(len(grid), self.channels, self.image_size, self.image_size)
        return self.module.get_image_features(pixels).pooler_output


class QwenVision(VisionFamily):
    """`visual` of Qwen2-VL and Qwen2.5-VL. Images of any size; one row is one patch."""

    def __init__(self, config: VisionConfig) -> None:
        vision = config.hf.vision_config
        if config.hf.model_type == "qwen2_vl":
            self.module, self.hidden_size = _Qwen2VLModel(config.hf), vision.hidden_size
        else:
            self.module, self.hidden_size = _Qwen2_5_VLModel(config.hf), vision.out_hidden_size
        self.merge = config.merge
        self.row_size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        self.sample_grid = 1, 4 * config.merge, 4 * config.merge

    def name_of(self, stored: str) -> str | None:
        name = stored.removeprefix("model.")
        return name if name.startswith("visual.") and not name.endswith(".inv_freq") else None

    def check_image(self, t: int, h: int, w: int) -> None:
        if min(t, h, w) < 1 or h % self.merge or w % self.merge:
            raise InputError(
                GRID, f"must be positive, height and width multiples of {self.merge}, got {[t, h, w]}"
            )

    def rows(self, t: int, h: int, w: int) -> int:
        return t * h * w

    def features(self, pixel_values: torch.Tensor, grid: Grid) -> Sequence[torch.Tensor]:
        grid_thw = torch.tensor(list(grid), dtype=torch.int64, device=pixel_values.device)
        return self.module.get_image_features(pixel_values, grid_thw).pooler_output


class _LlavaModel(modeling_llava.LlavaModel):
    def __init__(self, config: Any) -> None:
        modeling_llava.LlavaPreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = modeling_llava.LlavaMultiModalProjector(config)


class _Qwen2VLModel(modeling_qwen2_vl.Qwen2VLModel):
    def __init__(self, config: Any) -> None:
        modeling_qwen2_vl.Qwen2VLPreTrainedModel.__init__(self, config)
        tower = modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel
        self.visual = tower._from_config(config.vision_config)


class _Qwen2_5_VLModel(modeling_qwen2_5_vl.Qwen2_5_VLModel):
    def __init__(self, config: Any) -> None:
        modeling_qwen2_5_vl.Qwen2_5_VLPreTrainedModel.__init__(self, config)
        tower = modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel
        self.visual = tower._from_config(config.vision_config)


def _stop_at_features(config: Any) -> int:
    """Cuts the layers above the last one whose output is used (LLaVA 1.5: one of 24); those that stay.

    Raises:
        UnsupportedConfig: a feature layer the tower does not have.
    """
    vision, stated = config.vision_config, config.vision_feature_layer
    states = vision.num_hidden_layers + 1  # the embedding's output is number 0
    indices = [stated] if isinstance(stated, int) else list(stated)
    if not indices or not all(-states <= i < states for i in indices):
        raise UnsupportedConfig(
            f"vision_feature_layer {stated} is not within the {states - 1} layers of the vision tower"
        )
    indices = [i % states for i in indices]
    kept = max(1, *indices)
    vision.num_hidden_layers = kept
    # Counted from the end: transformers takes a single layer 0 for "no hidden states".
    indices = [i - kept - 1 for i in indices]
    config.vision_feature_layer = indices[0] if isinstance(stated, int) else indices
    return kept
