"""Writes a complete, commented Triton model repository for a checkpoint.

    OUT/generator/config.pbtxt, 1/quire.json, 1/<checkpoint>   streaming generator and the checkpoint
    OUT/generator_unary/config.pbtxt, 1/quire.json             same engine, one response per request
    OUT/tokenizer/config.pbtxt, 1/model.py                     text or chat messages to token ids
    OUT/chat/config.pbtxt                                      ensemble tokenizer -> generator
    OUT/chat_unary/config.pbtxt                                ensemble tokenizer -> generator_unary

and for a checkpoint with a vision tower of a known family, instead of the last three,

    OUT/vision_preprocessor/config.pbtxt, 1/model.py           messages and images to token ids and pixels
    OUT/vision_encoder/config.pbtxt, 1/model.py                pixels to embeddings
    OUT/vision_chat/config.pbtxt                               ensemble of the two and generator
    OUT/vision_chat_unary/config.pbtxt                         ensemble of the two and generator_unary

`<checkpoint>` is a link or a copy; with placement `path` there is none, and quire.json names the checkpoint's
path. An ensemble also has the file 1/.gitkeep. The folder `model_repository/` of this project holds this
builder's output for the two demo checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from quire_common.checkpoint_files import check_directory
from quire_common.gguf_file import GGUFError, GGUFFile, part_names
from quire_ensemble import pbtxt
from quire_ensemble.errors import BuildError
from quire_ensemble.tokenizer import TOKENIZER_FILES, Tokenizer
from quire_ensemble.vision_config import has_known_tower

Placement = Literal["link", "copy", "path"]
PLACEMENTS: tuple[Placement, ...] = ("link", "copy", "path")

VERSION = "1"
"""Triton's version directory; the builder writes one version."""

ENGINE_DEFAULTS: Mapping[str, tuple[Any, str]] = {
    "dtype": ("auto", "auto (the checkpoint's own), float32, bfloat16 or float16."),
    "device": ("auto", "cpu, cuda, or auto: cuda where a CUDA device is visible."),
    "max_model_len": (None, "Longest prompt plus output in tokens; null: what the checkpoint allows."),
    "block_size": (None, "Tokens per block of the KV cache; null: 16, or more where layers keep states."),
    "kv_cache_memory": (None, 'Size of the KV cache, such as "512MiB"; null: a fraction of free memory.'),
    "max_num_seqs": (64, "Most requests computed in one step."),
    "max_num_batched_tokens": (512, "Token budget of one step, prefill and decode together."),
    "max_waiting_requests": (1024, "Requests that may wait; one more is answered UNAVAILABLE."),
}
"""Keys spelled out in every quire.json, each with the engine's own default and a comment; a test compares the
defaults with quire.config. Other keys of quire.config, except `model`, may be given as engine options."""

_PYTHON_MODEL = '''\
"""{about}; the code is in quire_ensemble.{module}."""

import atexit
import gc
import locale
import sys

# Triton's interpreter looks for modules in the server's working directory first.
sys.path[:] = filter(None, sys.path)
# Triton runs Python models in the C locale, where files are read as ASCII.
locale.setlocale(locale.LC_ALL, "C.UTF-8")
# Collecting all of transformers when the stub ends would hold up the server's stop by a second.
atexit.register(gc.freeze)

import triton_python_backend_utils as pb_utils  # noqa: E402

{imports}


class TritonPythonModel({base}):
    pb_utils = pb_utils
'''


_MEMBERS: Mapping[str, tuple[Callable[..., str], str, str]] = {
    "tokenizer": (pbtxt.tokenizer_config, "Text or chat messages to token ids", "TokenizerModel"),
    "vision_preprocessor": (
        pbtxt.vision_preprocessor_config,
        "Messages with images to token ids and pixels",
        "VisionPreprocessorModel",
    ),
    "vision_encoder": (pbtxt.vision_encoder_config, "Pixels to embeddings", "VisionEncoderModel"),
}
"""Models that may stand before the generator in an ensemble, by role. Each has the renderer of its
config.pbtxt, a line on what it does, and the name of its class in `quire_ensemble.triton_<role>`."""


def _python_model(role: str) -> str:
    """Returns the text of a member's model.py, which subclasses the role's class in `_MEMBERS`."""
    _, about, base = _MEMBERS[role]
    module = f"triton_{role}"
    lines = [f"from quire_ensemble.{module} import {base}  # noqa: E402"]
    if role != "vision_encoder":
        forbid = "from quire_ensemble.tokenizer import forbid_torch  # noqa: E402"
        lines = [forbid, *lines, "", "forbid_torch()"]
    return _PYTHON_MODEL.format(about=about, module=module, base=base, imports="\n".join(lines))


def build_repository(
    checkpoint: Path,
    out: Path,
    *,
    name_prefix: str = "",
    instance_count: int = 1,
    placement: Placement = "link",
    engine_options: Mapping[str, Any] | None = None,
    generator_name: str = "generator",
    force: bool = False,
) -> list[Path]:
    """Writes the model repository.

    Args:
        checkpoint: Hugging Face directory with config.json and tokenizer files, or a .gguf file. A checkpoint
            that already lies at its place in the repository stays there.
        out: directory of the repository; made if missing. Other models in it are not touched.
        name_prefix: put before every model's name, so that several checkpoints share one repository.
        instance_count: frontends of the streaming generator (all serve one engine).
        placement: how the checkpoint gets into the repository: a symbolic link, a copy, or only its absolute
            path in the configuration.
        engine_options: keys of quire.json, except `model`; the engine checks them when it loads.
        generator_name: name of the generator, for a repository that already holds another one.
        force: overwrite files of models that exist, and links in the checkpoint's place.

    Returns:
        Files written, in the order of writing; the checkpoint's links or copies last.

    Raises:
        BuildError: the checkpoint is incomplete or broken, files are in the way, `name_prefix` has a
            character that is not allowed, or `engine_options` has `model`. Nothing is written then.
    """
    checkpoint, out = checkpoint.absolute(), out.absolute()
    options = dict(engine_options or {})
    has_vision = has_known_tower(_checkpoint_config(checkpoint))
    if name_prefix and not all(c.isalnum() or c in "_-." for c in name_prefix):
        raise BuildError(f"name prefix {name_prefix!r} may hold letters, digits, '_', '-' and '.' only")
    if "model" in options:
        raise BuildError("engine option 'model' is set by the checkpoint")

    generator = name_prefix + generator_name
    members = ("vision_preprocessor", "vision_encoder") if has_vision else ("tokenizer",)
    before = {role: name_prefix + role for role in members}
    place = out / generator / VERSION / checkpoint.name
    in_place = place.exists() and place.resolve() == checkpoint.resolve()
    own, shared = checkpoint.name, f"../{generator}/{VERSION}/{checkpoint.name}"
    unary = f"../{shared}"
    if placement == "path" and not in_place:
        own = shared = unary = str(checkpoint)

    files: dict[Path, str] = {}
    for role, model in before.items():
        files[out / model / "config.pbtxt"] = _MEMBERS[role][0](model, checkpoint=shared)
        files[out / model / VERSION / "model.py"] = _python_model(role)
    for suffix, decoupled, location in (("", True, own), ("_unary", False, unary)):
        model = generator + suffix
        files[out / model / "config.pbtxt"] = pbtxt.generator_config(
            model, decoupled=decoupled, instance_count=instance_count if decoupled else 1
        )
        files[out / model / VERSION / "quire.json"] = engine_file(location, options)
        ensemble = f"{name_prefix}{'vision_chat' if has_vision else 'chat'}{suffix}"
        files[out / ensemble / "config.pbtxt"] = pbtxt.ensemble_config(
            ensemble, before=before, generator=model, decoupled=decoupled
        )
        # Triton wants a version directory of every model, and git keeps no empty one.
        files[out / ensemble / VERSION / ".gitkeep"] = ""

    existing = sorted(str(path) for path in files if path.exists())
    if existing and not force:
        raise BuildError(f"{existing[0]} exists already; use --force to overwrite, or --name-prefix")
    places = {}
    if placement != "path" and not in_place:
        names = part_names(checkpoint.name) if checkpoint.is_file() else (checkpoint.name,)
        places = {place.with_name(name): checkpoint.with_name(name) for name in names}
    for part in places:
        if (part.exists() or part.is_symlink()) and not (part.is_symlink() and force):
            raise BuildError(f"{part} exists already and is not this checkpoint; remove it first")
    for part in places:
        part.unlink(missing_ok=True)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    written = list(files)
    for part, source in places.items():
        _place_checkpoint(source, part, placement)
    return [*written, *places]


def _checkpoint_config(checkpoint: Path) -> dict[str, Any]:
    """Returns the config.json of a checkpoint that a repository can be built for; empty for a .gguf file.

    Raises:
        BuildError: no repository can be built for it. For example, its config.json is missing or states no
            architectures, the .gguf file is broken, or there is no tokenizer.
    """
    if checkpoint.is_file() and checkpoint.suffix == ".gguf":
        if "tokenizer.ggml.model" not in _open_gguf(checkpoint).metadata:
            raise BuildError(f"{checkpoint}: holds no tokenizer")
        return {}
    if not checkpoint.is_dir():
        raise BuildError(f"{checkpoint}: neither a Hugging Face checkpoint directory nor a .gguf file")
    config = checkpoint / "config.json"
    if not config.is_file():
        raise BuildError(f"{config}: missing; a Hugging Face checkpoint directory is expected")
    values = _read_json(config)
    if not values.get("architectures"):
        raise BuildError(f"{config}: states no 'architectures'; a model's config.json is expected")
    if not Tokenizer.exists(checkpoint):
        raise BuildError(f"{checkpoint}: no tokenizer files; expected one of {', '.join(TOKENIZER_FILES)}")
    return values


def _open_gguf(file: Path) -> GGUFFile:
    try:
        return GGUFFile.open(file)
    except (OSError, GGUFError) as error:
        raise BuildError(f"{file}: broken GGUF file: {error}") from None


def _read_json(file: Path) -> dict[str, Any]:
    check_directory(file.parent, BuildError)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BuildError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise BuildError(f"{file}: must hold a JSON object")
    return values


def has_chat_template(checkpoint: Path) -> bool:
    """Whether the checkpoint has a chat template, as far as its files show without loading the tokenizer.

    Raises:
        BuildError: a file that had to be read is broken.
    """
    if checkpoint.is_file():
        return bool(_open_gguf(checkpoint).metadata.get("tokenizer.chat_template"))
    if (checkpoint / "chat_template.jinja").is_file() or (checkpoint / "chat_template.json").is_file():
        return True
    config = checkpoint / "tokenizer_config.json"
    return config.is_file() and bool(_read_json(config).get("chat_template"))


def engine_file(model: str, options: Mapping[str, Any]) -> str:
    """Returns the text of a quire.json: the checkpoint's path `model`, the keys of ENGINE_DEFAULTS, then
    further options."""
    lines: dict[str, Any] = {
        "//": "Engine of this model. Keys that begin with // are comments.",
        "//model": "Checkpoint directory or .gguf file; a relative path starts at this file's directory.",
        "model": model,
    }
    for key, (default, comment) in ENGINE_DEFAULTS.items():
        lines[f"//{key}"] = comment
        lines[key] = options.get(key, default)
    lines |= {key: value for key, value in options.items() if key not in ENGINE_DEFAULTS}
    return json.dumps(lines, indent=2, ensure_ascii=False) + "\n"


def _place_checkpoint(checkpoint: Path, place: Path, placement: Placement) -> None:
    if placement == "link":
        place.symlink_to(checkpoint.resolve(), target_is_directory=checkpoint.is_dir())
        return
    # Copied beside its place first: a copy that was cut short must not look like a checkpoint.
    partial = place.with_name(f".{place.name}.partial-{os.getpid()}")
    try:
        if checkpoint.is_dir():
            shutil.copytree(checkpoint, partial)
        else:
            shutil.copyfile(checkpoint, partial)
        partial.rename(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
        raise
