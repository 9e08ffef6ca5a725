"""Triton-language kernels for GPUs.

Importing this registers the kernels without importing `triton`, which is loaded when one of them first runs.
With TRITON_INTERPRET=1 in the environment they also compute on CPU tensors, in Triton's interpreter. That is
slow and for tests, so the kernels then have a lower priority than the PyTorch reference.
"""

from __future__ import annotations

from quire_kernels.triton_lang import operators

__all__ = ["operators"]
