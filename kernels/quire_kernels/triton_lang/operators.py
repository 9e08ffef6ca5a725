"""Registers the Triton-language kernels as implementation "triton" of their operators, without importing
`triton`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from quire_common.cache import cache_directory
from quire_kernels.metadata import NO_SINKS
from quire_kernels.registry import implementation

PRIORITY = 10
"""Priority outside the interpreter: above the PyTorch reference, and below FlashInfer and CUDA C++."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
UNAVAILABLE = "it needs the package triton and a GPU of compute capability 8.0"
_KV_DTYPES = (*FLOATS, torch.int8, torch.float8_e4m3fn)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def is_available() -> bool:
    """Whether `triton` is installed and the device has tensor cores for bfloat16. The interpreter needs no
    such device. If `triton` is installed and TRITON_CACHE_DIR is not set, sets it to our own folder."""
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
    predicate: Callable[..., str | None],
) -> None:
    """Registers function `name` of `quire_kernels.triton_lang.<module>` as implementation "triton" of
    `operator`.

    With the interpreter, it is also registered for CPU tensors, and has the lowest priority.
    """

    def why_not(**facts: Any) -> str | None:
        return predicate(**facts) if is_available() else UNAVAILABLE

    def run(*args: Any) -> Any:
        return getattr(importlib.import_module(f"quire_kernels.triton_lang.{module}"), name)(*args)

    devices = ("cuda", "cpu") if is_interpreted() else ("cuda",)
    priority = -PRIORITY if is_interpreted() else PRIORITY
    implementation(
        operator,
        "triton",
        devices=devices,
        dtypes=dtypes,
        priority=priority,
        predicate=why_not,
        leaves=("joint",),
    )(run)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _why_not_attend(
    *,
    head_dim: int,
    kv_dtype: torch.dtype,
    num_groups: int = 1,
    block_size: int = 16,
    sinks: bool = False,
    **_: Any,
) -> str | None:
    """Returns why the kernels do not support this shape; None: they do. They support any window and any
    softcap."""
    if sinks:
        return NO_SINKS
    if head_dim % 16 != 0 or head_dim > 256:
        return "head_dim must be a multiple of 16, at most 256"
    if kv_dtype not in _KV_DTYPES:
        return f"no cache of {kv_dtype}"
    if not _is_power_of_two(block_size) or block_size > 128:
        return "block_size must be a power of two, at most 128"
    return None if num_groups <= 64 else "at most 64 query heads per KV head"


def _why_not_add_lora(rank: int, **_: object) -> str | None:
    return None if rank <= 128 else "rank must be at most 128"


register("paged_attention", "attention", "paged_attention", predicate=_why_not_attend)
register("add_lora", "lora", "add_lora", predicate=_why_not_add_lora)
