"""Pooling: how a checkpoint's embeddings are made of its last hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError
from quire.layers.hf_config import read_json
from quire_common.checkpoint_files import check_directory
from quire_common.errors import is_name, shown

_KINDS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the hidden states after the final norm become an embedding.

    The defaults are for checkpoints that state nothing. They make what is custom for decoders: the last
    token's hidden state, brought to length 1.
    """

    is_mean: bool = False
    """The mean over all tokens; else the last token's."""
    normalizes: bool = True
    """Whether the vector is brought to length 1, behind a cut to fewer dimensions."""
    why_not: str = ""
    """Why there are no embeddings; empty: there are."""


def read_pooling(checkpoint: Path) -> Pooling:
    """Reads the pooling that sentence-transformers' modules.json and the config.json that it names state.

    A checkpoint whose pooling is not supported serves everything but embeddings; `why_not` says why.

    Args:
        checkpoint: directory, or a file, which states nothing.

    Raises:
        CheckpointError: a file is broken.
    """
    file = checkpoint / "modules.json"
    if not file.is_file():
        return Pooling()
    modules = read_json(file, list)
    if not all(isinstance(module, Mapping) for module in modules):
        raise CheckpointError(f"{file}: must be a list of objects")
    is_mean = normalizes = False
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            stated = read_json(_folder(file, module.get("path")) / "config.json")
            modes = _modes(stated)
            if len(modes) != 1 or modes[0] not in _KINDS:
                return Pooling(why_not=f"the checkpoint pools by {', '.join(modes) or 'nothing'}")
            is_mean = _KINDS[modes[0]] == "mean"
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            return Pooling(why_not=f"the checkpoint has a module {kind}")
    return Pooling(is_mean, normalizes)


def _folder(file: Path, name: Any) -> Path:
    """The folder of a module that `file` names."""
    if not isinstance(name, str) or not is_name(name) or Path(name).name != name or name == "..":
        raise CheckpointError(f"{file}: {shown(name)} is not the name of a folder beside it")
    folder = file.with_name(name)
    if folder.is_dir():
        check_directory(folder, CheckpointError)
    return folder


def _modes(stated: Mapping[str, Any]) -> list[str]:
    return [name for name, value in stated.items() if name.startswith("pooling_mode_") and value is True]
