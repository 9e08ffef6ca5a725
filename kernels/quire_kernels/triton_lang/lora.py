"""Low-rank adapters in the Triton language. One kernel computes A x in float32, another adds B times that.

A program has a tile of tokens and one adapter, and ends at once if none of these tokens has that adapter. So
nothing is sorted, nothing waits for the host, and a launch does not depend on which adapters are used.
Sums over parts of the inputs are added in order, and tiles do not depend on the number of tokens. So a row's
result does not depend on other rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire_kernels.triton_lang import interpreter
from quire_kernels.triton_lang.compiler import CompileCase

interpreter.install()

_BLOCK_TOKENS = 32
_BLOCK_OUT = 64
_PART_INPUTS = 512
"""A layer's n inputs are divided into at most n / _PART_INPUTS parts, but at least one."""
_MAX_PARTS = 8
_STEP = 16
"""Number of ranks that `_expand_kernel` multiplies at once. More may not fit in registers."""
_OPTIONS = {"num_warps": 4, "num_stages": 3}


@triton.jit
def _rows_of(slots_ptr, num_tokens, slot, BLOCK_TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the tokens of the program's tile, which of them have this adapter, and whether any has."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_own = tl.load(slots_ptr + token, token < num_tokens, other=-1) == slot
    return token.to(tl.int64), is_own, tl.max(is_own.to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    a_ptr,
    slots_ptr,
    inner_ptr,
    num_tokens,
    in_features,
    x_stride,
    a_stride,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes inner [PARTS, num_tokens, BLOCK_RANK], the products of x and a by parts of the inputs. Grid:
    (tiles of tokens, slots, PARTS)."""
    slot, part = tl.program_id(1), tl.program_id(2)
    token, is_own, any_own = _rows_of(slots_ptr, num_tokens, slot, BLOCK_TOKENS)
    if any_own:
        rank = tl.arange(0, BLOCK_RANK)
        x_row = x_ptr + token[:, None] * x_stride
        a_row = a_ptr + slot.to(tl.int64) * a_stride + rank[None, :] * in_features
        sums = tl.zeros((BLOCK_TOKENS, BLOCK_RANK), tl.float32)
        per_part = tl.cdiv(tl.cdiv(in_features, BLOCK_K), PARTS)
        for tile in tl.range(part * per_part, (part + 1) * per_part):
            k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
            x = tl.load(x_row + k[None, :], is_own[:, None] & (k < in_features)[None, :], other=0.0)
            a = tl.load(a_row + k[:, None], (rank < RANK)[None, :] & (k < in_features)[:, None], other=0.0)
            sums = tl.dot(x, a, sums, input_precision="ieee")
        inner = inner_ptr + (part.to(tl.int64) * num_tokens + token[:, None]) * BLOCK_RANK + rank[None, :]
        tl.store(inner, sums, is_own[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    b_ptr,
    slots_ptr,
    inner_ptr,
    num_tokens,
    out_features,
    y_stride,
    b_stride,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Adds b times the `inner` of `_shrink_kernel` to y. Grid: (tiles of tokens, slots, tiles of outputs)."""
    slot = tl.program_id(1)
    token, is_own, any_own = _rows_of(slots_ptr, num_tokens, slot, BLOCK_TOKENS)
    if any_own:
        index = tl.program_id(2) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        is_out = index < out_features
        b_row = b_ptr + slot.to(tl.int64) * b_stride + index.to(tl.int64)[None, :] * RANK
        # Numbers of 16 bits are tf32's as they are, and with three products inner keeps what it has.
        PRECISION: tl.constexpr = "ieee" if b_ptr.dtype.element_ty == tl.float32 else "tf32x3"
        sums = tl.zeros((BLOCK_TOKENS, BLOCK_OUT), tl.float32)
        for first in tl.range(0, BLOCK_RANK, STEP):
            rank = first + tl.arange(0, STEP)
            inner = tl.zeros((BLOCK_TOKENS, STEP), tl.float32)
            for part in tl.static_range(PARTS):
                row = num_tokens.to(tl.int64) * part + token[:, None]
                inner += tl.load(inner_ptr + row * BLOCK_RANK + rank[None, :], is_own[:, None], other=0.0)
            b = tl.load(b_row + rank[:, None], (rank < RANK)[:, None] & is_out[None, :], other=0.0)
            sums = tl.dot(inner, b.to(tl.float32), sums, input_precision=PRECISION)
        y_row = y_ptr + token[:, None] * y_stride + index[None, :]
        mask = is_own[:, None] & is_out[None, :]
        y = tl.load(y_row, mask, other=0.0).to(tl.float32)
        tl.store(y_row, y + sums, mask)


def add_lora(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor) -> None:
    """See `ops.add_lora`."""
    num_tokens = slots.shape[0]
    if not num_tokens:
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    (num_slots, rank, in_features), out_features = a.shape, b.shape[1]
    parts = _parts(in_features)
    block_rank = max(16, triton.next_power_of_2(rank))
    inner = torch.empty((parts, num_tokens, block_rank), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(num_tokens, _BLOCK_TOKENS)
    blocks = {"RANK": rank, "PARTS": parts, "BLOCK_TOKENS": _BLOCK_TOKENS, "BLOCK_RANK": block_rank}
    _shrink_kernel[(tiles, num_slots, parts)](
        x,
        a,
        slots,
        inner,
        num_tokens,
        in_features,
        x.stride(0),
        a.stride(0),
        **blocks,
        BLOCK_K=_block_k(x.dtype.itemsize),
        **_OPTIONS,
    )
    _expand_kernel[(tiles, num_slots, triton.cdiv(out_features, _BLOCK_OUT))](
        y,
        b,
        slots,
        inner,
        num_tokens,
        out_features,
        y.stride(0),
        b.stride(0),
        **blocks,
        BLOCK_OUT=_BLOCK_OUT,
        STEP=_STEP,
        **_OPTIONS,
    )


def _parts(in_features: int) -> int:
    return max(1, min(in_features // _PART_INPUTS, _MAX_PARTS))


def _block_k(itemsize: int) -> int:
    return 32 if itemsize == 4 else 128


def compile_cases(capability: int) -> list[CompileCase]:
    """Returns cases for the layers of a model with 8 billion parameters, and for other types and ranks."""
    cases: list[CompileCase] = []
    for dtype, rank in (("bf16", 16), ("bf16", 128), ("fp16", 8), ("fp32", 128)):
        itemsize = 4 if dtype == "fp32" else 2
        arguments: dict[str, Any] = dict.fromkeys(("x_ptr", "y_ptr", "a_ptr", "b_ptr"), f"*{dtype}:16")
        arguments |= {"inner_ptr": "*fp32:16", "slots_ptr": "*i32:16", "num_tokens": "i32"}
        arguments |= dict.fromkeys(("in_features", "out_features"), "i32:16")
        arguments |= dict.fromkeys(("x_stride", "y_stride", "a_stride", "b_stride"), "i32:16")
        arguments |= {"RANK": rank, "BLOCK_RANK": max(16, rank), "PARTS": _parts(4096)}
        arguments |= {
            "BLOCK_TOKENS": _BLOCK_TOKENS,
            "BLOCK_OUT": _BLOCK_OUT,
            "BLOCK_K": _block_k(itemsize),
            "STEP": _STEP,
        }
        name = "llama-8b" if (dtype, rank) == ("bf16", 16) else f"{dtype}-rank{rank}"
        for kind, kernel in (("shrink", _shrink_kernel), ("expand", _expand_kernel)):
            cases.append(
                CompileCase(f"lora.{kind}.{name}", kernel, arguments, _OPTIONS, tensor_cores=itemsize == 2)
            )
    return cases
