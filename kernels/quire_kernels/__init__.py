"""Operators of the engine. Each has a PyTorch reference, and may have faster implementations.

`ops` holds the functions that the engine calls, `metadata` the description of a ragged batch, `registry` the
choice of an implementation. This package uses torch, numpy, gguf and `quire_common`, never `quire`, and
imports no CUDA package when it is imported.
"""
