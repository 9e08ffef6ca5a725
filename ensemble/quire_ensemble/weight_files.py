"""A checkpoint's weight files and their tensors, for the vision part here and for the generator's loader.

Tensors are memory-mapped, so that loading needs the model's memory once. Pickles are read by `weights_only`;
whether they may be read at all is the caller's to decide.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from quire_ensemble.errors import one_line, shown

Fail = Callable[[str], Exception]
"""Makes the exception of a complaint, which is one line and names the file."""
Wanted = Callable[[str], bool]
"""Whether a tensor of this name is to be read."""


class NamedTensor(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    tensor: torch.Tensor
    file: Path


def everything(name: str) -> bool:
    return True


def find_files(
    directory: Path, name: str, fail: Fail, wanted: Wanted = everything
) -> tuple[Path, tuple[Path, ...]] | None:
    """(file to name in complaints, files) of `name` or of those of its shards that hold a wanted tensor; None
    where neither is there.

    Raises:
        Exception: made by `fail`: the index is broken, or a shard is not there.
    """
    index = directory / f"{name}.index.json"
    if not index.exists():
        single = directory / name
        return (single, (single,)) if single.exists() else None
    try:
        content = json.loads(index.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise fail(f"{index}: cannot be read as JSON: {one_line(error)}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise fail(f"{index}: must hold a weight_map of tensor names to files")
    files: dict[Path, None] = {}
    for shard in (shard for tensor, shard in weight_map.items() if wanted(tensor)):
        is_name = isinstance(shard, str) and Path(shard).name == shard and shard not in ("", "..")
        if not is_name or "\0" in shard:
            raise fail(f"{index}: {shown(shard)} is not the name of a file beside the index")
        files[directory / shard] = None
    for file in files:
        if not file.exists():
            raise fail(f"{file}: shard not found; {index.name} names it")
    return index, tuple(files)


def read_safetensors(file: Path, fail: Fail, wanted: Wanted = everything) -> Iterator[NamedTensor]:
    """Wanted tensors of one file, memory-mapped."""
    try:
        with safe_open(file, framework="pt") as reader:
            for name in filter(wanted, reader.keys()):
                yield NamedTensor(name, reader.get_tensor(name), file)
    except (SafetensorError, OSError) as error:
        raise fail(f"{file}: broken safetensors file: {one_line(error)}") from None


def read_pickle(file: Path, fail: Fail, wanted: Wanted = everything) -> Iterator[NamedTensor]:
    """Wanted tensors of one .bin or .pt file; code in it is refused."""
    try:
        # Files of before torch 1.6 are no zip archives and cannot be mapped.
        with file.open("rb") as stream:
            mapped = stream.read(2) == b"PK"
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise fail(f"{file}: not a pickle of tensors only: {one_line(error)}") from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise fail(f"{file}: broken checkpoint file: {one_line(error)}") from None
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise fail(f"{file}: holds a {type(state).__name__}, not a dictionary of tensors")
    for name in list(state):
        tensor = state.pop(name)
        if not wanted(name):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise fail(f"{file}: {name} is a {type(tensor).__name__}, not a tensor")
        yield NamedTensor(name, tensor, file)
