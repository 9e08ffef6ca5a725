"""Reads tensors of a GGUF file under Hugging Face's names, in their blocks or decoded one at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import torch
from gguf import GGMLQuantizationType, quants

from quire.errors import CheckpointError
from quire.layers.config import MAX_EXPERTS
from quire.layers.rotary import neighbours_apart
from quire.loader.gguf.metadata import ROPE_FACTORS, is_mixtral
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
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
}
_OF_MIXTRAL = {
    "mlp": "block_sparse_moe",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
_OF_GPT_OSS = {"gate": "router"}
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def read_gguf(file: Path, opened: GGUFFile, *, keeps_blocks: bool) -> Iterator[NamedTensor]:
    """Yields the tensors of one file, except ROPE_FACTORS, under Hugging Face's names. A tensor without such
    a name keeps its own.

    Args:
        file: one of `opened.files`.
        opened: the GGUF file of which `file` is a part.
        keeps_blocks: whether matrices of the types in BLOCK_KINDS are given as uint8 [rows, bytes of a row].

    Raises:
        CheckpointError: a tensor of experts does not fit the metadata. A tensor of an unknown type raises it
            when its content is read.
    """
    arch = opened.metadata["general.architecture"]
    heads = {"attn_q": _heads(opened, arch, "head_count"), "attn_k": _heads(opened, arch, "head_count_kv")}
    own_parts = _own_parts(opened)
    for stored in _matrices(opened):
        if stored.file != file or stored.name == ROPE_FACTORS:
            continue
        is_kept = keeps_blocks and _has_blocks(stored)
        part = stored.name.split(".")[-2] if "." in stored.name else stored.name
        # Only this architecture's files pair neighbouring dimensions in rotary embedding, by reordering rows.
        is_paired = arch == "llama" and part in heads
        change: _Change | None = partial(_rotate_half_order, num_heads=heads[part]) if is_paired else None
        dtype = torch.uint8 if is_kept else _PLAIN.get(stored.kind)
        if dtype is not None:
            shape = (*stored.shape[:-1], stored.num_bytes // math.prod(stored.shape[:-1]) // dtype.itemsize)
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            yield NamedTensor(hf_name(stored.name, own_parts), tensor, file, stored.offset, change)
        else:
            tensor = torch.empty(stored.shape, device="meta")
            change = partial(_decode, opened, stored, change)
            yield NamedTensor(hf_name(stored.name, own_parts), tensor, file, None, change)


def block_scheme(opened: GGUFFile) -> GGUFScheme:
    """Makes the scheme for the tensors that `read_gguf` gives with `keeps_blocks`. Logs a warning about
    tensors that must be decoded."""
    tensors = list(_matrices(opened))
    decoded = [one for one in tensors if one.kind not in _PLAIN and not _has_blocks(one)]
    if decoded:
        logger.warning(
            "%s: %d tensors of the types %s are decoded: %.0f MB of the file become %d numbers of `dtype`",
            opened.path,
            len(decoded),
            ", ".join(sorted({one.kind.name for one in decoded})),
            sum(one.num_bytes for one in decoded) / 1e6,
            sum(math.prod(one.shape) for one in decoded),
        )
    own_parts = _own_parts(opened)
    kept = {hf_name(one.name, own_parts): one.kind for one in tensors if _has_blocks(one)}
    return GGUFScheme(opened.path, kept)


def _matrices(opened: GGUFFile) -> Iterator[StoredTensor]:
    """Yields a file's tensors. A tensor of all experts of a layer ("..._exps") is split into one per expert,
    named as in older files. Raises CheckpointError."""
    stated = opened.metadata.get(f"{opened.metadata['general.architecture']}.expert_count")
    for stored in opened.tensors.values():
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


def _own_parts(opened: GGUFFile) -> Mapping[str, str]:
    """Maps parts of Hugging Face's usual (Llama's) tensor names, such as "gate_proj", to the parts that
    Hugging Face uses in their place for the file's architecture; empty: the usual ones."""
    if is_mixtral(opened):
        return _OF_MIXTRAL
    return _OF_GPT_OSS if opened.metadata["general.architecture"] == "gpt-oss" else {}


def hf_name(name: str, own_parts: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns Hugging Face's name of a GGUF tensor; without one, the name as it is."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _TOP:
        return f"{_TOP[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _IN_BLOCK:
        in_block = _IN_BLOCK[parts[2]]
    elif len(parts) == 5 and parts[0] == "blk" and parts[2] in _IN_BLOCK:
        in_block = _IN_BLOCK[parts[2]].replace(".", f".experts.{parts[3]}.")
    else:
        return name
    in_block = ".".join(own_parts.get(part, part) for part in in_block.split("."))
    if parts[2] == "attn_sinks":
        return f"model.layers.{parts[1]}.{in_block}"
    return f"model.layers.{parts[1]}.{in_block}.{parts[-1]}"


def _heads(opened: GGUFFile, arch: str, key: str) -> int:
    stated = opened.metadata.get
    return int(stated(f"{arch}.attention.{key}") or stated(f"{arch}.attention.head_count") or 0)


def _has_blocks(stored: StoredTensor) -> bool:
    """Whether the tensor is a matrix that can stay in its blocks."""
    return stored.kind in BLOCK_KINDS and len(stored.shape) == 2


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


def _rotate_half_order(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders the rows of each head: pairs (0, 1), (2, 3), ... become pairs (i, i + head_dim / 2)."""
    size = tensor.shape[0] // num_heads
    return neighbours_apart(tensor, size, size)
