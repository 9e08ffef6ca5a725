"""A checkpoint's weight files, and their tensors one after the other.

Every reader yields tensors that are memory-mapped (or decoded one at a time), so that loading needs the
model's memory once. Pickles are read with `weights_only`, and only when the configuration allows them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from quire.config import ModelConfig
from quire.errors import CheckpointError
from quire.loader.info import gguf_file
from quire.models.hf_config import read_json


class NamedTensor(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    tensor: torch.Tensor
    file: Path


class WeightFiles(NamedTuple):
    """The files that hold a checkpoint's weights."""

    source: Path
    """What complaints name: the index, or the only file."""
    files: tuple[Path, ...]
    read: Callable[[Path], Iterator[NamedTensor]]

    def tensors(self) -> Iterator[NamedTensor]:
        """All tensors, file by file; raises CheckpointError for a file that is missing or broken."""
        for file in self.files:
            yield from self.read(file)


def find_weights(config: ModelConfig) -> WeightFiles:
    """Chooses the weight files by `load_format`; `auto`: safetensors or GGUF.

    Raises:
        CheckpointError: there are none of that format, or only pickles, which were not asked for.
    """
    path = Path(config.model)
    if config.load_format in ("auto", "gguf"):
        found = gguf_file(path)
        if found is not None:
            from quire.loader.gguf_weights import read_gguf

            return WeightFiles(found, (found,), read_gguf)
        if config.load_format == "gguf":
            raise CheckpointError(f"{path}: load_format=gguf, but this is no .gguf file")
    if config.load_format in ("auto", "safetensors"):
        files = _indexed(path, "model.safetensors")
        if files is not None:
            return WeightFiles(files[0], files[1], read_safetensors)
        if config.load_format == "safetensors":
            raise CheckpointError(f"{path}: holds neither model.safetensors nor its index")
    for name in ("pytorch_model.bin", "pytorch_model.pt", "model.pt"):
        files = _indexed(path, name)
        if files is None:
            continue
        if config.load_format != "bin":
            raise CheckpointError(
                f"{files[0]}: the weights are pickles, which may hold code; load_format=bin reads them "
                "(tensors only, code is refused)"
            )
        return WeightFiles(files[0], files[1], read_pickle)
    wanted = "pytorch_model.bin" if config.load_format == "bin" else "model.safetensors"
    raise CheckpointError(f"{path}: holds no weights: neither {wanted} nor {wanted}.index.json")


def _indexed(directory: Path, name: str) -> tuple[Path, tuple[Path, ...]] | None:
    """(file to name in complaints, files) of `name` or of its shards; None where neither is there."""
    index = directory / f"{name}.index.json"
    if not index.exists():
        single = directory / name
        return (single, (single,)) if single.exists() else None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: must hold a weight_map of tensor names to files")
    shards = []
    for shard in dict.fromkeys(weight_map.values()):
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{index}: {shard!r} is not the name of a file beside the index")
        if not (directory / shard).exists():
            raise CheckpointError(f"{directory / shard}: shard not found; {index.name} names it")
        shards.append(directory / shard)
    return index, tuple(shards)


def read_safetensors(file: Path) -> Iterator[NamedTensor]:
    """Tensors of one file, memory-mapped."""
    try:
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118  (safe_open is no mapping)
                yield NamedTensor(name, reader.get_tensor(name), file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: broken safetensors file: {_one_line(error)}") from None


def read_pickle(file: Path) -> Iterator[NamedTensor]:
    """Tensors of one .bin or .pt file; anything but tensors in it is refused."""
    try:
        # Files of before torch 1.6 are no zip archives and cannot be mapped.
        with file.open("rb") as stream:
            mapped = stream.read(2) == b"PK"
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{file}: not a pickle of tensors only: {_one_line(error)}") from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{file}: broken checkpoint file: {_one_line(error)}") from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{file}: holds a {type(state).__name__}, not a dictionary of tensors")
    for name in list(state):
        tensor = state.pop(name)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{file}: {name} is a {type(tensor).__name__}, not a tensor")
        yield NamedTensor(name, tensor, file)


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
