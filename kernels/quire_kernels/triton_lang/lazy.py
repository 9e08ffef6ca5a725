"""How a Triton-language operator is registered without importing `triton`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from quire_kernels.cache import cache_directory
from quire_kernels.registry import implementation

PRIORITY = 10
"""Above the PyTorch reference, below CUDA C++."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def is_available() -> bool:
    """Whether `triton` is installed and, outside the interpreter, the device has tensor cores for bf16."""
    if importlib.util.find_spec("triton") is None:
        return False
    # What it compiles is executed: under our rule for such folders, and also where there is no home.
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory("triton")))
    return is_interpreted() or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0))


def register(
    operator: str,
    module: str,
    name: str,
    *,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    predicate: Callable[..., bool | str] | None = None,
) -> None:
    """Registers function `name` of `quire_kernels.triton_lang.<module>` as implementation "triton".

    In the interpreter it is also registered for CPU tensors, behind every other implementation.
    """

    def can_do(**facts: Any) -> bool | str:
        return is_available() and (predicate is None or predicate(**facts))

    def run(*args: Any) -> Any:
        return getattr(importlib.import_module(f"quire_kernels.triton_lang.{module}"), name)(*args)

    devices = ("cuda", "cpu") if is_interpreted() else ("cuda",)
    priority = -PRIORITY if is_interpreted() else PRIORITY
    implementation(operator, "triton", devices=devices, dtypes=dtypes, priority=priority, predicate=can_do)(
        run
    )
