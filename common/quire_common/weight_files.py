"""A checkpoint's weight files and their tensors.

Readers of safetensors return where tensors lie, so that tensors can be read in parallel and straight into
their final memory. Pickles are memory-mapped (except files from before torch 1.6) and loaded with
`weights_only`, after a check of the names that they import. The caller decides whether pickles may be read at
all.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from quire_common.errors import is_name, is_panic, one_line, shown

Fail = Callable[[str], Exception]
"""Function that makes an exception from a one-line message that names the file."""
Wanted = Callable[[str], bool]
"""Function that says whether to read the tensor with this name."""

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Torch's types by their names in safetensors files; others are not supported."""
_MAX_PICKLE = 2**23
"""Most bytes of the pickle that names a file's tensors (in a file from before torch 1.6, of all its pickles
together). Each tensor takes about 250."""
_PICKLED = frozenset(
    (
        "collections OrderedDict",
        "torch.nn.parameter Parameter",
        "torch._tensor _rebuild_from_type_v2",
        *(
            f"torch._utils _rebuild_{name}"
            for name in ("tensor", "tensor_v2", "parameter", "parameter_with_state")
        ),
        *(
            f"torch {name}Storage"
            for name in (
                "Double",
                "Float",
                "Half",
                "BFloat16",
                "Long",
                "Int",
                "Short",
                "Char",
                "Byte",
                "Bool",
            )
        ),
    )
)
"""Names that the pickle of a state dictionary may import. Some others that `weights_only` allows, such as
bytearray, allocate as much memory as a number in the file says."""


class NamedTensor(NamedTuple):
    """A tensor of a checkpoint: its content, or how to read it."""

    name: str
    tensor: torch.Tensor
    """Content of the tensor. If there is an offset or a change, only its type and shape (on torch's "meta"
    device); `read` then reads the content into new memory. A mapped file would be read page by page, and
    would end the process if it is cut short meanwhile."""
    file: Path
    offset: int | None = None
    """Position in the file of the bytes of `tensor` (of `raw`, if given). None: `tensor` has the content, or
    `change` makes it."""
    change: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Function that makes the content from the bytes at `offset`, given as a tensor like `raw`, or without
    `raw` like `tensor`. Without an offset, it makes the content by itself, whatever its argument is. None:
    nothing is changed."""
    raw: torch.Tensor | None = None
    """Type and shape of the bytes at `offset` (on torch's "meta" device), if they are not those of
    `tensor`."""

    def read(self) -> torch.Tensor:
        """Returns the content, read from the file if there is an offset, and changed by `change`.

        Raises:
            OSError: the file cannot be read, or has become shorter.
            Exception: raised by `change`.
        """
        content = self.tensor
        if self.offset is not None:
            content = self.empty()
            read_into(bytes_of(content), self.file, self.offset)
        return content if self.change is None else self.change(content)

    def empty(self) -> torch.Tensor:
        """Returns new memory, as a tensor, for the bytes at `offset`."""
        like = self.tensor if self.raw is None else self.raw
        return torch.empty(like.shape, dtype=like.dtype)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a tensor, which must be contiguous and on the host."""
    return tensor.flatten().view(torch.uint8).numpy().data


def read_into(memory: memoryview, file: Path, offset: int) -> None:
    """Fills memory with the bytes of a file from position `offset` on. The interpreter's lock is not held
    during the reads.

    Raises:
        OSError: the file cannot be read, or has become shorter.
    """
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        while memory:
            count = stream.readinto(memory)
            if not count:
                raise OSError(f"{file} has become shorter: truncated")
            memory = memory[count:]


def everything(name: str) -> bool:
    return True


def find_files(
    directory: Path, name: str, fail: Fail, wanted: Wanted = everything
) -> tuple[Path, tuple[Path, ...]] | None:
    """Finds the shards that hold a wanted tensor, if there is an index of shards for `name`; else the file
    `name` itself. Returns (file to name in errors, files found); None if there is neither.

    Raises:
        Exception: made by `fail`: the index is broken, or a shard is missing.
    """
    index, single = directory / f"{name}.index.json", directory / name
    if not index.exists():
        return (single, (single,)) if single.exists() else None
    try:
        content = json.loads(index.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise fail(f"{index}: cannot be read as JSON: {one_line(error)}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise fail(f"{index}: must hold a weight_map of tensor names to files")
    files: dict[Path, None] = {}
    for shard in (shard for tensor, shard in weight_map.items() if wanted(tensor)):
        # By its suffix a change of a file is known for one of the checkpoint.
        is_file = isinstance(shard, str) and Path(shard).name == shard
        if not is_file or not is_name(shard) or Path(shard).suffix != single.suffix:
            raise fail(f"{index}: {shown(shard)} is not the name of a {single.suffix} file beside the index")
        files[directory / shard] = None
    for file in files:
        try:
            file.stat()
        except OSError:
            raise fail(f"{file}: shard not found; {index.name} names it") from None
    return index, tuple(files)


def read_safetensors(file: Path, fail: Fail, wanted: Wanted = everything) -> Iterator[NamedTensor]:
    """Yields the wanted tensors of one file, in the order in which they lie there. Raises the exception that
    `fail` makes if the file cannot be read, is broken, or has a tensor of an unknown type."""
    try:
        with safe_open(file, framework="pt") as reader:
            with file.open("rb") as stream:
                offset = 8 + int.from_bytes(stream.read(8), "little")
            # The library has checked that they lie behind each other, without gaps.
            for name in reader.offset_keys():
                if not is_name(name):
                    raise ValueError(f"a tensor has the name {shown(name)}")
                head = reader.get_slice(name)
                dtype = _DTYPES.get(head.get_dtype())
                if dtype is None:
                    raise ValueError(f"{name} has the type {head.get_dtype()}, which is not supported")
                tensor = torch.empty(head.get_shape(), dtype=dtype, device="meta")
                if wanted(name):
                    yield NamedTensor(name, tensor, file, offset)
                offset += tensor.nbytes
    except BaseException as error:  # whatever lies in the file
        if isinstance(error, GeneratorExit) or not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise fail(f"{file}: broken safetensors file: {one_line(error)}") from None


def read_pickle(file: Path, fail: Fail, wanted: Wanted = everything) -> Iterator[NamedTensor]:
    """Yields the wanted tensors of one .bin or .pt file. Raises the exception that `fail` makes if the file
    cannot be read, is broken or holds code, or if a wanted entry is not a tensor."""
    try:
        mapped = _check_pickle(file)
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise fail(f"{file}: not a pickle of tensors only: {one_line(error)}") from None
    except Exception as error:  # whatever lies in the file
        raise fail(f"{file}: broken checkpoint file: {one_line(error)}") from None
    names = state if isinstance(state, dict) else (None,)
    if not all(isinstance(name, str) and is_name(name) for name in names):
        raise fail(f"{file}: holds a {type(state).__name__}, not a dictionary of tensors")
    for name in list(state):
        tensor = state.pop(name)
        if not wanted(name):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise fail(f"{file}: {name} is a {type(tensor).__name__}, not a tensor")
        yield NamedTensor(name, tensor, file)


def _check_pickle(file: Path) -> bool:
    """Refuses a file that would unpack to more bytes than it has, or whose pickle imports a name that is not
    in _PICKLED. Returns whether the file is an archive, which can be mapped; files from before torch 1.6 are
    not.

    Raises:
        UnpicklingError: a pickle imports such a name.
        Exception: the file cannot be read, is broken, or would unpack to more.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        if stream.read(2) != b"PK":
            stream.seek(0)
            _check_names(io.BytesIO(stream.read(_MAX_PICKLE)))
            return False
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > size or any(
            entry.compress_type != zipfile.ZIP_STORED for entry in entries
        ):
            raise ValueError("its entries are compressed, or longer than itself")
        for entry in entries:
            if entry.filename.endswith("data.pkl"):
                if entry.file_size > _MAX_PICKLE:
                    raise ValueError(f"{entry.filename} is longer than {_MAX_PICKLE} bytes")
                _check_names(io.BytesIO(archive.read(entry)))
    return True


def _check_names(stream: io.BytesIO) -> None:
    """Raises UnpicklingError if a pickle in the stream has an operation GLOBAL for a name that is not in
    _PICKLED, or an operation STACK_GLOBAL. Up to five pickles are read: old files begin with so many."""
    end = len(stream.getbuffer())
    for _ in range(5):
        for operation, value, _ in pickletools.genops(stream):
            if "GLOBAL" in operation.name and value not in _PICKLED:
                raise pickle.UnpicklingError(f"it names {shown(value)}")
        if stream.tell() == end:
            break
