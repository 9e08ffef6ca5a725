"""Operators of the engine: a PyTorch reference for each, faster implementations beside it, one registry.

`ops` holds the functions that models call, `metadata` the description of a ragged batch, `registry` the
choice of an implementation. This package imports torch and numpy, never `quire`, and no CUDA library at
import.
"""
