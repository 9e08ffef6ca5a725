"""Operators of the engine. Each has a PyTorch reference, and may have faster implementations.

`ops` holds the functions through which the engine calls operators, `metadata` the description of a ragged
batch, `registry` the choice of an implementation. The package never imports `quire`, and it can be imported
without CUDA's packages.
"""
