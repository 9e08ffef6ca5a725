"""Writing the paged KV cache in Triton: plain and quantised, alone and fused with norm and rotary embedding.

Numbers are rounded as in the reference, step by step, so that what is stored does not depend on which of the
implementations stored it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire_kernels.quantized_kv import SCALE_DTYPE, KVLayer, data_of
from quire_kernels.triton_lang.compiler import CompileCase
from quire_kernels.triton_lang.kv_memory import E4M3, INT8, PLAIN, kind_of, kv_memory
from quire_kernels.triton_lang.numerics import round_even, to_e4m3_bits

TILE = 2048
"""Numbers that a program holds at once: heads of one token."""
COPY_TILE = 2048

_LIMITS = {PLAIN: 1.0, INT8: 127.0, E4M3: 448.0}
_SMALLEST_SCALE = tl.constexpr(torch.finfo(SCALE_DTYPE).tiny)


@triton.jit
def _store_heads(  # type: ignore[no-untyped-def]
    x,
    kv,
    scales,
    places,
    scale_places,
    stored,
    dims,
    HEAD_DIM: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Stores heads x, float32 [rows, width], at kv + places, and their scales at scales + scale_places.

    Only rows where `stored`; numbers of x behind HEAD_DIM are zeros.
    """
    inside = stored[:, None] & (dims < HEAD_DIM)[None, :]
    data_places = kv + places[:, None] + dims[None, :]
    if KIND == 0:
        tl.store(data_places, x.to(kv.dtype.element_ty), mask=inside)
    else:
        # The maximum leaves NaN out.
        is_nan = tl.max((x != x).to(tl.int32), 1) != 0
        peak = tl.where(is_nan, float("nan"), tl.max(tl.abs(x), 1))
        # Zeros get the smallest scale rather than none, which would make them NaN.
        scale = tl.div_rn(peak, LIMIT)
        scale = tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)
        scale = scale.to(scales.dtype.element_ty)
        scaled = tl.div_rn(x, tl.broadcast_to(scale.to(tl.float32)[:, None], x.shape))
        if KIND == 1:
            tl.store(data_places, round_even(scaled).to(tl.int8), mask=inside)
        else:
            tl.store(data_places, to_e4m3_bits(scaled), mask=inside)
        tl.store(scales + scale_places, scale, mask=stored)


@triton.jit
def _normed(x, mean_square, weight, eps, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """RMS norm of float32 x as `rms_norm` rounds it: a weight of type `dtype` multiplies what is rounded."""
    scaled = x * (1.0 / tl.sqrt_rn(mean_square + eps))[:, None]
    if weight.dtype == tl.float32:
        scaled = scaled * weight
    else:
        scaled = scaled.to(dtype).to(tl.float32) * weight.to(tl.float32)
    return scaled.to(dtype).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _norm_rope_write_kernel(  # type: ignore[no-untyped-def]
    out,
    qkv,
    query_weight,
    key_weight,
    eps,
    cos,
    sin,
    kv,
    scales,
    slot_mapping,
    qkv_token_stride,
    qkv_head_stride,
    cos_stride,
    sin_stride,
    kv_block_stride,
    kv_half_stride,
    kv_head_stride,
    kv_token_stride,
    scale_block_stride,
    scale_half_stride,
    scale_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """A program takes some heads of one token; HALF is rotary_dim / 2.

    Each number and the one it is rotated with are loaded side by side: the second load finds the first one's
    cache lines.
    """
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    dtype: tl.constexpr = qkv.dtype.element_ty
    is_query = rows < NUM_HEADS
    is_rotated = rows < NUM_HEADS + NUM_KV_HEADS
    inside = (rows < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    source = qkv + token * qkv_token_stride + (rows * qkv_head_stride)[:, None]
    x = tl.load(source + dims[None, :], mask=inside, other=0.0).to(tl.float32)

    is_first = dims < HALF
    has_partner = dims < 2 * HALF
    partner_dims = tl.where(is_first, dims + HALF, dims - HALF)
    rotated = is_rotated[:, None] & has_partner[None, :]
    partner = tl.load(source + partner_dims[None, :], mask=rotated, other=0.0).to(tl.float32)
    if NORM:
        mean_square = tl.sum(x * x, 1) / HEAD_DIM
        normed = is_rotated[:, None] & (dims < HEAD_DIM)[None, :]
        weights = tl.where(is_query, query_weight, key_weight)[:, None]
        weight = tl.load(weights + dims[None, :], mask=normed, other=0.0)
        partner_weight = tl.load(weights + partner_dims[None, :], mask=rotated, other=0.0)
        x = tl.where(is_rotated[:, None], _normed(x, mean_square, weight, eps, dtype), x)
        partner = _normed(partner, mean_square, partner_weight, eps, dtype)
    angle = tl.where(is_first, dims, dims - HALF)
    cosine = tl.load(cos + token * cos_stride + angle, mask=has_partner, other=1.0)[None, :]
    sine = tl.load(sin + token * sin_stride + angle, mask=has_partner, other=0.0)[None, :]
    turned = x * cosine + tl.where(is_first[None, :], -partner, partner) * sine
    # The cache gets what `rope` returns: numbers of qkv's type.
    x = tl.where(rotated, turned.to(dtype).to(tl.float32), x)

    places = out + token * (NUM_HEADS * HEAD_DIM) + (rows * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(places, x.to(dtype), mask=is_query[:, None] & (dims < HEAD_DIM)[None, :])
    cached = rows - NUM_HEADS
    half, head = cached // NUM_KV_HEADS, cached % NUM_KV_HEADS
    slot = tl.load(slot_mapping + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    kv_places = (
        block * kv_block_stride + half * kv_half_stride + head * kv_head_stride + offset * kv_token_stride
    )
    scale_places = block * scale_block_stride + half * scale_half_stride + head * scale_head_stride + offset
    stored = (cached >= 0) & (half < 2)
    _store_heads(x, kv, scales, kv_places, scale_places, stored, dims, HEAD_DIM, KIND, LIMIT)


@triton.jit(
    do_not_specialize=["size"],
    do_not_specialize_on_alignment=["source_rows", "target_rows"],
)
def _copy_kernel(  # type: ignore[no-untyped-def]
    target,
    source,
    target_rows,
    source_rows,
    target_stride,
    source_stride,
    size,
    GATHER: tl.constexpr,
    TILE: tl.constexpr,
):
    """Rows of `source`, at source_rows if GATHER, become rows of `target`, at target_rows if not."""
    row = tl.program_id(0).to(tl.int64)
    if GATHER:
        source_row = tl.load(source_rows + row)
        target_row = row
    else:
        source_row = row
        target_row = tl.load(target_rows + row)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    data = tl.load(source + source_row * source_stride + columns, mask=columns < size)
    tl.store(target + target_row * target_stride + columns, data, mask=columns < size)


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_layer: KVLayer, slot_mapping: torch.Tensor) -> None:
    """See `ops.write_kv`: `norm_rope_write` without queries, norms and rotation."""
    none = torch.empty((key.shape[0], 0), dtype=torch.float32, device=key.device)
    norm_rope_write(torch.cat((key, value), dim=1), 0, None, 0.0, none, none, kv_layer, slot_mapping)


def norm_rope_write(
    qkv: torch.Tensor,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_layer: KVLayer,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """See `ops.norm_rope_write`."""
    num_tokens, all_heads, head_dim = qkv.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return out
    qkv, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (qkv, cos, sin))
    kv, scales, strides = kv_memory(kv_layer)
    width, rows = _tile(head_dim, all_heads)
    kind = kind_of(data_of(kv_layer).dtype)
    query_weight, key_weight = norms or (qkv, qkv)
    _norm_rope_write_kernel[(num_tokens, triton.cdiv(all_heads, rows))](
        out,
        qkv,
        query_weight,
        key_weight,
        eps,
        cos,
        sin,
        kv,
        scales,
        slot_mapping,
        qkv.stride(0),
        qkv.stride(1),
        cos.stride(0),
        sin.stride(0),
        *strides,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=(all_heads - num_heads) // 2,
        BLOCK_SIZE=kv.shape[3],
        HEAD_DIM=head_dim,
        HALF=cos.shape[-1],
        WIDTH=width,
        ROWS=rows,
        NORM=norms is not None,
        KIND=kind,
        LIMIT=_LIMITS[kind],
        num_warps=4,
    )
    return out


def copy_blocks(blocks: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """See `ops.copy_blocks`.

    Through a temporary copy of the sources: programs of one launch have no order in which a chain of copies
    could be kept apart.
    """
    if len(source) == 0:
        return
    words = _as_words(blocks)
    size = words.shape[1]
    staged = torch.empty((len(source), size), dtype=words.dtype, device=words.device)
    grid = (len(source), triton.cdiv(size, COPY_TILE))
    for to, of, gather in ((staged, words, True), (words, staged, False)):
        _copy_kernel[grid](
            to,
            of,
            target,
            source,
            to.stride(0),
            of.stride(0),
            size,
            GATHER=gather,
            TILE=COPY_TILE,
            num_warps=8,
        )


def _as_words(blocks: torch.Tensor) -> torch.Tensor:
    """The same memory in the widest integers that its rows consist of."""
    assert blocks.stride(1) == 1, "the numbers of a block are neighbours"
    data = blocks.view(torch.uint8)
    for dtype in (torch.int64, torch.int32, torch.int16):
        places = (data.shape[1], data.stride(0), data.data_ptr())
        if all(place % dtype.itemsize == 0 for place in places):
            return data.view(dtype)
    return data


def _tile(head_dim: int, num_rows: int) -> tuple[int, int]:
    """(head_dim as a power of two, rows of a tile)."""
    width: int = triton.next_power_of_2(head_dim)
    return width, min(triton.next_power_of_2(num_rows), max(TILE // width, 1))


def compile_cases(capability: int) -> list[CompileCase]:
    """Writes of models of common shapes, with each kind of cache, and the copy."""
    del capability  # one launch fits all
    cases: list[CompileCase] = []
    strides = "qkv_token qkv_head cos sin kv_block kv_half kv_head kv_token scale_block scale_half scale_head"
    types = dict.fromkeys(("out", "qkv", "query_weight", "key_weight", "scales"), "*bf16:16")
    types |= {"cos": "*fp32:16", "sin": "*fp32:16", "slot_mapping": "*i64", "eps": "fp32"}
    types |= {f"{name}_stride": "i32:16" for name in strides.split()}
    for name, num_heads, num_kv_heads, head_dim, norm in (
        ("llama-8b", 32, 8, 128, False),
        ("qwen3-8b", 32, 8, 128, True),
        ("phi3-head96", 32, 32, 96, False),
    ):
        for kind, kv_type in ((PLAIN, "bf16"), (INT8, "i8"), (E4M3, "i8")):
            width, rows = _tile(head_dim, num_heads + 2 * num_kv_heads)
            constants = {
                "NUM_HEADS": num_heads,
                "NUM_KV_HEADS": num_kv_heads,
                "BLOCK_SIZE": 16,
                "HEAD_DIM": head_dim,
                "HALF": head_dim // 2,
                "WIDTH": width,
                "ROWS": rows,
                "NORM": norm,
                "KIND": kind,
                "LIMIT": _LIMITS[kind],
            }
            cases.append(
                CompileCase(
                    f"cache.norm_rope_write.{name}.{('plain', 'int8', 'e4m3')[kind]}",
                    _norm_rope_write_kernel,
                    types | constants | {"kv": f"*{kv_type}:16"},
                    {"num_warps": 4},
                )
            )
    copy: dict[str, Any] = dict.fromkeys(("target", "source"), "*i64:16")
    copy |= dict.fromkeys(("target_rows", "source_rows"), "*i64")
    copy |= {"target_stride": "i32:16", "source_stride": "i32:16", "size": "i32", "TILE": COPY_TILE}
    for name, gather in (("gather", True), ("scatter", False)):
        arguments = copy | {"GATHER": gather}
        cases.append(CompileCase(f"cache.copy.{name}", _copy_kernel, arguments, {"num_warps": 8}))
    return cases
