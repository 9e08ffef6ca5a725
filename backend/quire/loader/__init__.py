"""Reading checkpoints: what a directory or file holds (`info`, torch-free) and its weights (`load`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.loader.info import CheckpointInfo, read_checkpoint_info

if TYPE_CHECKING:
    from quire.loader.load import LoadedModel, load_model

__all__ = ["CheckpointInfo", "LoadedModel", "load_model", "read_checkpoint_info"]


def __getattr__(name: str) -> Any:
    # Frontends import `info` from here; torch comes in only with what needs it.
    if name in ("LoadedModel", "load_model"):
        from quire.loader import load

        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
