"""The operators, as models call them. Each picks its implementation through the registry.

KV cache: one allocation in which a block (keys and values of all layers that share a block table, and their
scales) is contiguous. The operators take one layer's view of it, `[num_blocks, 2, num_kv_heads, block_size,
head_dim]` with keys at index 0 of the second dimension and values at 1, or a `QuantizedKV` of such a view and
its scales. The slot of a token is `block_id * block_size + offset`. Where values are the keys, as in latent
attention, both indices are the same memory (a stride of 0).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

# Register the implementations.
import quire_kernels.cpu
import quire_kernels.cuda
import quire_kernels.flashinfer
import quire_kernels.reference
import quire_kernels.triton_lang  # noqa: F401
from quire_kernels import registry
from quire_kernels.block_weights import BlockWeight
from quire_kernels.grouped_weights import GroupedWeight
from quire_kernels.metadata import AttentionMetadata, attention_facts
from quire_kernels.quantized_kv import KVLayer, data_of
from quire_kernels.routing import Routing
from quire_kernels.sampling import SamplingTensors
from quire_kernels.weights import (
    PackedExperts,
    PackedHeads,
    PackedLinear,
    QuantizedRows,
    group_weight,
    quantized_bytes,
)


def paged_attention(
    query: torch.Tensor,
    kv_layer: KVLayer,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch over its paged context, for prefill, decode and any mixture.

    Keys and values of the new tokens are already in the cache (`write_kv`). The token at position p sees the
    positions (p - sliding_window, p], or [0, p] without a window.

    Args:
        query: [num_tokens, num_heads, head_dim].
        kv_layer: [num_blocks, 2, num_kv_heads, block_size, head_dim], a layer's view of the cache, plain or
            quantised; num_heads is a multiple of num_kv_heads, consecutive query heads share a KV head.
        meta: the batch.
        scale: factor of the scores, usually head_dim ** -0.5.
        sliding_window: number of positions a token sees, itself included.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: float32 [num_heads]: a score of every row of a head, not capped, whose value is zero: it takes
            part in the softmax's denominator alone (gpt-oss; "Efficient Streaming Language Models with
            Attention Sinks", arXiv 2309.17453).
        implementation: name of the one to take, but for calls that it leaves to others; None: the best.

    Returns:
        [num_tokens, num_heads, head_dim] in query's type; softmax and sums are float32.
    """
    attend = functools.partial(
        _attend,
        kv_layer=kv_layer,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        wanted=implementation,
    )
    return attend(query, meta) if meta.interrupt is None else meta.interrupt(query, attend)


def _attend(
    query: torch.Tensor,
    meta: AttentionMetadata,
    kv_layer: KVLayer,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    wanted: str | None,
) -> torch.Tensor:
    data = data_of(kv_layer)
    (num_heads, head_dim), (num_kv_heads, block_size) = query.shape[1:], data.shape[2:4]
    facts = attention_facts(
        num_heads,
        head_dim,
        num_kv_heads,
        block_size,
        data.dtype,
        sliding_window,
        softcap,
        meta.max_query_len,
        sinks=sinks is not None,
    )
    # Implementations without sinks need not know of them: their predicates refuse these calls.
    others = () if sinks is None else (sinks,)
    failed: tuple[Callable[..., Any], ...] = ()
    while True:
        function = registry.select(
            "paged_attention", query.device.type, query.dtype, wanted=wanted, without=failed, **facts
        )
        out: torch.Tensor | None = function(query, kv_layer, meta, scale, sliding_window, softcap, *others)
        if out is not None:
            return out
        failed = (*failed, function)


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_layer: KVLayer, slot_mapping: torch.Tensor) -> None:
    """Stores the keys and values of new tokens in their slots.

    A quantised layer gets, for each token and head, the scale max|x| / 127 (int8) or max|x| / 448 (fp8),
    rounded to the scale's type, and x / scale rounded to nearest even. A NaN or an infinity makes the token's
    whole head NaN when read.

    Args:
        key: [num_tokens, num_kv_heads, head_dim], rotated already.
        value: the same shape.
        kv_layer: [num_blocks, 2, num_kv_heads, block_size, head_dim], plain or quantised; written in place.
        slot_mapping: int64 [num_tokens]; every slot is valid, and no two tokens share one.
    """
    data = data_of(kv_layer)
    registry.select(
        "write_kv",
        key.device.type,
        key.dtype,
        head_dim=key.shape[2],
        block_size=data.shape[3],
        kv_dtype=data.dtype,
    )(key, value, kv_layer, slot_mapping)


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
    """Norm of queries and keys, rotary embedding and cache write: `rms_norm`, `rope` and `write_kv` in one.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values; left as it is.
        num_heads: of the queries.
        norms: weights [head_dim] of the queries' and the keys' norm over each head, in qkv's type or, then
            multiplied before the result is rounded, float32; None: no norms.
        eps: of the norms.
        cos: float32 [num_tokens, rotary_dim / 2]; see `rope`.
        sin: as cos.
        kv_layer: see `write_kv`.
        slot_mapping: int64 [num_tokens]; see `write_kv`.

    Returns:
        [num_tokens, num_heads, head_dim]: the queries as attention wants them.
    """
    data = data_of(kv_layer)
    out: torch.Tensor = registry.select(
        "norm_rope_write",
        qkv.device.type,
        qkv.dtype,
        head_dim=qkv.shape[2],
        rotary_dim=2 * cos.shape[-1],
        block_size=data.shape[3],
        kv_dtype=data.dtype,
        norm_dtype=None if norms is None else norms[0].dtype,
    )(qkv, num_heads, norms, eps, cos, sin, kv_layer, slot_mapping)
    return out


@registry.implementation("norm_rope_write", "reference")
def _norm_rope_write(
    qkv: torch.Tensor,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_layer: KVLayer,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """`norm_rope_write` by its parts, each by its best implementation."""
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    sizes = [num_heads, num_kv_heads]
    rotated, value = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        # A float32 weight over a narrower type multiplies before the result is rounded.
        parts = zip(rotated.split(sizes, dim=1), norms, strict=True)
        rotated = torch.cat([rms_norm(x.to(w.dtype), w, eps).to(x.dtype) for x, w in parts], dim=1)
    query, key = rope(rotated, cos, sin).split(sizes, dim=1)
    write_kv(key, value, kv_layer, slot_mapping)
    return query


def copy_blocks(blocks: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies whole blocks inside the cache; all sources are read before any target is written.

    Args:
        blocks: [num_blocks, size], of any type: the bytes of the cache; written in place.
        source: int64 [n], block ids.
        target: int64 [n], block ids, distinct; they may be sources too.
    """
    registry.select("copy_blocks", blocks.device.type, blocks.dtype)(blocks, source, target)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension; the mean of squares is float32, the type stays x's."""
    function = registry.select("rms_norm", x.device.type, x.dtype, size=x.shape[-1])
    out: torch.Tensor = function(x, weight, eps, None)[0]
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds, then normalises: (rms_norm(x + residual), x + residual), the sum in x's type."""
    function = registry.select("rms_norm", x.device.type, x.dtype, size=x.shape[-1])
    out: tuple[torch.Tensor, torch.Tensor] = function(x, weight, eps, residual)
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the rotate-half kind: pairs are (i, i + rotary_dim / 2).

    Args:
        x: [num_tokens, num_heads, head_dim], queries or keys or both behind each other.
        cos: float32 [num_tokens, rotary_dim / 2]; rotary_dim may be smaller than head_dim (partial rotary
            embedding: the dimensions after it pass unchanged). M-RoPE differs in how these are made only.
        sin: as cos.

    Returns:
        A new tensor of x's shape and type.
    """
    out: torch.Tensor = registry.select(
        "rope", x.device.type, x.dtype, head_dim=x.shape[-1], rotary_dim=2 * cos.shape[-1]
    )(x, cos, sin)
    return out


def gate_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up of gate_up [num_tokens, 2 * size], gate first; returns [num_tokens, size].

    `activation` is "silu", "gelu", "gelu_tanh" (gelu by its approximation with tanh) or, of gpt-oss,
    "clamped_swiglu": with gate at most 7 and up in [-7, 7], gate * sigmoid(1.702 * gate) * (up + 1).
    """
    out: torch.Tensor = registry.select(
        "gate_mul", gate_up.device.type, gate_up.dtype, size=gate_up.shape[-1] // 2
    )(gate_up, activation)
    return out


def argmax(x: torch.Tensor) -> torch.Tensor:
    """The largest number of each row: the first one of equals.

    Args:
        x: float32 [n, size].

    Returns:
        int64 [n]: indices; -1 for rows with NaN, and where the largest is not finite.
    """
    out: torch.Tensor = registry.select("argmax", x.device.type, x.dtype)(x)
    return out


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability and rank of a given token of each row, and log-probabilities of the most likely ones.

    Args:
        logits: float32 [n, vocab_size]; left as they are.
        token_ids: int64 [n], the given tokens; a negative one stands for any.
        count: how many of the most likely tokens are wanted; all, if there are fewer.

    Returns:
        int64 [n, count + 1]: the given token of each row, then its most likely ones, in descending order (of
        equals the lowest first, but with PyTorch in any order; rows with NaN have any); float32
        [n, count + 1]: their log-probabilities; int64 [n]: ranks of the given tokens, 1 where no other is
        more likely.
    """
    function = registry.select("top_logprobs", logits.device.type, logits.dtype)
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = function(logits, token_ids, count)
    return out


def forbid_others(logits: torch.Tensor, allowed: torch.Tensor) -> None:
    """Makes -inf of the logits of all tokens but those allowed.

    Args:
        logits: float32 [n, vocab_size] whose rows are contiguous, one by one; changed in place.
        allowed: int32 [n, ceil(vocab_size / 32)], contiguous: bit i % 32 of word i / 32 is token i's.
    """
    registry.select("forbid_others", logits.device.type, logits.dtype)(logits, allowed)


def sample(logits: torch.Tensor, rows: SamplingTensors) -> torch.Tensor:
    """One token per row: penalties, biases, bans, then temperature, top-k, top-p, min-p, typical-p, then a
    draw by the inverse of the distribution.

    The draw takes the first token, by id, whose cumulative probability exceeds a number that is a pure
    function of the row's seed and position: no row depends on another.

    Args:
        logits: float32 [n, vocab_size]. With `rows.edits` its rows are contiguous and do not overlap, and the
            edits are made in place: afterwards it holds what the tokens were drawn from.
        rows: what each row asks for.

    Returns:
        int64 [n]; -1 for rows with NaN, and where the largest is not finite.
    """
    function = registry.select("sample", logits.device.type, logits.dtype, typical=rows.typical_p is not None)
    out: torch.Tensor = function(logits, rows)
    return out


def packed_bytes(
    weight: torch.Tensor | GroupedWeight | BlockWeight | QuantizedRows,
    *,
    device_type: str,
    activation: str | None = None,
    quantization: str | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """Bytes that `pack_linear` will keep of a weight on such a device, but for what fills up its last tile.

    Args:
        weight: as of `pack_linear`; it may be on torch's "meta" device, as its numbers do not matter.
    """
    num_rows, num_columns = weight.shape
    if quantization == "w4a8" and isinstance(weight, torch.Tensor):
        dtype, weight = weight.dtype, group_weight(weight)
    if isinstance(weight, GroupedWeight | BlockWeight):
        assert dtype is not None
        picked = registry.pick("grouped_linear", device_type, dtype, **_facts(weight, activation))
        return num_rows * num_columns * dtype.itemsize if picked.name == "reference" else weight.nbytes
    if isinstance(weight, QuantizedRows):
        quantization = weight.quantization
    dtype = dtype or weight.dtype
    is_whole = quantization is None
    if device_type == "cpu" and not is_whole:
        facts = _facts(weight, activation, quantization=quantization)
        picked = registry.pick("linear", device_type, dtype, **facts)
        is_whole = picked.name == "reference"  # it computes with what the quantised weights mean
    whole = num_rows * num_columns * dtype.itemsize
    return whole if is_whole else quantized_bytes(num_rows, num_columns, quantization or "")


def pack_linear(
    weight: torch.Tensor | GroupedWeight | BlockWeight | QuantizedRows,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    quantization: str | None = None,
    dtype: torch.dtype | None = None,
) -> PackedLinear:
    """Brings a linear layer's weights, once at load, into the form in which they are read fastest.

    Args:
        weight: [out_features, in_features]; the result may keep it, so it must not be changed afterwards.
        bias: [out_features].
        activation: as of `gate_mul`: the result is activation(gate) * up of a weight whose first half of rows
            is the gate.
        quantization: of a tensor: None, "int8", "int4", "w8a8" (weights as with "int8", and rows of x
            quantised as they come, `weights.quantize_rows`), "w4a8" (the GroupedWeight of
            `weights.group_weight`), "fp8" (weights, and on GPUs with products of such numbers rows of x as
            they come, a scale each; results of float32 are then rounded to 16 bits before) or "fp8_weights"
            (the same weights and never x: for logits); with "int4", "w4a8" and "w8a8" in_features is a
            multiple of their group. See `weights.quantize_weight`.
        dtype: of x, for whatever is no tensor; a tensor has x's.
    """
    if quantization == "w4a8" and isinstance(weight, torch.Tensor):
        dtype, weight, quantization = weight.dtype, group_weight(weight), None
    if isinstance(weight, GroupedWeight | BlockWeight):
        assert dtype is not None and quantization is None
        select = registry.select("grouped_linear", weight.device.type, dtype, **_facts(weight, activation))
        grouped: PackedLinear = select(weight, bias, activation, dtype)
        return grouped
    if isinstance(weight, QuantizedRows):
        assert dtype is not None and quantization is None
        quantization, weight = weight.quantization, replace(weight, dtype=dtype)
    facts = _facts(weight, activation, quantization=quantization)
    select = registry.select("linear", weight.device.type, weight.dtype, **facts)
    out: PackedLinear = select(weight, bias, activation, quantization)
    return out


def pack_heads(weight: torch.Tensor) -> PackedHeads:
    """Brings matrices [num_heads, out_features, in_features], one of each head, into the form in which they
    are read fastest; the result may keep them."""
    num_heads, out_features, in_features = weight.shape
    select = registry.select(
        "head_linear",
        weight.device.type,
        weight.dtype,
        in_features=in_features,
        out_features=out_features,
        num_heads=num_heads,
    )
    out: PackedHeads = select(weight)
    return out


def add_lora(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor) -> None:
    """Adds to each row what its low-rank adapter makes of the layer's input: y[t] += b[slot] (a[slot] x[t]).

    (Hu et al., 2021, arXiv 2106.09685; many adapters in one batch: Chen et al., 2023, arXiv 2310.18547.)
    Sums are float32, and so is a[slot] x[t]; y is rounded once.

    Args:
        y: [num_tokens, out_features], of any stride of rows: columns of a wider matrix, as of a fused layer;
            changed in place.
        x: [num_tokens, in_features], of any stride of rows.
        a: [num_slots, max_rank, in_features], in x's type; each slot's matrix is contiguous.
        b: [num_slots, out_features, max_rank], in x's type and with the adapter's scaling in it; each slot's
            matrix is contiguous. Ranks that an adapter lacks are zeros in both, and what no row names may be
            anything.
        slots: int32 [num_tokens], contiguous, on x's device: the adapter of each row, below num_slots. Rows
            with -1 have none, and stay as they are.
    """
    num_slots, rank, in_features = a.shape
    num_tokens, out_features = y.shape
    assert x.shape == (num_tokens, in_features) and slots.shape == (num_tokens,), (x.shape, slots.shape)
    assert b.shape == (num_slots, out_features, rank), b.shape
    assert y.dtype == x.dtype == a.dtype == b.dtype and slots.dtype == torch.int32, (a.dtype, slots.dtype)
    assert a.stride()[1:] == (in_features, 1) and b.stride()[1:] == (rank, 1), (a.stride(), b.stride())
    assert y.stride()[1] == 1 and slots.is_contiguous(), (y.stride(), slots.stride())
    registry.select("add_lora", x.device.type, x.dtype, rank=rank)(y, x, a, b, slots)


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, meta: AttentionMetadata
) -> torch.Tensor:
    """Causal convolution of each channel over the tokens of its sequence, with SiLU behind it.

    Sums and SiLU are float32; the result is rounded once.

    Args:
        x: [num_tokens, num_channels], of any stride of rows.
        weight: [num_taps, num_channels] in x's type, contiguous; the last tap is the token's own.
        states: [num_blocks, num_taps - 1, num_channels] in x's type, each block's contiguous: the last inputs
            of the sequence, zeros before its first one; written in place.
        meta: the batch. `block_table[:, 0]` is the block of each sequence's state, of which no two are the
            same. A sequence without other tokens than its new ones begins with zeros, whatever is there.

    Returns:
        [num_tokens, num_channels] in x's type.
    """
    num_taps, num_channels = weight.shape
    assert x.shape == (meta.num_tokens, num_channels) and x.stride(1) == 1, (x.shape, x.stride())
    assert states.shape[1:] == (num_taps - 1, num_channels) and weight.is_contiguous(), states.shape
    assert states.stride()[1:] == (num_channels, 1) and x.dtype == weight.dtype == states.dtype
    function = registry.select("causal_conv", x.device.type, x.dtype, num_channels=num_channels)
    out: torch.Tensor = function(x, weight, states, meta)
    return out


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    log_decay: torch.Tensor,
    step_bias: torch.Tensor,
    states: torch.Tensor,
    meta: AttentionMetadata,
) -> torch.Tensor:
    """Linear attention by the gated delta rule (Yang et al., 2024, arXiv 2412.06464).

    With k and q of length 1, a token makes of each head's state S

        S = decay * S;  S = S + k (rate * (v - k S));  output = q S / sqrt(key_dim)

    where decay = exp(-exp(log_decay) * softplus(a + step_bias)) and rate = sigmoid(b). All is float32; the
    output is rounded once. The bits of a token depend on the tokens before it in its sequence, and not on how
    these were cut into batches.

    Args:
        query: [num_tokens, num_key_heads, key_dim], of any length; tokens may have any stride.
        key: the same shape.
        value: [num_tokens, num_heads, value_dim]; num_heads is a multiple of num_key_heads, consecutive heads
            share a key head.
        a: [num_tokens, num_heads]; and `b`.
        log_decay: float32 [num_heads]; and `step_bias`.
        states: float32 [num_blocks, num_heads, key_dim, value_dim], each block's contiguous; written in
            place.
        meta: see `causal_conv`.

    Returns:
        [num_tokens, num_heads, value_dim] in value's type.
    """
    num_tokens, num_heads, value_dim = value.shape
    key_dim = key.shape[2]
    assert query.shape == key.shape and num_tokens == meta.num_tokens and num_heads % key.shape[1] == 0
    assert a.shape == b.shape == (num_tokens, num_heads), (a.shape, b.shape)
    assert states.shape[1:] == (num_heads, key_dim, value_dim) and states.dtype == torch.float32, states.shape
    assert states.stride()[1:] == (key_dim * value_dim, value_dim, 1), states.stride()
    assert log_decay.dtype == step_bias.dtype == torch.float32, (log_decay.dtype, step_bias.dtype)
    function = registry.select(
        "gated_delta_rule", value.device.type, value.dtype, key_dim=key_dim, value_dim=value_dim
    )
    out: torch.Tensor = function(query, key, value, a, b, log_decay, step_bias, states, meta)
    return out


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts that compute each token, those of the largest scores, and their shares.

    Args:
        logits: float32 [num_tokens, num_experts], and one more column where the routing's shared expert is
            gated.
        routing: how they are chosen and weighed.
        bias: float32 [num_experts], added to the scores for the choice alone, not for the shares (Wang et
            al., 2024, arXiv 2408.15664); None: none.

    Returns:
        int64 [num_tokens, num_routes], in descending order of what decided, of equals (also among groups) the
        first; and their shares, float32 of that shape. The shared expert is the last, and has the number
        behind the others'. A token whose logits are NaN has any experts, and NaN shares.
    """
    function = registry.select("route", logits.device.type, logits.dtype)
    out: tuple[torch.Tensor, torch.Tensor] = function(logits, routing, bias)
    return out


def pack_experts(
    gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], *, device_type: str, dtype: torch.dtype
) -> PackedExperts:
    """The experts of a layer as one operator, `moe`, over weights that are packed already.

    Each token goes through its experts' gate_up (gated, with its activation) and down; an expert without
    tokens is not read. (Shazeer et al., 2017, arXiv 1701.06538; Fedus et al., 2021, arXiv 2101.03961.)

    Args:
        gate_up: of each expert, hidden_size to its inner size; the result may keep them. A shared expert is
            the last.
        down: of each expert, its inner size to hidden_size.
        device_type: where they are.
        dtype: of x.
    """
    # Not `select`, which keeps the facts of calls for the life of the process.
    picked = registry.pick("moe", device_type, dtype, gate_up=gate_up, down=down)
    out: PackedExperts = picked.function(gate_up, down)
    return out


def _facts(
    weight: torch.Tensor | GroupedWeight | BlockWeight | QuantizedRows, activation: str | None, **others: Any
) -> dict[str, Any]:
    """Facts that implementations of a linear layer may depend on."""
    return {
        "in_features": weight.shape[1],
        "out_features": weight.shape[0],
        "activation": activation,
        **others,
    }
