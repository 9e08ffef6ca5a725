"""Checkpoints by one word: a path, or the name of a repository of a Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from quire_ensemble.errors import HubError, one_line

_NAME = re.compile(
    r"(?P<repository>\w[\w.-]*/\w[\w.-]*)(/(?P<file>(\w[\w.-]*/)*\w[\w.-]*\.gguf))?(@(?P<revision>\w[\w./-]*))?",
    re.ASCII,
)
_HEADERS = ("etag", "x-linked-etag", "x-repo-commit")
"""Whose values `huggingface_hub` makes names of files of."""
_FILES = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt", "*.tiktoken")
"""Of a repository: weights in safetensors, and what is said of them; no code and no pickles."""


def find_checkpoint(named: str | Path) -> Path:
    """The directory or .gguf file of a checkpoint, fetched where it is named as a hub does.

    What exists here is never looked for elsewhere. Cache, offline mode, token and the hub's address are those
    of `huggingface_hub` (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT).

    Args:
        named: a path, or OWNER/NAME, OWNER/NAME/FILE.gguf, each with @REVISION if need be.

    Returns:
        `named` itself where it is a path, which may not exist.

    Raises:
        HubError: the hub has no such repository, revision or file, or cannot be reached; one line.
    """
    path = Path(named).expanduser()
    match = _NAME.fullmatch(str(named))
    if match is None or path.exists():
        return path
    import huggingface_hub

    session = huggingface_hub.get_session()
    if _check_headers not in (hooks := session.event_hooks)["response"]:
        session.event_hooks = {**hooks, "response": [*hooks["response"], _check_headers]}
    repository, file, revision = match["repository"], match["file"], match["revision"]
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision))
        found = huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=list(_FILES))
    except Exception as error:  # of the network, the disk, or the hub's answer
        raise HubError(f"{named}: neither a path nor to be had from the hub: {one_line(error)}") from error
    if not (Path(found) / "config.json").is_file():
        raise HubError(f"{named}: the repository has no config.json; name one of its .gguf files")
    return Path(found)


def _check_headers(response: Any) -> None:
    """Refuses an answer whose headers lead out of the cache: the library writes wherever they do."""
    for name in _HEADERS:
        value = response.headers.get(name, "")
        if ".." in value or value.removeprefix("W/").strip('"').startswith("/"):
            raise ValueError(f"the hub's {name} is {value[:80]!r}")
