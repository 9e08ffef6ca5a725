"""read_adapter: reads a LoRA adapter in PEFT's format, and checks it against the model.

A directory holds `adapter_config.json` and `adapter_model.safetensors` (or `adapter_model.bin`). The adapter
may come from anybody, so no other file is read, and a tensor is read only if its shape fits the model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import regex
import torch

from quire.adapters import AdapterTarget, AdapterWeights
from quire.errors import CheckpointError
from quire.layers.config import DTYPES
from quire_common.errors import in_line, one_line, shown
from quire_common.weight_files import NamedTensor, read_pickle, read_safetensors

logger = logging.getLogger("quire")

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 2**22
"""Most bytes of a safetensors file's header: enough for some 20,000 tensors. The header is parsed with the
interpreter's lock held."""
MAX_PATTERN_LENGTH = 2000
MAX_PATTERNS = 4096
PATTERNS_S = 5.0
"""Most seconds that all patterns and lists of one adapter may take. They come from the user, who may make
them slow."""
_PREFIXES = ("base_model.", "model.", "language_model.")
_UNSUPPORTED = (
    "use_dora", "use_qalora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters",
    "alora_invocation_tokens", "arrow_config", "use_bdlora", "layer_replication",
)  # fmt: skip
"""Keys of adapter_config.json for features that are not supported. An adapter that sets one is refused,
unless the value is empty, 0, false or null."""
_KNOWN = frozenset((
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform", "bias", "init_lora_weights",
    # Of training, of who saved it, of how a base model lies in memory.
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "fan_in_fan_out", "layers_pattern", "megatron_config", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "runtime_config", "qalora_group_size",
    "ensure_weight_tying",
))  # fmt: skip
"""Keys of adapter_config.json that are obeyed, and keys that are ignored without a warning."""
_CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Prefixes of `init_lora_weights` values that also change the base model's weights. They are refused."""


class ReadAdapter(NamedTuple):
    """A LoRA adapter that was read and fits the model."""

    rank: int
    """Largest rank among the adapter's layers."""
    digest: bytes
    """Digest of the dtype, targets, ranks and numbers that the model computes with."""
    weights: AdapterWeights


def read_adapter(
    directory: Path, targets: Sequence[AdapterTarget], dtype: str, max_rank: int, root: Path | None = None
) -> ReadAdapter:
    """Reads an adapter.

    Args:
        directory: the adapter's directory.
        targets: layers of the model that adapters may change.
        dtype: the model's dtype, to which the weights are converted.
        max_rank: largest rank that there is memory for.
        root: directory in which all files must lie, with links resolved; None: anywhere.

    Raises:
        CheckpointError: the adapter is missing, broken, unsupported, or made for another model. The message
            is one line that names the file or the directory.
    """
    config_file = _regular(directory / CONFIG, root)
    if config_file is None:
        raise CheckpointError(f"{directory / CONFIG}: no such file: not the directory of a LoRA adapter")
    config = _Config(config_file)
    by_name = {target.name: index for index, target in enumerate(targets)}
    found: dict[int, dict[str, NamedTensor]] = {}
    for stored in _tensors(directory, root):
        name, side = config.place_of(stored)
        if name not in by_name:
            raise CheckpointError(
                f"{stored.file}: {shown(stored.name)} adapts what no adapter may change here: not the "
                "query, key, value, output, gate, up or down projection of a layer of this model (experts, "
                "routers, embeddings and the output head are not supported)"
            )
        if side in found.setdefault(by_name[name], {}):
            raise CheckpointError(f"{stored.file}: {shown(stored.name)} is there twice")
        found[by_name[name]][side] = stored
    if not found:
        raise CheckpointError(f"{directory}: holds no tensors of an adapter")
    parts, data = [], []
    kind = DTYPES[dtype]
    for index, sides in sorted(found.items()):
        target = targets[index]
        rank, scaling = config.scale_of(sides, target, max_rank)
        parts.append((index, rank))
        try:
            a, b = (sides[side].read().float() for side in "AB")
        except (OSError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{sides['A'].file}: cannot be read: {one_line(error)}") from None
        data += [a.to(kind), (b * scaling).to(kind)]
    flat = torch.cat([one.contiguous().flatten().view(torch.uint8) for one in data]).numpy()
    digest = hashlib.blake2b(json.dumps([dtype, parts]).encode(), digest_size=16, person=b"lora")
    digest.update(np.ascontiguousarray(flat).data)
    return ReadAdapter(max(rank for _, rank in parts), digest.digest(), AdapterWeights(parts, flat))


def _regular(path: Path, root: Path | None) -> Path | None:
    """Returns the path if there is a file; None: there is none. Raises CheckpointError if it is no regular
    file, lies outside `root`, or cannot be looked at."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: is not a file")
    if root is not None and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise CheckpointError(f"{path}: leads out of {root}")
    return path


def _tensors(directory: Path, root: Path | None) -> Iterator[NamedTensor]:
    for name, read in (
        ("adapter_model.safetensors", read_safetensors),
        ("adapter_model.bin", read_pickle),
    ):
        file = _regular(directory / name, root)
        if file is not None:
            _check_beginning(file)
            return read(file, CheckpointError)
    raise CheckpointError(f"{directory}: holds neither adapter_model.safetensors nor adapter_model.bin")


def _check_beginning(file: Path) -> None:
    """Checks the first bytes of an adapter's file.

    Raises:
        CheckpointError: the file cannot be read, is a pickle (.bin) but no zip archive, or a safetensors file
            with a header so long that parsing it would hold up other threads.
    """
    try:
        with file.open("rb") as stream:
            begin = stream.read(8)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror or error}") from None
    if file.suffix == ".bin":
        if not begin.startswith(b"PK"):
            raise CheckpointError(f"{file}: is no archive, as torch writes them since its version 1.6")
    elif int.from_bytes(begin, "little") > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: broken safetensors file: its header is longer than {MAX_HEADER_BYTES} bytes"
        )


class _Config:
    """The content of an adapter_config.json."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            if file.stat().st_size > MAX_CONFIG_BYTES:
                raise self._error(f"is longer than {MAX_CONFIG_BYTES} bytes")
            values = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise self._error(f"cannot be read as JSON: {one_line(error)}") from None
        if not isinstance(values, dict):
            raise self._error("must hold a JSON object")
        self._values: dict[str, Any] = values
        self._seconds_left = PATTERNS_S
        if values.get("peft_type", "LORA") != "LORA":
            raise self._error(f"peft_type {shown(values['peft_type'])} is not supported, only LORA")
        for key in _UNSUPPORTED:
            if values.get(key):
                raise self._error(f"{key} is not supported")
        if values.get("bias", "none") != "none":
            raise self._error('bias must be "none"')
        initial = values.get("init_lora_weights")
        if isinstance(initial, str) and initial.startswith(_CHANGES_BASE):
            raise self._error(f"init_lora_weights {shown(initial)} changes the base model: not supported")
        if unknown := [key for key in values.keys() - _KNOWN - {*_UNSUPPORTED} if values[key]]:
            logger.warning("%s: %s: not known, and not used", file, in_line(", ".join(sorted(unknown))))
        self._rank = self._whole("r", values.get("r"))
        self._alpha = self._number("lora_alpha", values.get("lora_alpha", 8))
        self._ranks = self._patterns("rank_pattern", self._whole)
        self._alphas = self._patterns("alpha_pattern", self._number)
        self._is_rank_stabilised = bool(values.get("use_rslora"))
        self._layers = self._numbers("layers_to_transform") or None

    def place_of(self, stored: NamedTensor) -> tuple[str, str]:
        """Returns (the layer's name in the form that targets' names have, "A" or "B") for a stored tensor.

        Raises:
            CheckpointError: the tensor is no matrix of an adapter, the configuration does not adapt its
                layer, or a pattern in it is broken or too slow.
        """
        module, _, end = stored.name.rpartition(".lora_")
        side, _, rest = end.partition(".")
        if not module or side not in ("A", "B") or rest not in ("weight", "default.weight"):
            kind = "a magnitude of DoRA" if end.startswith("magnitude") else "no matrix A or B of a layer"
            raise CheckpointError(f"{stored.file}: {shown(stored.name)} is {kind}: not supported")
        module = module.removeprefix("base_model.model.")
        if not self._is_target(module):
            raise CheckpointError(
                f"{stored.file}: {shown(stored.name)} is not among the target_modules of {CONFIG}"
            )
        name = module
        while name.startswith(_PREFIXES):
            name = name.partition(".")[2]
        return name, side

    def scale_of(
        self, sides: Mapping[str, NamedTensor], target: AdapterTarget, max_rank: int
    ) -> tuple[int, float]:
        """Returns (rank, scaling) of one layer's adapter.

        Args:
            sides: the stored matrices by side: "A" [rank, in_features] and "B" [out_features, rank].
            target: the layer.
            max_rank: largest rank that is allowed.

        Raises:
            CheckpointError: a matrix is missing or has the wrong shape or type, the rank is too large, or a
                pattern of the configuration is broken or too slow.
        """
        for side in "AB":
            if side not in sides:
                raise CheckpointError(f"{self.file.parent}: {target.name} lacks its lora_{side}")
        module = sides["A"].name.removeprefix("base_model.model.").rpartition(".lora_A")[0]
        rank = self._pattern_value(self._ranks, module, self._rank)
        alpha = self._pattern_value(self._alphas, module, self._alpha)
        if rank > max_rank:
            raise self._error(f"rank {rank} of {target.name} exceeds max_lora_rank {max_rank}")
        shapes = {"A": [rank, target.in_features], "B": [target.out_features, rank]}
        for side, shape in shapes.items():
            stored = sides[side]
            if list(stored.tensor.shape) != shape:
                raise CheckpointError(
                    f"{stored.file}: {shown(stored.name)} has shape {list(stored.tensor.shape)}, the model "
                    f"and {CONFIG} mean {shape}"
                )
            if not stored.tensor.is_floating_point():
                raise CheckpointError(f"{stored.file}: {shown(stored.name)} has type {stored.tensor.dtype}")
        return rank, alpha / (math.sqrt(rank) if self._is_rank_stabilised else rank)

    def _is_target(self, module: str) -> bool:
        """Whether the configuration adapts a module. In `target_modules` and `exclude_modules` a list holds
        ends of module names, and a text is a pattern (or "all-linear"), as in PEFT."""
        if self._matches(self._values.get("exclude_modules"), module):
            return False
        wanted = self._values.get("target_modules")
        if wanted in (None, "all-linear"):
            return True
        if not self._matches(wanted, module):
            return False
        if self._layers is None or not isinstance(wanted, list):
            return True
        numbers = regex.findall(r"\.(\d+)\.", module)
        return bool(numbers) and int(numbers[0]) in self._layers

    def _matches(self, wanted: Any, module: str) -> bool:
        if wanted is None:
            return False
        if isinstance(wanted, str):
            return self._match(wanted, module)
        with self._timed():
            if not isinstance(wanted, list) or not all(isinstance(one, str) for one in wanted):
                raise self._error("target_modules and exclude_modules must be a text or a list of texts")
            return any(module == one or module.endswith(f".{one}") for one in wanted)

    def _pattern_value(self, patterns: Mapping[str, Any], module: str, default: Any) -> Any:
        """Returns the value of the first pattern that matches the module's name, or the rest of the name
        after one of its dots; without a match, the default."""
        for pattern, value in patterns.items():
            if module.endswith(f".{pattern}") or self._match(rf"(?:.*\.)?(?:{pattern})", module):
                return value
        return default

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Runs a block whose time counts against the PATTERNS_S seconds that an adapter's patterns and lists
        may take. Raises CheckpointError if none are left. Other work on the adapter is not counted."""
        if self._seconds_left <= 0:
            raise self._error("its patterns and lists of modules take too long")
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds_left -= time.monotonic() - began

    def _match(self, pattern: str, module: str) -> bool:
        if len(pattern) > MAX_PATTERN_LENGTH:
            raise self._error(f"a pattern is longer than {MAX_PATTERN_LENGTH} characters")
        try:
            with self._timed():
                left = self._seconds_left
                return regex.fullmatch(pattern, module, timeout=left, concurrent=True) is not None
        except TimeoutError:
            raise self._error(f"pattern {shown(pattern)} takes too long") from None
        except (regex.error, RecursionError, MemoryError, OverflowError) as error:
            raise self._error(f"pattern {shown(pattern)} is none: {one_line(error)}") from None

    def _patterns(self, key: str, convert: Any) -> dict[str, Any]:
        values = self._values.get(key) or {}
        if not isinstance(values, dict) or len(values) > MAX_PATTERNS:
            raise self._error(f"{key} must be a JSON object of at most {MAX_PATTERNS} entries")
        return {pattern: convert(f"{key}: {shown(pattern)}", value) for pattern, value in values.items()}

    def _numbers(self, key: str) -> set[int] | None:
        values = self._values.get(key)
        if values is None:
            return None
        values = values if isinstance(values, list) else [values]
        if not all(type(one) is int for one in values):
            raise self._error(f"{key} must be an integer or a list of them")
        return set(values)

    def _whole(self, key: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= 2**16:
            raise self._error(f"{key} must be an integer in [1, {2**16}], got {shown(value)}")
        return value

    def _number(self, key: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= sys.float_info.max:  # an integer may be beyond it
            raise self._error(f"{key} must be a number, got {shown(value)}")
        return float(value)

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {message}")
