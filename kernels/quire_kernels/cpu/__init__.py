"""C++ kernels for CPUs: one library per instruction set, compiled on first use.

Importing this registers an implementation for each instruction set of the processor. Nothing is compiled
before one is chosen.
"""

from quire_kernels.cpu import operators

__all__ = ["operators"]
