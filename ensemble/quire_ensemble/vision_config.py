"""Configuration of a vision part, from config.json, and the geometry of its images; for both vision models.

An image has a grid: three numbers, whose meaning depends on the model family. The grid goes from the
preprocessor to the encoder with the image's pixels. All counts of an image (rows of pixels, patches, rows of
embeddings) follow from the grid and the configuration. This module does not import torch.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from quire_common.checkpoint_files import check_directory
from quire_common.errors import InputError, one_line
from quire_ensemble.errors import VisionError

GRID = "image_grid"
MAX_TILES = 256
"""Largest number of tiles per image; with LLaVA-NeXT and OneVision, besides the tile of the whole image."""
MAX_PINPOINTS = 1024
MAX_SIDE = 2**24
"""Largest height and width in a grid of LLaVA-NeXT or OneVision, and largest value of some keys of
config.json."""
_CLASS_ROWS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Number of rows before those of the patches, by the type of LLaVA's vision tower."""

_MOST_OF_TOWER = {
    **dict.fromkeys(("num_hidden_layers", "depth"), 1024),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "head_dim"), 2**12),
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size"), 2**16),
    "intermediate_size": 2**18,
    "position_embedding_size": 2**16,
    "pooling_kernel_size": 64,
}
"""Largest values that are allowed for some keys of a vision tower's configuration. The tower is built before
its weights are read, so a larger value might take all memory."""

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class VisionConfig(ABC):
    """The configuration of a checkpoint with a vision part."""

    hf: Any
    """transformers' configuration, defaults filled in."""
    patch: int
    """Pixels of a patch's side."""
    has_mrope: ClassVar[bool] = False
    """Whether a token's position has three numbers (time, height, width), as in the Qwen models."""
    extra_tokens: ClassVar[tuple[str, ...]] = ()
    """Texts of the tokens that `sequence` adds to an image's placeholders."""

    @abstractmethod
    def rows(self, t: int, h: int, w: int) -> int:
        """Returns the number of `pixel_values` rows for an image with this grid."""

    @abstractmethod
    def patches(self, t: int, h: int, w: int) -> int:
        """Returns the number of patches that the vision tower computes for an image with this grid."""

    @abstractmethod
    def tokens(self, t: int, h: int, w: int) -> int:
        """Returns the number of embedding rows for an image with this grid."""

    @abstractmethod
    def check_image(self, t: int, h: int, w: int) -> None:
        """Checks an image's grid. Raises InputError of field `image_grid` if the model cannot take it."""

    def check_settings(self, processor: Any) -> None:  # noqa: B027
        """Checks some settings of an image processor before it processes anything; with some families none.
        Raises an exception, mostly ValueError, if one does not fit the checkpoint or is not supported."""

    @abstractmethod
    def check_processor(self, processor: Any, out: Any) -> int:
        """Checks that an image processor, and its output for an image, fit the tower.

        Returns:
            The size of a row of `pixel_values`.

        Raises:
            ValueError: they do not fit; the message says why.
        """

    @abstractmethod
    def processed(self, out: Any) -> tuple[np.ndarray, Grid]:
        """Returns the pixels, float32 [rows, row size], and the grid from an image processor's output for one
        image."""

    def preprocess(self, processor: Any, image: Any, is_alone: bool) -> Any:
        """Returns the image processor's output for one of a prompt's images (mode RGB). Passes on the
        processor's ValueError.

        Args:
            processor: image processor of the checkpoint.
            image: an image of Pillow.
            is_alone: whether the prompt has no other image.
        """
        return processor(images=[image], return_tensors="np")

    @abstractmethod
    def planned_patches(self, processor: Any, height: int, width: int, is_alone: bool) -> int:
        """Returns the number of patches that the vision tower will compute for an image of this size in
        pixels, which need not be decoded yet. With some families, raises ValueError for a size that the image
        processor refuses."""

    def scaled_size(self, processor: Any, short: int, long: int, is_alone: bool) -> tuple[int, int]:
        """Returns the shorter and the longer side, in pixels, to which the image processor may first scale or
        pad an image with the sides `short` and `long`. Returns `short` and `long` themselves if that cannot
        make a huge image."""
        return short, long

    @property
    def marks(self) -> list[int]:
        """Token ids of the text that stands for one image, in order; `mark` is among them."""
        return [self.mark]

    @property
    def mark(self) -> int:
        """Token id that the text of a prompt has once for each image, until `mark_parts` replace it."""
        return self.hf.image_token_id

    @property
    def mark_parts(self) -> list[int | str]:
        """Token ids and texts that replace `mark` in the text of a prompt before it is tokenized. The
        placeholder's id is one of them."""
        return [self.mark]

    def sequence(self, grid: Grid, placeholder: int, extra: Sequence[int]) -> list[int]:
        """Returns the token ids that replace an image's placeholder: the placeholder once for each row of
        embeddings, and `extra` if the family has such tokens.

        Args:
            grid: grid of the image.
            placeholder: id of the placeholder.
            extra: ids of `extra_tokens`.
        """
        return [placeholder] * self.tokens(*grid)


@dataclass(frozen=True)
class LlavaConfig(VisionConfig):
    """LLaVA 1.5: images of one size. A row of `pixel_values` is an image, [C, H, W]; a grid is (1, patches
    down, patches across)."""

    side: int
    """Pixels of a side of an image, or of a tile."""
    extra_rows: int
    """Rows of embeddings in addition to those of the patches; -1: the row of a patch is dropped."""

    @property
    def patches_per_side(self) -> int:
        """Number of patches along a side. If the patch size does not divide the side (SigLIP: 384 by 14), a
        border is in no patch."""
        return self.side // self.patch

    @property
    def tile_tokens(self) -> int:
        """Number of rows of embeddings that the projector makes for one image or tile."""
        return self.patches_per_side**2 + self.extra_rows

    def rows(self, t: int, h: int, w: int) -> int:
        return 1

    def patches(self, t: int, h: int, w: int) -> int:
        return self.patches_per_side**2

    def tokens(self, t: int, h: int, w: int) -> int:
        return self.tile_tokens

    def planned_patches(self, processor: Any, height: int, width: int, is_alone: bool) -> int:
        return self.patches_per_side**2

    def scaled_size(self, processor: Any, short: int, long: int, is_alone: bool) -> tuple[int, int]:
        edge = dict(processor.size or {}).get("shortest_edge")
        if getattr(processor, "do_pad", False):
            return long, long
        return (edge, edge * long // short) if processor.do_resize and edge else (short, long)

    def check_image(self, t: int, h: int, w: int) -> None:
        wanted = [1, self.patches_per_side, self.patches_per_side]
        if [t, h, w] != wanted:
            raise InputError(GRID, f"must be {wanted} for this model, got {[t, h, w]}")

    def check_processor(self, processor: Any, out: Any) -> int:
        return self._check_shape(np.asarray(out["pixel_values"]).shape, (1,))

    def _check_shape(self, shape: tuple[int, ...], images: tuple[int, ...]) -> int:
        if shape != (*images, 3, self.side, self.side):
            raise ValueError(
                f"the image processor gives {list(shape[1:])}, the vision tower takes "
                f"{[*images[1:], 3, self.side, self.side]}"
            )
        return 3 * self.side**2

    def processed(self, out: Any) -> tuple[np.ndarray, Grid]:
        pixels = np.asarray(out["pixel_values"], dtype=np.float32)
        return pixels.reshape(1, -1), (1, self.patches_per_side, self.patches_per_side)


@dataclass(frozen=True)
class AnyresConfig(LlavaConfig):
    """LLaVA-NeXT and OneVision: an image becomes one tile, and is also scaled to the best of `pinpoints` and
    cut into further tiles. For OneVision, each of several images of a prompt becomes one tile only.

    A row is a tile. A grid is (tiles, height, width), with the size of the original image in pixels.
    """

    pinpoints: tuple[tuple[int, int], ...]
    """Sizes (height, width) in pixels to which an image may be scaled; multiples of the tiles' `side`."""
    max_tiles: int | None
    """OneVision: if the tiles of an image, without padding, have over 1.21 times as many embeddings as this
    number of tiles has, their embeddings are scaled down to about as many. None: LLaVA-NeXT, which does not
    scale them down."""

    def rows(self, t: int, h: int, w: int) -> int:
        return t

    def patches(self, t: int, h: int, w: int) -> int:
        return t * self.patches_per_side**2

    def tokens(self, t: int, h: int, w: int) -> int:
        if t == 1:
            return self.tile_tokens + 1
        rows, columns = self.shown(h, w)
        return self.tile_tokens + rows * (columns + 1)

    def _is_tiled(self, is_alone: bool) -> bool:
        return is_alone or self.max_tiles is None

    def preprocess(self, processor: Any, image: Any, is_alone: bool) -> Any:
        if self._is_tiled(is_alone):
            return processor(images=[image], return_tensors="np")
        # As in a list of a prompt's images, without those beside it.
        base: Any = type(processor).__base__
        return base.preprocess(processor, [image], [2], return_tensors="np")

    def planned_patches(self, processor: Any, height: int, width: int, is_alone: bool) -> int:
        down, across = self.tiles(height, width) if self._is_tiled(is_alone) else (0, 0)
        return self.patches(1 + down * across, height, width)

    def scaled_size(self, processor: Any, short: int, long: int, is_alone: bool) -> tuple[int, int]:
        # One of several is padded to a square; tiles do not grow with the image.
        return (short, long) if self._is_tiled(is_alone) else (long, long)

    def tiles(self, h: int, w: int) -> tuple[int, int]:
        """Returns how many tiles, (down, across), an image of this size in pixels is cut into. The tile of
        the whole image does not count."""
        from transformers.image_processing_utils import select_best_resolution

        height, width = select_best_resolution((h, w), list(self.pinpoints))
        return height // self.side, width // self.side

    def shown(self, h: int, w: int) -> tuple[int, int]:
        """Returns how many rows and columns the embeddings of an image's tiles form together, without the
        tile of the whole image. Padding and the mark after each row are not counted, and `max_tiles` is
        applied. (The arithmetic of `unpad_image` and `pack_image_features` in transformers.)"""
        down, across = (n * self.patches_per_side for n in self.tiles(h, w))
        if w / h > across / down:
            down -= (down - int(round(h * (across / w), 7))) // 2 * 2
        else:
            across -= (across - int(round(w * (down / h), 7))) // 2 * 2
        if self.max_tiles is not None:
            ratio = math.sqrt(down * across / (self.max_tiles * self.patches_per_side**2))
            if ratio > 1.1:
                return int(down // ratio), int(across // ratio)
        return down, across

    def check_image(self, t: int, h: int, w: int) -> None:
        if not (1 <= h <= MAX_SIDE and 1 <= w <= MAX_SIDE):
            raise InputError(GRID, f"height and width must be from 1 to {MAX_SIDE}, got {[t, h, w]}")
        down, across = self.tiles(h, w)
        allowed = [1 + down * across] if self.max_tiles is None else [1, 1 + down * across]
        if t not in allowed:
            raise InputError(GRID, f"an image of {h} x {w} pixels has {allowed} tiles, got {t}")

    def check_settings(self, processor: Any) -> None:
        if tuple(tuple(one) for one in processor.image_grid_pinpoints) != self.pinpoints:
            raise ValueError("image_grid_pinpoints differ between the image processor and config.json")

    def check_processor(self, processor: Any, out: Any) -> int:
        down, across = self.tiles(*(int(n) for n in out["image_sizes"][0]))
        return self._check_shape(np.asarray(out["pixel_values"]).shape, (1, 1 + down * across))

    def processed(self, out: Any) -> tuple[np.ndarray, Grid]:
        pixels = np.asarray(out["pixel_values"][0], dtype=np.float32)
        height, width = (int(n) for n in out["image_sizes"][0])
        return pixels.reshape(len(pixels), -1), (len(pixels), height, width)


@dataclass(frozen=True)
class Gemma3VisionConfig(LlavaConfig):
    """Gemma 3: images of one size, whose patches are pooled. Rows and grids are those of LLaVA 1.5."""

    @property
    def tile_tokens(self) -> int:
        return self.hf.mm_tokens_per_image

    def check_settings(self, processor: Any) -> None:
        if processor.do_pan_and_scan:
            raise ValueError("do_pan_and_scan true of the image processor is not supported")

    @property
    def mark(self) -> int:
        return self.hf.boi_token_id

    @property
    def mark_parts(self) -> list[int | str]:
        # Line feeds in the text beside them may make one token with them.
        return ["\n\n", self.mark, self.hf.image_token_id, self.hf.eoi_token_id, "\n\n"]


def _check_equal(processor: Any, **sizes: int) -> None:
    """Raises ValueError unless an image processor has these sizes, which config.json states, too."""
    for name, ours in sizes.items():
        theirs = getattr(processor, name, None)
        if theirs != ours:
            raise ValueError(f"{name} is {theirs} in the image processor and {ours} in config.json")


@dataclass(frozen=True)
class PatchesConfig(VisionConfig):
    """Base of families whose images differ in size. A row of `pixel_values` is a patch; a grid is (1, height,
    width) in patches."""

    merge: int
    """A square of `merge` x `merge` patches makes one row of embeddings."""

    @property
    @abstractmethod
    def most_patches(self) -> int:
        """Most patches of an image's side."""

    def rows(self, t: int, h: int, w: int) -> int:
        return h * w

    def patches(self, t: int, h: int, w: int) -> int:
        return h * w

    def tokens(self, t: int, h: int, w: int) -> int:
        return h * w // self.merge**2

    def check_image(self, t: int, h: int, w: int) -> None:
        most = self.most_patches
        if t != 1 or not all(1 <= n <= most and n % self.merge == 0 for n in (h, w)):
            raise InputError(
                GRID,
                f"must be 1, and height and width multiples of {self.merge} up to {most}, got {[t, h, w]}",
            )

    def check_processor(self, processor: Any, out: Any) -> int:
        return 3 * self.patch**2


@dataclass(frozen=True)
class Gemma4VisionConfig(PatchesConfig):
    """Gemma 4. Patches are pooled to rows of embeddings."""

    @property
    def most_patches(self) -> int:
        return int(self.hf.vision_config.position_embedding_size)

    def planned_patches(self, processor: Any, height: int, width: int, is_alone: bool) -> int:
        from transformers.models.gemma4 import image_processing_pil_gemma4 as theirs

        most = processor.max_soft_tokens * self.merge**2
        sides = theirs.get_aspect_ratio_preserving_size(height, width, self.patch, most, self.merge)
        return sides[0] * sides[1] // self.patch**2

    def check_settings(self, processor: Any) -> None:
        _check_equal(processor, pooling_kernel_size=self.merge, patch_size=self.patch)
        if not processor.do_resize:
            raise ValueError("do_resize false of the image processor is not supported")
        side, most = processor.max_soft_tokens * self.merge, self.most_patches
        if side > most:
            raise ValueError(
                f"the image processor makes images of up to {side} patches a side, at most {most} are "
                "allowed (position_embedding_size)"
            )

    def processed(self, out: Any) -> tuple[np.ndarray, Grid]:
        width, height = (int(n) + 1 for n in np.asarray(out["image_position_ids"][0]).max(0))
        pixels = np.asarray(out["pixel_values"][0], dtype=np.float32)  # padded behind its patches
        return pixels[: height * width], (1, height, width)

    @property
    def mark_parts(self) -> list[int | str]:
        return [self.hf.boi_token_id, self.mark, self.hf.eoi_token_id]


@dataclass(frozen=True)
class QwenConfig(VisionConfig):
    """Qwen's vision models, whose images differ in size. A row of `pixel_values` is a patch; a grid is (time,
    height, width) in patches."""

    merge: int
    """A square of `merge` x `merge` patches makes one row of embeddings."""
    has_mrope: ClassVar[bool] = True

    def rows(self, t: int, h: int, w: int) -> int:
        return t * h * w

    def patches(self, t: int, h: int, w: int) -> int:
        return t * h * w

    def tokens(self, t: int, h: int, w: int) -> int:
        return t * h * w // self.merge**2

    def planned_patches(self, processor: Any, height: int, width: int, is_alone: bool) -> int:
        return int(processor.get_number_of_image_patches(height, width))

    def check_image(self, t: int, h: int, w: int) -> None:
        if min(t, h, w) < 1 or h % self.merge or w % self.merge:
            raise InputError(
                GRID, f"must be positive, height and width multiples of {self.merge}, got {[t, h, w]}"
            )

    def check_processor(self, processor: Any, out: Any) -> int:
        _check_equal(processor, merge_size=self.merge, patch_size=self.patch)
        return int(np.asarray(out["pixel_values"]).shape[1])

    def processed(self, out: Any) -> tuple[np.ndarray, Grid]:
        pixels = np.asarray(out["pixel_values"], dtype=np.float32)
        return pixels, cast("Grid", tuple(int(n) for n in out["image_grid_thw"][0]))

    @property
    def marks(self) -> list[int]:
        return [self.hf.vision_start_token_id, self.hf.image_token_id, self.hf.vision_end_token_id]


@dataclass(frozen=True)
class InternVLConfig(VisionConfig):
    """InternVL: an image is cut into tiles of one size. If there are several, the whole image follows as one
    more. A row of `pixel_values` is a tile. A grid is (tiles, patches down a tile, patches across a tile)."""

    side: int
    """Pixels of a tile's side."""
    merge: int
    """A square of `merge` x `merge` patches makes one row of embeddings."""
    extra_tokens: ClassVar[tuple[str, ...]] = ("<img>", "</img>")

    def rows(self, t: int, h: int, w: int) -> int:
        return t

    def patches(self, t: int, h: int, w: int) -> int:
        return t * h * w

    def tokens(self, t: int, h: int, w: int) -> int:
        return t * h * w // self.merge**2

    def check_image(self, t: int, h: int, w: int) -> None:
        side = self.side // self.patch
        if not 1 <= t <= MAX_TILES or (h, w) != (side, side):
            raise InputError(
                GRID, f"must be 1 to {MAX_TILES} tiles of [{side}, {side}] for this model, got {[t, h, w]}"
            )

    def preprocess(self, processor: Any, image: Any, is_alone: bool) -> Any:
        # What transformers' processor asks of its image processor.
        return processor(images=[image], crop_to_patches=True, return_tensors="np")

    def planned_patches(self, processor: Any, height: int, width: int, is_alone: bool) -> int:
        tiles = processor.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        return int(tiles) * (self.side // self.patch) ** 2

    def check_settings(self, processor: Any) -> None:
        most = processor.max_patches
        # All arrangements of up to so many tiles are tried; the tile of the whole image is added to them.
        if type(most) is not int or not 1 <= most < MAX_TILES:
            raise ValueError(f"max_patches of the image processor must be from 1 to {MAX_TILES - 1}")

    def check_processor(self, processor: Any, out: Any) -> int:
        if (shape := np.asarray(out["pixel_values"]).shape[1:]) != (3, self.side, self.side):
            raise ValueError(
                f"the image processor gives {list(shape)}, the vision tower takes {[3, self.side, self.side]}"
            )
        return 3 * self.side**2

    def processed(self, out: Any) -> tuple[np.ndarray, Grid]:
        pixels = np.asarray(out["pixel_values"], dtype=np.float32)
        return pixels.reshape(len(pixels), -1), (len(pixels), *2 * (self.side // self.patch,))

    def sequence(self, grid: Grid, placeholder: int, extra: Sequence[int]) -> list[int]:
        begin, end = extra
        return [begin, *super().sequence(grid, placeholder, extra), end]


@dataclass(frozen=True)
class PixtralConfig(PatchesConfig):
    """Pixtral's tower (in LLaVA, in Mistral 3). A token ends each line of an image's rows."""

    side: int
    """Most pixels of an image's side, after scaling."""
    extra_tokens: ClassVar[tuple[str, ...]] = ("[IMG_BREAK]", "[IMG_END]")

    @property
    def most_patches(self) -> int:
        return self.side // self.patch

    def preprocess(self, processor: Any, image: Any, is_alone: bool) -> Any:
        # What transformers' processor asks of its image processor.
        return processor(images=[image], patch_size=self.patch * self.merge, return_tensors="np")

    def planned_patches(self, processor: Any, height: int, width: int, is_alone: bool) -> int:
        ratio = max(1.0, max(height, width) / self._longest_edge(processor))
        unit = self.patch * self.merge
        lines, columns = (-(-int(n / ratio) // unit) for n in (height, width))
        if not lines or not columns:
            raise ValueError(f"{width} x {height} pixels are too long and narrow")
        return lines * columns * self.merge**2

    def _longest_edge(self, processor: Any) -> int:
        edge = dict(processor.size or {}).get("longest_edge")
        unit = self.patch * self.merge
        if type(edge) is not int or not 1 <= edge <= self.side // unit * unit:
            raise ValueError(
                f"longest_edge of the image processor must be an integer up to {self.side // unit * unit}, "
                f"got {edge!r:.40}"
            )
        return edge

    def check_settings(self, processor: Any) -> None:
        self._longest_edge(processor)

    def processed(self, out: Any) -> tuple[np.ndarray, Grid]:
        pixels = np.asarray(out["pixel_values"][0], dtype=np.float32)
        h, w = (n // self.patch for n in pixels.shape[1:])
        patches = pixels.reshape(3, h, self.patch, w, self.patch).transpose(1, 3, 0, 2, 4)
        return patches.reshape(h * w, -1), (1, h, w)

    def sequence(self, grid: Grid, placeholder: int, extra: Sequence[int]) -> list[int]:
        line_break, end = extra
        lines, columns = (n // self.merge for n in grid[1:])
        ids = [*[placeholder] * columns, line_break] * lines
        return [*ids[:-1], end]


def read_vision_config(path: Path) -> VisionConfig:
    """Reads the VisionConfig of a checkpoint from its config.json.

    Raises:
        VisionError: config.json is missing or broken, or has no supported vision part, or `check_directory`
            refuses a file beside it. The message is one line that names the file.
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
    if hf.model_type not in _READERS:
        known = ", ".join(_READERS)
        raise VisionError(f"{file}: model_type {hf.model_type!r} has no known vision part; known are {known}")
    try:
        for name, most in _MOST_OF_TOWER.items():
            value = getattr(hf.vision_config, name, None)
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                raise ValueError(f"{name} of the vision tower must be from 1 to {most}, got {value!r:.40}")
        return _READERS[hf.model_type](hf)
    except ValueError as error:
        raise VisionError(f"{file}: {error}") from None


def _size(vision: Any, name: str) -> int:
    """Returns the value of a key of the vision tower's configuration. Raises ValueError unless it is an
    integer from 1 to MAX_SIDE."""
    value = getattr(vision, name)
    if type(value) is not int or not 1 <= value <= MAX_SIDE:
        raise ValueError(f"{name} of the vision tower must be an integer of at least 1")
    return value


def _read_qwen(hf: Any) -> VisionConfig:
    vision = hf.vision_config
    return QwenConfig(hf, _size(vision, "patch_size"), _size(vision, "spatial_merge_size"))


def _read_llava(hf: Any) -> VisionConfig:
    vision = hf.vision_config
    if vision.model_type == "pixtral" and hf.model_type == "llava":
        return _read_pixtral(hf)
    if vision.model_type not in _CLASS_ROWS:
        known = ", ".join(_CLASS_ROWS)
        raise ValueError(f"vision tower {vision.model_type!r} is not supported; supported: {known}")
    patch, side = _size(vision, "patch_size"), _size(vision, "image_size")
    if patch > side:
        raise ValueError(f"patch_size {patch} of the vision tower is larger than its image_size {side}")
    # "default" drops the first row, whatever it is.
    dropped = int(hf.vision_feature_select_strategy == "default")
    extra_rows = _CLASS_ROWS[vision.model_type] - dropped
    if hf.model_type == "llava":
        return LlavaConfig(hf, patch, side, extra_rows)
    if extra_rows:
        raise ValueError(
            f"vision_feature_select_strategy {hf.vision_feature_select_strategy!r} of a "
            f"{vision.model_type} leaves rows that are not those of the patches, which tiles cannot have"
        )
    max_tiles = None
    if hf.model_type == "llava_onevision":
        found = re.fullmatch(r"anyres_max_([1-9]\d{0,3})", str(hf.vision_aspect_ratio))
        if found is None:
            raise ValueError(f"vision_aspect_ratio {hf.vision_aspect_ratio!r:.40} is not anyres_max_N")
        max_tiles = int(found[1])
    pinpoints = _pinpoints(hf.image_grid_pinpoints, side)
    longest = max(map(max, pinpoints)) // side
    if max_tiles is not None and longest > max_tiles * (side // patch):
        raise ValueError(
            f"vision_aspect_ratio {hf.vision_aspect_ratio!r} would scale lines of {longest} tiles to nothing"
        )
    return AnyresConfig(hf, patch, side, extra_rows, pinpoints, max_tiles)


def _read_gemma3(hf: Any) -> VisionConfig:
    vision, tokens = hf.vision_config, hf.mm_tokens_per_image
    if vision.model_type != "siglip_vision_model":
        raise ValueError(
            f"vision tower {vision.model_type!r} is not supported; supported: siglip_vision_model"
        )
    patch, side = _size(vision, "patch_size"), _size(vision, "image_size")
    patches = side // patch
    pooled = math.isqrt(tokens) if type(tokens) is int and 1 <= tokens <= patches**2 else 0
    if not pooled or (patches // (patches // pooled)) ** 2 != tokens:
        raise ValueError(
            f"mm_tokens_per_image {tokens!r:.40} must be the square of what the {patches} patches of a "
            "side are pooled to"
        )
    return Gemma3VisionConfig(hf, patch, side, 0)


def _read_gemma4(hf: Any) -> VisionConfig:
    vision = hf.vision_config
    if vision is None:
        raise ValueError("has no vision_config")
    side, merge = _size(vision, "position_embedding_size"), _size(vision, "pooling_kernel_size")
    if side < 4 * merge:
        raise ValueError(f"position_embedding_size {side} must be at least {4 * merge}")
    return Gemma4VisionConfig(hf, _size(vision, "patch_size"), merge)


def _read_pixtral(hf: Any) -> VisionConfig:
    vision = hf.vision_config
    if vision.model_type != "pixtral":
        raise ValueError(f"vision tower {vision.model_type!r} is not supported; supported: pixtral")
    merge = 1 if hf.model_type == "llava" else hf.spatial_merge_size
    if type(merge) is not int or not 1 <= merge <= 64:
        raise ValueError(f"spatial_merge_size must be an integer from 1 to 64, got {merge!r:.40}")
    return PixtralConfig(hf, _size(vision, "patch_size"), merge, _size(vision, "image_size"))


def _read_internvl(hf: Any) -> VisionConfig:
    vision, ratio = hf.vision_config, hf.downsample_ratio
    sizes = {}
    for name in ("patch_size", "image_size"):
        pair = getattr(vision, name)
        if len(pair) != 2 or type(pair[0]) is not int or not 1 <= pair[0] == pair[1] <= MAX_SIDE:
            raise ValueError(f"{name} of the vision tower must be one number, or twice the same")
        sizes[name] = pair[0]
    patch, side = sizes.values()
    merge = round(1 / ratio) if type(ratio) is float and 0.01 < ratio <= 1 else 0
    if not merge or 1 / merge != ratio or patch > side or side // patch % merge:
        raise ValueError(f"downsample_ratio {ratio!r:.40} does not divide the patches of a tile's side")
    if hf.vision_feature_select_strategy != "default":
        raise ValueError(
            f"vision_feature_select_strategy {hf.vision_feature_select_strategy!r:.40} is not supported"
        )
    return InternVLConfig(hf, patch, side, merge)


def _pinpoints(stated: Any, side: int) -> tuple[tuple[int, int], ...]:
    """Returns `image_grid_pinpoints` as pairs (height, width) in pixels. Raises ValueError unless they are 1
    to MAX_PINPOINTS pairs of multiples of a tile's `side`, each pair of at most MAX_TILES tiles."""
    pairs = [tuple(one) if isinstance(one, list | tuple) else () for one in stated]
    if not 1 <= len(pairs) <= MAX_PINPOINTS:
        raise ValueError(f"image_grid_pinpoints must be 1 to {MAX_PINPOINTS} sizes, got {len(pairs)}")
    for pair in pairs:
        fits = len(pair) == 2 and all(type(n) is int and n > 0 and n % side == 0 for n in pair)
        if not fits or pair[0] * pair[1] > MAX_TILES * side**2:
            raise ValueError(
                f"image_grid_pinpoints must be pairs of multiples of {side}, at most {MAX_TILES} tiles, "
                f"got {pair!r:.40}"
            )
    return tuple(cast("list[tuple[int, int]]", pairs))


_READERS = {
    "llava": _read_llava,
    "llava_next": _read_llava,
    "llava_onevision": _read_llava,
    "internvl": _read_internvl,
    "mistral3": _read_pixtral,
    "gemma3": _read_gemma3,
    "gemma4": _read_gemma4,
    "qwen2_vl": _read_qwen,
    "qwen2_5_vl": _read_qwen,
    "qwen3_vl": _read_qwen,
    "qwen3_5": _read_qwen,
    "qwen3_5_moe": _read_qwen,
}
"""Functions that make the VisionConfig from transformers' configuration, by `model_type`."""


def has_known_tower(values: Mapping[str, Any]) -> bool:
    """Whether config.json has a vision part, and a `model_type` of which at least some vision parts are
    supported here."""
    return values.get("vision_config") is not None and values.get("model_type") in _READERS
