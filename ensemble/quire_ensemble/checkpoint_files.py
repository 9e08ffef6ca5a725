"""What a checkpoint's directory may hold, looked at before anything in it is opened."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from quire_ensemble.errors import shown

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
