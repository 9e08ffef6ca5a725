"""Paged attention by FlashInfer, where it is installed: optional, between CUDA C++ and the Triton language.

- `operators`: registration, what keeps it from being used, and what it hands to other implementations.
- `wrappers`: FlashInfer's wrappers, what they are told of a batch, and when one may be told of another.

Written after the sources of flashinfer-python 0.7.2.post1. **It has run neither with the package nor on a GPU
yet**: tests/kernels/test_flashinfer.py puts PyTorch behind the signatures of that version.

Importing this registers the implementation; it does not import `flashinfer`.
"""

from quire_kernels.flashinfer import operators

__all__ = ["operators"]
