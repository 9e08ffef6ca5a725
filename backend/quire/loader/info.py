"""What can be said of a checkpoint without its weights: for frontends and builders. No torch in here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError
from quire.models.hf_config import HFConfig, as_token_ids, read_json


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Facts of a checkpoint that a frontend needs."""

    path: Path
    architectures: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    """Longest sequence config.json states."""
    eos_token_ids: frozenset[int]
    """End tokens that generation_config.json names, if any, else those of config.json."""
    generation_config: dict[str, Any] = field(default_factory=dict)
    """generation_config.json; empty where there is none."""


def read_checkpoint_info(path: str | Path) -> CheckpointInfo:
    """Reads config.json and generation_config.json of a directory, or the head of a .gguf file.

    Raises:
        CheckpointError: missing or broken; one line that names the file.
    """
    path = Path(path)
    hf = read_hf_config(path)
    generation = read_generation_config(path)
    return CheckpointInfo(
        path=path,
        architectures=(hf.architecture,),
        vocab_size=hf.require_int("vocab_size"),
        max_model_len=hf.require_int("max_position_embeddings"),
        eos_token_ids=as_token_ids(generation.get("eos_token_id")) or hf.eos_token_ids,
        generation_config=generation,
    )


def read_hf_config(path: Path) -> HFConfig:
    """The configuration of a checkpoint; a GGUF file's metadata appears under Hugging Face's keys.

    Raises:
        CheckpointError: as `read_checkpoint_info`.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint directory or file")
    gguf = gguf_file(path)
    if gguf is not None:
        from quire.loader.gguf_metadata import read_gguf_config

        return read_gguf_config(gguf)
    if not path.is_dir():
        raise CheckpointError(f"{path}: neither a checkpoint directory nor a .gguf file")
    return HFConfig.read(path)


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that is all a directory without config.json holds; else None."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path}: holds several .gguf files ({names}); name one of them")
    return files[0] if files else None


def read_generation_config(path: Path) -> dict[str, Any]:
    """generation_config.json of a directory; empty where there is none. Raises CheckpointError if broken."""
    file = path / "generation_config.json"
    return read_json(file) if path.is_dir() and file.exists() else {}
