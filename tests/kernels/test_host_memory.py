"""Large pieces of memory must be able to have huge pages, whatever the machine has set for shared memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

import pytest
import torch

from quire_common.host_memory import ALIGNMENT, HUGE_PAGE, aligned_bytes, read_ahead
from tests.fixtures.waiting import wait_until

SMAPS = Path("/proc/self/smaps")


def vm_flags(address: int) -> set[str]:
    """Flags of the mapping that holds an address: `sh` shared, `hg` advised to have huge pages."""
    flags: set[str] = set()
    inside = False
    for line in SMAPS.read_text().splitlines():
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(header[1], 16) <= address < int(header[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = set(line.split()[1:])
    return flags


@pytest.mark.parametrize("count", [0, 1, 1000, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_as_many_bytes_as_asked_for_aligned(count: int) -> None:
    memory = aligned_bytes(count)
    assert (memory.shape, memory.dtype) == ((count,), torch.uint8)
    assert memory.data_ptr() % (HUGE_PAGE if count >= HUGE_PAGE else ALIGNMENT) == 0
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * count


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE") or not SMAPS.exists(), reason="no huge pages here")
def test_large_pieces_are_private_and_advised() -> None:
    memory = aligned_bytes(4 * HUGE_PAGE)
    memory.fill_(1)
    flags = vm_flags(memory.data_ptr())
    assert flags, "no such mapping"
    assert "sh" not in flags, "shared memory has huge pages only where /dev/shm has them"
    if Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        assert "hg" in flags


def test_too_much_is_an_error() -> None:
    with pytest.raises((OSError, OverflowError, ValueError)):
        aligned_bytes(1 << 62)


def pages_in_memory(memory: torch.Tensor) -> list[bool]:
    """Whether the system has each page of a mapping in memory."""
    begin = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = memory.data_ptr() + memory.nbytes - begin
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(size), pages) == 0
    return [bool(page & 1) for page in pages]


def test_a_part_of_a_mapped_file_is_read_ahead(tmp_path: Path) -> None:
    """A part that begins and ends within pages, of a file that the system has forgotten. (In tmpfs it forgets
    nothing.)"""
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 2**15)
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    forgets = not any(pages_in_memory(memory))
    part = memory[2**22 + 100 : 2**22 + 2**20 + 50]
    read_ahead(part)
    wait_until(lambda: all(pages_in_memory(part)))
    assert forgets != all(pages_in_memory(memory)), "no more than that"
