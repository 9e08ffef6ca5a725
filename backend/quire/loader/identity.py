"""Identities. That of code, libraries and processor says whether two processes compute alike, given the same
weights and options. That of a checkpoint's files detects that they were replaced."""

from __future__ import annotations

import functools
import hashlib
import inspect
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quire.loader.info import checkpoint_files
from quire_kernels import registry
from quire_kernels.cpu.compiler import BuildError, library_name, supported_isas
from quire_kernels.cpu.native import library

_CODE = (
    *("quire.layers", "quire.loader", "quire.models", "quire.worker"),
    *("quire_common", "quire_ensemble", "quire_kernels"),
)
"""Packages with the code that computes, for `code_identity`."""
_LIBRARIES = ("gguf", "safetensors", "torch", "transformers")
"""Libraries whose versions are part of `code_identity` on all devices."""
_GPU_LIBRARIES = ("triton", "flashinfer-python")


def code_identity(device: torch.device) -> dict[str, Any]:
    """Returns an identity of the code, libraries and processor that compute on a device, as JSON values."""
    return {
        "code": _code_digest(),
        "libraries": [f"{name} {_version(name)}" for name in _LIBRARIES],
        "forced": registry.choices(),
        "processor": _processor(device),
    }


def model_identity(model: object) -> list[str]:
    """Returns the model class's name, and a digest of its source file, which may lie outside this package."""
    kind = type(model)
    source = Path(inspect.getfile(kind)).read_bytes()
    return [kind.__qualname__, hashlib.blake2b(source, digest_size=16).hexdigest()]


class FileIdentity(NamedTuple):
    """State of a checkpoint's files at one time. If two states are equal, the files are taken to be
    unchanged."""

    files: list[tuple[str, str, int, int, int, int]]
    """(name, path without links, bytes, modification time in ns, status change time in ns, inode) of each
    file."""
    places: list[tuple[str, int, int]]
    """(path, inode, status change time in ns) of the files' folders and of all symbolic links on the way.
    They change even if a file is replaced and then put back."""

    @classmethod
    def from_path(cls, path: str) -> FileIdentity:
        """Returns the state of the files of a directory or GGUF file; empty if there are none."""
        files, places = [], dict[Path, tuple[int, int]]()
        for file in checkpoint_files(path):
            try:
                _add_links(file.absolute(), places)
                real = file.resolve(strict=True)
                stat, folder = real.stat(), real.parent.stat()
            except OSError:
                continue
            state = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino
            files.append((file.name, str(real), *state))
            places[real.parent] = folder.st_ino, folder.st_ctime_ns
        return cls(files, [(str(place), *state) for place, state in sorted(places.items())])


def _add_links(path: Path, places: dict[Path, tuple[int, int]]) -> None:
    for place in (path, *path.parents):
        if place not in places and place.is_symlink():
            stat = place.lstat()
            places[place] = stat.st_ino, stat.st_ctime_ns
            _add_links(place.parent / place.readlink(), places)


def _processor(device: torch.device) -> list[str]:
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        found = [torch.cuda.get_device_name(device), str(capability), str(torch.version.cuda)]
        return found + [f"{name} {_version(name)}" for name in _GPU_LIBRARIES]
    try:
        # Its name stands for the instruction set, the sources and the compiler; `code` holds prebuilt ones.
        # The best is the one that computes: those behind it need not be compiled.
        best = next((isa for isa in supported_isas() if library(isa) is not None), None)
        libraries = [] if best is None else [library_name(best)]
    except BuildError:
        libraries = []
    return [*libraries, torch.backends.cpu.get_cpu_capability()]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def _code_digest() -> str:
    """Returns a digest of the files of the packages in _CODE."""
    digest = hashlib.blake2b(digest_size=16)
    for package in _CODE:
        spec = util.find_spec(package)
        assert spec is not None and spec.submodule_search_locations, package
        root = Path(next(iter(spec.submodule_search_locations)))
        for file in sorted(root.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                for part in (f"{package}/{file.relative_to(root)}".encode(), file.read_bytes()):
                    digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
