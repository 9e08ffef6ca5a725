"""Fills the vision part of a model from a checkpoint's files.

Only the vision part's tensors are read from safetensors. Pickles are memory-mapped, but files from before
torch 1.6 are read whole. Shards that hold nothing of the vision part, by their index, are not opened.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch

from quire_common.weight_files import NamedTensor, Wanted, find_files, read_pickle, read_safetensors
from quire_ensemble.errors import VisionError

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Types in which a weight may be stored. A weight of another type is mostly quantised, and means nothing
without its scales."""

_MAX_LISTED = 8


def fill_weights(
    targets: dict[str, torch.Tensor],
    path: Path,
    name_of: Callable[[str], str | None],
    *,
    allow_pickle: bool = False,
) -> None:
    """Copies a checkpoint's tensors into the targets, converting type and device on the way.

    Args:
        targets: parameters and buffers to fill, by the names that `name_of` returns.
        path: checkpoint directory.
        name_of: returns the model's name for a checkpoint's name; None: the tensor is not needed. A name that
            `targets` lacks is an error.
        allow_pickle: whether .bin files may be read (tensors only) where there are no safetensors.

    Raises:
        VisionError: there are no weights that may be read, a file is broken, or a tensor is missing,
            unexpected, of a wrong shape or of a type that is not in DTYPES.
    """
    source, tensors = _find_files(path, lambda stored: name_of(stored) is not None, allow_pickle)
    filled: set[str] = set()
    unexpected: list[str] = []
    with torch.no_grad():
        for one in tensors:
            stored, tensor, file = one[:3]
            name = name_of(stored)
            target = None if name is None else targets.get(name)
            if name is None or target is None:
                unexpected.append(stored)
                continue
            if tensor.shape != target.shape:
                raise VisionError(
                    f"{file}: {stored} has shape {list(tensor.shape)}, config.json means {list(target.shape)}"
                )
            if tensor.dtype not in DTYPES:
                raise VisionError(f"{file}: {stored} has type {tensor.dtype}, expected floating point")
            try:
                target.copy_(one.read())
            except OSError as error:
                raise VisionError(f"a weight file cannot be read: {error}") from None
            filled.add(name)
    if unexpected:
        raise VisionError(f"{source}: {len(unexpected)} unexpected tensors: {_listed(unexpected)}")
    missing = [name for name in targets if name not in filled]
    if missing:
        raise VisionError(f"{source}: {len(missing)} missing tensors: {_listed(missing)}")


def _find_files(path: Path, wanted: Wanted, allow_pickle: bool) -> tuple[Path, Iterator[NamedTensor]]:
    """Returns (file to name in errors about the tensors as a whole, the wanted tensors). Raises VisionError
    if there are no files, their index is broken, or they are pickles and `allow_pickle` is false."""
    for name, read in (("model.safetensors", read_safetensors), ("pytorch_model.bin", read_pickle)):
        found = find_files(path, name, VisionError, wanted)
        if found is None:
            continue
        source, files = found
        if read is read_pickle and not allow_pickle:
            raise VisionError(
                f"{source}: the weights are pickles, which may hold code; allow_pickle=true reads them "
                "(tensors only, code is refused)"
            )
        return source, itertools.chain.from_iterable(read(file, VisionError, wanted) for file in files)
    raise VisionError(f"{path}: holds no weights: neither model.safetensors nor its index")


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:_MAX_LISTED]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
