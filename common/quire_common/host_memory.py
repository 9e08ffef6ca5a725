"""Large pieces of host memory: aligned, in huge pages where possible, shared between processes, or in mapped
files."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from pathlib import Path

import torch

ALIGNMENT = 64
"""Bytes of a cache line."""
HUGE_PAGE = 1 << 21


def aligned_bytes(count: int) -> torch.Tensor:
    """Allocates uint8 [count], aligned to cache lines, and in huge pages if it is large and the system has
    them. The content is arbitrary.

    Weights are read from end to end in every step, and with 4 KiB pages the processor's prefetchers stop at
    the end of each page. Blocks of keys and values lie anywhere, so with 4 KiB pages each costs a walk
    through the page tables, which is longer in a virtual machine.

    Raises:
        OSError, RuntimeError: there is no such memory.
    """
    if count < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        memory = torch.empty(count + ALIGNMENT, dtype=torch.uint8)
        start = -memory.data_ptr() % ALIGNMENT
    else:
        # Private: shared memory, Python's default, has huge pages only where /dev/shm has them.
        pages = mmap.mmap(-1, count + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = torch.frombuffer(pages, dtype=torch.uint8)  # keeps `pages`
        start = -memory.data_ptr() % HUGE_PAGE
        with contextlib.suppress(OSError):  # a kernel built without them
            # Whole ones only: what is left of the last one would be taken, too.
            pages.madvise(mmap.MADV_HUGEPAGE, start, count // HUGE_PAGE * HUGE_PAGE)
    return memory[start : start + count]


def prefer_huge_pages(memory: torch.Tensor) -> None:
    """Asks the system to use huge pages for memory that nobody has written to yet, if the memory is large and
    the system has huge pages. Filling the memory then causes fewer page faults."""
    begin = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    size = (memory.data_ptr() + memory.nbytes - begin) // HUGE_PAGE * HUGE_PAGE
    if size > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


def read_ahead(memory: torch.Tensor) -> None:
    """Asks the system to read a part of a mapped file from the disk, as far as it is not in memory, and does
    not wait for the data.

    Args:
        memory: the mapped part.
    """
    begin = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = memory.data_ptr() + memory.nbytes - begin
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_WILLNEED)


def resident_bytes() -> int:
    """Returns the resident memory of this process, in bytes."""
    pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    return int(pages) * mmap.PAGESIZE


def trim_heap() -> None:
    """Gives free memory of the C library's heap back to the system, if the library is glibc."""
    with contextlib.suppress(AttributeError):  # of another than glibc
        ctypes.CDLL(None).malloc_trim(0)


def shared_bytes(count: int) -> tuple[torch.Tensor, int]:
    """Allocates uint8 [count], all zero, in shared memory without a name. Returns it and the file descriptor
    by which other processes can map it. The system takes the memory when it is first used.

    Raises:
        OSError: the system refuses to make it.
    """
    fd = os.memfd_create("quire-blocks", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, count)
        return torch.frombuffer(mmap.mmap(fd, count), dtype=torch.uint8), fd
    except BaseException:
        os.close(fd)
        raise


def file_bytes(count: int, directory: Path) -> torch.Tensor:
    """Allocates uint8 [count], all zero, in a mapped file without a name. The system keeps in memory what it
    has room for. The file lasts as long as the tensor, and no longer than the process.

    Raises:
        OSError: the file cannot be made, for example because the disk has no room for it.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, count)
        return torch.frombuffer(mmap.mmap(file.fileno(), count), dtype=torch.uint8)
