"""VisionTower: the vision part of a checkpoint, from processed pixels to rows for the language model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.initialization import no_init_weights

from quire_common.errors import InputError, one_line
from quire_common.machine import num_cpus
from quire_ensemble.errors import VisionError
from quire_ensemble.vision_config import GRID, Grid, VisionConfig, read_vision_config
from quire_ensemble.vision_families import UnsupportedConfig, VisionFamily, family_of
from quire_ensemble.vision_weights import fill_weights

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_IMAGES = 4096
"""Most images of one request."""
PIXELS = "pixel_values"


class VisionTower:
    """Encodes images, as `get_image_features` of the full model in transformers does. For one thread.

    Attributes:
        device: device of the weights.
        row_size: values in one row of `pixel_values`.
        hidden_size: values in one row of the output: the language model's hidden size, and as many again for
            each level of deepstack.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: str = "auto",
        dtype: str = "float32",
        num_threads: int | None = None,
        max_patches: int = 16384,
        allow_pickle: bool = False,
    ) -> None:
        """Loads the vision part of a checkpoint.

        Args:
            path: checkpoint directory, with config.json and safetensors (or .bin, see `allow_pickle`).
            device: `auto` (CUDA where visible), or a CPU or CUDA device of torch.
            dtype: of weights and computation: float32, float16, bfloat16, or auto (config.json's, else
                float32).
            num_threads: on CPU, how many threads torch may use in this process; None: half of the cores.
            max_patches: most patches in one forward pass, see `split`.
            allow_pickle: whether weights may be read from .bin files.

        Raises:
            VisionError: the vision part is missing, broken or unsupported, or `device` or `dtype` is not
                supported. The message is one line that names what is wrong.
        """
        self.path = Path(path)
        self.max_patches = max_patches
        self.device = choose_device(device)
        if self.device.type == "cpu":
            torch.set_num_threads(num_threads or default_num_threads())
        self._config = read_vision_config(self.path)
        weights = _choose_dtype(dtype, self._config.hf, self.path)
        self._family = _build(self.path, self._config, weights, self.device)
        fill_weights(_targets(self._family), self.path, self._family.name_of, allow_pickle=allow_pickle)

    def warm_up(self) -> None:
        """Encodes an image, so that a client's first image does not wait for torch's one-time work.

        Raises:
            VisionError: the image cannot be encoded.
        """
        grid = np.array([self._family.sample_grid])
        try:
            self.encode(np.zeros((sum(self.rows(grid)), self.row_size), np.float32), grid)
        except (RuntimeError, ValueError) as error:  # of sizes that do not fit each other
            raise VisionError(f"{self.path}: the first image failed: {one_line(error)}") from error

    @property
    def row_size(self) -> int:
        return self._family.row_size

    @property
    def hidden_size(self) -> int:
        return self._family.hidden_size

    def rows(self, grid: np.ndarray) -> list[int]:
        """Returns the number of `pixel_values` rows of each image; `grid` [n, 3] must have passed `check`."""
        return [self._config.rows(*image) for image in _images(grid)]

    def tokens(self, grid: np.ndarray) -> list[int]:
        """Returns the number of output rows of each image; `grid` [n, 3] must have passed `check`."""
        return [self._config.tokens(*image) for image in _images(grid)]

    def check(self, pixel_values: np.ndarray, grid: np.ndarray) -> None:
        """Checks the arguments of `encode`.

        Raises:
            InputError: a shape or a grid is wrong, there are too many images, or the number of rows is not
                that of the grids.
        """
        if grid.ndim != 2 or grid.shape[1] != 3:
            raise InputError(GRID, f"must have shape [images, 3], got {list(grid.shape)}")
        if pixel_values.ndim != 2 or pixel_values.shape[1] != self.row_size:
            raise InputError(
                PIXELS, f"must have shape [rows, {self.row_size}], got {list(pixel_values.shape)}"
            )
        if len(grid) > MAX_IMAGES:
            raise InputError(GRID, f"at most {MAX_IMAGES} images are allowed, got {len(grid)}")
        for index, image in enumerate(_images(grid)):
            try:
                self._config.check_image(*image)
            except InputError as error:
                raise InputError(f"{GRID}[{index}]", error.reason) from None
        rows = sum(self.rows(grid))
        if rows != pixel_values.shape[0]:
            raise InputError(PIXELS, f"has {pixel_values.shape[0]} rows, image_grid means {rows}")

    def split(self, grid: np.ndarray) -> list[slice]:
        """Returns a slice of the images (rows of `grid` [n, 3]) for each call of `encode`, in order. This
        bounds the memory of a call. The images of a slice have at most `max_patches` patches together, or the
        slice is a single image, which cannot be divided.
        """
        parts: list[slice] = []
        start = patches = 0
        for index, image in enumerate(_images(grid)):
            more = self._config.patches(*image)
            if index > start and patches + more > self.max_patches:
                parts.append(slice(start, index))
                start, patches = index, 0
            patches += more
        return [*parts, slice(start, len(grid))] if len(grid) else []

    def encode(self, pixel_values: np.ndarray, grid: np.ndarray) -> list[np.ndarray]:
        """Computes the rows for the language model; both arguments must have passed `check`.

        Args:
            pixel_values: float32 [rows of all images, row_size].
            grid: integers [n, 3], at least one row: the grid of each image, see `VisionConfig`.

        Returns:
            One float32 [tokens, hidden_size] per image; they share memory.

        Raises:
            RuntimeError: torch failed, for example because it is out of memory.
        """
        # Triton's arrays are read-only views of shared memory, which torch warns of, and must not be kept.
        pixels = torch.from_numpy(np.array(pixel_values, dtype=np.float32, order="C"))
        try:
            with torch.inference_mode():
                outputs = self._family.features(pixels.to(self.device), _images(grid))
                # One copy from the device instead of one for each image.
                joined = torch.cat(list(outputs)).to("cpu", torch.float32).numpy()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # or the next forward finds the memory in pieces
            raise
        tokens = self.tokens(grid)
        assert joined.shape == (sum(tokens), self.hidden_size), f"tower gave {joined.shape}"
        return np.split(joined, np.cumsum(tokens)[:-1])


def choose_device(device: str) -> torch.device:
    """Returns a torch device; `auto` is CUDA if it is visible, else the CPU.

    Raises:
        VisionError: there is no such device, this machine does not have it, or it is neither a CPU nor CUDA.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise VisionError(f"device {device!r} is not a device; expected auto, cpu, cuda or cuda:N") from None
    if chosen.type not in ("cpu", "cuda"):
        raise VisionError(f"device {device!r} is not supported; expected auto, cpu, cuda or cuda:N")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise VisionError(f"device {device!r} is not there: {torch.cuda.device_count()} GPUs are visible")
    return chosen


def default_num_threads() -> int:
    """Returns half of the cores that this process may use, at least 1. The other half is for decoding."""
    return max(1, num_cpus() // 2)


def _choose_dtype(asked: str, config: Any, path: Path) -> torch.dtype:
    if asked == "auto":
        stated = config.dtype or config.vision_config.dtype or torch.float32
        if stated not in DTYPES.values():
            raise VisionError(f"{path / 'config.json'}: dtype {stated} is not supported")
        return stated
    if asked not in DTYPES:
        raise VisionError(f"dtype {asked!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    return DTYPES[asked]


def _build(path: Path, config: VisionConfig, dtype: torch.dtype, device: torch.device) -> VisionFamily:
    try:
        with _default_dtype(dtype), no_init_weights():
            family = family_of(config)
    except UnsupportedConfig as error:
        raise VisionError(f"{path / 'config.json'}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        raise VisionError(f"{path / 'config.json'}: no vision part by it: {one_line(error)}") from error
    family.module.to(device).eval()
    return family


def _targets(family: VisionFamily) -> dict[str, torch.Tensor]:
    targets: dict[str, torch.Tensor] = {}
    for own, tensor in family.module.state_dict(keep_vars=True).items():  # buffers that are stored too
        name = family.name_of(own)
        assert name is not None and name not in targets, f"{own} is no parameter of a vision part"
        targets[name] = tensor
    return targets


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context manager in which new parameters get the dtype. Buffers that transformers keeps in float32 do
    not, whereas `to` would convert them."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _images(grid: np.ndarray) -> list[Grid]:
    """Returns the grid's rows as tuples of Python integers, because products of a client's 32-bit numbers
    must not overflow."""
    return [(int(t), int(h), int(w)) for t, h, w in grid]
