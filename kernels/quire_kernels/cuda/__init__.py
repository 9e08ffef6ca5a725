"""CUDA C++ kernels, compiled when first needed. They are optional, and usually preferred over all other
implementations.

Where things are:
- `src/*.cu`: the kernels. A kernel takes one structure by value. The comment at the head of a file says which
  macros the file needs, if any. `include/device.cuh` wraps the instructions that only a GPU has; the other
  headers are plain C++ on it.
- `compiler`: NVRTC, the cache on disk, the list of all variants, and the report of registers and spills.
- `launch`: the driver. `kernels`: operators on any launcher, with the structures as the sources declare them.
- `linear`: linear layers, by cuBLAS, by linear.cu or by torch's product of fp8 by fp8.
- `operators`: registration, and the fallback if a kernel is not available. `copy`: blocks to and from hosts.
- tests/kernels/cuda_emulator: the same sources on a CPU.

To add a kernel: write it with `KERNEL(name, Params, threads, blocks)` and the primitives of device.cuh, add
its variants to `compiler.all_units` (tests then compile it for every architecture and refuse spills), call it
in `kernels.Kernels`, register it in `operators`, and compare it with the reference in
tests/kernels/test_cuda_emulated.py.

Importing this package registers the operators; it loads neither the package `cuda` nor a driver.
"""

from quire_kernels.cuda import operators

__all__ = ["operators"]
