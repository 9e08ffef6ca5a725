"""Which files hold a checkpoint's weights, and their tensors one after the other.

Every reader yields tensors that are memory-mapped (or decoded one at a time), so that loading needs the
model's memory once. Pickles are read only when the configuration allows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from quire.config import ModelConfig
from quire.errors import CheckpointError
from quire.layers.scheme import LinearScheme
from quire.loader.info import gguf_file
from quire_ensemble.errors import one_line
from quire_ensemble.weight_files import NamedTensor, find_files, read_pickle, read_safetensors


class WeightFiles(NamedTuple):
    """The files that hold a checkpoint's weights."""

    source: Path
    """What complaints name: the index, or the only file."""
    files: tuple[Path, ...]
    read: Callable[[Path], Iterator[NamedTensor]]
    scheme: LinearScheme | None = None
    """Of weights that stay as the files quantise them; None: they are plain matrices when they are read."""

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def tensors(self) -> Iterator[NamedTensor]:
        """All tensors, file by file; raises CheckpointError for a file that is missing or broken."""
        for file in self.files:
            try:
                yield from self.read(file)
            except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(f"{file}: broken weight file: {one_line(error)}") from error


def find_weights(config: ModelConfig) -> WeightFiles:
    """Chooses the weight files by `load_format`; `auto`: safetensors or GGUF.

    Raises:
        CheckpointError: there are none of that format, or only pickles, which were not asked for.
    """
    path = Path(config.model)
    if config.load_format in ("auto", "gguf"):
        found = gguf_file(path)
        if found is not None:
            from quire.loader.gguf_weights import block_scheme, read_gguf

            keeps_blocks = config.quantization is None
            scheme = block_scheme([found]) if keeps_blocks else None
            return WeightFiles(found, (found,), partial(read_gguf, keeps_blocks=keeps_blocks), scheme)
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
