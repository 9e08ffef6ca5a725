"""The vision parts of the supported model families: their modules, and the names of the modules' parameters.

A module is a model class of transformers without the language model, so `get_image_features` is transformers'
own.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModel
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.internvl import modeling_internvl
from transformers.models.llava import modeling_llava
from transformers.models.llava_next import modeling_llava_next
from transformers.models.llava_onevision import modeling_llava_onevision
from transformers.models.mistral3 import modeling_mistral3
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_vl import modeling_qwen3_vl

from quire_ensemble.vision_config import (
    AnyresConfig,
    Gemma3VisionConfig,
    Gemma4VisionConfig,
    Grid,
    InternVLConfig,
    LlavaConfig,
    PixtralConfig,
    QwenConfig,
    VisionConfig,
)


class UnsupportedConfig(ValueError):
    """The configuration asks for something that is not supported or not possible; the message says what."""


class VisionFamily(ABC):
    """A vision part of one kind.

    Attributes:
        module: the torch module; its parameters mean nothing until they are filled.
        row_size: values in one row of `pixel_values`.
        hidden_size: values in one row of the output.
        sample_grid: grid of an image to warm up with.
    """

    module: Any
    row_size: int
    hidden_size: int
    sample_grid: Grid

    @abstractmethod
    def __init__(self, config: VisionConfig) -> None:
        """Builds the module in torch's default dtype; may change `config.hf`.

        Raises:
            UnsupportedConfig: the vision part of this configuration is not supported. Other exceptions of
                transformers and torch pass through.
        """

    @abstractmethod
    def name_of(self, stored: str) -> str | None:
        """Returns one name for the known spellings of a parameter in checkpoints and in versions of
        transformers. None: the parameter does not belong to the vision part, or is not used here.
        """

    @abstractmethod
    def features(self, pixel_values: torch.Tensor, grids: Sequence[Grid]) -> Sequence[torch.Tensor]:
        """Returns the rows for the language model: one [tokens, hidden_size] tensor per image.

        Args:
            pixel_values: float32 [rows of all images, row_size] on the module's device.
            grids: grids of the images, which `VisionConfig.check_image` has accepted.
        """


class LlavaVision(VisionFamily):
    """CLIP or SigLIP tower and projector. Images of one size; one row is a whole image, [C, H, W]."""

    @property
    def module_class(self) -> Any:
        """Class of the module, which is made from transformers' configuration."""
        return _LlavaModel

    def __init__(self, config: VisionConfig) -> None:
        vision = config.hf.vision_config
        self.layers = _stop_at_features(config.hf)
        if vision.model_type == "siglip_vision_model":
            vision.vision_use_head = False  # pools the image to one row, which LLaVA does not use
        self.module = self.module_class(config.hf)
        self.shape = vision.num_channels, vision.image_size, vision.image_size
        self.row_size = vision.num_channels * vision.image_size**2
        side = cast("LlavaConfig", config).patches_per_side
        self.sample_grid = 1, side, side
        self.hidden_size = config.hf.text_config.hidden_size

    def name_of(self, stored: str) -> str | None:
        name = stored.removeprefix("model.")
        if name.startswith(("multi_modal_projector.", "image_newline")):
            return name
        if not name.startswith("vision_tower."):
            return None
        # transformers 4 wrapped the tower once more.
        name = "vision_tower." + name.removeprefix("vision_tower.").removeprefix("vision_model.")
        layer = re.match(r"vision_tower\.encoder\.layers\.(\d+)\.", name)
        beyond = layer is not None and int(layer[1]) >= self.layers
        head = name.startswith("vision_tower.head.")
        return None if beyond or head or name.endswith(".position_ids") else name

    def features(self, pixel_values: torch.Tensor, grids: Sequence[Grid]) -> Sequence[torch.Tensor]:
        pixels = pixel_values.view(-1, *self.shape)
        # LLaVA 1.5's method for every family here: what the others do in addition follows it.
        return modeling_llava.LlavaModel.get_image_features(self.module, pixels).pooler_output


class LlavaNextVision(LlavaVision):
    """LlavaVision for LLaVA-NeXT and OneVision, whose images are tiles; one row is one tile, [C, H, W].
    `pack_image_features` of transformers joins the embeddings of an image's tiles."""

    def __init__(self, config: VisionConfig) -> None:
        assert isinstance(config, AnyresConfig)
        self.is_onevision = config.max_tiles is not None
        super().__init__(config)
        down, across = config.tiles(config.side, config.side)
        self.sample_grid = 1 + down * across, config.side, config.side

    @property
    def module_class(self) -> Any:
        return _LlavaOnevisionModel if self.is_onevision else _LlavaNextModel

    def features(self, pixel_values: torch.Tensor, grids: Sequence[Grid]) -> Sequence[torch.Tensor]:
        tiles = torch.stack(list(super().features(pixel_values, grids)))
        return self.module.pack(tiles.split([t for t, _, _ in grids]), [(h, w) for _, h, w in grids])


class Gemma3Vision(LlavaVision):
    """SigLIP tower, and a projector that pools patches. One row is a whole image, [C, H, W]."""

    def __init__(self, config: VisionConfig) -> None:
        config.hf.vision_feature_layer = -1  # there is no choice
        super().__init__(config)

    @property
    def module_class(self) -> Any:
        return _Gemma3Model

    def features(self, pixel_values: torch.Tensor, grids: Sequence[Grid]) -> Sequence[torch.Tensor]:
        pixels = pixel_values.view(-1, *self.shape)
        return list(self.module.get_image_features(pixels).pooler_output)


class Gemma4Vision(VisionFamily):
    """Tower and projector of Gemma 4. Images differ in size; one row is one patch."""

    def __init__(self, config: VisionConfig) -> None:
        merge = cast("Gemma4VisionConfig", config).merge
        self.module = _Gemma4Model(config.hf)
        self.row_size = 3 * config.patch**2
        self.sample_grid = 1, 4 * merge, 4 * merge
        self.hidden_size = config.hf.text_config.hidden_size

    def name_of(self, stored: str) -> str | None:
        name = stored.removeprefix("model.")
        return name if name.startswith(("vision_tower.", "embed_vision.")) else None

    def features(self, pixel_values: torch.Tensor, grids: Sequence[Grid]) -> Sequence[torch.Tensor]:
        parts = pixel_values.split([h * w for _, h, w in grids])
        return [self._of_image(part, h, w) for part, (_, h, w) in zip(parts, grids, strict=True)]

    def _of_image(self, patches: torch.Tensor, h: int, w: int) -> torch.Tensor:
        places = torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1).to(patches.device)
        found = self.module.get_image_features(patches[None], places[None])
        return found.pooler_output[0]


class InternVLVision(VisionFamily):
    """Tower and projector of InternVL. One row is a tile, [C, H, W]."""

    def __init__(self, config: VisionConfig) -> None:
        vision, side = config.hf.vision_config, cast("InternVLConfig", config).side
        layer = config.hf.vision_feature_layer
        if type(layer) is not int or not -vision.num_hidden_layers <= layer <= vision.num_hidden_layers:
            raise UnsupportedConfig(f"vision_feature_layer {layer!r:.40} is none of the vision tower's")
        self.module = _InternVLModel(config.hf)
        self.shape = 3, side, side
        self.row_size = 3 * side**2
        self.sample_grid = 1, side // config.patch, side // config.patch
        self.hidden_size = config.hf.text_config.hidden_size

    def name_of(self, stored: str) -> str | None:
        name = stored.removeprefix("model.")
        return name if name.startswith(("vision_tower.", "multi_modal_projector.")) else None

    def features(self, pixel_values: torch.Tensor, grids: Sequence[Grid]) -> Sequence[torch.Tensor]:
        rows = self.module.get_image_features(pixel_values.view(-1, *self.shape)).pooler_output
        return [tiles.flatten(0, 1) for tiles in rows.split([t for t, _, _ in grids])]


class PixtralVision(VisionFamily):
    """Pixtral's tower and the projector of LLaVA or Mistral 3. One row is one patch, [C, H, W]."""

    def __init__(self, config: VisionConfig) -> None:
        self.layers = _stop_at_features(config.hf)
        self.patch, merge = config.patch, cast("PixtralConfig", config).merge
        self.module = (_LlavaModel if config.hf.model_type == "llava" else _Mistral3Model)(config.hf)
        self.row_size = 3 * config.patch**2
        self.sample_grid = 1, merge, merge
        self.hidden_size = config.hf.text_config.hidden_size

    def name_of(self, stored: str) -> str | None:
        name = stored.removeprefix("model.")
        if name.startswith("multi_modal_projector."):
            return name
        layer = re.match(r"vision_tower\.transformer\.layers\.(\d+)\.", name)
        beyond = layer is not None and int(layer[1]) >= self.layers
        return name if name.startswith("vision_tower.") and not beyond else None

    def features(self, pixel_values: torch.Tensor, grids: Sequence[Grid]) -> Sequence[torch.Tensor]:
        # One after the other: together all would be padded to the longest and the widest of them, and each
        # patch compared with those of all images.
        parts = pixel_values.split([h * w for _, h, w in grids])
        return [self._of_image(part, h, w) for part, (_, h, w) in zip(parts, grids, strict=True)]

    def _of_image(self, patches: torch.Tensor, h: int, w: int) -> torch.Tensor:
        lines = patches.view(h, w, 3, self.patch, self.patch).permute(2, 0, 3, 1, 4)
        image = lines.reshape(1, 3, h * self.patch, w * self.patch)
        sizes = torch.tensor([image.shape[2:]])
        return self.module.get_image_features(image, image_sizes=sizes).pooler_output[0]


class QwenVision(VisionFamily):
    """Vision tower (`visual`) of Qwen2-VL, 2.5 and 3, and of Qwen3.5. Images differ in size; one row is one
    patch.

    With Qwen3-VL, each row of the output holds an embedding, then the features that deepstack adds after
    layers of the language model.
    """

    def __init__(self, config: VisionConfig) -> None:
        vision = config.hf.vision_config
        if config.hf.model_type == "qwen2_vl":
            self.module, self.hidden_size = _Qwen2VLModel(config.hf), vision.hidden_size
        elif config.hf.model_type == "qwen2_5_vl":
            self.module, self.hidden_size = _Qwen2_5_VLModel(config.hf), vision.out_hidden_size
        elif config.hf.model_type.startswith("qwen3_5"):
            self.module, self.hidden_size = _Qwen3_5Model(config.hf), vision.out_hidden_size
        else:
            indexes = list(vision.deepstack_visual_indexes)
            if indexes != sorted(set(indexes) & set(range(vision.depth))):
                raise UnsupportedConfig(
                    f"deepstack_visual_indexes {indexes!r:.80} are not ascending layers of {vision.depth}"
                )
            self.module = _Qwen3VLModel(config.hf)
            self.hidden_size = vision.out_hidden_size * (1 + len(indexes))
        self.row_size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        self.sample_grid = 1, 4 * vision.spatial_merge_size, 4 * vision.spatial_merge_size

    def name_of(self, stored: str) -> str | None:
        name = stored.removeprefix("model.")
        return name if name.startswith("visual.") and not name.endswith(".inv_freq") else None

    def features(self, pixel_values: torch.Tensor, grids: Sequence[Grid]) -> Sequence[torch.Tensor]:
        grid_thw = torch.tensor(list(grids), dtype=torch.int64, device=pixel_values.device)
        found = self.module.get_image_features(pixel_values, grid_thw)
        levels = getattr(found, "deepstack_features", [])
        return [torch.cat(rows, dim=-1) for rows in zip(found.pooler_output, *levels, strict=True)]


def family_of(config: VisionConfig) -> VisionFamily:
    """Builds the vision part for a configuration; raises as `VisionFamily.__init__` does."""
    families: dict[type[VisionConfig], Callable[[VisionConfig], VisionFamily]] = {
        LlavaConfig: LlavaVision,
        AnyresConfig: LlavaNextVision,
        Gemma3VisionConfig: Gemma3Vision,
        Gemma4VisionConfig: Gemma4Vision,
        InternVLConfig: InternVLVision,
        PixtralConfig: PixtralVision,
        QwenConfig: QwenVision,
    }
    return families[type(config)](config)


class _LlavaModel(modeling_llava.LlavaModel):
    def __init__(self, config: Any) -> None:
        modeling_llava.LlavaPreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = modeling_llava.LlavaMultiModalProjector(config)


class _LlavaNextModel(modeling_llava_next.LlavaNextModel):
    def __init__(self, config: Any) -> None:
        modeling_llava_next.LlavaNextPreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = modeling_llava_next.LlavaNextMultiModalProjector(config)
        self.image_newline = nn.Parameter(torch.empty(config.text_config.hidden_size))

    def pack(self, images: Sequence[torch.Tensor], sizes: list[tuple[int, int]]) -> Sequence[torch.Tensor]:
        """Returns the rows of each image. `images`: [tiles, rows, hidden_size] of each; `sizes`: (height,
        width) of each in pixels."""
        strategy = self.config.vision_feature_select_strategy
        return self.pack_image_features(images, sizes, strategy, self.image_newline)[0]


class _LlavaOnevisionModel(modeling_llava_onevision.LlavaOnevisionModel):
    def __init__(self, config: Any) -> None:
        modeling_llava_onevision.LlavaOnevisionPreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = modeling_llava_onevision.LlavaOnevisionMultiModalProjector(config)
        self.image_newline = nn.Parameter(torch.empty(config.text_config.hidden_size))

    def pack(self, images: Sequence[torch.Tensor], sizes: list[tuple[int, int]]) -> Sequence[torch.Tensor]:
        """Returns the rows of each image; arguments as for `_LlavaNextModel.pack`."""
        ratio = self.config.vision_aspect_ratio
        return self.pack_image_features(images, sizes, self.image_newline, ratio)[0]


class _Gemma3Model(modeling_gemma3.Gemma3Model):
    def __init__(self, config: Any) -> None:
        modeling_gemma3.Gemma3PreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = modeling_gemma3.Gemma3MultiModalProjector(config)


class _Gemma4Model(modeling_gemma4.Gemma4Model):
    def __init__(self, config: Any) -> None:
        modeling_gemma4.Gemma4PreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        vision, text = config.vision_config, config.text_config
        self.embed_vision = modeling_gemma4.Gemma4MultimodalEmbedder(vision, text)


class _InternVLModel(modeling_internvl.InternVLModel):
    def __init__(self, config: Any) -> None:
        modeling_internvl.InternVLPreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = modeling_internvl.InternVLMultiModalProjector(config)


class _Mistral3Projector(modeling_mistral3.Mistral3MultiModalProjector):
    """Mistral 3's projector, with a dimension of size 1 put before its result's. Its caller in transformers
    squeezes the first dimension; without the added one, a result of a single row would lose that of rows."""

    def forward(self, image_features: torch.Tensor, image_sizes: torch.Tensor) -> torch.Tensor:
        return super().forward(image_features, image_sizes).unsqueeze(0)


class _Mistral3Model(modeling_mistral3.Mistral3Model):
    def __init__(self, config: Any) -> None:
        modeling_mistral3.Mistral3PreTrainedModel.__init__(self, config)
        self.vision_tower = AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = _Mistral3Projector(config)


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


class _Qwen3VLModel(modeling_qwen3_vl.Qwen3VLModel):
    def __init__(self, config: Any) -> None:
        modeling_qwen3_vl.Qwen3VLPreTrainedModel.__init__(self, config)
        self.visual = modeling_qwen3_vl.Qwen3VLVisionModel._from_config(config.vision_config)


class _Qwen3_5Model(modeling_qwen3_5.Qwen3_5Model):
    """Vision part of Qwen3.5, also of checkpoints whose language model has experts."""

    def __init__(self, config: Any) -> None:
        modeling_qwen3_5.Qwen3_5PreTrainedModel.__init__(self, config)
        self.visual = modeling_qwen3_5.Qwen3_5VisionModel._from_config(config.vision_config)


def _stop_at_features(config: Any) -> int:
    """Removes from the configuration the tower's layers above the last one whose output is used (LLaVA 1.5:
    one of 24), but not the first layer, and renumbers `vision_feature_layer`. Returns the number of layers
    that stay.

    Raises:
        UnsupportedConfig: the configuration names no feature layer, or one that the tower does not have.
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
