"""Files with one block each: a header that identifies the block, then the block.

A file is written under a temporary name and renamed when it is complete, so a process that is killed leaves
no incomplete file under a block's name. The checksum (XXH3-128) detects files damaged by a power failure or a
bad disk, so nothing waits for fsync. It takes little time compared with the disk. It protects against
accidents only: whoever may write into the directory (mode 0700) could sign anything. A CRC-32 would miss one
accident in 4 billion, which would show as silently wrong tokens.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import xxhash

from quire.kv_tiers.connector import MAX_KEY_BYTES, BlockArray

MAGIC = b"quireKV1"
"""First bytes of a block file, including the version of its format."""

_HEADER = struct.Struct("<8sQ16sI32s")
"""Header: magic, size of the block in bytes, fingerprint, length of the key, key (padded with zeros). The
checksum follows it."""
_CHECKSUM_BYTES = 16
HEADER_BYTES = _HEADER.size + _CHECKSUM_BYTES


class DamagedBlockError(Exception):
    """The file is damaged, or holds another block than the one asked for."""


def _header(fingerprint: str, key: bytes, data: BlockArray) -> bytes:
    assert 16 <= len(key) <= MAX_KEY_BYTES, len(key)
    head = _HEADER.pack(MAGIC, data.nbytes, bytes.fromhex(fingerprint), len(key), key)
    checksum = xxhash.xxh3_128(head)
    checksum.update(data.data)
    return head + checksum.digest()


def write_block(path: Path, temporary: Path, fingerprint: str, key: bytes, data: BlockArray) -> None:
    """Writes a file of mode 0600, which gets the name `path` only when it is complete.

    Args:
        temporary: a path in the same file system that no other writer uses.
        fingerprint: 32 hex digits.
        data: uint8 [block_bytes].

    Raises:
        OSError: `path` is unchanged. For example, the disk is full, or the directory is gone.
    """
    try:
        with open(temporary, "wb", opener=_private) as file:
            file.write(_header(fingerprint, key, data))
            file.write(data.data)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def read_block(path: Path, fingerprint: str, key: bytes, out: BlockArray) -> None:
    """Reads a block into `out`, uint8 [block_bytes], and verifies it.

    Raises:
        FileNotFoundError: there is no such file.
        DamagedBlockError: the file is truncated or changed, or of another key, size or fingerprint.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
        num_bytes = file.readinto(out.data)
        if num_bytes < out.nbytes or file.read(1):
            raise DamagedBlockError(f"{path}: is not {HEADER_BYTES + out.nbytes} bytes long")
    if header != _header(fingerprint, key, out):
        raise DamagedBlockError(f"{path}: header or checksum is wrong")


def key_of(name: str) -> bytes | None:
    """Returns the key in a file's name; None: `name` is not that of a block file."""
    if not name.endswith(".kv"):
        return None
    try:
        key = bytes.fromhex(name.removesuffix(".kv"))
    except ValueError:
        return None
    return key if 16 <= len(key) <= MAX_KEY_BYTES else None


def allocated_bytes(size: int) -> int:
    """Returns the bytes that a file of `size` bytes occupies on disk, if the file system allocates units of
    4096 bytes."""
    return -(-size // 4096) * 4096
