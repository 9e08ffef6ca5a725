"""Reads tensors of a GGUF file under Hugging Face's names, as they are stored or decoded one at a time."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from quire.errors import CheckpointError
from quire.layers.config import MAX_EXPERTS
from quire.layers.rotary import neighbours_apart
from quire.loader.gguf.families import FAMILIES, IN_LAYER, PARAMETERS, TOP, Family, family_of
from quire.loader.gguf.metadata import LONG_FACTORS, ROPE_FACTORS, num_layers
from quire.loader.gguf.scheme import GGUFScheme
from quire_common.errors import shown
from quire_common.gguf_file import GGUFFile, StoredTensor
from quire_common.weight_files import NamedTensor
from quire_kernels.block_weights import BLOCK_KINDS

logger = logging.getLogger("quire")

_Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
_LEAST_MATRIX = 128
"""Least bytes of one expert's matrix. A file with smaller ones is refused: the Python object that describes a
matrix takes some three times as many."""
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def read_gguf(file: Path, opened: GGUFFile, *, keeps_blocks: bool) -> Iterator[NamedTensor]:
    """Yields the tensors of one file under Hugging Face's names. A tensor without such a name keeps its own.
    Divisors of rotary frequencies and layers for multi-token prediction are left out, and some tensors are
    split or joined.

    Args:
        file: one of `opened.files`.
        opened: the GGUF file of which `file` is a part.
        keeps_blocks: whether matrices that can stay in their blocks are given as uint8 [rows, bytes of a
            row].

    Raises:
        CheckpointError: a tensor of experts does not fit the metadata. A tensor of an unknown type raises it
            when its content is read.
    """
    family = _family(opened)
    heads, deltas = {}, _delta_changes(opened)
    if family.is_paired:
        heads = {"attn_q": _heads(opened, "head_count"), "attn_k": _heads(opened, "head_count_kv")}
    for stored in _matrices(opened):
        if stored.file != file or stored.name in (ROPE_FACTORS, *LONG_FACTORS.values()):
            continue
        joined = _joined(opened, stored)
        if joined is not None:
            yield from joined
            continue
        is_kept = keeps_blocks and _has_blocks(opened, stored)
        part = (stored.name.split(".")[2:3] or stored.name.split("."))[0]
        change: _Change | None = None
        if part in heads:
            change = partial(_rotate_half_order, num_heads=heads[part])
        elif part in deltas:
            change = deltas[part]
        elif family.has_whole_norms and part.endswith("norm") and part != "ssm_norm":
            change = _less_one
        dtype = torch.uint8 if is_kept else _PLAIN.get(stored.kind)
        name = hf_name(stored.name, family.names)
        if dtype is not None:
            shape = (*stored.shape[:-1], stored.num_bytes // math.prod(stored.shape[:-1]) // dtype.itemsize)
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            yield NamedTensor(name, tensor, file, stored.offset, change)
        else:
            tensor = torch.empty(stored.shape, device="meta")
            yield NamedTensor(name, tensor, file, None, partial(_decode, opened, stored, change))


def block_scheme(opened: GGUFFile) -> GGUFScheme:
    """Makes the scheme for the tensors that `read_gguf` gives with `keeps_blocks`. Logs a warning about
    tensors that must be decoded."""
    tensors = list(_matrices(opened))
    decoded = [one for one in tensors if one.kind not in _PLAIN and not _has_blocks(opened, one)]
    if decoded:
        logger.warning(
            "%s: %d tensors of the types %s are decoded: %.0f MB of the file become %d numbers of `dtype`",
            opened.path,
            len(decoded),
            ", ".join(sorted({one.kind.name for one in decoded})),
            sum(one.num_bytes for one in decoded) / 1e6,
            sum(math.prod(one.shape) for one in decoded),
        )
    names = _family(opened).names
    kept = {hf_name(one.name, names): one.kind for one in tensors if _has_blocks(opened, one)}
    return GGUFScheme(opened.path, kept)


def _matrices(opened: GGUFFile) -> Iterator[StoredTensor]:
    """Yields a file's tensors, without those of layers for multi-token prediction. A tensor of all experts of
    a layer ("..._exps") is split into one per expert, named as in older files. Raises CheckpointError if it
    does not fit the metadata."""
    own = partial(_own, opened)
    stated, count, behind = own("expert_count"), num_layers(own), own("nextn_predict_layers")
    skipped = range(count, count + behind) if type(count) is type(behind) is int else ()
    for stored in opened.tensors.values():
        layer = re.match(r"blk\.(\d{1,9})\.", stored.name)
        if layer is not None and int(layer[1]) in skipped:
            continue
        name, _, suffix = stored.name.rpartition("_exps.")
        rank = 2 if suffix == "bias" else 3
        if not name or len(stored.shape) != rank or stored.shape[0] > MAX_EXPERTS:
            yield stored
            continue
        count, *shape = stored.shape
        size = stored.num_bytes // count
        if count != stated or (rank == 3 and size < _LEAST_MATRIX):
            raise CheckpointError(
                f"{stored.file}: {stored.name} holds {count} matrices of {size} bytes, the file states "
                f"{shown(stated)} experts"
            )
        for expert in range(count):
            yield stored._replace(
                name=f"{name}.{expert}.{suffix}",
                shape=tuple(shape),
                offset=stored.offset + expert * size,
                num_bytes=size,
            )


def _joined(opened: GGUFFile, stored: StoredTensor) -> list[NamedTensor] | None:
    """Returns the tensors in place of a part of `kv_b_proj`: the whole of it for the part for keys, which the
    file holds transposed, and none for the part for values. None: the tensor is neither part, or the two do
    not fit together."""
    name, _, end = stored.name.partition(".attn_")
    parts = [opened.tensors.get(f"{name}.attn_{part}_b.weight") for part in "kv"]
    if end not in ("k_b.weight", "v_b.weight") or None in parts:
        return None
    keys, values = (one for one in parts if one is not None)
    if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != values.shape[::2]:
        return None
    if stored is values:
        return []
    num_heads, rank, size = keys.shape
    tensor = torch.empty(num_heads * (size + values.shape[1]), rank, device="meta")
    change = partial(_join_heads, opened, keys, values)
    return [NamedTensor(hf_name(f"{name}.attn_kv_b.weight"), tensor, stored.file, None, change)]


def _join_heads(opened: GGUFFile, keys: StoredTensor, values: StoredTensor, _: torch.Tensor) -> torch.Tensor:
    parts = [_decode(opened, keys, None, _).transpose(1, 2), _decode(opened, values, None, _)]
    return torch.cat(parts, 1).flatten(0, 1)


def hf_name(name: str, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns Hugging Face's name of a GGUF tensor; without one, the name as it is.

    Args:
        names: see `Family`.
    """
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in TOP:
        return f"{TOP[parts[0]]}.{parts[1]}"
    if parts[0] != "blk" or len(parts) not in (3, 4, 5):
        return name
    part = ".".join(parts[2:-1]) or parts[2]
    in_layer = names.get(part) or IN_LAYER.get(part)
    if in_layer is None and len(parts) == 5:
        in_layer = names.get(parts[2]) or IN_LAYER.get(parts[2])
        in_layer = in_layer and in_layer.replace(".", f".experts.{parts[3]}.")
    if in_layer is None:
        return name
    end = "" if parts[2] in PARAMETERS else f".{parts[-1]}"
    return f"model.layers.{parts[1]}.{in_layer}{end}"


def _family(opened: GGUFFile) -> Family:
    return family_of(opened.metadata, opened.tensors) or FAMILIES["llama"]


def _own(opened: GGUFFile, name: str) -> Any:
    return opened.metadata.get(f"{opened.metadata['general.architecture']}.{name}")


def _heads(opened: GGUFFile, key: str) -> int:
    return int(_own(opened, f"attention.{key}") or _own(opened, "attention.head_count") or 0)


def _has_blocks(opened: GGUFFile, stored: StoredTensor) -> bool:
    """Whether the tensor is a matrix that can stay in its blocks."""
    if stored.kind not in BLOCK_KINDS or len(stored.shape) != 2:
        return False
    # Its columns are reordered by heads, which must be whole blocks.
    num_heads = _own(opened, "ssm.time_step_rank")
    is_cut = stored.name.endswith(".ssm_out.weight") and type(num_heads) is int and num_heads > 0
    return not is_cut or stored.shape[1] // num_heads % GGML_QUANT_SIZES[stored.kind][0] == 0


def _delta_changes(opened: GGUFFile) -> dict[str, _Change]:
    """Returns functions that undo the converter's changes of gated DeltaNet's tensors, by their names in a
    layer. The converter puts value heads of the same key head as far apart as there are key heads."""
    names = ("group_count", "time_step_rank", "state_size", "inner_size")
    sizes = [_own(opened, f"ssm.{name}") for name in names]
    if "ssm_out" not in _family(opened).names or any(type(one) is not int or one < 1 for one in sizes):
        return {}
    num_groups, num_heads, key_dim, inner_size = sizes
    rows = partial(_beside, num_groups=num_groups, size=max(inner_size // num_heads, 1))
    single = partial(_beside, num_groups=num_groups, size=1)
    channels = partial(rows, first=2 * num_groups * key_dim)
    return {
        "attn_qkv": channels,
        "ssm_conv1d": channels,
        "attn_gate": rows,
        **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_dt"), single),
        "ssm_a": lambda tensor: single(-tensor.float()).log(),
        "ssm_out": lambda tensor: _beside(tensor.T, num_groups, tensor.shape[1] // num_heads).T.contiguous(),
    }


def _beside(tensor: torch.Tensor, num_groups: int, size: int, first: int = 0) -> torch.Tensor:
    """Returns the tensor with heads of `size` rows, from row `first` on, in the order of their groups. The
    stored order is that of their places in the groups."""
    heads = tensor[first:].unflatten(0, (-1, num_groups, size)).transpose(0, 1).flatten(0, 2)
    return torch.cat([tensor[:first], heads])


def _decode(
    opened: GGUFFile,
    stored: StoredTensor,
    change: _Change | None,
    _: torch.Tensor,
) -> torch.Tensor:
    try:
        decoded = torch.from_numpy(quants.dequantize(opened.data(stored), stored.kind))
        return decoded if change is None else change(decoded)
    except NotImplementedError:
        name = stored.kind.name
        raise CheckpointError(f"{stored.file}: {stored.name} has unsupported type {name}") from None


def _less_one(scale: torch.Tensor) -> torch.Tensor:
    """Returns a norm's scale less 1, as Hugging Face's checkpoints of some families store it."""
    return scale.float() - 1


def _rotate_half_order(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders the rows of each head: pairs (0, 1), (2, 3), ... become pairs (i, i + head_dim / 2)."""
    size = tensor.shape[0] // num_heads
    return neighbours_apart(tensor, size, size)
