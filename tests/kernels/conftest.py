"""Lets Triton kernels compute on CPU tensors where there is no GPU: in Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch


def interpret() -> None:
    """Registers the kernels for CPU tensors too.

    Tests that share the process are not affected: on the CPU these implementations stand behind all others.
    """
    is_late = "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ
    assert not is_late, "Triton's own functions are for GPUs: a test module that was collected imports it"
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from quire_kernels import registry
    from quire_kernels.triton_lang import operators

    if not operators.is_interpreted():
        return
    # Tests that were collected before these may have registered them for GPUs only.
    for names in registry._implementations.values():
        names.pop("triton", None)
    importlib.reload(operators)
    if operators.is_available():
        quicken_interpreter()


def quicken_interpreter() -> None:
    """Device functions of a kernel patch `triton.language` once, not whenever they are called.

    The launch has patched `tl` for the kernel, and what a device function patches besides (`tl.core`) stays
    so. Otherwise this is most of an interpreted kernel's time.
    """
    from triton.runtime import interpreter

    patched: set[Callable[..., Any]] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


if not torch.cuda.is_available():
    interpret()
