"""The cache folder, for example of compiled kernels, tuning results and packed weights.

Code in the folder is executed, so the folder is used only if it belongs to this user or to root, and no other
user can write in it. If the wanted folder is not like that, or cannot be made (no home, a read-only disk), a
folder of this user below the temporary directory takes its place. If that fails too, a folder of this process
alone does. One line in the log says so.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("quire_common")

ENVIRONMENT = "QUIRE_CACHE_DIR"
_DIGEST_BYTES = hashlib.sha256().digest_size


def cache_directory(name: str) -> Path:
    """Returns the folder `name` below QUIRE_CACHE_DIR, else $XDG_CACHE_HOME/quire, else ~/.cache/quire, or
    below the folder that takes their place.

    The folder may be missing or read-only: `keep` makes it, or logs that it could not. If it cannot be used
    (other users can write in it, for example), a folder of this process alone is returned.
    """
    folder = _root(_wanted(), Path(tempfile.gettempdir())) / name
    try:
        _check_ours(folder, folder.lstat())
    except FileNotFoundError:
        return folder
    except OSError as error:
        _warn_once(folder, str(error))
        return private_directory() / name
    return folder


def lasting_directory(name: str) -> Path | None:
    """Returns the folder of `cache_directory` for files that may be large. None: only a folder below the
    temporary directory can be used, which is no place for gigabytes."""
    folder, wanted = cache_directory(name), _wanted()
    return folder if folder.parent == wanted else None


@functools.cache
def private_directory() -> Path:
    """Returns a folder of this process alone. It is made by the first call, and removed when the interpreter
    ends (not if the process is killed)."""
    folder = Path(tempfile.mkdtemp(prefix="quire-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def kept(path: Path) -> bytes | None:
    """Returns the data that `keep` wrote to a file, without the digest. None: there is no such file, it
    cannot be read, or its digest shows that it is damaged. A damaged file is logged."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(stored[:-_DIGEST_BYTES]).digest() != stored[-_DIGEST_BYTES:]:
        logger.warning("%s is damaged and is made again", path)
        return None
    return stored[:-_DIGEST_BYTES]


def keep(path: Path, data: bytes) -> bool:
    """Writes data followed by its digest, which loaders of shared libraries and machine code ignore.

    The write is atomic: readers see the old file or the new one, and the last writer wins. Returns whether
    it succeeded; a failure is logged once per folder and reason.
    """
    return write(path, sealed(data))


def sealed(data: bytes) -> bytes:
    """Returns the data with the digest that `kept` looks for."""
    return data + hashlib.sha256(data).digest()


def write(path: Path, data: bytes) -> bool:
    """Writes data as `keep` does, without the digest."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        _warn_once(path.parent, error.strerror or str(error))
        return False
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Context manager that holds a lock on a file, so that one process at a time does the work in the block.
    If the file cannot be locked, the block runs without the lock."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield


def _wanted() -> Path | None:
    """Returns the cache folder that the environment or the home directory decides. None: there is no home
    directory (as for an unknown user in a container), or it or XDG_CACHE_HOME is not an absolute path."""
    if named := os.environ.get(ENVIRONMENT):
        return Path(named).absolute()
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # neither HOME nor an entry for this user
        return None
    return base / "quire" if base.is_absolute() else None


@functools.cache
def _root(wanted: Path | None, temporary: Path) -> Path:
    own = temporary / f"quire-cache-{os.getuid()}"
    reason = "there is no home directory"
    for root in (wanted, own):
        if root is None:
            continue
        try:
            # The temporary directory is everybody's: what has our name there may be somebody's link.
            _make_ours(root, follow=root is wanted)
        except OSError as error:
            reason = str(error) if root is wanted else reason
            continue
        if root is not wanted:
            logger.warning("the cache cannot be used (%s): %s is, see %s", reason, root, ENVIRONMENT)
        return root
    root = private_directory()
    logger.warning("the cache cannot be used (%s): nothing is kept, see %s", reason, ENVIRONMENT)
    return root


def _make_ours(folder: Path, *, follow: bool) -> None:
    """Makes the folder if it is missing. Raises OSError if that fails, if another user can write in the
    folder, or if it is a link and `follow` is false."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_ours(folder, folder.stat() if follow else folder.lstat())


def _check_ours(folder: Path, found: os.stat_result) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is no folder")
    if found.st_uid not in (0, os.getuid()) or found.st_mode & 0o022:
        who = f"owner {found.st_uid}, mode {found.st_mode & 0o777:o}"
        raise PermissionError(f"other users can write in {folder} ({who})")


@functools.cache
def _warn_once(folder: Path, reason: str) -> None:
    logger.warning("what is made cannot be kept in %s: %s", folder, reason)
