"""Pooling: how a checkpoint's embeddings are computed from its last hidden states."""

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
    """How an embedding is computed from the hidden states after the final norm.

    The defaults apply to checkpoints that state nothing: the last token's hidden state, normalised to length
    1, as is usual for decoders.
    """

    is_mean: bool = False
    """Whether the embedding is the mean over all tokens; if not, it is the last token's hidden state."""
    normalizes: bool = True
    """Whether the embedding is normalised to length 1. That is done after it is cut to fewer dimensions."""
    why_not: str = ""
    """Reason why embeddings are not supported; empty: they are."""


def read_pooling(checkpoint: Path) -> Pooling:
    """Reads how a checkpoint pools, from sentence-transformers' modules.json and the config.json files that
    it names.

    A checkpoint with unsupported pooling serves everything but embeddings; `why_not` gives the reason.

    Args:
        checkpoint: a directory, or a file, for which the defaults apply.

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
    """Returns the folder of a module that `file` names."""
    if not isinstance(name, str) or not is_name(name) or Path(name).name != name or name == "..":
        raise CheckpointError(f"{file}: {shown(name)} is not the name of a folder beside it")
    folder = file.with_name(name)
    if folder.is_dir():
        check_directory(folder, CheckpointError)
    return folder


def _modes(stated: Mapping[str, Any]) -> list[str]:
    return [name for name, value in stated.items() if name.startswith("pooling_mode_") and value is True]
