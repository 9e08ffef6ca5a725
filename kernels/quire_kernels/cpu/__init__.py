"""C++ kernels for CPUs: a library per instruction set, compiled on first use.

Importing this registers the implementations of the instruction sets that the processor has; nothing is
compiled before one of them is picked.
"""

from quire_kernels.cpu import operators

__all__ = ["operators"]
