"""fingerprint: whether KV blocks of another process may be used here.

Two engines have the same fingerprint when the same weights, read with the same configuration, fill blocks of
the same layout. Files are recognised by size and samples of their content, so that 20 GB take well under a
second; a checkpoint trained further differs in every tensor it was trained in, and each tensor is sampled. An
edit of a few rows of a large tensor alone may be missed: clear the tiers after such surgery.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError

FORMAT_VERSION = 1
"""Of what the bytes of a block mean; to be raised when their layout changes."""

SAMPLE_BYTES = 4096
SAMPLE_DISTANCE = 4 * 2**20
WHOLE_BELOW = 8 * 2**20
"""Smaller files are read whole."""

_WEIGHT_FILES = ("*.safetensors", "*.gguf", "*.bin", "*.pt")
_COSMETIC = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_commit_hash")
"""Keys of config.json that do not change what is computed; the type in use is part of the layout."""


def fingerprint(model_path: Path | str, **layout: Any) -> str:
    """32 hex digits that stand for weights, configuration and layout of the blocks.

    Args:
        model_path: a checkpoint's directory, or a .gguf file.
        layout: what else decides the bytes of a block, as JSON can hold it: dtype, kv_cache_dtype,
            block_size, groups, ...

    Raises:
        CheckpointError: there are no weights, or a file cannot be read.
    """
    path = Path(model_path)
    state = hashlib.blake2b(digest_size=16)
    _add(state, json.dumps([FORMAT_VERSION, layout], sort_keys=True).encode())
    try:
        config = path / "config.json"
        if config.is_file():
            values = json.loads(config.read_text(encoding="utf-8"))
            semantic = {key: value for key, value in values.items() if key not in _COSMETIC}
            _add(state, json.dumps(semantic, sort_keys=True).encode())
        files = [path] if path.is_file() else [f for kind in _WEIGHT_FILES for f in sorted(path.glob(kind))]
        if not files:
            raise CheckpointError(f"{path}: holds no weights")
        for file in files:
            _add(state, file.name.encode())
            for part in _samples(file):
                _add(state, part)
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: no fingerprint can be taken: {error}") from None
    return state.hexdigest()


def _add(state: hashlib.blake2b, part: bytes) -> None:
    """Parts are told apart by their lengths, so that no two lists of parts look alike."""
    state.update(len(part).to_bytes(8, "little"))
    state.update(part)


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    yield size.to_bytes(8, "little")
    with file.open("rb") as stream:
        if size < WHOLE_BELOW:
            yield stream.read()
            return
        positions = set(range(0, size, SAMPLE_DISTANCE)) | {size - SAMPLE_BYTES}
        if file.suffix == ".safetensors":
            header_bytes = int.from_bytes(stream.read(8), "little")
            if header_bytes > size:
                raise ValueError(f"{file.name} is no safetensors file")
            header = stream.read(header_bytes)
            yield header
            for name, tensor in json.loads(header).items():
                if name != "__metadata__":
                    begin, end = tensor["data_offsets"]
                    positions.add(8 + header_bytes + (begin + end) // 2)
        for position in sorted(positions):
            stream.seek(position)
            yield stream.read(SAMPLE_BYTES)
