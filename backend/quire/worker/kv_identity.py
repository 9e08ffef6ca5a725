"""kv_identity: what decides the bits of the keys and values that this process computes.

Weights and frequencies as they are in memory, not the files they came from: whatever chose the files, made
them up (`load_format=dummy`) or derived a number from several keys is covered without being known here. The
instruction sets and the libraries belong to it, since sums rounded in another order have other bits.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch

from quire.layers.rotary import RotaryEmbedding
from quire.layers.scheme import SCHEMES
from quire.loader.load import LoadedModel
from quire_kernels import registry
from quire_kernels.cpu.compiler import BuildError, library_name, supported_isas
from quire_kernels.cpu.native import library

_CODE = ("quire.layers", "quire.loader", "quire.models", "quire.worker", "quire_kernels")
"""Packages that decide what is computed."""
_GPU_LIBRARIES = ("triton", "flashinfer-python")


def kv_identity(loaded: LoadedModel, device: torch.device) -> dict[str, Any]:
    """The identity of keys and values as JSON can hold it; `loaded` must have its weights' digest."""
    assert loaded.weights_digest, "the weights were not looked at before they were packed"
    model, scheme = loaded.model, loaded.config.scheme
    config = dataclasses.asdict(dataclasses.replace(loaded.config, scheme=SCHEMES[None]))
    config |= {"dtype": str(loaded.config.dtype), "scheme": scheme.identity()}
    return {
        "weights": loaded.weights_digest,
        "model": type(model).__name__,
        "config": config,
        "rotary": [layer.identity() for layer in model.modules() if isinstance(layer, RotaryEmbedding)],
        "code": _code_digest(),
        "torch": torch.__version__,
        "forced": registry.choices(),
        "processor": _processor(device),
    }


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
    """Digest of all files of the packages that compute."""
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
