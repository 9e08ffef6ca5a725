"""Checks of a checkpoint's directory before anything in it is opened, and paths to checkpoints."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from quire_common.errors import shown

MAX_TEXT = 2**27
"""Bytes of a file that is read whole. The largest tokenizer.json have some 2**25."""
_TEXTS = frozenset((".json", ".jinja", ".model", ".tiktoken", ".txt"))


def check_directory(directory: Path, fail: Callable[[str], Exception]) -> None:
    """Refuses pipes and devices, whose readers wait or read for ever, and texts that fill the memory.

    Args:
        directory: of a checkpoint.
        fail: makes the exception of a complaint.

    Raises:
        OSError: it cannot be listed.
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
    """The path without links. With them where it has letters that are none of this process's file system
    encoding: a stub of Triton, whose is ASCII, opens such a path by a link alone."""
    found = path.resolve()
    try:
        str(found).encode("utf-8")  # such letters are lone surrogates
    except UnicodeEncodeError:
        return path.absolute()
    return found


def with_ascii_name(path: Path, link: Path) -> Path:
    """A checkpoint's path, if it is of ASCII letters alone, else `link`, made to lead there: a .gguf file
    keeps its suffix, and its name where it can, as names tell the parts of a split one."""
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
