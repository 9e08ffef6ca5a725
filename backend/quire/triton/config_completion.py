"""A generator's configuration: tensors to declare to Triton, and engine keys from its model directory.

A model directory needs only `config.pbtxt` with `backend: "quire"` and a checkpoint. If `1/` is the version
directory, engine keys are in
- `1/quire.json`, or without it in vllm_backend's `1/model.json` (`vllm_config.py`), and
- `parameters` of config.pbtxt.
The key `model` is a path, absolute or relative to `1/` or to the model directory, or a name on Hugging Face's
hub. Without it the checkpoint's files must be in `1/` or beside it in the model directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.config import MTP, EngineConfig, load_config_file
from quire.errors import CheckpointError, ConfigError
from quire.loader.info import gguf_file
from quire.named_code import resolved
from quire.triton import vllm_config
from quire_common.checkpoint_files import without_links
from quire_common.errors import HubError
from quire_common.hub import find_checkpoint
from quire_ensemble.generator_schema import MAX_PROMPTS, inputs_of, outputs_of

_OF_OTHERS = frozenset(
    (
        *("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"),
        *(vllm_config.METRICS, "ENABLE_VLLM_HEALTH_CHECK"),
    )
)
"""Parameters of Triton's Python backend and of vllm_backend that config.pbtxt may have besides engine keys.
ENABLE_VLLM_HEALTH_CHECK has no effect here, because an engine that dies is replaced."""


def complete(config: Any) -> Any:
    """Completes an auto-complete model configuration and returns it: adds the generator's tensors that it
    lacks, sets `max_batch_size`, and makes it decoupled if it states no transaction policy.

    Raises:
        ConfigError: the configuration has dynamic_batching, or a max_batch_size above MAX_PROMPTS.
    """
    given = config.as_dict()
    size = given.get("max_batch_size", 0)
    if size > MAX_PROMPTS:
        raise ConfigError(f"max_batch_size must be at most {MAX_PROMPTS}, got {size}")
    if given.get("dynamic_batching"):
        raise ConfigError("dynamic_batching must not be set: requests are batched by the engine")
    declared = {kind: {t["name"] for t in given.get(kind, [])} for kind in ("input", "output")}
    for spec in inputs_of(batched=size > 0):
        if spec.name not in declared["input"]:
            config.add_input(spec.input_config())
    for spec in outputs_of(batched=size > 0):
        if spec.name not in declared["output"]:
            config.add_output(spec.output_config())
    config.set_max_batch_size(max(0, size))
    if "model_transaction_policy" not in given:
        config.set_model_transaction_policy({"decoupled": True})
    return config


def is_decoupled(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def is_batched(model_config: Mapping[str, Any]) -> bool:
    """Whether the model's tensors have a batch dimension."""
    return int(model_config.get("max_batch_size", 0)) > 0


def declared_outputs(model_config: Mapping[str, Any]) -> frozenset[str] | None:
    """Names of the outputs in the model's configuration; None if it lists none.

    A client that names no output asks for all of these.
    """
    return frozenset(output["name"] for output in model_config.get("output", ())) or None


def num_instances(model_config: Mapping[str, Any]) -> int:
    """Sum of `count` over a model's instance groups, at least 1. (Triton starts `count` instances on each
    device of a group.)"""
    return max(1, sum(group.get("count", 1) for group in model_config.get("instance_group", ())))


def read_engine_config(model_config: Mapping[str, Any], version_directory: Path) -> EngineConfig:
    """The engine's configuration from the model directory.

    Args:
        model_config: Triton's, as a mapping (`json.loads(args["model_config"])`).
        version_directory: `<repository>/<model>/<version>`.

    Raises:
        ConfigError: keys are wrong, such as an unknown or ill-typed one, or one that the JSON file and
            config.pbtxt state differently; or the version directory has no such file as a class name states.
        CheckpointError: no checkpoint is found, or this process cannot open a path.
    """
    config = EngineConfig.from_mapping(read_engine_values(model_config, version_directory))
    processors = {
        name: resolved(f"logits_processors: {name!r:.80}", where, version_directory)
        for name, where in config.model.logits_processors.items()
    }
    model_class = resolved("model_class", config.model.model_class, version_directory)
    return config.replace(logits_processors=processors, model_class=model_class)


def read_engine_values(model_config: Mapping[str, Any], version_directory: Path) -> dict[str, Any]:
    """Engine keys as the model directory states them; `read_engine_config` checks them.

    Paths of the model, the draft model, the tokenizer and adapters are made absolute, and usually without
    links; a model that is a file keeps its own name.

    Raises:
        ConfigError, CheckpointError: see `read_engine_config`.
    """
    values: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    file = version_directory / "quire.json"
    if file.exists():
        values = load_config_file(file)
    elif (version_directory / vllm_config.FILE).exists():
        file = version_directory / vllm_config.FILE
        theirs = load_config_file(file)
        values = vllm_config.translated(theirs)
    problems: list[str] = []
    for key, parameter in model_config.get("parameters", {}).items():
        if key in _OF_OTHERS:
            continue
        if key.isupper():
            problems.append(f"config.pbtxt: parameter {key!r:.80} is unknown")
            continue
        text = parameter["string_value"]
        if key in values and str(values[key]) != text:
            problems.append(f"{key} is {values[key]!r} in {file} but {text!r} in config.pbtxt: state it once")
        values[key] = text
    if problems:
        raise ConfigError(*problems)
    checkpoint = _checkpoint(str(values.get("model", "")), version_directory)
    if "quantization" not in values:
        vllm_config.check_quantization(theirs.get("quantization"), checkpoint)
    values["model"] = str(checkpoint)
    _find_adapters(values, version_directory)
    for key in ("tokenizer", "draft_model"):
        if isinstance(named := values.get(key), str) and named and (key, named) != ("draft_model", MTP):
            _check_letters(key, named)
            values[key] = str(without_links(version_directory / named))
    return values


def _find_adapters(values: dict[str, Any], version_directory: Path) -> None:
    """Adds vllm_backend's list of adapters to `lora_modules` if adapters are on, and resolves paths of
    adapters.

    A relative path of an adapter begins in the version directory. If nothing is there, it begins in the
    directory in which the server was started, as in vllm_backend. A relative `lora_root` always begins in the
    version directory.
    """
    modules = values.get("lora_modules") or {}
    if isinstance(modules, str):
        try:
            modules = json.loads(modules)
        except (ValueError, RecursionError):
            modules = None
    listed = version_directory / vllm_config.ADAPTERS
    if isinstance(modules, dict):  # anything else is refused where keys are checked
        if str(values.get("enable_lora", "")).strip().lower() == "true" and listed.exists():
            theirs = load_config_file(listed)
            if twice := [name for name in theirs if name in modules]:
                raise ConfigError(f"{listed}: {twice[0]!r} is in lora_modules, too: state it once")
            modules = {**modules, **theirs}
        if modules:
            values["lora_modules"] = {
                name: str(_beside(path, version_directory)) if isinstance(path, str) else path
                for name, path in modules.items()
            }
    if isinstance(root := values.get("lora_root"), str) and root:
        _check_letters("lora_root", root)
        values["lora_root"] = str(without_links(version_directory / root))


def _beside(path: str, version_directory: Path) -> Path:
    _check_letters("lora_modules", path)
    found = without_links(version_directory / path)
    return found if found.exists() else without_links(Path(path))


def _check_letters(key: str, named: str) -> None:
    try:
        os.fsencode(named)
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{key} {named!r}: Triton's Python opens paths of ASCII letters alone: name a link to it"
        ) from None


def shows_vllm_metrics(model_config: Mapping[str, Any], version_directory: Path) -> bool:
    """Whether the model directory asks for vllm_backend's metrics, by vllm_backend's own rules."""
    file = version_directory / vllm_config.FILE
    return vllm_config.shows_metrics(model_config, lambda: load_config_file(file) if file.exists() else {})


def _checkpoint(named: str, version_directory: Path) -> Path:
    if named:
        _check_letters("model", named)
        for base in (version_directory, version_directory.parent):
            path = base / Path(named).expanduser()
            if path.exists():
                return _resolved(path)
        try:
            if (path := find_checkpoint(named)).exists():
                return _resolved(path)
        except HubError as error:
            raise CheckpointError(f"model {error} (relative to {version_directory})") from None
        raise CheckpointError(f"model {named!r}: no such directory or file (relative to {version_directory})")
    for path in (version_directory, version_directory.parent):
        if (path / "config.json").exists():
            return without_links(path)
        if (file := gguf_file(path)) is not None:
            return _resolved(file)
    raise CheckpointError(
        f"no checkpoint: {version_directory} has neither config.json nor a quire.json that names a `model`, "
        f"and {version_directory.parent} has no config.json"
    )


def _resolved(path: Path) -> Path:
    """A checkpoint's path, usually without links, so that all names of one directory give the same path.

    A file keeps its name even if it is a link: the link's name says that it is a .gguf file, and which part
    of a split one, while the name of the link's target may not.
    """
    return without_links(path) if path.is_dir() else without_links(path.parent) / path.name


def visible_device(args: Mapping[str, str]) -> dict[str, str]:
    """Environment variables for the engine: with KIND_GPU it sees the instance's device alone.

    Empty for other kinds.
    """
    if args.get("model_instance_kind") != "GPU":
        return {}
    index = args["model_instance_device_id"]
    # The server counts the devices that it sees itself.
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return {"CUDA_VISIBLE_DEVICES": visible[int(index)] if visible else index}


def with_instance_kind(config: EngineConfig, args: Mapping[str, str]) -> EngineConfig:
    """Returns the configuration with the device of KIND_CPU or KIND_GPU, if its own `device` is "auto";
    otherwise unchanged."""
    kinds = {"CPU": "cpu", "GPU": "cuda"}
    kind = kinds.get(args.get("model_instance_kind", ""))
    if kind is None or config.model.device != "auto":
        return config
    return config.replace(device=kind)


def parse_model_config(args: Mapping[str, str]) -> dict[str, Any]:
    config = json.loads(args["model_config"])
    assert isinstance(config, dict)
    return config
