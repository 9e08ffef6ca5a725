"""Checks of configurations: reports all the problems that are found, not only the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.config import EngineConfig, load_config_file, problems_by_key
from quire.errors import ConfigError, QuireError
from quire.loader.info import gguf_file
from quire.server.model_links import read_model_config
from quire.triton.config_completion import read_engine_values


@dataclass
class Planned:
    """A model's configuration as read, with the problems found."""

    name: str
    config: EngineConfig | None = None
    """Configuration from the keys that are valid, perhaps without some that need others; None: there is none,
    and `problems` says why."""
    problems: list[str] = field(default_factory=list)
    """Reasons why an engine would not start, or why it cannot be planned."""
    advice: list[str] = field(default_factory=list)
    """Warnings, which do not prevent an engine from starting."""


def read(path: Path, settings: Mapping[str, Any]) -> list[Planned]:
    """Reads the configurations at a path: a checkpoint, a quire.json, a model of a repository, or a
    repository.

    Args:
        path: the path to read.
        settings: keys that take precedence over those in the files.

    Raises:
        ConfigError: the path is none of these.
        CheckpointError: the path is a directory without config.json that holds several GGUF files.
    """
    if not path.exists():
        raise ConfigError(f"{path}: does not exist")
    if path.is_file() and path.suffix == ".json":
        return [_planned(str(path), lambda: _of_file(path), settings)]
    if (path / "config.json").exists() or gguf_file(path) is not None:
        return [_planned(str(path), lambda: {"model": str(path)}, settings)]
    folders = [path] if (path / "config.pbtxt").exists() else sorted(path.glob("*/"))
    found = [
        _planned(folder.name, lambda folder=folder: _of_model(folder), settings)  # type: ignore[misc]
        for folder in folders
        if _is_generator(folder)
    ]
    if not found:
        raise ConfigError(f"{path}: neither a checkpoint, nor a quire.json, nor a repository with generators")
    return found


def _is_generator(folder: Path) -> bool:
    try:
        return bool(read_model_config(folder).get("backend") == "quire")
    except ConfigError:
        return (folder / "config.pbtxt").exists()  # `_of_model` says what is wrong with it


def _of_file(file: Path) -> dict[str, Any]:
    values = load_config_file(file)
    named = file.parent / Path(str(values.get("model", ""))).expanduser()
    return {**values, "model": str(named)}


def _of_model(folder: Path) -> dict[str, Any]:
    versions = sorted((one for one in folder.glob("[1-9]*") if one.name.isdigit()), key=lambda p: int(p.name))
    return read_engine_values(read_model_config(folder), versions[-1] if versions else folder / "1")


def _planned(name: str, values_of: Callable[[], dict[str, Any]], settings: Mapping[str, Any]) -> Planned:
    planned = Planned(name)
    try:
        values = {**values_of(), **settings}
    except ConfigError as error:
        planned.problems += error.problems
        return planned
    except QuireError as error:
        planned.problems.append(str(error))
        return planned
    wrong = problems_by_key(values)
    planned.problems += [problem for problems in wrong.values() for problem in problems]
    right = {key: value for key, value in values.items() if key not in wrong}
    try:
        planned.config = EngineConfig.from_mapping(right)
    except ConfigError as error:  # of keys that need others, each right by itself
        planned.problems += error.problems
        for key in ("preemption_mode", "lora_modules", "lora_root", "draft_model"):
            right.pop(key, None)
        try:
            planned.config = EngineConfig.from_mapping(right)
        except ConfigError:
            return planned
    for is_problem, text in _contradictions(planned.config):
        (planned.problems if is_problem else planned.advice).append(text)
    return planned


def _contradictions(config: EngineConfig) -> Iterator[tuple[bool, str]]:
    """Yields conflicts between keys, or between a key and the machine: whether the conflict stops an engine,
    and its text."""
    model, cache, limits = config.model, config.cache, config.scheduler
    tokenizer = Path(model.tokenizer)
    if model.tokenizer and not tokenizer.exists():
        yield True, f"tokenizer: {tokenizer} does not exist"
    if limits.trace_file and not Path(limits.trace_file).absolute().parent.is_dir():
        yield True, f"trace_file: {Path(limits.trace_file).absolute().parent} is not a directory"
    if limits.preemption_mode == "auto" and not cache.host_cache_memory:
        yield False, "preemption_mode=auto only recomputes: host_cache_memory is 0"
    if cache.num_blocks and cache.kv_cache_memory:
        yield False, "kv_cache_memory does not count, as num_blocks is stated too"
    if model.device == "cpu" and model.enforce_eager:
        yield False, "enforce_eager does not count on cpu"
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        yield (
            False,
            (
                f"max_num_batched_tokens={limits.max_num_batched_tokens} is below max_num_seqs="
                f"{limits.max_num_seqs}: a step has no token for some of the requests that run"
            ),
        )
    if (limits.max_prefill_tokens_per_request or 0) > limits.max_num_batched_tokens:
        yield False, "max_prefill_tokens_per_request does not count: it is above max_num_batched_tokens"
    if model.max_model_len and limits.max_waiting_tokens < model.max_model_len:
        yield False, "max_waiting_tokens is below max_model_len: the longest prompts are always refused"
    first, last = limits.default_ttft_deadline_ms, limits.default_deadline_ms
    if first and last and first > last:
        yield False, "default_ttft_deadline_ms does not count: it is above default_deadline_ms"
    if cache.kv_events.replay_endpoint and not cache.kv_events.endpoint:
        yield False, "kv_events: replay_endpoint does not count without endpoint"
    if cache.kv_connector.options and not cache.kv_connector.connector:
        yield False, "kv_connector: options do not count without connector"
    if any(one.weight != 1 for one in limits.tenants.values()) and limits.queue_policy != "fair":
        yield False, "tenants: weights count with queue_policy=fair only"
