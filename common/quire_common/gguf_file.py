"""Reads GGUF files: their heads, which state metadata and where tensors lie, and the bytes of tensors.

The format is that of ggml's docs/gguf.md, versions 2 and 3, little-endian. (The reader of the `gguf` package
makes several arrays of each string, and takes ten seconds for a vocabulary of 49 k.) A large file may be
split into NAME-00001-of-00003.gguf and so on: the first part says what the model is, and all say `split.no`
(from 0), `split.count` and `split.tensors.count` (of all parts together).

Files are read, not mapped: if a file is cut short meanwhile, reading fails with an error, whereas a mapping
would end in SIGBUS.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from quire_common.errors import in_line, is_name, shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Format characters of `struct` for numbers and booleans, by GGUF type number."""
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_LENGTH = struct.Struct("<Q")
_MAX_HEAD = 2**26
"""Most bytes of a head, which takes up to ten times as much memory. The largest vocabularies take 16 MiB."""
_MAX_VALUES = 2**22
"""Most values in all arrays of a file together: a number of one byte takes forty in memory. The arrays of the
largest vocabularies have 1.3 million."""
_MAX_TENSORS = 2**16
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)


class GGUFError(ValueError):
    """A GGUF file is broken or not supported, or a directory holds several. The message is one line, without
    the path of the file or directory."""


def part_names(name: str) -> tuple[str, ...]:
    """Returns the names of all parts of a split file, for the name of any of them. A name that is not that of
    a part is returned alone."""
    stem, count = _split(name)
    return tuple(_part(stem, number, count) for number in range(1, count + 1)) or (name,)


def first_part(name: str) -> str:
    """Returns the first name that `part_names` returns, without making all the names."""
    stem, count = _split(name)
    return _part(stem, 1, count) if count else name


def _split(name: str) -> tuple[str, int]:
    """Returns the stem that the names of a split file's parts share, and the number of parts. If the name is
    not that of a part, returns the whole name and 0."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return name, 0
    return match["stem"], int(match["count"])


def _part(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05}-of-{count:05}.gguf"


def find_gguf(path: Path) -> Path | None:
    """Returns the GGUF file that `path` is, or the only one in the directory `path` if that has no
    config.json; else None. For a split file, returns the first part, whichever part `path` is.

    Raises:
        GGUFError: the directory holds several GGUF files. Parts of a split file count as one.
    """
    if path.is_file():
        return path.with_name(first_part(path.name)) if path.suffix == ".gguf" else None
    if (path / "config.json").exists():
        return None
    files = sorted({file.with_name(first_part(file.name)) for file in path.glob("*.gguf")})
    if len(files) > 1:
        names = in_line(", ".join(file.name for file in files))
        raise GGUFError(f"holds several .gguf files ({names}); name one of them")
    return files[0] if files else None


class StoredTensor(NamedTuple):
    """A tensor of a GGUF file: its name, type and shape, and where its bytes lie."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """Shape in torch's order of dimensions: the fastest one last."""
    offset: int
    """Position of the tensor's first byte in the file."""
    num_bytes: int
    file: Path


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file with all its parts. Their heads have been read; `data` reads the bytes of a tensor."""

    path: Path
    """Path of the file, or of the first part of a split file."""
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: tuple[Path, ...]
    """Paths of all parts, in order; the path of the file alone if it is not split."""

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Opens a GGUF file and reads the heads of all its parts. The memory used is bounded by the sizes of
        the files, whatever the heads state.

        Args:
            path: path of the file, or of any of its parts.

        Raises:
            GGUFError: the file is no GGUF file, is broken or truncated, or is not supported; or a further
                part is missing, cannot be read, or belongs to another file.
            OSError: the file, or the first of its parts, cannot be read.
        """
        names = part_names(path.name)
        path = path.with_name(names[0])
        metadata, tensors = _read_head(path)
        count = metadata.get("split.count", 1)
        if not _is_number(count) or (count > 1 and count != len(names)):
            raise GGUFError(f"states split.count {shown(count)}, its name says {len(names)}")
        files = tuple(map(path.with_name, names)) if count > 1 else (path,)
        if count > 1:
            _check_split(metadata, 0, metadata)
            for number, file in enumerate(files[1:], 1):
                try:
                    of_part, further = _read_head(file)
                    _check_split(of_part, number, metadata)
                    if double := tensors.keys() & further.keys():
                        raise GGUFError(f"holds {min(double)}, as a part before it does")
                except (OSError, GGUFError) as error:
                    raise GGUFError(
                        f"its part {file.name}: {getattr(error, 'strerror', None) or error}"
                    ) from None
                tensors |= further
            if metadata["split.tensors.count"] != len(tensors):
                stated = metadata["split.tensors.count"]
                raise GGUFError(f"states split.tensors.count {stated}, its parts hold {len(tensors)}")
        return cls(path, metadata, tensors, files)

    def data(self, tensor: StoredTensor) -> np.ndarray:
        """Reads and returns a tensor's bytes: uint8 [rows..., bytes of a row].

        Raises:
            GGUFError: the file has become shorter.
            OSError: the file cannot be read.
        """
        found = np.fromfile(tensor.file, np.uint8, tensor.num_bytes, offset=tensor.offset)
        if found.size < tensor.num_bytes:
            raise GGUFError(f"{tensor.name} does not lie in it any more: truncated")
        block, size = GGML_QUANT_SIZES[tensor.kind]
        return found.reshape(*tensor.shape[:-1], tensor.shape[-1] // block * size)


def _read_head(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    if not stat.S_ISREG(path.stat().st_mode):
        raise GGUFError("is a directory, a pipe or a device")
    with path.open("rb") as file:
        head = _Head(path, file)
        return head.metadata, head.tensors


def _check_split(metadata: dict[str, Any], number: int, first: dict[str, Any]) -> None:
    """Raises GGUFError if `metadata` cannot be that of part `number`, counted from 0, of the split file whose
    first part has the metadata `first`."""
    for key in ("split.no", "split.count", "split.tensors.count"):
        stated, wanted = metadata.get(key), number if key == "split.no" else first.get(key)
        if not _is_number(stated) or stated != wanted:
            raise GGUFError(f"states {key} {shown(stated)}, not {shown(wanted)}")
    for key, value in metadata.items():
        if not key.startswith("split.") and value != first.get(key, value):
            raise GGUFError(f"states another {in_line(key)} than the first part: of another file")


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class _Head:
    """The head of a GGUF file: its metadata, and where its tensors lie. The constructor reads all of it."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        self._read, self._at, self._num_values = bytearray(), 0, 0
        magic = self._read_bytes(len(_MAGIC))
        if magic != _MAGIC:
            raise GGUFError(f"begins with {magic!r}, not with {_MAGIC!r}")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise GGUFError(f"version {version} is not supported; supported: 2, 3 (little-endian)")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        if num_tensors > _MAX_TENSORS:
            raise GGUFError(f"states {num_tensors} tensors, at most {_MAX_TENSORS} are allowed")
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

    def _read_bytes(self, num_bytes: int) -> bytes:
        begin = self._at
        self._fill(begin + num_bytes)
        self._at = begin + num_bytes
        return bytes(self._read[begin : self._at])

    def _fill(self, end: int) -> None:
        """Reads on until all bytes of the file before the position `end` are in memory."""
        if end > self._size:
            raise GGUFError(f"ends at byte {self._size}, within its head: truncated")
        if end > _MAX_HEAD:
            raise GGUFError(f"its head is longer than {_MAX_HEAD} bytes")
        if end <= len(self._read):
            return
        self._read += self._file.read(max(end, 2 * len(self._read), 2**20) - len(self._read))
        if end > len(self._read):
            raise GGUFError("has been truncated while it was read")

    def _scalar(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self._read_bytes(struct.calcsize("<" + letter)))[0]

    def _string(self) -> str:
        return _text(self._read_bytes(self._scalar("Q")))

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise GGUFError(f"holds a value of the unknown type {kind}")
        of, count = self._scalar("I"), self._scalar("Q")
        self._num_values += count
        if self._num_values > _MAX_VALUES:
            raise GGUFError(f"states arrays of {self._num_values} values, at most {_MAX_VALUES} are allowed")
        if of == _STRING:
            return self._strings(count)
        if of not in _SCALARS:
            raise GGUFError(f"holds an array of the unknown type {of}")
        letter = "<" + _SCALARS[of]
        return np.frombuffer(self._read_bytes(count * struct.calcsize(letter)), letter).tolist()

    def _strings(self, count: int) -> list[str]:
        """Reads the next `count` strings. Repeats the code of `_string` for speed: vocabularies have some
        100 000."""
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
        """Reads the entry of a tensor. The offset in the result is still the entry's, which counts from where
        the first tensor may begin."""
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
        return StoredTensor(name, kind, shape, offset, math.prod(shape) // block * size, self._path)

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
