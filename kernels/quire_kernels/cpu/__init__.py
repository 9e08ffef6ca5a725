"""C++ kernels for CPUs: one library per instruction set, prebuilt in a wheel or compiled on first use.

Importing this registers implementations for each instruction set of the processor. A library is loaded, or
compiled, when it is first needed.
"""

from quire_kernels.cpu import operators

__all__ = ["operators"]
