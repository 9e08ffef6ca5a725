"""Weight files: finds the files with a checkpoint's weights, and reads their tensors ahead and in parallel.

Tensors are read into their final memory if possible, otherwise a few at a time, so loading usually needs
little memory besides the model's. Pickles are read only if the configuration allows them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from quire.config import ModelConfig
from quire.errors import CheckpointError
from quire.layers.scheme import LinearScheme
from quire.loader.info import gguf_file
from quire_common.errors import one_line
from quire_common.gguf_file import GGUFFile
from quire_common.host_memory import prefer_huge_pages
from quire_common.weight_files import (
    NamedTensor,
    bytes_of,
    find_files,
    read_into,
    read_pickle,
    read_safetensors,
)

_THREADS = min(8, 2 * len(os.sched_getaffinity(0)))
"""Number of threads that read. They wait for disks and copy; more would take CPU time from packing."""
_PART = 2**21
"""Most bytes that a thread reads at a time."""
_AHEAD = 2**27
"""Limit in bytes for the tensors that are read ahead of the one that is handed on next. Above it no further
read begins, so that it is exceeded by one tensor at most."""


class WeightFiles(NamedTuple):
    """The files that hold a checkpoint's weights."""

    source: Path
    """File that errors about the weights as a whole name: the index, the only file, or the first part of a
    split GGUF file."""
    files: tuple[Path, ...]
    read: Callable[[Path], Iterator[NamedTensor]]
    scheme: LinearScheme | None = None
    """Scheme for a GGUF file's weights that stay in blocks; None: the configuration or config.json
    decides."""

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def tensors(self) -> Iterator[NamedTensor]:
        """Yields the tensors that `read` gives, file by file; raises CheckpointError if a file is missing or
        broken."""
        for file in self.files:
            try:
                yield from self.read(file)
            except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(f"{file}: broken weight file: {one_line(error)}") from error


def find_weights(config: ModelConfig, gguf: GGUFFile | None = None) -> WeightFiles:
    """Chooses the weight files by `load_format`; `auto` accepts GGUF and safetensors.

    Args:
        config: the fields `model`, `load_format` and `quantization` are used.
        gguf: the GGUF file, if it is already open; None: it is not.

    Raises:
        CheckpointError: there are no files of that format, they are broken or incomplete, or there are only
            pickles, which the configuration does not allow.
    """
    path = Path(config.model)
    if config.load_format in ("auto", "gguf"):
        found = gguf_file(path)
        if found is not None:
            from quire.loader.gguf.metadata import open_gguf
            from quire.loader.gguf.weights import block_scheme, read_gguf

            opened, keeps_blocks = gguf or open_gguf(found), config.quantization is None
            scheme = block_scheme(opened) if keeps_blocks else None
            read = partial(read_gguf, opened=opened, keeps_blocks=keeps_blocks)
            return WeightFiles(opened.path, opened.files, read, scheme)
        if config.load_format == "gguf":
            raise CheckpointError(f"{path}: load_format=gguf, but this is no .gguf file")
    if config.load_format in ("auto", "safetensors"):
        files = find_files(path, "model.safetensors", CheckpointError)
        if files is not None:
            return WeightFiles(files[0], files[1], partial(read_safetensors, fail=CheckpointError))
        if config.load_format == "safetensors":
            raise CheckpointError(f"{path}: holds neither model.safetensors nor its index")
    for name in ("pytorch_model.bin", "pytorch_model.pt", "model.pt"):
        files = find_files(path, name, CheckpointError)
        if files is None:
            continue
        if config.load_format != "bin":
            raise CheckpointError(
                f"{files[0]}: the weights are pickles, which may hold code; load_format=bin reads them "
                "(tensors only, code is refused)"
            )
        return WeightFiles(files[0], files[1], partial(read_pickle, fail=CheckpointError))
    wanted = "pytorch_model.bin" if config.load_format == "bin" else "model.safetensors"
    raise CheckpointError(f"{path}: holds no weights: neither {wanted} nor {wanted}.index.json")


class Wanted(NamedTuple):
    """A tensor to read, and the memory that it is read for."""

    tensor: NamedTensor
    name: str
    """Name of the weight in the model."""
    memory: torch.Tensor
    is_kept: bool
    """Whether the file's bytes, unchanged, are read into `memory`."""


def read_ahead(wanted: Iterable[Wanted]) -> Iterator[tuple[Wanted, torch.Tensor]]:
    """Yields each tensor with its content, in order. The content is in `Wanted.memory` if `is_kept`,
    otherwise in other memory.

    Raises:
        OSError: a file cannot be read, or has become shorter. A tensor's `change` may raise other errors.
    """
    ahead: deque[tuple[Wanted, torch.Tensor, list[Future[None]]]] = deque()
    with ThreadPoolExecutor(_THREADS, "weights") as pool:
        for one in wanted:
            stored = one.tensor
            if stored.offset is None:
                ahead.append((one, stored.tensor, []))
            else:
                content = one.memory if one.is_kept else stored.empty()
                prefer_huge_pages(content)
                ahead.append((one, content, _begin(pool, stored.file, stored.offset, bytes_of(content))))
            while sum(content.nbytes for _, content, _ in ahead) - ahead[0][1].nbytes > _AHEAD:
                yield _end(*ahead.popleft())
        while ahead:
            yield _end(*ahead.popleft())


def _begin(pool: ThreadPoolExecutor, file: Path, offset: int, memory: memoryview) -> list[Future[None]]:
    parts = range(0, len(memory), _PART)
    return [pool.submit(read_into, memory[at : at + _PART], file, offset + at) for at in parts]


def _end(one: Wanted, content: torch.Tensor, parts: list[Future[None]]) -> tuple[Wanted, torch.Tensor]:
    for part in parts:
        part.result()
    change = one.tensor.change
    return one, content if change is None else change(content)
