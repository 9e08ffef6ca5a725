"""DiskTier: keeps blocks in a directory, so that later processes can use them.

    DIRECTORY/<fingerprint>/lock              held by the process that writes
    DIRECTORY/<fingerprint>/write.tmp         the block that is being written
    DIRECTORY/<fingerprint>/<2 digits>/<key>.kv

The 2 digits are the first of the key. Each block has its own file rather than a record in a large segment. A
rename makes a write atomic, an unlink frees one block, and damage is limited to one block. A file's
modification time tells later processes about when its block was last used. Segments would need compaction.
They would save the file system's work per file, which matters for small blocks, and the scan of many files at
start.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np

from quire.errors import ConfigError
from quire.kv_tiers.block_file import (
    HEADER_BYTES,
    DamagedBlockError,
    allocated_bytes,
    key_of,
    read_block,
    write_block,
)
from quire.kv_tiers.connector import BlockArray, KVConnector
from quire.kv_tiers.throttled_warnings import ThrottledWarnings

logger = logging.getLogger("quire")

LOCK_RETRY_S = 1.0
RESCANS_PER_CAPACITY = 16
"""Number of parts of the capacity: whenever this process has written about one part, it counts other models'
files again."""

_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors after which DiskTier takes a directory as one that cannot be written for now, and
starts all the same."""


class DiskTier(KVConnector):
    """Stores the blocks of one model in files, and bounds the files of all models in the directory.

    Saved blocks wait in memory for a writer thread; they can be loaded meanwhile. Evictions and removals run
    on the same thread. So once it runs, no other thread of this process writes or removes blocks; loads only
    set modification times.

    One process per fingerprint writes. Another process with that fingerprint finds only blocks that were
    there when it started, and saves nothing. When the writer has ended, another process becomes the writer
    with one of its next saves. Processes with other fingerprints may share the directory. The writers among
    them count each other's files and may evict the oldest, which the others see as a miss. A process counts
    these files only now and then (RESCANS_PER_CAPACITY), so several at work may exceed the bound for a while.

    If the disk is full or read-only, blocks are not stored, a warning is logged, and later saves try again.
    If the directory was removed, a later save tries to create it.

    `clear` by the writer also removes the files, a little later. `clear` by another process hides the blocks
    from that process, until it becomes the writer.
    """

    name: ClassVar[str] = "disk"

    def __init__(
        self,
        directory: Path | str,
        capacity_bytes: int,
        *,
        block_bytes: int,
        fingerprint: str,
        max_queued_bytes: int = 2**27,
    ) -> None:
        """Scans the directory. If this process is the writer, also deletes files of the wrong size, and
        evicts blocks of all models beyond the capacity.

        Args:
            capacity_bytes: bound of the bytes that the blocks of all models in the directory occupy on disk.
            fingerprint: 32 hex digits.
            max_queued_bytes: most bytes of blocks that wait to be written; beyond it saves are skipped. There
                is room for one block at least.

        Raises:
            ConfigError: the directory cannot be used, or the capacity is less than one block. A directory
                that cannot be written for now is no error: later saves try again.
        """
        assert _FINGERPRINT.fullmatch(fingerprint), fingerprint
        self.block_bytes = block_bytes
        self.file_bytes = allocated_bytes(HEADER_BYTES + block_bytes)
        if capacity_bytes < self.file_bytes:
            raise ConfigError(
                f"disk_cache_size={capacity_bytes} holds no block: one takes {self.file_bytes} bytes"
            )
        self._fingerprint = fingerprint
        self._root = Path(directory)
        self._directory = self._root / fingerprint
        self._capacity = capacity_bytes
        self._max_queued = max(max_queued_bytes, block_bytes)
        self._lock = threading.Condition()
        self._index: OrderedDict[bytes, float] = OrderedDict()
        """Keys of the blocks that can be found on disk, least recently used first, with the time of the
        latest use that this process knows of (seconds since the epoch)."""
        self._pending: dict[bytes, BlockArray] = {}
        """Blocks that are not written yet, by key, each a uint8 [block_bytes]."""
        self._spare: list[BlockArray] = []
        """Buffers that hold no block any more, for reuse: new memory would cost more than the copy into
        it."""
        self._num_buffers = 0
        """Number of block buffers made so far: the spare ones, and those of blocks still to be written."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_working = self._is_closing = False
        self._on_disk: set[bytes] = set()
        """Keys of this model's files as far as known, including forgotten ones still to be removed. Only the
        writer thread uses it after `__init__`."""
        self._foreign: list[tuple[float, int, str]] = []
        """Blocks of other models as (mtime, bytes, path), oldest last, from the latest scan. Only the writer
        thread uses it after `__init__`."""
        self._foreign_bytes = self._written_since_scan = 0
        self._counts = dict.fromkeys(
            ("saved", "loaded", "evicted", "damaged", "lost", "dropped", "failed"), 0
        )
        self._shards: set[str] = set()
        self._unremoved: dict[bytes, None] = {}
        """Keys of forgotten blocks whose files the writer thread is removing, or could not remove yet."""
        self._warnings = ThrottledWarnings()
        self._lock_fd: int | None = None
        self._next_attempt = 0.0
        self._is_owner = False
        try:
            try:
                self._is_owner = self._try_lock()
            except OSError as error:
                if error.errno not in _UNWRITABLE:
                    raise
                self._complain(error)
            else:
                if not self._is_owner:
                    logger.warning(
                        "disk tier: %s is written by another process, this one only reads it", self._directory
                    )
            self._scan()
            if self._is_owner:
                self._make_room(0)
        except OSError as error:
            raise ConfigError(f"disk_cache_directory={directory}: {error}") from None
        logger.info(
            "disk tier: %s holds %d blocks of this model (%.1f MiB), %.1f MiB of others, of %.1f MiB",
            self._root,
            len(self._index),
            len(self._on_disk) * self.file_bytes / 2**20,
            self._foreign_bytes / 2**20,
            capacity_bytes / 2**20,
        )
        self._writer = threading.Thread(target=self._run, name="quire-disk-tier", daemon=True)
        self._writer.start()

    # Any thread.

    def contains(self, key: bytes) -> bool:
        return key in self._pending or key in self._index

    def save(self, keys: Sequence[bytes], data: BlockArray) -> None:
        with self._lock:
            if not self._is_owner and not self._take_over():
                self._counts["dropped"] += len(keys)
                return
            for key, row in zip(keys, data, strict=True):
                if key in self._pending:
                    continue
                if key in self._index:
                    self._use(key)
                    continue
                block = self._buffer()
                if block is None:
                    self._counts["dropped"] += 1
                    continue
                block[:] = row
                self._pending[key] = block
                self._jobs.append(partial(self._write, key, block))
            self._lock.notify_all()

    def load(self, keys: Sequence[bytes], out: BlockArray) -> int:
        for index, key in enumerate(keys):
            with self._lock:
                pending = self._pending.get(key)
                if pending is not None:
                    out[index] = pending  # within the lock, as the memory is used again
                elif key not in self._index:
                    return index
            if pending is None and not self._read(key, out[index]):
                return index
            with self._lock:
                self._counts["loaded"] += 1
        return len(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                if key in self._index:
                    self._use(key)

    def drop(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._pending.pop(key, None)
            self._forget([key for key in dict.fromkeys(keys) if key in self._index])

    def clear(self) -> int:
        with self._lock:
            count = len(self._index) + len(self._pending)
            self._pending.clear()
            self._forget(list(self._index))
            return count

    def flush(self, timeout_s: float | None = None) -> bool:
        with self._lock:
            return self._lock.wait_for(lambda: not self._jobs and not self._is_working, timeout_s)

    def close(self) -> None:
        """Ends the writer thread after it has processed its queue, and lets another process become the
        writer."""
        with self._lock:
            self._is_closing = True
            self._lock.notify_all()
        self._writer.join()
        if self._lock_fd is not None:
            os.close(self._lock_fd)

    def stats(self) -> dict[str, float]:
        with self._lock:
            return {
                "blocks": len(self._index) + len(self._pending),
                "bytes": len(self._index) * self.file_bytes,
                "capacity_bytes": self._capacity,
                "foreign_bytes": self._foreign_bytes,
                "queued_blocks": len(self._pending),
                "read_only": not self._is_owner,
                **{f"{name}_blocks": count for name, count in self._counts.items()},
            }

    # With the lock held.

    def _buffer(self) -> BlockArray | None:
        """Returns a buffer for one more block; None: the queue is full, or the tier is closing."""
        if self._is_closing:
            return None
        if self._spare:
            return self._spare.pop()
        if (self._num_buffers + 1) * self.block_bytes > self._max_queued:
            return None
        self._num_buffers += 1
        return np.empty(self.block_bytes, dtype=np.uint8)

    def _use(self, key: bytes) -> None:
        self._index[key] = time.time()
        self._index.move_to_end(key)

    def _forget(self, keys: list[bytes]) -> None:
        """Removes blocks from the index and, if this process is the writer, schedules the removal of their
        files."""
        for key in keys:
            del self._index[key]
        if keys and self._is_owner:
            self._jobs.append(partial(self._remove, keys))
            self._lock.notify_all()

    def _take_over(self) -> bool:
        """Tries to make this process the writer, unless it tried less than LOCK_RETRY_S ago; returns whether
        it succeeded."""
        if time.monotonic() < self._next_attempt or self._is_closing:
            return False
        try:
            self._is_owner = self._try_lock()
        except OSError as error:
            self._complain(error)
        if self._is_owner:
            logger.info("disk tier: %s has no writer any more, this process writes it now", self._directory)
            self._jobs.append(self._scan)
        return self._is_owner

    def _try_lock(self) -> bool:
        """Tries to become the writer, creating the directory and its lock if necessary; returns whether it
        succeeded.

        Raises:
            OSError: the directory or the lock cannot be created or used.
            ConfigError: the directory belongs to another user.
        """
        self._next_attempt = time.monotonic() + LOCK_RETRY_S
        self._open_directory()
        # Not for writing: an open file for that would keep the disk from being made read-only.
        fd = os.open(self._directory / "lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:
            os.close(fd)
            raise
        self._lock_fd = fd
        return True

    def _complain(self, error: OSError) -> None:
        what = f"disk tier: {self._directory} cannot be written: {error.strerror or error}"
        self._warnings.warn(f"write {error.errno}", what)

    # The reader.

    def _read(self, key: bytes, out: BlockArray) -> bool:
        path = self._path(key)
        try:
            read_block(path, self._fingerprint, key, out)
        except FileNotFoundError:  # evicted by another process, or between our look at the index and now
            self._drop_unreadable(key, "lost")
            return False
        except (DamagedBlockError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EIO:
                raise
            self._warnings.warn("damage", f"disk tier: {path} is damaged and not used: {error}")
            self._drop_unreadable(key, "damaged")
            return False
        try:
            os.utime(path)
        except OSError:  # only the order of eviction suffers
            pass
        with self._lock:
            if key in self._index:
                self._use(key)
        return True

    def _drop_unreadable(self, key: bytes, reason: str) -> None:
        with self._lock:
            if key in self._index:
                self._counts[reason] += 1
                self._forget([key])

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._directory / name[:2] / f"{name}.kv"

    # The writer thread (and __init__, before it runs).

    def _run(self) -> None:
        while True:
            with self._lock:
                self._is_working = False
                self._lock.notify_all()
                self._lock.wait_for(lambda: self._jobs or self._is_closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._is_working = True
            try:
                job()
            except OSError as error:
                self._complain(error)
            except Exception:
                logger.exception("disk tier: a change of %s failed", self._directory)

    def _write(self, key: bytes, block: BlockArray) -> None:
        try:
            if self._pending.get(key) is block:  # else it was dropped meanwhile
                self._write_wanted(key, block)
        finally:
            with self._lock:
                if self._pending.get(key) is block:  # its memory is another's from now on
                    del self._pending[key]
                    self._counts["failed"] += 1
                self._spare.append(block)

    def _write_wanted(self, key: bytes, block: BlockArray) -> None:
        written = False
        try:
            if not self._holds_lock():
                self._begin_anew()
            if self._is_owner and self._pending.get(key) is block:
                written = self._write_file(key, block)
        except OSError as error:
            self._shards.clear()  # the directories may have been removed
            self._complain(error)
        with self._lock:
            is_wanted = self._pending.get(key) is block
            if is_wanted:
                if written:  # first, as `contains` takes no lock
                    self._use(key)
                del self._pending[key]
                self._counts["saved" if written else "failed"] += 1
        if written and self._unremoved:
            self._remove([])
        if written and not is_wanted:
            self._remove([key])

    def _write_file(self, key: bytes, block: BlockArray) -> bool:
        """Writes a block's file, after evicting others if there is too little room. Returns False if there is
        no room even so. Raises OSError if the block cannot be written or another one cannot be removed."""
        if not self._make_room(self.file_bytes):
            return False
        path = self._path(key)
        if path.parent.name not in self._shards:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._shards.add(path.parent.name)
        write_block(path, self._directory / "write.tmp", self._fingerprint, key, block)
        self._on_disk.add(key)
        self._unremoved.pop(key, None)
        return True

    def _holds_lock(self) -> bool:
        """Returns whether the directory's lock file is the one that this process has locked."""
        if self._lock_fd is None:
            return False
        try:
            return os.path.samestat((self._directory / "lock").stat(), os.fstat(self._lock_fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _begin_anew(self) -> None:
        """Tries to become the writer again, creating the directory if necessary, and scans it. It was removed
        or replaced, for example because another disk was mounted there. Raises as `_try_lock` does."""
        with self._lock:  # else a save might try for the lock meanwhile, and find it taken: by ourselves
            self._is_owner = False
            if self._lock_fd is not None:  # while it is open, its lock keeps this process out, too
                os.close(self._lock_fd)
                self._lock_fd = None
            self._is_owner = self._try_lock()
        self._shards.clear()
        self._unremoved.clear()
        self._scan()

    def _remove(self, keys: list[bytes]) -> None:
        """Removes the files of these keys, and those that could not be removed before. Raises OSError if one
        cannot be removed."""
        self._unremoved.update(dict.fromkeys(keys))
        while self._unremoved:
            self._unlink(next(iter(self._unremoved)))

    def _unlink(self, key: bytes) -> None:
        self._path(key).unlink(missing_ok=True)
        self._on_disk.discard(key)
        self._unremoved.pop(key, None)

    def _make_room(self, num_bytes: int) -> bool:
        """Evicts old blocks of all models until `num_bytes` more fit, those first that were used longest ago
        as far as this process knows; returns whether they fit. Files of forgotten blocks are removed
        before."""
        self._written_since_scan += num_bytes
        if self._written_since_scan * RESCANS_PER_CAPACITY > self._capacity:
            self._scan_foreign()
        while len(self._on_disk) * self.file_bytes + self._foreign_bytes + num_bytes > self._capacity:
            if self._unremoved:
                self._unlink(next(iter(self._unremoved)))
                continue
            with self._lock:
                oldest = next(iter(self._index.items()), None)
                evicts_foreign = bool(self._foreign) and (oldest is None or self._foreign[-1][0] < oldest[1])
                if not evicts_foreign and oldest is None:
                    return False
            # The index follows the disk: where nothing can be removed nothing is forgotten.
            if evicts_foreign:
                _, size, path = self._foreign.pop()
                Path(path).unlink(missing_ok=True)
                self._foreign_bytes -= size
            else:
                assert oldest is not None
                self._unlink(oldest[0])
            with self._lock:
                if not evicts_foreign and oldest is not None:
                    self._index.pop(oldest[0], None)
                self._counts["evicted"] += 1
        return True

    def _open_directory(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self._directory.stat()
        if status.st_uid != os.geteuid():
            raise ConfigError(f"disk_cache_directory: {self._directory} belongs to another user")
        if status.st_mode & 0o077:
            self._directory.chmod(0o700)

    def _scan(self) -> None:
        """Builds the index from the files on disk, and counts other models' files. If this process is the
        writer, deletes files of the wrong size."""
        found: list[tuple[float, bytes]] = []
        for key, mtime, size, path in _block_files(self._directory):
            if size == HEADER_BYTES + self.block_bytes:
                found.append((mtime, key))
            elif self._is_owner:
                self._warnings.warn("damage", f"disk tier: {path} is deleted: it has {size} bytes")
                self._counts["damaged"] += 1
                Path(path).unlink(missing_ok=True)
        found.sort()
        with self._lock:
            self._index = OrderedDict((key, mtime) for mtime, key in found)
            for key in self._index.keys() & self._pending.keys():
                del self._pending[key]
        self._on_disk = set(self._index)
        self._scan_foreign()

    def _scan_foreign(self) -> None:
        self._foreign = []
        for entry in _entries(self._root):
            if _FINGERPRINT.fullmatch(entry.name) and entry.name != self._fingerprint:
                self._foreign.extend(
                    (mtime, allocated_bytes(size), path) for _, mtime, size, path in _block_files(entry.path)
                )
        self._foreign.sort(reverse=True)
        self._foreign_bytes = sum(size for _, size, _ in self._foreign)
        self._written_since_scan = 0


def _block_files(directory: Path | str) -> Iterator[tuple[bytes, float, int, str]]:
    """Yields key, modification time, size in bytes and path of each block of one model; skips files that
    vanish meanwhile."""
    for shard in _entries(directory):
        if not shard.is_dir(follow_symlinks=False):
            continue
        for entry in _entries(shard.path):
            key = key_of(entry.name)
            if key is None:
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield key, status.st_mtime, status.st_size, entry.path


def _entries(directory: Path | str) -> list[os.DirEntry[str]]:
    """Returns the entries of a directory; none if it is gone or may not be read."""
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, PermissionError):
        return []
