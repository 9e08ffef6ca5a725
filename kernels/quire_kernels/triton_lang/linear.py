"""Linear layers in the Triton language: a matrix product for few rows, with weights read once.

Decoding multiplies few rows by large matrices, so the time is that of reading the weights. A program holds a
tile of outputs (the M operand of the tensor cores) for all rows (the N operand) and walks along the inputs;
where there are fewer tiles than the device can run, the inputs are split among several programs. Their
partial sums are added in the order of the inputs by whichever program comes last, so that results do not
depend on timing.

A row's result depends on the configuration, which is chosen by shape, type and `row_bucket` of the number of
rows: it is the same for all numbers of rows in one bucket (1 to 16, 17 to 32, 33 to 64) as long as the
tuner's choice stays. More rows than MAX_ROWS are torch's matrix product, which promises nothing of the kind.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from quire_kernels.triton_lang import interpreter, tuning
from quire_kernels.triton_lang.compiler import CompileCase
from quire_kernels.triton_lang.elementwise import ACTIVATIONS, argmax, as_rows, factor, gate, gate_mul
from quire_kernels.triton_lang.numerics import from_e4m3_bits
from quire_kernels.weights import INT4_GROUP, QuantizedRows, quantize_weight

interpreter.install()

MAX_ROWS = 64
"""The products of more rows are limited by arithmetic, and torch's."""
INT4_PAIR = 2 * INT4_GROUP
"""Input features of a block of bytes: one group in the low halves, the next one in the high halves."""
PLAIN, INT8, INT4, FP8 = (tl.constexpr(number) for number in range(4))
FORMATS = {None: 0, "int8": 1, "int4": 2, "fp8": 3}
"""What the kernels call quantisations."""
_GROUP = tl.constexpr(INT4_GROUP)
_FP8_FACTOR = 256.0
"""What `_unpack` divides FP8 numbers by."""
_MIN_BLOCK_OUT = 16
_PROGRAMS_PER_PROCESSOR = 2
_INTERPRETED_PROCESSORS = 4
_MAX_SPLIT = 32


@triton.jit
def _unpack(codes, FORMAT: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of type DTYPE, exactly, of PLAIN or INT8 codes, or of FP8 ones divided by 256."""
    if FORMAT == FP8:
        return from_e4m3_bits(codes, DTYPE)
    if codes.dtype == DTYPE:
        return codes
    return codes.to(tl.float32).to(DTYPE)


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    x_row,
    weight_ptr,
    scale_ptr,
    column,
    accumulator,
    tile,
    in_features,
    num_weights,
    FORMAT: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Adds the product of one tile of inputs; the layouts are those of `TritonLinear`.

    x_row: pointers [1, rows] to rows of x; column: int64 [outputs], rows of the weights, in range.
    """
    DTYPE: tl.constexpr = x_row.dtype.element_ty
    if FORMAT == INT4:
        byte = tl.arange(0, _GROUP)
        block = tile * num_weights + column
        codes = tl.load(weight_ptr + block[:, None] * _GROUP + byte[None, :], eviction_policy="evict_first")
        scales = scale_ptr + tile * 2 * num_weights + column
        low_scale = tl.load(scales, eviction_policy="evict_first")
        high_scale = tl.load(scales + num_weights, eviction_policy="evict_first")
        k = tile * 2 * _GROUP + byte[:, None]
        low_x = tl.load(x_row + k)
        if EVEN:
            high_x = tl.load(x_row + _GROUP + k)
        else:
            high_x = tl.load(x_row + _GROUP + k, k + _GROUP < in_features, other=0.0)
        # Shifts of signed bytes extend the sign.
        low = (((codes << 4) >> 4).to(tl.float32) * low_scale[:, None]).to(DTYPE)
        high = ((codes >> 4).to(tl.float32) * high_scale[:, None]).to(DTYPE)
        accumulator = tl.dot(low, low_x, accumulator, input_precision="ieee")
        return tl.dot(high, high_x, accumulator, input_precision="ieee")
    k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    weights = weight_ptr + column[:, None] * in_features + k[None, :]
    inputs = x_row + k[:, None]
    if EVEN:
        codes = tl.load(weights, eviction_policy="evict_first")
        x = tl.load(inputs)
    else:
        codes = tl.load(weights, (k < in_features)[None, :], other=0, eviction_policy="evict_first")
        x = tl.load(inputs, (k < in_features)[:, None], other=0.0)
    return tl.dot(_unpack(codes, FORMAT, DTYPE), x, accumulator, input_precision="ieee")


@triton.jit
def _finished(  # type: ignore[no-untyped-def]
    accumulator, scale_ptr, bias_ptr, column, FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Sums with the scales of outputs, and the bias."""
    if (FORMAT == INT8) or (FORMAT == FP8):  # noqa: SIM109  (no `in` in kernels)
        accumulator *= tl.load(scale_ptr + column)[:, None]
    if HAS_BIAS:
        accumulator += tl.load(bias_ptr + column).to(tl.float32)[:, None]
    return accumulator


@triton.jit(do_not_specialize=["num_rows", "split"])
def _skinny_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    scratch_ptr,
    ticket_ptr,
    num_rows,
    in_features,
    out_features,
    x_stride,
    split,
    FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [num_rows, out_features] of x [num_rows, in_features]; grid (tiles of outputs, split).

    scratch: float32 [tiles, split, 1 or 2, BLOCK_OUT, BLOCK_ROWS]. ticket: int32 [tiles], zeros, and zeros
    again when the kernel ends: two launches at once must not share them.
    """
    tile_out, part = tl.program_id(0), tl.program_id(1)
    IS_GATED: tl.constexpr = ACTIVATION != 0
    PARTS: tl.constexpr = 2 if IS_GATED else 1
    num_weights = out_features * PARTS
    index = tile_out * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.arange(0, BLOCK_ROWS)
    # Outputs and rows beyond the last one repeat it, so that loads need no masks.
    column = tl.minimum(index, out_features - 1).to(tl.int64)
    x_row = x_ptr + tl.minimum(row, num_rows - 1).to(tl.int64)[None, :] * x_stride
    sums = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    up_sums = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    num_tiles = tl.cdiv(in_features, BLOCK_K)
    per_part = tl.cdiv(num_tiles, split)
    begin = part * per_part
    for tile in tl.range(begin, tl.minimum(begin + per_part, num_tiles)):
        sums = _multiply(
            x_row,
            weight_ptr,
            scale_ptr,
            column,
            sums,
            tile,
            in_features,
            num_weights,
            FORMAT,
            EVEN,
            BLOCK_K,
        )
        if IS_GATED:
            up_sums = _multiply(
                x_row,
                weight_ptr,
                scale_ptr,
                column + out_features,
                up_sums,
                tile,
                in_features,
                num_weights,
                FORMAT,
                EVEN,
                BLOCK_K,
            )
    is_last = True
    if IS_SPLIT:
        SIZE: tl.constexpr = BLOCK_OUT * BLOCK_ROWS
        cell = tl.arange(0, BLOCK_OUT)[:, None] * BLOCK_ROWS + row[None, :]
        scratch = scratch_ptr + tile_out.to(tl.int64) * split * PARTS * SIZE + cell
        tl.store(scratch + part * PARTS * SIZE, sums, cache_modifier=".cg")
        if IS_GATED:
            tl.store(scratch + (part * PARTS + 1) * SIZE, up_sums, cache_modifier=".cg")
        # All threads have stored before the ticket says so.
        tl.debug_barrier()
        ticket = tl.atomic_add(ticket_ptr + tile_out, 1, sem="acq_rel", scope="gpu")
        is_last = ticket == split - 1
        if is_last:
            tl.store(ticket_ptr + tile_out, 0)
            sums = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
            up_sums = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
            # In the order of the inputs, this program's own share included.
            for other in range(split):
                sums += tl.load(scratch + other * PARTS * SIZE, cache_modifier=".cg")
                if IS_GATED:
                    up_sums += tl.load(scratch + (other * PARTS + 1) * SIZE, cache_modifier=".cg")
    if is_last:
        out = _finished(sums, scale_ptr, bias_ptr, column, FORMAT, HAS_BIAS)
        if IS_GATED:
            up = _finished(up_sums, scale_ptr, bias_ptr, column + out_features, FORMAT, HAS_BIAS)
            out = gate(out, ACTIVATION) * factor(up, ACTIVATION)
        targets = out_ptr + row.to(tl.int64)[None, :] * out_features + index[:, None]
        tl.store(targets, out, (row < num_rows)[None, :] & (index < out_features)[:, None])


@triton.jit
def _restore_kernel(  # type: ignore[no-untyped-def]
    weight_ptr,
    scale_ptr,
    out_ptr,
    in_features,
    num_weights,
    FORMAT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Weights in out's type, [num_weights, in_features]; grid (tiles of outputs, tiles of inputs)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)[:, None]
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    mask = (index < num_weights) & (k < in_features)
    if FORMAT == INT4:
        pair, inside = k // (2 * _GROUP), k % (2 * _GROUP)
        block = (pair * num_weights + index) * _GROUP
        codes = tl.load(weight_ptr + block + inside % _GROUP, mask, other=0)
        codes = tl.where(inside < _GROUP, (codes << 4) >> 4, codes >> 4)
        scale = tl.load(scale_ptr + (k // _GROUP) * num_weights + index, mask, other=0.0)
        out = codes.to(tl.float32) * scale
    else:
        codes = tl.load(weight_ptr + index * in_features + k, mask, other=0)
        scale = tl.load(scale_ptr + index, index < num_weights, other=0.0)
        out = _unpack(codes, FORMAT, tl.float32) * scale
    tl.store(out_ptr + index * in_features + k, out.to(out_ptr.dtype.element_ty), mask)


def row_bucket(num_rows: int) -> int:
    """The tile of rows, 1 to MAX_ROWS of them, that a product uses."""
    return max(16, triton.next_power_of_2(num_rows))


class TritonLinear:
    """See `ops.pack_linear`.

    Weights are kept in rows [out_features, in_features]; those of four bits as int8
    [pairs, out_features, INT4_GROUP] with scales float32 [pairs, 2, out_features], where byte i of pair p has
    input 64 p + i in its low half and input 64 p + 32 + i in its high half. Scales of the other
    quantisations are float32 [out_features]. Calls must follow one another on one stream.
    """

    def __init__(
        self,
        weight: torch.Tensor | QuantizedRows,
        bias: torch.Tensor | None,
        activation: str | None,
        quantization: str | None,
    ) -> None:
        num_weights, self.in_features = weight.shape
        self.activation, self.quantization, self.dtype = activation, quantization, weight.dtype
        self.out_features = num_weights if activation is None else num_weights // 2
        self.bias = None if bias is None else bias.detach().contiguous()
        self.num_weights = num_weights
        self.scales: torch.Tensor | None = None
        if isinstance(weight, torch.Tensor) and quantization is None:
            self.weight = weight.detach().contiguous()
        else:
            assert quantization is not None
            self.weight, self.scales = _packed(weight, quantization)
        self.nbytes = self.weight.nbytes + (0 if self.scales is None else self.scales.nbytes)
        self._tuner = tuning.tuner_of(weight.device)
        self._prepare()

    def _prepare(self) -> None:
        most_tiles = triton.cdiv(self.out_features, _MIN_BLOCK_OUT)
        self._tickets = torch.zeros(most_tiles, dtype=torch.int32, device=self.weight.device)
        self._known: dict[int, tuple[str, tuning.Config]] = {}
        """The tuner's key and the default of each bucket."""

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        assert self.quantization is None and self.activation is None, "W is not kept as it was"
        return F.embedding(indices, self.weight)

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """See PackedLinear."""
        return argmax(self(x, torch.float32))

    def ungated(self) -> TritonLinear:
        """See PackedLinear."""
        out = copy.copy(self)
        out.activation, out.out_features = None, self.num_weights
        out._prepare()
        return out

    def __call__(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See PackedLinear."""
        assert x.dtype == self.dtype and x.shape[-1] == self.in_features, (x.dtype, x.shape)
        rows = as_rows(x)
        if rows.shape[0] > MAX_ROWS:
            out = self._wide_product(rows, dtype or x.dtype)
        else:
            out = torch.empty((rows.shape[0], self.out_features), dtype=dtype or x.dtype, device=x.device)
            if rows.shape[0]:
                self._skinny_product(rows, out)
        return out.view(*x.shape[:-1], self.out_features)

    def _wide_product(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        weight = self.weight if self.quantization is None else self._restored()
        out = F.linear(rows, weight, self.bias)
        if self.activation is not None:
            out = gate_mul(out, self.activation)
        return out.to(dtype)

    def _restored(self) -> torch.Tensor:
        """[num_weights, in_features] in x's type, anew each time: only one layer's at once is kept."""
        out = torch.empty((self.num_weights, self.in_features), dtype=self.dtype, device=self.weight.device)
        grid = (triton.cdiv(self.num_weights, 32), triton.cdiv(self.in_features, 128))
        _restore_kernel[grid](
            self.weight,
            self.scales,
            out,
            self.in_features,
            self.num_weights,
            FORMAT=FORMATS[self.quantization],
            BLOCK_OUT=32,
            BLOCK_K=128,
            num_warps=4,
        )
        return out

    def _skinny_product(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        bucket = row_bucket(rows.shape[0])
        known = self._known.get(bucket)
        if known is None:
            known = self._known[bucket] = self._key(bucket), self._default(bucket)
        config = self._tuner.choose(
            *known,
            functools.partial(self._candidates, bucket),
            functools.partial(self._launch, rows, out, bucket),
        )
        self._launch(rows, out, bucket, config)

    def _launch(self, rows: torch.Tensor, out: torch.Tensor, bucket: int, config: tuning.Config) -> None:
        block_out, block_k, split = config["BLOCK_OUT"], config["BLOCK_K"], config["SPLIT"]
        num_tiles = triton.cdiv(self.out_features, block_out)
        parts = 1 if self.activation is None else 2
        # Of this call alone: nothing of it outlives the launch, and graphs have their own pools.
        scratch = out
        if split > 1:
            size = num_tiles * split * parts * block_out * bucket
            scratch = torch.empty(size, dtype=torch.float32, device=out.device)
        _skinny_kernel[(num_tiles, split)](
            rows,
            self.weight,
            self.weight if self.scales is None else self.scales,
            self.weight if self.bias is None else self.bias,
            out,
            scratch,
            self._tickets,
            rows.shape[0],
            self.in_features,
            self.out_features,
            rows.stride(0),
            split,
            FORMAT=FORMATS[self.quantization],
            ACTIVATION=ACTIVATIONS[self.activation],
            HAS_BIAS=self.bias is not None,
            EVEN=self.in_features % block_k == 0,
            IS_SPLIT=split > 1,
            BLOCK_ROWS=bucket,
            BLOCK_OUT=block_out,
            BLOCK_K=block_k,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )

    def _key(self, bucket: int) -> str:
        shape: dict[str, int | str] = {
            "rows": bucket,
            "in_features": self.in_features,
            "out_features": self.out_features,
            "dtype": str(self.dtype).removeprefix("torch."),
            "activation": self.activation or "none",
            "quantization": self.quantization or "none",
        }
        return tuning.kernel_key("linear", tuning.source_hash(__file__), shape)

    def _default(self, bucket: int) -> tuning.Config:
        processors, shared = _limits(self.weight.device)
        block_out, block_k = _default_blocks(self.dtype.itemsize, self.quantization)
        stage = self._stage_bytes(bucket, block_out, block_k)
        num_stages = max(2, min(5, shared // 2 // stage))
        return self._config(block_out, block_k, 4, num_stages, _PROGRAMS_PER_PROCESSOR * processors)

    def _candidates(self, bucket: int) -> list[tuning.Config]:
        processors, shared = _limits(self.weight.device)
        found = []
        depths = (INT4_PAIR,) if self.quantization == "int4" else (64, 128, 256)
        for block_out, num_warps in ((16, 4), (32, 4), (64, 4), (128, 4), (128, 8)):
            for block_k in depths:
                stage = self._stage_bytes(bucket, block_out, block_k)
                for num_stages in (3, 5, 8):
                    # Enough bytes on their way to memory, and no more than there is room for.
                    if 24 << 10 <= num_stages * stage <= shared:
                        found += [
                            self._config(block_out, block_k, num_warps, num_stages, waves * processors)
                            for waves in (1, 2, 4)
                        ]
        return list(dict.fromkeys(found))

    def _config(
        self, block_out: int, block_k: int, num_warps: int, num_stages: int, programs: int
    ) -> tuning.Config:
        """Splits the inputs so that about this many programs run, each with two tiles at least."""
        tiles = triton.cdiv(self.out_features, block_out)
        most = triton.cdiv(triton.cdiv(self.in_features, block_k), 2)
        split = max(1, min(triton.cdiv(programs, tiles), most, _MAX_SPLIT))
        return tuning.Config.of(num_warps, num_stages, BLOCK_OUT=block_out, BLOCK_K=block_k, SPLIT=split)

    def _stage_bytes(self, bucket: int, block_out: int, block_k: int) -> int:
        parts = 1 if self.activation is None else 2
        weights = block_out * block_k * self.weight.itemsize
        if self.quantization == "int4":
            weights = block_out * (block_k // 2 + 8)
        return parts * weights + bucket * block_k * self.dtype.itemsize


def _default_blocks(itemsize: int, quantization: str | None) -> tuple[int, int]:
    """(BLOCK_OUT, BLOCK_K) of x with this size of a number."""
    block_out, block_k = (32, 64) if itemsize == 4 else (64, 128)
    return block_out, INT4_PAIR if quantization == "int4" else block_k


@functools.cache
def _limits(device: torch.device) -> tuple[int, int]:
    """(processors, bytes of shared memory a program may have)."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS, 96 << 10
    properties = torch.cuda.get_device_properties(device)
    # A little is the compiler's own.
    # Older ones of torch do not tell; every device with compute capability 8.0 has 99 KiB.
    shared = getattr(properties, "shared_memory_per_block_optin", 99 << 10)
    return properties.multi_processor_count, shared - 4096


def _packed(weight: torch.Tensor | QuantizedRows, quantization: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) in the layout of `TritonLinear`."""
    codes, scales = quantize_weight(weight, quantization)
    if quantization == "int8":
        return codes, scales.squeeze(1)
    if quantization == "fp8":
        return codes.view(torch.int8), scales.squeeze(1) * _FP8_FACTOR
    missing = -codes.shape[1] % INT4_PAIR
    codes, scales = F.pad(codes, (0, missing)), F.pad(scales, (0, missing // INT4_GROUP))
    low, high = codes.unflatten(1, (-1, 2, INT4_GROUP)).unbind(2)
    packed = (low & 15) | (high << 4)
    return packed.transpose(0, 1).contiguous(), scales.T.contiguous()


def compile_cases(capability: int) -> list[CompileCase]:
    """The product as a model of 8 billion parameters has it, in the default configurations."""
    cases: list[CompileCase] = []
    for quantization, number in FORMATS.items():
        for dtype in ("bf16", "fp16", "fp32"):
            for rows, activation in ((16, None), (64, None), (16, "silu")):
                block_out, block_k = _default_blocks(4 if dtype == "fp32" else 2, quantization)
                arguments: dict[str, Any] = dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), f"*{dtype}:16")
                arguments |= {"weight_ptr": f"*{dtype}:16" if quantization is None else "*i8:16"}
                arguments |= dict.fromkeys(("scale_ptr", "scratch_ptr"), "*fp32:16")
                arguments |= {"ticket_ptr": "*i32:16", "num_rows": "i32", "split": "i32"}
                arguments |= dict.fromkeys(("x_stride", "in_features", "out_features"), "i32:16")
                arguments |= {"FORMAT": number, "ACTIVATION": ACTIVATIONS[activation]}
                arguments |= dict.fromkeys(("HAS_BIAS", "EVEN", "IS_SPLIT"), True)
                arguments |= {"BLOCK_ROWS": rows, "BLOCK_OUT": block_out, "BLOCK_K": block_k}
                name = f"linear-{quantization or 'plain'}-{dtype}-{rows}rows-{activation or 'none'}"
                # As `TritonLinear._default` has it where a program may have 99 KiB, and with room to spare.
                options = {"num_warps": 4, "num_stages": 2 if capability == 89 else 3}
                cases.append(
                    CompileCase(name, _skinny_kernel, arguments, options, tensor_cores=dtype != "fp32")
                )
    for quantization in ("int8", "int4", "fp8"):
        arguments = {"weight_ptr": "*i8:16", "scale_ptr": "*fp32:16", "out_ptr": "*bf16:16"}
        arguments |= {"in_features": "i32:16", "num_weights": "i32:16", "FORMAT": FORMATS[quantization]}
        arguments |= {"BLOCK_OUT": 32, "BLOCK_K": 128}
        cases.append(CompileCase(f"restore-{quantization}", _restore_kernel, arguments))
    return cases
