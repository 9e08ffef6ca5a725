"""Fills the vision part of a model from a checkpoint's files, without reading the language model's tensors.

safetensors are read tensor by tensor, pickles are memory-mapped, and shards that hold nothing of the vision
part are not opened.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from quire_ensemble.errors import VisionError, one_line

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""What a weight may be stored as; anything else is quantised and means nothing without its scales."""

_MAX_LISTED = 8

Wanted = Callable[[str], str | None]
"""The model's name for a checkpoint's name; None for a tensor that is not needed."""


def fill_weights(
    targets: dict[str, torch.Tensor], path: Path, wanted: Wanted, *, allow_pickle: bool = False
) -> None:
    """Copies a checkpoint's tensors into the targets, converting type and device on the way.

    Args:
        targets: by the names that `wanted` gives.
        path: checkpoint directory.
        wanted: maps the names of the checkpoint; what it names and `targets` lacks is an error.
        allow_pickle: whether .bin files may be read (tensors only) where there are no safetensors.

    Raises:
        VisionError: no weights, a broken file, or tensors that are missing, unexpected or of a wrong shape.
    """
    source, files = _find_files(path, wanted, allow_pickle)
    filled: set[str] = set()
    with torch.no_grad():
        for file in files:
            unexpected = []
            for stored, name, tensor in _read(file, wanted):
                target = targets.get(name)
                if target is None:
                    unexpected.append(stored)
                    continue
                if tensor.shape != target.shape:
                    raise VisionError(
                        f"{file}: {stored} has shape {list(tensor.shape)}, "
                        f"config.json means {list(target.shape)}"
                    )
                if tensor.dtype not in DTYPES:
                    raise VisionError(f"{file}: {stored} has type {tensor.dtype}, expected floating point")
                target.copy_(tensor)
                filled.add(name)
            if unexpected:
                raise VisionError(f"{file}: {len(unexpected)} unexpected tensors: {_listed(unexpected)}")
    missing = [name for name in targets if name not in filled]
    if missing:
        raise VisionError(f"{source}: {len(missing)} missing tensors: {_listed(missing)}")


def _find_files(path: Path, wanted: Wanted, allow_pickle: bool) -> tuple[Path, list[Path]]:
    """(file named in complaints about missing tensors, files that hold wanted tensors)."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{name}.index.json"
        source = index if index.exists() else path / name
        if not source.exists():
            continue
        if name.endswith(".bin") and not allow_pickle:
            raise VisionError(
                f"{source}: the weights are pickles, which may hold code; allow_pickle=true reads them "
                "(tensors only, code is refused)"
            )
        return source, _shards(index, wanted) if source == index else [source]
    raise VisionError(f"{path}: holds no weights: neither model.safetensors nor its index")


def _shards(index: Path, wanted: Wanted) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text("utf-8")).get("weight_map")
    except (OSError, ValueError, AttributeError) as error:
        raise VisionError(f"{index}: not a JSON object: {one_line(error)}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise VisionError(f"{index}: must hold a weight_map of tensor names to files")
    shards = []
    for shard in dict.fromkeys(file for name, file in weight_map.items() if wanted(name) is not None):
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise VisionError(f"{index}: {shard!r} is not the name of a file beside the index")
        if not (index.parent / shard).exists():
            raise VisionError(f"{index.parent / shard}: shard not found; {index.name} names it")
        shards.append(index.parent / shard)
    return shards


def _read(file: Path, wanted: Wanted) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(checkpoint's name, model's name, tensor) of the wanted tensors of one file."""
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt") as reader:
                for stored in reader.keys():  # noqa: SIM118  (safe_open is no mapping)
                    name = wanted(stored)
                    if name is not None:
                        yield stored, name, reader.get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise VisionError(f"{file}: broken safetensors file: {one_line(error)}") from None
        return
    for stored, tensor in _load_pickle(file).items():
        name = wanted(stored)
        if name is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise VisionError(f"{file}: {stored} is a {type(tensor).__name__}, not a tensor")
        yield stored, name, tensor


def _load_pickle(file: Path) -> dict[str, object]:
    try:
        # Files of before torch 1.6 are no zip archives and cannot be mapped.
        with file.open("rb") as stream:
            mapped = stream.read(2) == b"PK"
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise VisionError(f"{file}: not a pickle of tensors only: {one_line(error)}") from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise VisionError(f"{file}: broken checkpoint file: {one_line(error)}") from None
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise VisionError(f"{file}: holds a {type(state).__name__}, not a dictionary of named tensors")
    return state


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:_MAX_LISTED]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
