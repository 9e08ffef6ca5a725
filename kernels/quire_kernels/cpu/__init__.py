"""C++ kernels for CPUs: one library per instruction set, prebuilt in a wheel or compiled when it is first
needed.

Importing this package registers implementations for the instruction sets that `supported_isas` returns. A
library is loaded when it is first needed.
"""

from quire_kernels.cpu import operators

__all__ = ["operators"]
