"""Loads classes that an operator's configuration names, as "file.py:Class" or "package.module:Class"."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, describe


def resolved(key: str, where: str, directory: Path) -> str:
    """Makes the file in a class name "file.py:Class" absolute, and appends a digest of the file's content.

    So models whose files differ do not share an engine. Other names are returned as they are.

    Args:
        key: the configuration key, for error messages.
        where: the class name.
        directory: directory that must contain the file; relative paths start there.

    Raises:
        ConfigError: there is no such file below `directory`, after links are followed.
    """
    file, colon, class_name = where.rpartition(":")
    if not (colon and file.endswith(".py")):
        return where
    root = directory.resolve()
    try:
        path = (root / file).resolve()
        is_there = path.is_relative_to(root) and path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        is_there = False
    if not is_there:
        raise ConfigError(f"{key}: no file {file!r:.200} in {root}")
    return f"{path}:{class_name}#{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def load_class(key: str, where: str) -> Any:
    """Imports the file or module of a class name and returns the object of that name, which is not checked
    to be a class.

    Raises:
        ConfigError: the class cannot be loaded; names it and says why.
    """
    place, _, class_name = where.partition("#")[0].rpartition(":")
    try:
        if place.endswith(".py"):
            module_name = f"quire_named_code_{hashlib.sha256(where.encode()).hexdigest()[:16]}"
            spec = importlib.util.spec_from_file_location(module_name, place)
            assert spec is not None and spec.loader is not None, place
            module = importlib.util.module_from_spec(spec)
            sys.modules[module_name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        return getattr(module, class_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key} cannot be loaded from {where!r:.300} "
            f'("file.py:Class" or "package.module:Class"): {describe(error)}'
        ) from None
