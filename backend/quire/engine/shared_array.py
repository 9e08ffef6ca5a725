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
    """Location of a float32 array [rows, columns] in a SharedBuffer of process `pid`. `open` must be called
    before the writer closes this buffer."""

    pid: int
    fd: int
    shape: tuple[int, int]
    device: int
    inode: int
    """With `device`, identifies the file, because the number of a closed descriptor may be reused."""

    def open(self) -> npt.NDArray[np.float32]:
        """Maps the array read-only; the memory lives as long as the array.

        Raises:
            UnavailableError: the writer is gone or has closed its buffer, or its memory cannot be mapped.
        """
        count = self.shape[0] * self.shape[1]
        if count == 0:
            return np.empty(self.shape, dtype=np.float32)
        found = -1
        try:
            # Opened as a path, whatever it is now is neither read nor waited for.
            found = os.open(f"/proc/{self.pid}/fd/{self.fd}", os.O_PATH | os.O_CLOEXEC)
            stat = os.fstat(found)
            if (stat.st_dev, stat.st_ino) != (self.device, self.inode):
                raise UnavailableError("the request's embeddings are gone: their buffer was closed")
            if stat.st_size < count * 4:
                raise UnavailableError(f"the request's embeddings are cut off at {stat.st_size} bytes")
            fd = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                memory = mmap.mmap(fd, count * 4, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
        except OSError as error:
            raise UnavailableError(f"the request's embeddings are gone: {error}") from None
        finally:
            if found >= 0:
                os.close(found)
        return np.frombuffer(memory, dtype=np.float32, count=count).reshape(self.shape)


class EmbedsBuffer:
    """Base of the writers' buffers on host and device: counts the bytes of both together.

    Keep a buffer until its request ends, because the engine may hold as much memory until then. A buffer's
    bytes count in `total_bytes` until it is deleted.
    """

    total_bytes: ClassVar[int] = 0
    """Number of bytes of all buffers of this process that are not deleted; closed ones count."""
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _num_bytes = 0

    def _reserve(self, num_bytes: int, limit: int | None) -> None:
        """Adds this buffer's bytes to `total_bytes`; raises UnavailableError if that would exceed `limit`
        bytes (None: no limit)."""
        with EmbedsBuffer._lock:
            total = EmbedsBuffer.total_bytes
            if limit is not None and total + num_bytes > limit:
                raise UnavailableError(
                    f"queue full: image_embeds of {total} bytes are waiting or in use, "
                    f"{num_bytes} more exceed the limit (max_embeds_bytes {limit})"
                )
            EmbedsBuffer.total_bytes += num_bytes
            self._num_bytes = num_bytes

    def close(self) -> None:
        raise NotImplementedError

    def __del__(self) -> None:
        try:
            self.close()
        finally:
            with EmbedsBuffer._lock:
                EmbedsBuffer.total_bytes -= self._num_bytes


class SharedBuffer(EmbedsBuffer):
    """The writer's side of a SharedArray: holds the memory's descriptor until `close`. Mappings of the memory
    outlive the descriptor."""

    def __init__(self, array: npt.NDArray[np.float32], limit: int | None = None) -> None:
        """Copies a two-dimensional array: the only copy between the caller's memory and the engine.

        Raises:
            UnavailableError: the buffers of this process would together exceed `limit` bytes.
        """
        self._fd = -1  # what __del__ needs if the next lines fail
        assert array.ndim == 2 and array.dtype == np.float32, (array.shape, array.dtype)
        self.shape = (int(array.shape[0]), int(array.shape[1]))
        self._reserve(array.nbytes, limit)
        self._fd = os.memfd_create("quire-embeds", os.MFD_CLOEXEC)
        self.array = array[:0]
        """The rows in the shared memory; `close` deletes this attribute."""
        if array.size:
            os.ftruncate(self._fd, array.nbytes)
            memory = mmap.mmap(self._fd, array.nbytes)
            self.array = np.frombuffer(memory, dtype=np.float32).reshape(self.shape)
            np.copyto(self.array, array)

    def descriptor(self) -> SharedArray:
        """Returns the location to send. Raises UnavailableError if the buffer is closed, as its request is
        over."""
        if self._fd < 0:
            raise UnavailableError("the request's embeddings are gone: their buffer was closed")
        stat = os.fstat(self._fd)
        return SharedArray(os.getpid(), self._fd, self.shape, stat.st_dev, stat.st_ino)

    def close(self) -> None:
        """Closes the descriptor and deletes `array`; may be called again. The memory lives as long as it
        is mapped, here or by the engine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            del self.array
