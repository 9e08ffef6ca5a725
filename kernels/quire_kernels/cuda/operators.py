"""Registers the CUDA kernels as implementation "cuda" of many operators.

Implementations are preferred in the order CUDA C++, FlashInfer (attention only), Triton language, PyTorch.
When an operator is first selected for a kind of call, its kernel is compiled for one type. If it cannot be
compiled or loaded, this is logged once and the next implementation is used, unless "cuda" was asked for by
name. Other kernels, and kernels for other types, are compiled at their first launch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from quire_kernels import registry
from quire_kernels.cuda import kernels, linear
from quire_kernels.cuda.compiler import CompileError, Unit, attention_unit, is_installed
from quire_kernels.cuda.kernels import Kernels, attention_shared_bytes
from quire_kernels.cuda.launch import Launcher, loaded
from quire_kernels.quantized_kv import KV_KINDS

logger = logging.getLogger("quire_kernels")

NAME = "cuda"
PRIORITY = 20
"""Priority above FlashInfer and the Triton-language kernels."""
CAPABILITY = (8, 0)
"""Least compute capability with asynchronous copies and bfloat16 on tensor cores."""
UNAVAILABLE = f"it needs NVRTC and a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]}"
_HALVES = (torch.bfloat16, torch.float16)
_FLOATS = (*_HALVES, torch.float32)


@functools.cache
def is_available() -> bool:
    """Whether NVRTC's binding is installed and the current device is a GPU of at least CAPABILITY."""
    return is_installed() and torch.cuda.is_available() and torch.cuda.get_device_capability() >= CAPABILITY


@functools.cache
def compiles(unit: Unit, kernel: str, shared_bytes: int = 0) -> bool:
    """Whether a kernel can be compiled and loaded for the current device. If not, the first call logs a
    warning with the reason."""
    try:
        loaded(unit, kernel, torch.cuda.current_device(), shared_bytes)
    except (CompileError, RuntimeError, OSError) as error:
        logger.warning("no CUDA kernel %s, the next implementation is used: %s", kernel, error)
        return False
    return True


def register(
    operator: str,
    function: Callable[..., Any],
    probe: Callable[..., tuple[Unit, str, int]],
    shapes: Callable[..., str | None] | None = None,
    dtypes: tuple[torch.dtype, ...] = _FLOATS,
    leaves: tuple[str, ...] = (),
) -> None:
    """Registers implementation "cuda" of an operator.

    Args:
        operator: name of the operator.
        function: computes it.
        probe: returns, from the call's facts, the (unit, kernel, bytes of dynamic shared memory) that must
            compile. One type stands for several, because facts do not include the operands' type.
        shapes: function that returns why the kernels do not support a call's facts, or None if they do. If
            `shapes` itself is None, they support all facts.
        dtypes: types of the operands; empty: any.
        leaves: see `registry.Implementation`.
    """

    def why_not(**facts: Any) -> str | None:
        if not is_available():
            return UNAVAILABLE
        reason = None if shapes is None else shapes(**facts)
        return reason or (None if compiles(*probe(**facts)) else "its kernel does not compile or load here")

    registry.implementation(
        operator,
        NAME,
        devices=("cuda",),
        dtypes=dtypes,
        priority=PRIORITY,
        predicate=why_not,
        leaves=leaves,
    )(function)


_kernels = Kernels(Launcher())


def _attention_probe(**facts: Any) -> tuple[Unit, str, int]:
    cache, head_dim = KV_KINDS.get(facts["kv_dtype"], 0), facts.get("head_dim", 64)
    return attention_unit("Float16", head_dim, cache), "attention", attention_shared_bytes(head_dim, cache)


def _probe(source: str, kernel: str, **defines: str) -> Callable[..., tuple[Unit, str, int]]:
    unit = Unit(source, tuple(defines.items()))
    return lambda **facts: (unit, kernel, 0)


_write_probe = _probe("cache", "norm_rope_write", TYPE="BFloat16")
register(
    "paged_attention",
    _kernels.paged_attention,
    _attention_probe,
    kernels.why_not_attend,
    _HALVES,
    leaves=("long_queries", "joint"),
)
register("norm_rope_write", _kernels.norm_rope_write, _write_probe, kernels.why_not_write)
register("write_kv", _kernels.write_kv, _write_probe, kernels.why_not_write)
register("rope", _kernels.rope, _write_probe, kernels.why_not_write)
register(
    "rms_norm",
    _kernels.rms_norm,
    _probe("elementwise", "rms_norm", TYPE="BFloat16"),
    kernels.why_not_keep_row,
)
register("gate_mul", _kernels.gate_mul, _probe("elementwise", "gate", TYPE="BFloat16"), kernels.why_not_gate)
register("copy_blocks", _kernels.copy_blocks, _probe("copy", "copy_rows"), dtypes=())
register("argmax", _kernels.argmax, _probe("sampling", "argmax"), dtypes=(torch.float32,))
register(
    "sample", _kernels.sample, _probe("sampling", "sample"), dtypes=(torch.float32,), leaves=("typical",)
)
register("linear", functools.partial(linear.pack, _kernels), linear.probe, linear.why_not_pack)
