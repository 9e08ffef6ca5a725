"""Operators of `ops` on the CUDA kernels of src/, with any launcher: a GPU's, or the tests' emulation."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from quire_kernels.cuda.compiler import Unit, attention_unit
from quire_kernels.cuda.launch import Launcher
from quire_kernels.metadata import NO_SINKS, AttentionMetadata
from quire_kernels.quantized_kv import KV_KINDS, KVLayer, QuantizedKV
from quire_kernels.sampling import SamplingTensors

TYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "Float32"}
HEAD_DIMS = (64, 80, 96, 128, 256)
QUANTIZED_HEAD_DIMS = (64, 128, 256)
MAX_ROW_BYTES = 1024 * 4 * 16
"""Bytes of a row that the kernel of `rms_norm` can hold: 1024 threads with 4 vectors of 16 bytes each."""
MAX_CHUNKS = 32
_ROWS = 16
_ATTENTION_THREADS = 128
_BLOCKS_PER_MULTIPROCESSOR = 2
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}


def attention_shared_bytes(head_dim: int, cache: int) -> int:
    """Returns the bytes of dynamic shared memory that a thread block of attention.cu's kernel `attention`
    needs. `cache`: see `compiler.attention_unit`."""
    tile, element = 32 if head_dim > 128 else 64, 1 if cache else 2
    row = head_dim * element if head_dim in QUANTIZED_HEAD_DIMS else 192
    stages = 4 if cache else 3
    query_bytes = head_dim // 16 * 512 if head_dim > 128 else 0
    scales = stages * 2 * tile * 4 if cache else 0
    return stages * 2 * tile * row + query_bytes + scales + 4 * _ROWS * 16 + 16


@dataclass(frozen=True)
class _Plan:
    """Work of each thread block of an attention launch, planned on the device. Layers of a step with the
    same window and shape usually share it."""

    items: torch.Tensor
    """int32 [num_items, 8]: `Item` structures of attention.cu."""
    starts: torch.Tensor
    """int32 [num_blocks, 4]: where each thread block's run of chunks begins."""
    total: torch.Tensor
    """int32 [1]: number of tiles of all items and heads."""
    tickets: torch.Tensor
    """int32 [num_blocks]: counters that an attention launch uses; zero before and after it."""
    states: torch.Tensor
    """float32 [num_blocks, MAX_CHUNKS, rows, head_dim + 2]: scratch memory, used by one layer at a time."""


class Kernels:
    """Functions of operators, in the form in which the registry calls them, and `quantize_rows`."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_layer: KVLayer,
        meta: AttentionMetadata,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `ops.paged_attention`, without sinks and joint sequences. Fast for few new tokens per sequence,
        correct for any number."""
        data, scales = kv_layer if isinstance(kv_layer, QuantizedKV) else (kv_layer, None)
        _, _, num_kv_heads, block_size, head_dim = data.shape
        num_heads = query.shape[1]
        groups = num_heads // num_kv_heads
        head_tiles = -(-groups // _ROWS)
        tokens_per_tile = min(_ROWS // groups, meta.max_query_len) if head_tiles == 1 else 1
        rows = tokens_per_tile * groups if head_tiles == 1 else _ROWS
        query_tiles = -(-meta.max_query_len // tokens_per_tile)
        cache = KV_KINDS.get(data.dtype, 0)
        unit = attention_unit(TYPES[query.dtype], head_dim, cache)
        device, window, heads = query.device, sliding_window or 0, num_kv_heads * head_tiles
        assert meta.block_table.stride(1) == 1 or meta.block_table.shape[1] == 1, meta.block_table.stride()
        assert data.dtype in KV_KINDS or data.dtype == query.dtype, (data.dtype, query.dtype)
        num_seqs = meta.query_start_loc.shape[0] - 1
        num_blocks = self.launcher.multiprocessors(device) * _BLOCKS_PER_MULTIPROCESSOR
        if query.stride(2) != 1 or query.data_ptr() % 16 or any(stride % 8 for stride in query.stride()[:2]):
            query = query.clone(memory_format=torch.contiguous_format)

        def make_plan() -> _Plan:
            empty = functools.partial(torch.empty, dtype=torch.int32, device=device)
            plan = _Plan(
                empty((num_seqs * query_tiles, 8)),
                empty((num_blocks, 4)),
                empty(1),
                empty(num_blocks),
                empty((num_blocks, MAX_CHUNKS, rows, head_dim + 2), dtype=torch.float32),
            )
            values = (
                *(meta.query_start_loc, meta.seq_lens, plan.items, plan.starts, plan.total, plan.tickets),
                *(num_seqs, query_tiles, tokens_per_tile, heads, window, num_blocks),
            )
            self.launcher.launch(device, unit, "attention_plan", (1, 1), 256, values)
            return plan

        key = ("cuda", unit, heads, rows, query_tiles, tokens_per_tile, window)
        plan = meta.shared_plan(key, make_plan)
        out = torch.empty(query.shape, dtype=query.dtype, device=device)
        values = (
            *(query, out, data, scales, meta.block_table),
            *(plan.items, plan.starts, plan.total, plan.states, plan.tickets),
            *query.stride()[:2],
            *data.stride()[:3],
            *((0, 0, 0) if scales is None else scales.stride()[:3]),
            meta.block_table.stride(0),
            *(scale, softcap or 0.0, window, block_size.bit_length() - 1),
            *(groups, num_kv_heads, head_tiles, rows, tokens_per_tile, query_tiles, num_seqs * query_tiles),
        )
        shared_bytes = attention_shared_bytes(head_dim, cache)
        self.launcher.launch(
            device, unit, "attention", (num_blocks, 1), _ATTENTION_THREADS, values, shared_bytes
        )
        return out

    def norm_rope_write(
        self,
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
        num_kv_heads = (qkv.shape[1] - num_heads) // 2
        query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        return self._write(query, key, value, norms, eps, cos, sin, kv_layer, slot_mapping)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_layer: KVLayer, slot_mapping: torch.Tensor
    ) -> None:
        """See `ops.write_kv`."""
        self._write(key[:, :0], key, value, None, 0.0, None, None, kv_layer, slot_mapping)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See `ops.rope`."""
        return self._write(x, None, None, None, 0.0, cos, sin, None, None)

    def _write(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        kv_layer: KVLayer | None,
        slot_mapping: torch.Tensor | None,
    ) -> torch.Tensor:
        data, scales = kv_layer if isinstance(kv_layer, QuantizedKV) else (kv_layer, None)
        assert data is None or data.dtype in KV_KINDS or data.dtype == query.dtype, (data.dtype, query.dtype)
        assert slot_mapping is None or slot_mapping.is_contiguous()
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = 0 if key is None else key.shape[1]
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
        if cos is not None and sin is not None:
            cos, sin = cos.contiguous(), sin.contiguous()
        query = query if query.stride(2) == 1 else query.contiguous()
        key, value = (x if x is None or x.stride(2) == 1 else x.contiguous() for x in (key, value))

        def strides(x: torch.Tensor | None) -> tuple[int, ...]:
            return (0, 0) if x is None else x.stride()[:2]

        values = (
            *(query, key, value, out, *(norms or (None, None)), cos, sin, data, scales, slot_mapping),
            *strides(query),
            *strides(key),
            *strides(value),
            0 if cos is None else cos.stride(0),
            *((0, 0, 0) if data is None else data.stride()[:3]),
            *((0, 0, 0) if scales is None else scales.stride()[:3]),
            eps,
            num_heads,
            num_kv_heads,
            head_dim,
            0 if cos is None else cos.shape[1],
            1 if data is None else data.shape[3],
            norms is not None and norms[0].dtype != query.dtype,
            0 if data is None else KV_KINDS.get(data.dtype, 0),
        )
        heads = num_heads + 2 * num_kv_heads
        if num_tokens and heads:
            unit = Unit("cache", (("TYPE", TYPES[query.dtype]),))
            grid = (num_tokens, -(-heads // 4))
            self.launcher.launch(query.device, unit, "norm_rope_write", grid, 128, values)
        return out

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ops.add_rms_norm`. Returns (normalised sum, sum); without a residual, x itself counts as the
        sum."""
        size = x.shape[-1]
        rows = aligned_rows(x)
        other = None if residual is None else aligned_rows(residual)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = x if residual is None else torch.empty_like(out)
        values = (
            *(rows, other, weight.contiguous(), out, None if residual is None else total),
            *(rows.stride(0), 0 if other is None else other.stride(0), eps, size),
        )
        vectors = size * x.element_size() // 16
        threads = min(1024, max(32, -(-vectors // 32) * 32))
        if rows.shape[0]:
            unit = Unit("elementwise", (("TYPE", TYPES[x.dtype]),))
            self.launcher.launch(x.device, unit, "rms_norm", (rows.shape[0], 1), threads, values)
        return out, total

    def gate_mul(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """See `ops.gate_mul`."""
        size = gate_up.shape[-1] // 2
        rows = aligned_rows(gate_up)
        out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
        values = (rows, out, rows.stride(0), size, ACTIVATIONS[activation])
        parts = -(-size * gate_up.element_size() // 16 // 256)
        if rows.shape[0]:
            unit = Unit("elementwise", (("TYPE", TYPES[gate_up.dtype]),))
            self.launcher.launch(gate_up.device, unit, "gate", (rows.shape[0], parts), 256, values)
        return out

    def quantize_rows(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantises activations to FP8 with a scale per row.

        Args:
            x: [n, size], of any type in TYPES; size is a multiple of 16.

        Returns:
            float8_e4m3fn [n, size], rounded to nearest even, and float32 [n, 1]. A value is about code *
            scale. A row's scale is its largest magnitude / 448, and at least float32's smallest normal
            number. Rows with NaN or infinities get zeros and a NaN scale.
        """
        rows = aligned_rows(x)
        count, size = rows.shape
        codes = torch.empty((count, size), dtype=torch.float8_e4m3fn, device=x.device)
        scales = torch.empty((count, 1), dtype=torch.float32, device=x.device)
        # As few vectors per thread as possible, then no more threads than these need.
        vectors = size * x.element_size() // 16
        threads = -(-vectors // (32 * -(-vectors // 1024))) * 32
        if count:
            unit = Unit("elementwise", (("TYPE", TYPES[x.dtype]),))
            values = (rows, codes, scales, rows.stride(0), size)
            self.launcher.launch(x.device, unit, "quantize_rows", (count, 1), threads, values)
        return codes, scales

    def copy_blocks(self, blocks: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """See `ops.copy_blocks`."""
        count, size = source.shape[0], blocks[0].nbytes
        if not count:
            return
        stride = blocks.stride(0) * blocks.element_size()
        kept = torch.empty((count, -(-size // 16) * 16), dtype=torch.uint8, device=blocks.device)
        source, target = source.contiguous(), target.contiguous()
        if blocks.data_ptr() % 16 or stride % 16:
            # Rows that vectors do not fit: by bytes.
            blocks.index_copy_(0, target, blocks.index_select(0, source))
            return
        gather = (blocks, kept, source, None, stride, kept.stride(0), size)
        scatter = (kept, blocks, None, target, kept.stride(0), stride, size)
        parts = max(1, min(64, size // (256 * 16 * 4)))
        for values in (gather, scatter):
            self.launcher.launch(blocks.device, Unit("copy"), "copy_rows", (count, parts), 256, values)

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """See `ops.argmax`."""
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
        values = (x, out, x.stride(0), x.shape[1])
        self._launch_rows("argmax", x, values)
        return out

    def sample(self, logits: torch.Tensor, rows: SamplingTensors) -> torch.Tensor:
        """See `ops.sample`."""
        edits = rows.edits
        if logits.stride(1) != 1:
            assert edits is None, "edits are made in place, and not in a copy"
            logits = logits.contiguous()
        out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        fields = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.positions)
        kept = [field.contiguous() for field in fields]
        lists = () if edits is None else edits.arguments
        values = (logits, *kept, out, lists, logits.stride(0), logits.shape[1])
        self._launch_rows("sample", logits, values)
        return out

    def _launch_rows(self, kernel: str, x: torch.Tensor, values: tuple[Any, ...]) -> None:
        """Launches a kernel of sampling.cu with a thread block per row. With more rows than multiprocessors,
        blocks have half as many threads, so that a multiprocessor can run two of them."""
        threads = 512 if x.shape[0] > self.launcher.multiprocessors(x.device) else 1024
        if x.shape[0]:
            self.launcher.launch(x.device, Unit("sampling"), kernel, (x.shape[0], 1), threads, values)


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x [..., size] as [n, size], each row contiguous and aligned to 16 bytes. It may be a copy. The
    bytes of `size` numbers must be a multiple of 16."""
    rows = x.reshape(-1, x.shape[-1])
    is_aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0
    # A single row is contiguous already: `contiguous` would leave it where it is.
    return rows if rows.stride(1) == 1 and is_aligned else rows.clone(memory_format=torch.contiguous_format)


def why_not_attend(**facts: Any) -> str | None:
    """Returns why `Kernels.paged_attention` does not support a call's cache type, head size, block size or
    sinks; None: it supports them."""
    if facts.get("sinks"):
        return NO_SINKS
    kv_dtype, block_size = facts.get("kv_dtype"), facts.get("block_size", 16)
    is_quantized = kv_dtype in KV_KINDS
    if not is_quantized and kv_dtype not in (torch.bfloat16, torch.float16):
        return f"no cache of {kv_dtype}"
    head_dims = QUANTIZED_HEAD_DIMS if is_quantized else HEAD_DIMS
    if facts.get("head_dim", 64) not in head_dims:
        return f"head_dim must be one of {head_dims}"
    if block_size & (block_size - 1) != 0:
        return "block_size must be a power of two"
    # Smaller quantised blocks have heads that do not begin on 16 bytes.
    return "block_size must be at least 8" if is_quantized and block_size < 8 else None


def why_not_write(**facts: Any) -> str | None:
    """Returns why `norm_rope_write`, `write_kv` and `rope` do not support a call's cache type or head size;
    None: they support them."""
    kv_dtype = facts.get("kv_dtype")
    if kv_dtype is not None and kv_dtype not in {**TYPES, **KV_KINDS}:
        return f"no cache of {kv_dtype}"
    return None if facts.get("head_dim", 64) <= 256 else "head_dim must be at most 256"


def why_not_keep_row(**facts: Any) -> str | None:
    """Returns why rows of `size` numbers are not supported; None: they are. In each of TYPES, a row must
    consist of whole vectors, and the threads of one thread block must be able to hold it."""
    if facts["size"] * 4 > MAX_ROW_BYTES:
        return f"size must be at most {MAX_ROW_BYTES // 4}"
    return why_not_gate(**facts)


def why_not_gate(**facts: Any) -> str | None:
    """Returns why rows of `size` numbers are not supported; None: they are. In each of TYPES, a row must
    consist of whole vectors."""
    return None if facts["size"] % 8 == 0 else "size must be a multiple of 8"
