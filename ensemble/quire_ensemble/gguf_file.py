"""The head of a GGUF file: what it says of itself, and where its tensors lie.

The format is that of ggml's docs/gguf.md, versions 2 and 3, little-endian. (The reader of the `gguf` package
makes several arrays of each string, and takes ten seconds for a vocabulary of 49 k.)
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Letters of `struct` by the numbers of types."""
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_LENGTH = struct.Struct("<Q")


class GGUFError(ValueError):
    """A GGUF file is broken, or not the only one; one line without the path."""


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that is all a directory without config.json holds; else None.

    Raises:
        GGUFError: the directory holds several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise GGUFError(f"holds several .gguf files ({names}); name one of them")
    return files[0] if files else None


class StoredTensor(NamedTuple):
    """Where a tensor lies in its file."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """As torch has it: the fastest dimension last."""
    offset: int
    """Of its first byte in the file."""
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file whose head is read; its tensors' bytes are mapped when they are asked for."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Reads the head. Nothing is allocated that the file is not long enough for.

        Raises:
            GGUFError: not a GGUF file, truncated, or of an unknown version; or its tensors do not lie in it.
            OSError: cannot be read.
        """
        with path.open("rb") as file:
            try:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise GGUFError("is empty") from None
        with mapped:
            head = _Head(mapped)
            return cls(path, head.metadata, head.tensors)

    def data(self, tensor: StoredTensor) -> np.ndarray:
        """A tensor's bytes, mapped: uint8 [rows..., bytes of a row]."""
        block, size = GGML_QUANT_SIZES[tensor.kind]
        shape = (*tensor.shape[:-1], tensor.shape[-1] // block * size)
        return np.memmap(self.path, np.uint8, "r", tensor.offset, shape)


class _Head:
    """Reads the head of a mapped file from its first byte on."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped, self._at, self._size = mapped, 0, len(mapped)
        magic = self._take(len(_MAGIC))
        if magic != _MAGIC:
            raise GGUFError(f"begins with {magic!r}, not with {_MAGIC!r}")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise GGUFError(f"version {version} is not supported; supported: 2, 3 (little-endian)")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            if key in self.metadata:
                raise GGUFError(f"states {key!r:.80} twice")
            self.metadata[key] = self._value(self._scalar("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        self.tensors = {tensor.name: tensor for tensor in self._placed(found)}
        if len(self.tensors) < len(found):
            raise GGUFError("holds two tensors of one name")

    def _take(self, num_bytes: int) -> bytes:
        begin, self._at = self._at, self._at + num_bytes
        if self._at > self._size:
            raise GGUFError(f"ends at byte {self._size}, within its head: truncated")
        return self._mapped[begin : self._at]

    def _scalar(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self._take(struct.calcsize("<" + letter)))[0]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise GGUFError(f"holds a value of the unknown type {kind}")
        of, count = self._scalar("I"), self._scalar("Q")
        if of == _STRING:
            return self._strings(count)
        if of not in _SCALARS:
            raise GGUFError(f"holds an array of the unknown type {of}")
        size = struct.calcsize("<" + _SCALARS[of])
        self._check_room(count, size)
        return np.frombuffer(self._take(count * size), "<" + _SCALARS[of]).tolist()

    def _strings(self, count: int) -> list[str]:
        """The next strings; vocabularies have some 100 000, so it does by hand what `_string` does."""
        self._check_room(count, _LENGTH.size)
        mapped, at, last, found = self._mapped, self._at, self._size - _LENGTH.size, []
        for _ in range(count):
            if at > last:
                break
            begin = at + _LENGTH.size
            at = begin + _LENGTH.unpack_from(mapped, at)[0]
            found.append(mapped[begin:at].decode("utf-8"))
        self._at = at
        if at > self._size or len(found) < count:
            raise GGUFError(f"ends at byte {self._size}, within its head: truncated")
        return found

    def _check_room(self, count: int, size: int) -> None:
        if count > (self._size - self._at) // size:
            raise GGUFError(f"has no room for an array of {count} elements: truncated")

    def _tensor(self) -> StoredTensor:
        """A tensor whose offset counts from where the tensors begin."""
        name, rank = self._string(), self._scalar("I")
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise GGUFError(f"{name!r:.80} has {rank} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(rank))[::-1]
        number, offset = self._scalar("I"), self._scalar("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise GGUFError(f"{name!r:.80} has the unknown type {number}") from None
        block, size = GGML_QUANT_SIZES[kind]
        if not all(shape) or shape[-1] % block:
            raise GGUFError(f"{name!r:.80} has the shape {shape}, rows of {kind.name} have blocks of {block}")
        return StoredTensor(name, kind, shape, offset, math.prod(shape) // block * size)

    def _placed(self, tensors: list[StoredTensor]) -> Iterator[StoredTensor]:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GGUFError(f"general.alignment is {alignment!r:.80}")
        begin = -(-self._at // alignment) * alignment
        for tensor in tensors:
            if tensor.offset % alignment or begin + tensor.offset + tensor.num_bytes > self._size:
                raise GGUFError(f"{tensor.name!r:.80} does not lie in it: truncated")
            yield tensor._replace(offset=begin + tensor.offset)
