"""Finds a checkpoint by one word: a path, or the name of a repository of a Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from quire_common.errors import HubError, one_line

_FILE = r"(\w[\w.-]*/)*\w[\w.-]*\.gguf"
_NAME = re.compile(
    rf"(?P<repository>\w[\w.-]*/\w[\w.-]*)(/(?P<file>{_FILE})|:(?P<kind>\w[\w.-]*))?(@(?P<revision>\w[\w./-]*))?",
    re.ASCII,
)
_HEADERS = ("etag", "x-linked-etag", "x-repo-commit")
"""Headers of the hub's answers whose values `huggingface_hub` uses as file names."""
_FILES = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt", "*.tiktoken")
"""Patterns of the files that are fetched from a repository if no .gguf file is named: weights in safetensors,
and the files that describe them; no code and no pickles."""
_MOST_LISTED = 12


def find_checkpoint(named: str | Path) -> Path:
    """Returns the directory or .gguf file of a checkpoint. If `named` is no existing path but the name of a
    repository, the checkpoint is fetched first; of a split file, all parts are.

    A path that exists is never looked for on the hub. Cache, offline mode, token and the hub's address are
    those of `huggingface_hub` (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT).

    Args:
        named: a path, or OWNER/NAME, OWNER/NAME/FILE.gguf, OWNER/NAME:TYPE, each optionally with @REVISION.
            TYPE is how the name of a .gguf file ends, such as Q4_K_M, in upper or lower case. A repository
            without config.json needs neither FILE nor TYPE if it has one .gguf model.

    Returns:
        `named`, with ~ expanded, if it exists or has none of these forms; else the fetched directory, or the
        fetched file or its first part.

    Raises:
        HubError: the checkpoint cannot be fetched. For example, the hub has no such repository, revision or
            file, several files may be meant, or the hub cannot be reached. The message is one line.
    """
    path = Path(named).expanduser()
    match = _NAME.fullmatch(str(named))
    if match is None or path.exists():
        return path
    import huggingface_hub

    session = huggingface_hub.get_session()
    if _check_headers not in (hooks := session.event_hooks)["response"]:
        session.event_hooks = {**hooks, "response": [*hooks["response"], _check_headers]}
    fetch = partial(huggingface_hub.snapshot_download, match["repository"], revision=match["revision"])
    try:
        if match["file"] is None and match["kind"] is None:
            found = Path(fetch(allow_patterns=list(_FILES)))
            if (found / "config.json").is_file():
                return found
        try:
            listed: Any = fetch(allow_patterns=["*.gguf"], dry_run=True)
            files = [file.filename for file in listed]
        except huggingface_hub.errors.DryRunError:  # offline: what has been fetched before
            here = Path(fetch(allow_patterns=[], local_files_only=True))
            files = [str(file.relative_to(here)) for file in here.rglob("*.gguf")]
        names = _chosen(files, match["file"], match["kind"])
        found = Path(fetch(allow_patterns=list(names)))
    except Exception as error:  # of the network, the disk, or the hub's answer
        raise HubError(f"{named}: neither a path nor to be had from the hub: {one_line(error)}") from error
    return found / names[0]


def _chosen(files: Iterable[str], file: str | None, kind: str | None) -> tuple[str, ...]:
    """Returns the names of all parts of one of a repository's .gguf files.

    Args:
        files: names of all .gguf files, relative to the repository.
        file: name of the wanted file; of a split file, the name of any of its parts. None: any but mmproj*.
        kind: how the wanted name ends, before ".gguf" and the number of a part, in upper or lower case; None:
            in any way.

    Raises:
        LookupError: no file fits, several do, or parts are missing.
    """
    from quire_common.gguf_file import first_part, part_names

    listed = {name for name in files if re.fullmatch(_FILE, name, re.ASCII)}
    whole = {first_part(name) for name in listed}
    if file is not None:
        found = [first_part(file)]
    else:
        # What encodes images stands beside the model as mmproj-*.gguf.
        found = [name for name in whole if not name.rpartition("/")[2].lower().startswith("mmproj")]
    if kind is not None:
        ends = re.compile(rf"(.*[-._/])?{re.escape(kind)}(-\d{{5}}-of-\d{{5}})?\.gguf", re.IGNORECASE)
        found = list(filter(ends.fullmatch, found))
    if len(found) != 1 or found[0] not in whole:
        several = len(found) > 1
        these = sorted(found if several else whole)
        there = ", ".join(these[:_MOST_LISTED]) + (", ..." if len(these) > _MOST_LISTED else "")
        problem = "several .gguf files may be meant" if several else "it has no such .gguf file; it has"
        raise LookupError(f"{problem}: {there or 'none'}")
    names = part_names(found[0])
    if missing := sorted(set(names) - listed):
        raise LookupError(f"it has no {missing[0]}, a part of {found[0]}")
    return names


def _check_headers(response: Any) -> None:
    """Raises ValueError if one of _HEADERS in an answer of the hub may be a path out of the cache folder: the
    library would write there."""
    for name in _HEADERS:
        value = response.headers.get(name, "")
        if ".." in value or value.removeprefix("W/").strip('"').startswith("/"):
            raise ValueError(f"the hub's {name} is {value[:80]!r}")
