"""Writes a checkpoint directory so that it is complete or does not exist."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from quire.errors import CheckpointError
from quire_common.errors import one_line

_SHARD_BYTES = 2 * 2**30


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yields a new directory beside `path`. It is renamed to `path` at the end, or removed if an error
    occurs.

    Raises:
        CheckpointError: `path` exists or cannot be written, or the body of the `with` statement raises
            OSError or SafetensorError.
    """
    directory: Path | None = None
    try:
        if path.exists():
            raise CheckpointError(f"{path}: exists already")
        directory = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.absolute().parent))
        yield directory
        directory.chmod(0o755)
        directory.rename(path)
    except BaseException as error:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"{path}: cannot be written: {one_line(error)}") from None
        raise


class WeightsWriter:
    """Writes tensors to one file, or to several files with an index if they are large.

    Args:
        directory: directory of the files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, torch.Tensor] = {}
        self._files: list[tuple[Path, list[str]]] = []
        self.num_bytes = 0
        """Bytes of all tensors added so far."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor. It is written by a later `add` or by `finish`."""
        if self._open and sum(one.nbytes for one in self._open.values()) + tensor.nbytes > _SHARD_BYTES:
            self._write()
        self._open[name] = tensor.contiguous()
        self.num_bytes += tensor.nbytes

    def finish(self) -> None:
        """Writes the remaining tensors, gives the files their names, and writes the index if there are
        several files."""
        self._write()
        if len(self._files) == 1:
            self._files[0][0].rename(self.directory / "model.safetensors")
            return
        weight_map = {}
        for number, (file, names) in enumerate(self._files, 1):
            renamed = file.rename(
                self.directory / f"model-{number:05d}-of-{len(self._files):05d}.safetensors"
            )
            weight_map.update(dict.fromkeys(names, renamed.name))
        write_json(
            self.directory / "model.safetensors.index.json",
            {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map},
        )

    def _write(self) -> None:
        file = self.directory / f"shard-{len(self._files)}"
        save_file(self._open, file, metadata={"format": "pt"})
        file.chmod(0o644)
        self._files.append((file, list(self._open)))
        self._open = {}


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Writes an object to a file, as indented JSON."""
    file.write_text(json.dumps(values, indent=2) + "\n", "utf-8")
