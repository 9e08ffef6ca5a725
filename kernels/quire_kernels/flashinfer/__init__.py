"""Paged attention by FlashInfer, an optional package. Its priority is between CUDA C++ and the Triton
language.

- `operators`: registration, conditions for its use, and calls that it leaves to other implementations.
- `wrappers`: FlashInfer's wrappers, how a batch is described to them, and when one can be used for another
  batch.

Written after the sources of flashinfer-python 0.7.2.post1. **It has run neither with the package nor on a GPU
yet**: tests/kernels/test_flashinfer.py puts PyTorch behind the signatures of that version.

Importing this registers the implementation; it does not import `flashinfer`.
"""

from quire_kernels.flashinfer import operators

__all__ = ["operators"]
