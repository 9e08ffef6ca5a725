"""PackedCache: keeps weights that are packed for the CPU kernels on disk, for the next start.

There is one file per model, options and rank. Its name is a digest of these, of the checkpoint's files and of
all code that computes, so a file of that name holds what packing would give. A file is written under a
temporary name and then renamed. Its index and every tensor have a checksum, so damage is detected. The file
is read into memory and not mapped: all of it is checked anyway, and access to a mapped file that was
truncated raises SIGBUS.
(Products were as fast from a mapped file: 17.9 and 17.3 GB/s, 2026-11-26.)
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import torch
import xxhash

from quire.config import ModelConfig
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.loader.identity import FileIdentity, code_identity, model_identity
from quire.models.interface import Model
from quire_common.cache import lasting_directory, locked
from quire_common.errors import one_line
from quire_common.host_memory import aligned_bytes
from quire_common.weight_files import bytes_of
from quire_kernels.cpu.linear import NativeLinear
from quire_kernels.cpu.native import library
from quire_kernels.weights import JoinedLinear, PackedLinear, ReorderedLinear

logger = logging.getLogger("quire")

_HEAD = struct.Struct("<8sQ16s")
"""Magic number, length in bytes of the JSON index that follows, and the XXH3 of that index."""
_MAGIC = b"QUIREPW2"
_ALIGNMENT = 4096
"""Alignment in bytes of the tensors, which lie after the index."""
_THREADS = 8
"""Number of threads that read."""
_PART = 2**21
"""Most bytes that are read, written and digested at a time: so few that those that were read are still in the
processor's cache when they are digested."""
_SETTLED_NS = 10**9
"""Least age in ns of a checkpoint's last change before its weights are cached. A younger file may change
again within the same time stamp."""


class _Tensor(NamedTuple):
    """Position and type of a tensor in an entry."""

    offset: int
    """Bytes from the start of the first tensor."""
    num_bytes: int
    dtype: str
    shape: list[int]
    digest: str
    """See `_digest`."""


class _Index(msgspec.Struct):
    key: str
    tree: Any
    """The entry's tree, in which {"tensor": index into `tensors`} replaces each tensor."""
    tensors: list[_Tensor]


class BackgroundWriter:
    """Writes a cache entry in its own thread."""

    def __init__(self, cache: PackedCache, key: str, tree: Any) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=cache.write, args=(key, tree, self._stopped), name="packed-weights", daemon=True
        )
        self._thread.start()
        # A thread that returns from PyTorch after the interpreter ended would abort the process: SIGABRT.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stops writing. Afterwards this object no longer holds the weights."""
        self._stopped.set()
        self.wait()
        atexit.unregister(self.stop)

    def wait(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()


class PackedCache:
    """A directory with one file per entry.

    Args:
        directory: a folder in which no other user can write; made when the first entry is written.
        limit: most bytes of its entries; the least recently used ones are removed.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory, self.limit = directory, limit

    @classmethod
    def from_config(cls, config: ModelConfig, device: torch.device) -> PackedCache | None:
        """Makes the cache that a configuration asks for.

        None: it asks for none, weights are random, the device is no CPU, or there is no lasting directory.
        """
        if not config.packed_weights_size or config.load_format == "dummy" or device.type != "cpu":
            return None
        directory = lasting_directory("packed")
        return None if directory is None else cls(directory, config.packed_weights_size)

    def path(self, key: str) -> Path:
        """Returns the path of an entry's file."""
        return self.directory / f"{key}.weights"

    def read(self, key: str) -> Any:
        """Returns the tree of an entry after checking its index and all its tensors. None: there is no entry,
        or it could not be read or was damaged; such an entry is removed if possible."""
        path = self.path(key)
        if not path.is_file():  # who opens a pipe waits for ever
            return None
        try:
            with path.open("rb", buffering=0) as file:
                tree = _read(file, key)
                with contextlib.suppress(OSError):
                    os.utime(path)
                return tree
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            logger.warning("%s cannot be used, weights are packed again: %s", path, one_line(error))
            with contextlib.suppress(OSError):
                path.unlink()
            return None

    def write(self, key: str, tree: Any, stopped: threading.Event) -> None:
        """Writes an entry, in place of one with this key. If it is too large, there is no room or the disk
        fails, this logs so and leaves no new entry.

        Args:
            key: digest from which the file's name is made.
            tree: the entry, a tree of JSON values and tensors.
            stopped: if it is set before all is written, the writing ends early and leaves no new entry.
        """
        head, tensors, size = _encode(key, tree)
        try:
            if size > self.limit:
                raise OSError(f"{size / 1e6:.0f} MB are more than packed_weights_size")
            with locked(self.directory / ".lock"):
                self._remove_left()
                if shutil.disk_usage(self.directory).free < 2 * size:
                    raise OSError(f"{size / 1e6:.0f} MB would take more than half of what the disk has left")
                handle, name = tempfile.mkstemp(dir=self.directory, prefix=".", suffix=".tmp")
                # Locked while it is written: an unlocked file was left by a process that died.
                with contextlib.suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_EX)
            with open(handle, "wb", buffering=0) as file:
                try:
                    begin = time.monotonic()
                    if _write(file, head, tensors, stopped):
                        os.fsync(handle)
                        with locked(self.directory / ".lock"):
                            self._make_room(size, self.path(key))
                            Path(name).replace(self.path(key))
                        seconds = time.monotonic() - begin
                        logger.info("%s: %.0f MB kept in %.1f s", self.path(key), size / 1e6, seconds)
                finally:
                    Path(name).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("packed weights are not kept in %s: %s", self.directory, one_line(error))

    def _remove_left(self) -> None:
        for path in self.directory.glob(".*.tmp"):
            if not path.is_file():
                continue
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()

    def _make_room(self, size: int, place: Path) -> None:
        """Removes the least recently used entries until one of `size` bytes at `place` fits the limit. A
        process that has a removed entry open can still read it."""
        found = []
        for path in self.directory.glob("*.weights"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, path))
        others = sorted(one for one in found if one[2] != place)
        total = size + sum(entry_size for _, entry_size, _ in others)
        for _, entry_size, path in others:
            if total <= self.limit:
                break
            path.unlink(missing_ok=True)
            total -= entry_size


class PackedEntry:
    """The cache entry for one model. It must be made before anything of the checkpoint is read."""

    def __init__(self, cache: PackedCache, config: ModelConfig) -> None:
        self._cache, self._config = cache, config
        self._seen_ns, self._before = time.time_ns(), FileIdentity.from_path(config.model)

    def key(self, model: Model) -> str:
        """Returns a digest of what decides the packed weights of a model."""
        identity = {
            "files": self._before.files,
            "model": model_identity(model),
            "dtype": str(model.config.dtype),
            "quantization": self._config.quantization,
            "load_format": self._config.load_format,
            "ranks": [model.config.ranks.rank, model.config.ranks.size],
            **code_identity(torch.device("cpu")),
        }
        return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16).hexdigest()

    def fill(self, model: Model, with_digest: bool) -> str | None:
        """Fills an empty model with the cached weights.

        Returns:
            `digest_weights` of the weights that were packed; empty: it was not computed when they were
            cached. None: nothing suitable is cached, and the model is still empty.
        """
        tree = self._cache.read(self.key(model))
        if tree is None or FileIdentity.from_path(self._config.model) != self._before:
            return None
        if with_digest and not tree["weights_digest"]:
            return None
        for name, module in model.packed_modules():
            kept = tree["modules"][name]
            if isinstance(module, Embedding):
                module.set_packed(_restored(kept["packed"]), kept["table"])
            else:
                module.set_packed(_restored(kept["packed"]))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(tree["parameters"][name])
        digest: str = tree["weights_digest"]
        return digest

    def keep(self, model: Model, weights_digest: str) -> BackgroundWriter | None:
        """Begins to write a packed model to the cache, and returns the writer. None: some weights cannot be
        cached, or the checkpoint's files may have changed while they were read."""
        newest = max((max(file[3:5]) for file in self._before.files), default=0)
        is_settled = newest < self._seen_ns - _SETTLED_NS
        if not is_settled or FileIdentity.from_path(self._config.model) != self._before:
            return None
        modules = {}
        for name, module in model.packed_modules():
            packed = _state(module.packed)
            if packed is None:
                return None
            modules[name] = {"packed": packed, "table": None if isinstance(module, Linear) else module.table}
        parameters = {name: parameter.data for name, parameter in model.named_parameters()}
        tree = {"modules": modules, "parameters": parameters, "weights_digest": weights_digest}
        return BackgroundWriter(self._cache, self.key(model), tree)


def _state(packed: PackedLinear) -> dict[str, Any] | None:
    """Returns the state from which `_restored` rebuilds packed weights; None: their implementation does not
    support that."""
    if isinstance(packed, NativeLinear):
        return {"native": packed.state()}
    if isinstance(packed, ReorderedLinear):
        layer = _state(packed.layer)
        return layer and {"reordered": layer, "order": packed.order}
    if isinstance(packed, JoinedLinear):
        parts = [_state(part) for part in packed.parts]
        return {"joined": parts} if all(parts) else None
    return None


def _restored(state: dict[str, Any]) -> PackedLinear:
    if "joined" in state:
        return JoinedLinear([_restored(part) for part in state["joined"]])
    if "reordered" in state:
        return ReorderedLinear(_restored(state["reordered"]), state["order"])
    found = library(state["native"]["isa"])
    assert found is not None, "the key says that there is one"
    return NativeLinear.restored(found, state["native"])


def _encode(key: str, tree: Any) -> tuple[bytes, list[tuple[int, torch.Tensor]], int]:
    """Returns (bytes before the tensors, [(offset in the file, tensor)], size of the file in bytes)."""
    tensors: list[torch.Tensor] = []
    places: list[_Tensor] = []
    end = 0

    def place(tensor: Any) -> dict[str, int]:
        nonlocal end
        assert isinstance(tensor, torch.Tensor), tensor
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        memory = bytes_of(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest = _digest(xxhash.xxh3_128_digest(memory[at : at + _PART]) for at in _parts(len(memory)))
        tensors.append(tensor)
        places.append(_Tensor(offset, len(memory), dtype, list(tensor.shape), digest))
        end = offset + len(memory)
        return {"tensor": len(places) - 1}

    tree = msgspec.to_builtins(tree, enc_hook=place)
    index = msgspec.json.encode(_Index(key, tree, places))
    head = _HEAD.pack(_MAGIC, len(index), xxhash.xxh3_128_digest(index)) + index
    first = _first(len(index))
    return head, [(first + at.offset, one) for at, one in zip(places, tensors, strict=True)], first + end


def _parts(num_bytes: int) -> range:
    """Returns the offsets at which the parts of a tensor begin."""
    return range(0, num_bytes, _PART)


def _digest(parts: Iterable[bytes]) -> str:
    """Returns a tensor's digest in hexadecimal: XXH3 over the XXH3 digests of its parts."""
    return xxhash.xxh3_128_hexdigest(b"".join(parts))


def _first(index_size: int) -> int:
    """Returns the offset of the first tensor in the file."""
    return -(-(_HEAD.size + index_size) // _ALIGNMENT) * _ALIGNMENT


def _write(
    file: BinaryIO, head: bytes, tensors: list[tuple[int, torch.Tensor]], stopped: threading.Event
) -> bool:
    """Writes the file. Returns False if `stopped` was set before the end."""
    for offset, memory in ((0, memoryview(head)), *((at, bytes_of(one)) for at, one in tensors)):
        file.seek(offset)
        while memory:
            if stopped.is_set():
                return False
            memory = memory[file.write(memory[:_PART]) :]
    return True


def _read(file: BinaryIO, key: str) -> Any:
    """Reads the tree of an entry.

    Raises:
        OSError: the file cannot be read.
        ValueError: the content is damaged.
    """
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEAD.size)
    magic, index_size, digest = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, b"")
    if magic != _MAGIC or index_size > size:
        raise ValueError("it does not begin as an entry does")
    content = file.read(index_size)
    if xxhash.xxh3_128_digest(content) != digest:
        raise ValueError("its index is damaged")
    index, first = msgspec.json.decode(content, type=_Index), _first(index_size)
    if index.key != key or size < max((first + at.offset + at.num_bytes for at in index.tensors), default=0):
        raise ValueError("it is truncated, or another one")
    tensors, readings, fd = [], [], file.fileno()
    with ThreadPoolExecutor(_THREADS, "packed-weights") as pool:
        for place in index.tensors:
            memory = aligned_bytes(place.num_bytes)
            readings.append(
                [
                    pool.submit(_read_part, fd, first + place.offset + at, bytes_of(memory[at : at + _PART]))
                    for at in _parts(place.num_bytes)
                ]
            )
            tensors.append(memory.view(getattr(torch, place.dtype)).view(place.shape))
        for place, parts in zip(index.tensors, readings, strict=True):
            if _digest(part.result() for part in parts) != place.digest:
                raise ValueError("a tensor is damaged")

    def filled(node: Any) -> Any:
        if isinstance(node, list):
            return [filled(each) for each in node]
        if not isinstance(node, dict):
            return node
        if node.keys() == {"tensor"}:
            return tensors[node["tensor"]]
        return {name: filled(each) for name, each in node.items()}

    return filled(index.tree)


def _read_part(fd: int, offset: int, memory: memoryview) -> bytes:
    """Fills `memory` from the file and returns its digest. Raises ValueError if the file ends before."""
    done = 0
    while done < len(memory):
        count = os.preadv(fd, [memory[done:]], offset + done)
        if not count:
            raise ValueError("it has become shorter")
        done += count
    return xxhash.xxh3_128_digest(memory)
