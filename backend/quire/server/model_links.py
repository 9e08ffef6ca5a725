"""Makes a model repository of links to chosen models of other repositories, for `quire serve --load-model`.

Triton itself can serve a choice of models only in explicit mode. Unless its API is restricted, every client
may then load models, even with Python code that the client sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from quire.errors import ConfigError


def link_models(repositories: Sequence[Path], names: Iterable[str], target: Path) -> None:
    """Makes the directory `target` with a link to each named model and, for ensembles, to their members.

    A member that no repository has is left out: the server reports which ensemble lacks it.

    Raises:
        ConfigError: no repository has a named model, or several have a named model or a member.
    """
    target.mkdir(mode=0o700)
    found: dict[str, list[Path]] = {}
    for repository in repositories:
        for folder in sorted(repository.iterdir()):
            if folder.is_dir():
                found.setdefault(folder.name, []).append(folder)
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in found:
            raise ConfigError(
                f"--load-model: there is no model {name!r}, only {', '.join(found) or 'nothing'}"
            )
    for name in wanted:  # grows while members are found
        if len(found[name]) > 1:
            places = ", ".join(str(folder.parent) for folder in found[name])
            raise ConfigError(f"--load-model: {name!r} is in more than one repository: {places}")
        (target / name).symlink_to(found[name][0])
        wanted += [member for member in _members(found[name][0]) if member in found and member not in wanted]


def _members(model: Path) -> list[str]:
    """Returns the names of the models in an ensemble, in the order of its steps, each once. Empty for other
    models, and if the configuration cannot be read."""
    try:
        config = read_model_config(model)
    except ConfigError:
        return []  # the server says what is wrong with it
    steps = config.get("ensemble_scheduling", {}).get("step", [])
    return list(dict.fromkeys(step.get("model_name", "") for step in steps))


def read_model_config(model: Path) -> dict[str, Any]:
    """Returns what a model directory's config.pbtxt states, as a mapping without default values and unknown
    keys; needs tritonclient.

    Raises:
        ConfigError: the file is missing or broken; names it.
    """
    from google.protobuf import json_format, text_format
    from tritonclient.grpc import model_config_pb2

    path, config = model / "config.pbtxt", model_config_pb2.ModelConfig()
    try:
        text_format.Parse(path.read_text("utf-8"), config, allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    found: dict[str, Any] = json_format.MessageToDict(config, preserving_proto_field_name=True)
    return found
