"""Checks of a checkpoint's directory before anything in it is opened, and paths to checkpoints."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from quire_common.errors import shown

MAX_TEXT = 2**27
"""Most bytes of a checkpoint's file with a suffix among _TEXTS: such files are read whole. The largest
tokenizer.json files have about 2**25."""
_TEXTS = frozenset((".json", ".jinja", ".model", ".tiktoken", ".txt"))


def check_directory(directory: Path, fail: Callable[[str], Exception]) -> None:
    """Refuses a directory that holds a pipe, socket or device, whose readers may wait or read for ever, or a
    file of more than MAX_TEXT bytes with a suffix among _TEXTS. Subdirectories are not searched.

    Args:
        directory: directory of a checkpoint.
        fail: makes the exception of a complaint.

    Raises:
        OSError: the directory cannot be listed.
        Exception: made by `fail`; one line that names the file.
    """
    for file in directory.iterdir():
        try:
            found = file.stat()
        except OSError:  # a link to nowhere: whoever needs it says so
            continue
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise fail(f"{directory}: {shown(file.name)} is neither a file nor a directory")
        if file.suffix in _TEXTS and found.st_size > MAX_TEXT:
            raise fail(f"{directory}: {shown(file.name)} is longer than {MAX_TEXT} bytes")


def without_links(path: Path) -> Path:
    """Returns the path with its links resolved. If the resolved path has letters outside this process's file
    system encoding, returns the absolute path with its links: a stub of Triton whose encoding is ASCII can
    open such a path only through a link."""
    found = path.resolve()
    try:
        str(found).encode("utf-8")  # such letters are lone surrogates
    except UnicodeEncodeError:
        return path.absolute()
    return found


def with_ascii_name(path: Path, link: Path) -> Path:
    """Returns a checkpoint's absolute path if it has only ASCII characters or does not exist. Otherwise makes
    a symbolic link, and returns a path through it.

    If `path` is a file with an ASCII name, `link` leads to the file's folder, so that the file and the other
    parts of a split one keep their names. Otherwise the link leads to the file or folder itself, and its
    suffix is replaced by that of the file, or removed for a folder.

    Args:
        link: path of the link; what is there is replaced.
    """
    path = path.absolute()
    if str(path).isascii() or not path.exists():
        return path
    if path.is_file() and path.name.isascii():
        link.unlink(missing_ok=True)
        link.symlink_to(path.parent)
        return link / path.name
    link = link.with_suffix(path.suffix if path.is_file() else "")
    link.unlink(missing_ok=True)
    link.symlink_to(path)
    return link
