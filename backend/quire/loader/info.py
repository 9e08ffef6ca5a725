"""What can be said of a checkpoint without its weights: for frontends and builders. No torch in here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import CheckpointError
from quire.models.hf_config import HFConfig, read_json
from quire_ensemble.checkpoint_files import check_directory
from quire_ensemble.gguf_file import GGUFError, find_gguf, part_names


def read_configs(path: str | Path) -> tuple[HFConfig, dict[str, Any]]:
    """config.json and generation_config.json, the latter empty where there is none.

    Args:
        path: a directory, or a GGUF file, whose metadata appears under the keys of config.json.

    Raises:
        CheckpointError: missing or broken; one line that names the file.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint directory or file")
    if path.is_dir():
        check_directory(path, CheckpointError)
    gguf = gguf_file(path)
    if gguf is not None:
        from quire.loader.gguf_metadata import read_gguf_config

        hf = read_gguf_config(gguf)
    elif path.is_dir():
        hf = HFConfig.read(path)
    else:
        raise CheckpointError(f"{path}: neither a checkpoint directory nor a .gguf file")
    generation = path / "generation_config.json"
    return hf, read_json(generation) if generation.exists() else {}


_CHECKPOINT_SUFFIXES = frozenset((".json", ".safetensors", ".gguf", ".bin", ".pt", ".model", ".jinja"))


def checkpoint_state(*paths: str) -> list[tuple[str, int, int]]:
    """Name, bytes and time of change (ns) of the files of checkpoints (directories or GGUF files): another
    state is another checkpoint in the same place. Empty where there is nothing."""
    found = [(file, file.stat()) for file in checkpoint_files(*paths)]
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in found]


def checkpoint_files(*paths: str) -> list[Path]:
    """The files of checkpoints (directories or GGUF files), in order, each once."""
    found = set()
    for path in map(Path, filter(None, paths)):
        for file in path.iterdir() if path.is_dir() else map(path.with_name, part_names(path.name)):
            if file.suffix in _CHECKPOINT_SUFFIXES and file.is_file():
                found.add(file)
    return sorted(found)


def gguf_file(path: Path) -> Path | None:
    """As `find_gguf`; raises CheckpointError."""
    try:
        return find_gguf(path)
    except GGUFError as error:
        raise CheckpointError(f"{path}: {error}") from None
