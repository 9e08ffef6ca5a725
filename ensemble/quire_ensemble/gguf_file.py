"""The head of a GGUF file: what it says of itself, and where its tensors lie.

The format is that of ggml's docs/gguf.md, versions 2 and 3, little-endian. (The reader of the `gguf` package
makes several arrays of each string, and takes ten seconds for a vocabulary of 49 k.)

Files are read, not mapped: one that is cut short meanwhile ends in an error here, and a mapped one in SIGBUS.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from quire_ensemble.errors import is_name, shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Letters of `struct` by the numbers of types."""
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_LENGTH = struct.Struct("<Q")
_MAX_HEAD = 2**26
"""Bytes of a head, which becomes up to ten times as many. The largest vocabularies take 16 MiB."""


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
    """A GGUF file whose head is read; its tensors' bytes are read when they are asked for."""

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
            head = _Head(file)
            return cls(path, head.metadata, head.tensors)

    def data(self, tensor: StoredTensor) -> np.ndarray:
        """A tensor's bytes: uint8 [rows..., bytes of a row].

        Raises:
            GGUFError: the file has become shorter.
            OSError: cannot be read.
        """
        found = np.fromfile(self.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
        if found.size < tensor.num_bytes:
            raise GGUFError(f"{tensor.name} does not lie in it any more: truncated")
        block, size = GGML_QUANT_SIZES[tensor.kind]
        return found.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * size)


class _Head:
    """Reads the head of a file from its first byte on."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        self._read, self._at = bytearray(), 0
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
                raise GGUFError(f"states {shown(key)} twice")
            self.metadata[key] = self._value(self._scalar("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        self.tensors = {tensor.name: tensor for tensor in self._placed(found)}
        if len(self.tensors) < len(found):
            raise GGUFError("holds two tensors of one name")

    def _take(self, num_bytes: int) -> bytes:
        begin = self._at
        self._fill(begin + num_bytes)
        self._at = begin + num_bytes
        return bytes(self._read[begin : self._at])

    def _fill(self, end: int) -> None:
        """Has the bytes before `end` read."""
        if end <= len(self._read):
            return
        if end > self._size:
            raise GGUFError(f"ends at byte {self._size}, within its head: truncated")
        if end > _MAX_HEAD:
            raise GGUFError(f"its head is longer than {_MAX_HEAD} bytes")
        self._read += self._file.read(max(end, 2 * len(self._read), 2**20) - len(self._read))
        if end > len(self._read):
            raise GGUFError("has been truncated while it was read")

    def _scalar(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self._take(struct.calcsize("<" + letter)))[0]

    def _string(self) -> str:
        return _text(self._take(self._scalar("Q")))

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
        letter = "<" + _SCALARS[of]
        return np.frombuffer(self._take(count * struct.calcsize(letter)), letter).tolist()

    def _strings(self, count: int) -> list[str]:
        """The next strings; vocabularies have some 100 000, so it does by hand what `_string` does."""
        read, at, found = self._read, self._at, []
        for _ in range(count):
            begin = at + _LENGTH.size
            if begin > len(read):
                self._fill(begin)
            at = begin + _LENGTH.unpack_from(read, begin - _LENGTH.size)[0]
            if at > len(read):
                self._fill(at)
            found.append(_text(read[begin:at]))
        self._at = at
        return found

    def _tensor(self) -> StoredTensor:
        """A tensor whose offset counts from where the tensors begin."""
        name, rank = self._string(), self._scalar("I")
        if not is_name(name):
            raise GGUFError(f"a tensor has the name {shown(name)}")
        if not 1 <= rank <= _MAX_DIMENSIONS:
            raise GGUFError(f"{name} has {rank} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(rank))[::-1]
        number, offset = self._scalar("I"), self._scalar("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise GGUFError(f"{name} has the unknown type {number}") from None
        block, size = GGML_QUANT_SIZES[kind]
        if not all(shape) or shape[-1] % block:
            raise GGUFError(f"{name} has the shape {shape}, rows of {kind.name} have blocks of {block}")
        return StoredTensor(name, kind, shape, offset, math.prod(shape) // block * size)

    def _placed(self, tensors: Sequence[StoredTensor]) -> list[StoredTensor]:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GGUFError(f"general.alignment is {alignment!r:.80}")
        begin = -(-self._at // alignment) * alignment
        placed = [tensor._replace(offset=begin + tensor.offset) for tensor in tensors]
        free = begin
        for tensor in sorted(placed, key=lambda tensor: tensor.offset):
            end = tensor.offset + tensor.num_bytes
            if (tensor.offset - begin) % alignment or end > self._size:
                raise GGUFError(f"{tensor.name} does not lie in it: truncated")
            if tensor.offset < free:
                raise GGUFError(f"{tensor.name} begins within another tensor")
            free = end
        return placed


def _text(data: bytes | bytearray) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GGUFError(f"holds a text that is not UTF-8: {error.reason}") from None
