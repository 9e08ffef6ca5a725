"""SharedArray: a numpy array handed from a frontend to the engine without copies on the way.

The frontend writes it once into anonymous shared memory (memfd); the engine maps the same pages through
/proc/<pid>/fd/<fd>. Nothing has a name, so nothing is left behind by a process that is killed.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from quire.errors import UnavailableError


class SharedArray(msgspec.Struct, frozen=True, tag="shared"):
    """Where a float32 array lies; `open` must happen while the writer still holds its SharedBuffer."""

    pid: int
    fd: int
    shape: tuple[int, int]

    def open(self) -> npt.NDArray[np.float32]:
        """Maps the array, read-only; the memory lives as long as the array.

        Raises:
            UnavailableError: the writer is gone.
        """
        count = self.shape[0] * self.shape[1]
        if count == 0:
            return np.empty(self.shape, dtype=np.float32)
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UnavailableError(f"the request's embeddings are gone: {error}") from None
        try:
            memory = mmap.mmap(fd, count * 4, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        return np.frombuffer(memory, dtype=np.float32, count=count).reshape(self.shape)


class SharedBuffer:
    """The writer's side: holds the memory's descriptor until `close`; mappings of it live on.

    The engine's mapping lives as long as its request, and so should this object: `total_bytes` counts it.
    """

    total_bytes: ClassVar[int] = 0
    """Of all buffers of this process."""
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, array: npt.NDArray[np.float32]) -> None:
        """Copies a two-dimensional array; the only copy between the caller's memory and the engine."""
        assert array.ndim == 2 and array.dtype == np.float32, (array.shape, array.dtype)
        self.shape = (int(array.shape[0]), int(array.shape[1]))
        self._fd, self._num_bytes = -1, 0  # what __del__ needs if the next lines fail
        self._fd = os.memfd_create("quire-embeds", os.MFD_CLOEXEC)
        self.array = np.empty(self.shape, dtype=np.float32)
        """The rows in the shared memory."""
        if array.size:
            os.ftruncate(self._fd, array.nbytes)
            memory = mmap.mmap(self._fd, array.nbytes)
            self.array = np.frombuffer(memory, dtype=np.float32).reshape(self.shape)
            np.copyto(self.array, array)
        self._num_bytes = array.nbytes
        self._count(array.nbytes)

    def descriptor(self) -> SharedArray:
        assert self._fd >= 0, "the buffer is closed"
        return SharedArray(os.getpid(), self._fd, self.shape)

    def close(self) -> None:
        """Gives the descriptor and the mapping back; may be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            del self.array

    @classmethod
    def _count(cls, num_bytes: int) -> None:
        with cls._lock:
            cls.total_bytes += num_bytes

    def __del__(self) -> None:
        self.close()
        self._count(-self._num_bytes)
