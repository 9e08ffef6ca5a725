"""Norms, rotary embedding, gated activations and argmax in the Triton language.

Every row is computed alone and in a fixed order: results do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from quire_kernels.triton_lang import interpreter
from quire_kernels.triton_lang.compiler import CompileCase

interpreter.install()

MAX_NORM_BLOCK = 16384
"""A longer row is read twice, in blocks."""
_ELEMENTS = 2048
"""Numbers that a program holds, where rows are short enough for several."""
_GATE_BLOCK = 1024
_ARGMAX_BLOCK = 4096
SILU, GELU, GELU_TANH, CLAMPED_SWIGLU = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
ACTIVATIONS = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "clamped_swiglu": 4}
"""Number of each activation in the kernels."""
INT_MAX = tl.constexpr(0x7FFFFFFF)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., size] as [n, size] whose rows are contiguous, one by one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)) of float32 x; 0 and 1 far out, without NaN."""
    return 1.0 / (1.0 + tl.exp2(-x * _LOG2_E))


@triton.jit
def gate(x, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """An activation of float32."""
    if ACTIVATION == SILU:
        return x * sigmoid(x)
    elif ACTIVATION == GELU:
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif ACTIVATION == CLAMPED_SWIGLU:
        clamped = tl.minimum(x, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return clamped * sigmoid(clamped * 1.702)
    else:
        # (1 + tanh(z)) / 2 is sigmoid(2 z).
        tl.static_assert(ACTIVATION == GELU_TANH)
        # In Triton 3.7's interpreter a constant on the left of a tensor makes a constant of it.
        return x * sigmoid((x + 0.044715 * x * x * x) * _TWICE_SQRT_2_OVER_PI)


@triton.jit
def factor(up, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """The factor of the activated gate, in float32."""
    if ACTIVATION == CLAMPED_SWIGLU:
        up = tl.minimum(up, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
    return up


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x [num_rows, SIZE]; out and total are contiguous. Blocks of a row longer than one are read again."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    x_row = row.to(tl.int64) * x_stride
    residual_row = row.to(tl.int64) * residual_stride
    out_row = row.to(tl.int64) * SIZE
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for begin in tl.static_range(0, SIZE, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        mask = (row < num_rows) & (column < SIZE)
        x = tl.load(x_ptr + x_row + column, mask, other=0.0)
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + residual_row + column, mask, other=0.0)
            # Rounded to the type before it is squared: the norm is of what the next layer adds to.
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            tl.store(total_ptr + out_row + column, x, mask)
        wide = x.to(tl.float32)
        squares += wide * wide
    scale = tl.math.rsqrt(tl.sum(squares, 1, keep_dims=True) / SIZE + eps)
    for begin in tl.static_range(0, SIZE, BLOCK):
        column = begin + tl.arange(0, BLOCK)[None, :]
        mask = (row < num_rows) & (column < SIZE)
        if SIZE > BLOCK:
            x = tl.load(x_ptr + x_row + column, mask, other=0.0)
            if HAS_RESIDUAL:
                residual = tl.load(residual_ptr + residual_row + column, mask, other=0.0)
                x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        weight = tl.load(weight_ptr + column, column < SIZE, other=0.0).to(tl.float32)
        # Two roundings, as in the reference.
        normed = (x.to(tl.float32) * scale).to(x.dtype).to(tl.float32)
        tl.store(out_ptr + out_row + column, (weight * normed).to(x.dtype), mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.rms_norm` and `ops.add_rms_norm`; the sum, or x itself without a residual, comes second."""
    size = x.shape[-1]
    rows = as_rows(x)
    addend = rows if residual is None else as_rows(residual)
    assert weight.is_contiguous() and addend.dtype == x.dtype and addend.shape == rows.shape
    out = torch.empty((rows.shape[0], size), dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    block = min(triton.next_power_of_2(size), MAX_NORM_BLOCK)
    together = max(1, _ELEMENTS // block)
    if rows.shape[0]:
        _rms_norm_kernel[(triton.cdiv(rows.shape[0], together),)](
            rows,
            addend,
            weight,
            out,
            total,
            rows.shape[0],
            rows.stride(0),
            addend.stride(0),
            eps,
            SIZE=size,
            HAS_RESIDUAL=residual is not None,
            ROWS=together,
            BLOCK=block,
            num_warps=_norm_warps(block),
        )
    return out.view(x.shape), x if residual is None else total.view(x.shape)


def _norm_warps(block: int) -> int:
    return 4 if block <= 2048 else 8 if block <= 8192 else 16


@triton.jit
def _gate_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    x_stride,
    size,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x [rows, 2 * size], out [rows, size] contiguous; one program for a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    wide = tl.load(x_ptr + row * x_stride + column, mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + size + column, mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + column, gate(wide, ACTIVATION) * factor(up, ACTIVATION), mask)


def gate_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """See `ops.gate_mul`."""
    rows = as_rows(gate_up)
    size = rows.shape[1] // 2
    out = torch.empty((rows.shape[0], size), dtype=rows.dtype, device=rows.device)
    if out.numel():
        # Rows lie along the grid's first axis, which alone may exceed 65535.
        _gate_kernel[(rows.shape[0], triton.cdiv(size, _GATE_BLOCK))](
            rows,
            out,
            rows.stride(0),
            size,
            ACTIVATION=ACTIVATIONS[activation],
            BLOCK=_GATE_BLOCK,
            num_warps=4,
        )
    return out.view(*gate_up.shape[:-1], size)


@triton.jit
def _rope_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_heads,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    """x [tokens, num_heads, HEAD_DIM]; out contiguous; pairs (i, i + HALF); one program for HEADS heads.

    BLOCK and REST are powers of two that hold HALF and the dimensions that pass unchanged (0: none).
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    x_head = x_ptr + token * token_stride + head * head_stride
    out_head = out_ptr + (token * num_heads + head) * HEAD_DIM
    mask = (head < num_heads) & (pair < HALF)
    cos = tl.load(cos_ptr + token * cos_stride + pair, pair < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * sin_stride + pair, pair < HALF, other=0.0)
    first = tl.load(x_head + pair, mask, other=0.0).to(tl.float32)
    second = tl.load(x_head + HALF + pair, mask, other=0.0).to(tl.float32)
    tl.store(out_head + pair, first * cos - second * sin, mask)
    tl.store(out_head + HALF + pair, second * cos + first * sin, mask)
    if REST:
        rest = 2 * HALF + tl.arange(0, REST)[None, :]
        mask = (head < num_heads) & (rest < HEAD_DIM)
        tl.store(out_head + rest, tl.load(x_head + rest, mask), mask)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `ops.rope`."""
    num_tokens, num_heads, head_dim = x.shape
    x, cos, sin = (part if part.stride(-1) == 1 else part.contiguous() for part in (x, cos, sin))
    half = cos.shape[1]
    block = triton.next_power_of_2(half)
    heads = min(triton.next_power_of_2(num_heads), max(1, _ELEMENTS // block))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        _rope_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
            x,
            cos,
            sin,
            out,
            num_heads,
            x.stride(0),
            x.stride(1),
            cos.stride(0),
            sin.stride(0),
            HEAD_DIM=head_dim,
            HALF=half,
            HEADS=heads,
            BLOCK=block,
            REST=triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
            num_warps=4,
        )
    return out


@triton.jit
def first_largest(values, index):  # type: ignore[no-untyped-def]
    """(largest of float32 `values`, least `index` that has it); (NaN, any) when one of them is NaN."""
    # NaN compares unequal to itself; what tl.max makes of it differs between devices.
    num_nans = tl.sum((values != values).to(tl.int32), 0)
    best = tl.max(values, 0)
    found = tl.min(tl.where(values == best, index, INT_MAX), 0)
    return tl.where(num_nans > 0, float("nan"), best), found


@triton.jit
def argmax_parts_kernel(  # type: ignore[no-untyped-def]
    x_ptr, value_ptr, index_ptr, x_stride, size, num_parts, BLOCK: tl.constexpr
):
    """x float32 [rows, size] to float32 and int32 [rows, num_parts]: `first_largest` of each block."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, column < size, other=-float("inf"))
    best, found = first_largest(x, column)
    tl.store(value_ptr + row * num_parts + part, best)
    tl.store(index_ptr + row * num_parts + part, found)


@triton.jit
def best_of_parts(value_ptr, index_ptr, row, num_parts, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(value, index) of a row from `argmax_parts_kernel`; the index is -1 where the value is not finite."""
    part = tl.arange(0, PARTS)
    value = tl.load(value_ptr + row * num_parts + part, part < num_parts, other=-float("inf"))
    index = tl.load(index_ptr + row * num_parts + part, part < num_parts, other=INT_MAX)
    best, found = first_largest(value, index)
    is_finite = (best == best) & (best < float("inf")) & (best > -float("inf"))
    return best, tl.where(is_finite, found, -1)


@triton.jit
def _argmax_kernel(  # type: ignore[no-untyped-def]
    value_ptr, index_ptr, out_ptr, num_parts, PARTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    _, found = best_of_parts(value_ptr, index_ptr, row, num_parts, PARTS)
    tl.store(out_ptr + row, found.to(tl.int64))


def argmax_parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 and int32 [n, parts]: the first largest number of each block of x [n, size], and its place."""
    num_rows, size = x.shape
    assert x.dtype == torch.float32 and x.stride(1) == 1 and 0 < size < INT_MAX.value
    # In a fixed number of blocks whatever the number of rows, so that one graph has one shape of grid.
    num_parts = triton.cdiv(size, _ARGMAX_BLOCK)
    values = torch.empty((num_rows, num_parts), dtype=torch.float32, device=x.device)
    indices = torch.empty((num_rows, num_parts), dtype=torch.int32, device=x.device)
    block = min(_ARGMAX_BLOCK, triton.next_power_of_2(size))
    argmax_parts_kernel[(num_rows, num_parts)](
        x, values, indices, x.stride(0), size, num_parts, BLOCK=block, num_warps=8
    )
    return values, indices


def argmax(x: torch.Tensor) -> torch.Tensor:
    """See `ops.argmax`: blocks of a row in parallel, then a small kernel over the blocks."""
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    if x.shape[0]:
        values, indices = argmax_parts(x)
        num_parts = values.shape[1]
        _argmax_kernel[(x.shape[0],)](
            values, indices, out, num_parts, PARTS=triton.next_power_of_2(num_parts), num_warps=1
        )
    return out


def compile_cases(capability: int) -> list[CompileCase]:
    """Each kernel as models of 1 to 8 billion parameters call it."""
    cases: list[CompileCase] = []
    for dtype in ("bf16", "fp16", "fp32"):
        pointer = f"*{dtype}:16"
        for size in (128, 4096, 20480):
            block = min(triton.next_power_of_2(size), MAX_NORM_BLOCK)
            names = ("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "total_ptr")
            arguments: dict[str, Any] = dict.fromkeys(names, pointer) | {"num_rows": "i32", "eps": "fp32"}
            arguments |= {"x_stride": "i32:16", "residual_stride": "i32:16", "SIZE": size}
            arguments |= {"HAS_RESIDUAL": True, "ROWS": max(1, _ELEMENTS // block), "BLOCK": block}
            options = {"num_warps": _norm_warps(block)}
            cases.append(CompileCase(f"rms_norm-{dtype}-{size}", _rms_norm_kernel, arguments, options))
        for activation, number in ACTIVATIONS.items():
            if activation is not None:
                arguments = {"x_ptr": pointer, "out_ptr": pointer, "x_stride": "i32:16", "size": "i32:16"}
                arguments |= {"ACTIVATION": number, "BLOCK": _GATE_BLOCK}
                cases.append(CompileCase(f"{activation}_mul-{dtype}", _gate_kernel, arguments))
        arguments = {"x_ptr": pointer, "cos_ptr": "*fp32:16", "sin_ptr": "*fp32:16", "out_ptr": pointer}
        arguments |= dict.fromkeys(("token_stride", "head_stride", "cos_stride", "sin_stride"), "i32:16")
        arguments |= {"num_heads": "i32", "HEAD_DIM": 128, "HALF": 32, "HEADS": 32, "BLOCK": 32, "REST": 64}
        cases.append(CompileCase(f"rope-{dtype}", _rope_kernel, arguments))
    arguments = {"x_ptr": "*fp32:16", "value_ptr": "*fp32:16", "index_ptr": "*i32:16", "x_stride": "i32:16"}
    arguments |= {"size": "i32:16", "num_parts": "i32", "BLOCK": _ARGMAX_BLOCK}
    cases.append(CompileCase("argmax_parts", argmax_parts_kernel, arguments, {"num_warps": 8}))
    arguments = {"value_ptr": "*fp32:16", "index_ptr": "*i32:16", "out_ptr": "*i64:16"}
    arguments |= {"num_parts": "i32", "PARTS": 64}
    cases.append(CompileCase("argmax", _argmax_kernel, arguments, {"num_warps": 1}))
    return cases
