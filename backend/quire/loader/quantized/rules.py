"""Rules: which layers of a checkpoint are quantised, and in which format, according to its config.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import regex
import torch

from quire.config import QUANTIZATION_KEYS
from quire.layers.hf_config import MAX_SIZE, HFConfig
from quire.loader.quantized.formats import (
    AWQ,
    BNB4,
    FP4,
    GPTQ,
    Format,
    PackedIntegers,
    ScaledBlocks,
    ScaledRows,
    WholeIntegers,
)
from quire_common.errors import shown
from quire_kernels.weights import FP8

Matches = Callable[[str], bool]
"""Tells whether a rule applies to a layer's name, such as "model.layers.0.mlp.gate_proj" or "lm_head"."""
Values = Mapping[str, Any]
_INTEGER_LAYOUTS = ("int-quantized", "naive-quantized")
_FLOAT_LAYOUTS = ("float-quantized", "naive-quantized")
_MATCH_S = 1.0
"""Seconds allowed to match one regular expression against one name. Some expressions backtrack for ever."""
_ROUTERS = ("gate", "shared_expert_gate")
"""Last parts of the names that many families give to routers. GPTQ's tools, modelopt and DeepSeek's files may
leave routers unquantised without listing them."""


@dataclass(frozen=True)
class Rules:
    """Rules by which layers of a checkpoint are quantised, from its config.json."""

    method: str
    """Method that quantised the checkpoint, as `quant_method` names it: "awq" or "gptq", for example."""
    rules: tuple[tuple[Matches, Format | None], ...]
    """Rules in order of precedence: the first that matches a layer gives its format. A layer is not quantised
    if that is None, or if no rule matches."""
    has_kv_scales: bool = False
    """Whether a checkpoint of compressed-tensors has a `kv_cache_scheme`, for quantised keys and values.
    False for other methods."""
    values: Values = field(default_factory=dict)
    """Object from config.json that the rules were read from, see QUANTIZATION_KEYS."""

    def format_of(self, name: str) -> Format | None:
        """Returns the format that the rules give to the layer of this name; None: none. Raises ValueError if
        a rule's pattern takes too long to match."""
        return next((form for matches, form in self.rules if matches(name)), None)


def read_rules(hf: HFConfig) -> Rules | None:
    """Reads the rules from config.json; None: it states no quantisation.

    Raises:
        CheckpointError: something that it states is not supported. The message is one line that names it.
            Values of a wrong type may raise other errors, such as TypeError.
    """
    values = next(filter(None, map(hf.get, QUANTIZATION_KEYS)), None)
    if values is None:
        return None
    method = values.get("quant_method", "compressed-tensors" if "config_groups" in values else "unknown")
    if method not in _METHODS:
        raise hf.error(
            f"quantization_config: weights quantised by {method!r:.40} are not supported; "
            f"supported: {', '.join(_METHODS)}"
        )
    try:
        return replace(_METHODS[method](values), values=values)
    except _UnsupportedError as error:
        raise hf.error(f"quantization_config of {method}: {error}") from None


class _UnsupportedError(Exception):
    """quantization_config contains something that is not supported."""


def _known(values: Values, key: str, default: Any, known: Iterable[Any]) -> Any:
    """Returns the value under `key`, or the default if it is missing or null. Raises _UnsupportedError unless
    the result is one of `known`."""
    value = values.get(key)
    value = default if value is None else value
    listed = [*known]
    if value not in listed:
        listing = ", ".join(map(str, listed))
        raise _UnsupportedError(f"{key} {value!r:.40} is not supported; supported: {listing}")
    return value


def _group(values: Values, default: int | None) -> int | None:
    """Reads `group_size`, the number of inputs that share a scale; None: inputs are not divided into groups.
    The default is for files without the key."""
    group = values.get("group_size", default)
    if group in (None, -1):
        return None
    return _size("group_size", group)


def _size(key: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise _UnsupportedError(f"{key} {value!r:.40} is no number of features")
    return value


def _block(key: str, value: Any) -> tuple[int, int]:
    """Reads a block's size: the (output, input) features that share a scale."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise _UnsupportedError(f"{key} {value!r:.40} is not two numbers of features")
    return _size(key, value[0]), _size(key, value[1])


def _ours(name: str) -> str:
    """Replaces "backbone." by "model." at the beginning of a module's name. Nemotron-H's files have such
    names; others stay as they are."""
    return f"model.{name.removeprefix('backbone.')}" if name.startswith("backbone.") else name


def _named(keys: Iterable[str] | None) -> Matches:
    """Makes a test for names of which a key is a part or several parts; dots separate the parts. A key with a
    "*" must match a whole name instead."""
    keys = tuple(map(_ours, keys or ()))
    return lambda name: any(
        fnmatchcase(name, key) if "*" in key else f".{key}." in f".{name}." for key in keys
    )


def _all_but(method: str, form: Format, *exempt: Iterable[str] | None, head: bool = False) -> Rules:
    """Makes rules that give all layers one format, except for the names in `exempt` and, without `head`, the
    output head."""
    names = [name for names in exempt for name in names or ()]
    rules: list[tuple[Matches, Format | None]] = [(_named(names), None)]
    if not head:
        rules.append((_named(["lm_head"]), None))
    return Rules(method, (*rules, (lambda _: True, form)))


def _awq(values: Values) -> Rules:
    _known(values, "bits", 4, (4,))
    _known(values, "zero_point", True, (True,))
    version = str(values.get("version") or "gemm").lower()
    _known({"version": version}, "version", None, ("gemm", "gemv"))
    form = AWQ(_group(values, 128), version == "gemv")
    return _all_but("awq", form, values.get("modules_to_not_convert"))


def _gptq(values: Values) -> Rules:
    if values.get("dynamic"):
        raise _UnsupportedError("dynamic, which gives some layers other bits, is not supported")
    bits = _known(values, "bits", None, (2, 3, 4, 8))
    key = "checkpoint_format" if values.get("checkpoint_format") else "format"
    layout = _known(values, key, "gptq", ("gptq", "gptq_v2"))
    form = GPTQ(bits, _group(values, 128), 1 if layout == "gptq" else 0)
    head = bool(values.get("lm_head", False))
    inside = values.get("modules_in_block_to_quantize")
    if inside:
        wanted = [name for names in inside for name in ([names] if isinstance(names, str) else names)]
        return Rules("gptq", ((_named([*wanted, "lm_head"] if head else wanted), form),))
    return _all_but("gptq", form, values.get("modules_to_not_convert"), _ROUTERS, head=head)


def _fp8(values: Values) -> Rules:
    _known(values, "fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    block = values.get("weight_block_size")
    form = ScaledRows(FP8, False) if block is None else ScaledBlocks(_block("weight_block_size", block))
    # DeepSeek V3.2's files leave the weights of an indexer's heads unquantised, too.
    exempt = values.get("modules_to_not_convert"), values.get("ignored_layers"), (*_ROUTERS, "weights_proj")
    return _all_but("fp8", form, *exempt)


def _fbgemm(values: Values) -> Rules:
    return _all_but("fbgemm_fp8", ScaledRows(FP8, True), values.get("modules_to_not_convert"))


def _modelopt(values: Values) -> Rules:
    formats: dict[str, Format] = {
        "FP8": ScaledRows(FP8, False),
        "FP8_PER_CHANNEL_PER_TOKEN": ScaledRows(FP8, True),
        "NVFP4": FP4(16, "weight", "weight_scale_2"),
    }
    algorithm = _known(values, "quant_algo", None, formats)
    exempt = values.get("exclude_modules"), values.get("ignore"), _ROUTERS
    return _all_but("modelopt", formats[algorithm], *exempt)


def _bitsandbytes(values: Values) -> Rules:
    exempt = values.get("llm_int8_skip_modules")
    if values.get("load_in_8bit") or values.get("_load_in_8bit"):
        form: Format = ScaledRows(torch.int8, True, "SCB", 127.0, quantized_inputs=True)
        return _all_but("bitsandbytes", form, exempt)
    _known(values, "bnb_4bit_quant_storage", "uint8", ("uint8",))
    kind = _known(values, "bnb_4bit_quant_type", "fp4", ("nf4", "fp4"))
    form = BNB4(kind, bool(values.get("bnb_4bit_use_double_quant", False)))
    return _all_but("bitsandbytes", form, exempt)


def _mxfp4(values: Values) -> Rules:
    # A name may stand for what lies below it, "model.layers.*.self_attn" for its projections.
    exempt = [key for name in values.get("modules_to_not_convert") or () for key in (name, f"{name}.*")]
    return Rules("mxfp4", ((_named(exempt), None), (_named(["mlp.experts"]), FP4(32))))


def _compressed(values: Values) -> Rules:
    for key in ("transform_config", "sparsity_config"):
        other = values.get(key) or {}
        if other and other.get("format") != "dense":
            raise _UnsupportedError(f"{key} is not supported")
    by_name: list[tuple[Matches, Format | None]] = [(_targets(values.get("ignore")), None)]
    by_pattern: list[tuple[Matches, Format | None]] = []
    by_class: list[tuple[Matches, Format | None]] = []
    for group in values["config_groups"].values():
        form = _compressed_format(group.get("format") or values.get("format"), group)
        for target in group["targets"]:
            # As compressed-tensors does: a name counts more than a pattern, and that more than a class.
            if target == "Linear":
                by_class.append((lambda _: True, form))
            elif target.startswith("re:"):
                by_pattern.append((_targets([target]), form))
            elif target == "Embedding":
                raise _UnsupportedError("quantised embeddings (targets: Embedding) are not supported")
            else:
                by_name.append((_targets([target]), form))
    rules = (*by_name, *by_pattern, *by_class)
    return Rules("compressed-tensors", rules, values.get("kv_cache_scheme") is not None)


def _targets(targets: Iterable[str] | None) -> Matches:
    """Makes a test for names that equal or end a target. A target that begins with "re:" is a regular
    expression, which must match from a name's first character on."""
    names = {_ours(target) for target in targets or () if not target.startswith("re:")}
    try:
        patterns = [regex.compile(one.removeprefix("re:")) for one in targets or () if one.startswith("re:")]
    except regex.error as error:
        raise _UnsupportedError(f"a target is no regular expression: {error}") from None

    def matches(pattern: Any, name: str) -> bool:
        try:
            return pattern.match(name, timeout=_MATCH_S) is not None
        except TimeoutError:
            raise ValueError(f"{shown(pattern.pattern)} as a target: it takes too long to match") from None

    # A multimodal checkpoint has the names of the whole.
    return lambda name: (
        name in names
        or any(one.endswith(f".{name}") for one in names)
        or any(matches(pattern, name) for pattern in patterns)
    )


def _compressed_format(layout: str | None, group: Values) -> Format | None:
    weights, inputs = group.get("weights"), group.get("input_activations")
    if group.get("output_activations") is not None:
        raise _UnsupportedError("output_activations are not supported")
    if weights is None or layout == "dense":
        return None
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    size, is_symmetric = _group(weights, None), _known(weights, "symmetric", True, (True, False))
    strategy = weights.get("strategy") or ("tensor" if weights.get("group_size") is None else "group")
    if strategy == "group" and size is None:
        strategy = "channel"
    named = f"{layout} of {kind}{bits} per {strategy}"
    if layout == "pack-quantized" and kind == "int" and bits in (2, 3, 4, 5, 6, 8):
        if strategy in ("group", "channel"):
            has_order = weights.get("actorder") in (True, "group", "dynamic")
            return PackedIntegers(bits, size, is_symmetric, has_order)
    elif layout in _INTEGER_LAYOUTS and kind == "int" and bits in (4, 8):
        if strategy in ("tensor", "channel") and bits == 8 and is_symmetric:
            return ScaledRows(torch.int8, strategy == "channel", quantized_inputs=inputs is not None)
        if strategy in ("tensor", "channel", "group"):
            return WholeIntegers(bits, (strategy != "tensor", size), is_symmetric)
    elif layout in _FLOAT_LAYOUTS and kind == "float" and bits == 8 and is_symmetric:
        if strategy in ("tensor", "channel"):
            return ScaledRows(FP8, strategy == "channel")
        if strategy == "block":
            return ScaledBlocks(_block("block_structure", weights["block_structure"]))
    elif layout == "mxfp8-quantized" and size == 32:
        return ScaledBlocks((1, 32), has_exponents=True)
    elif layout == "mxfp4-pack-quantized" and size == 32:
        return FP4(32)
    elif layout == "nvfp4-pack-quantized" and size == 16:
        return FP4(16, "weight_packed", "weight_global_scale", is_divisor=True)
    raise _UnsupportedError(f"weights of the format {named} are not supported")


_METHODS: dict[str, Callable[[Values], Rules]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
}
