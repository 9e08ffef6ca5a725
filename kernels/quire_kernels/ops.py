"""The operators of the engine. Each chooses its implementation through the registry.

KV cache: one allocation in which each block is contiguous. A block holds keys, values and scales, or states,
of all layers that share a block table. Attention reads a view of one layer, `[num_blocks, 2, num_kv_heads,
block_size, head_dim]`, with keys at index 0 of the second dimension and values at 1; or a `QuantizedKV` of
such a view and its scales. A token's slot is `block_id * block_size + offset`. If values are the keys, as in
latent attention, both indices are the same memory (a stride of 0).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
from quire_kernels.state_space import StateSpace
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
    """Computes causal attention of a ragged batch over its paged context, for prefill, decode and any
    mixture.

    Keys and values of the new tokens must already be in `kv_layer` (`write_kv`). The token at position p sees
    the positions (p - sliding_window, p], or [0, p] without a window. New tokens of a joint sequence
    (`AttentionMetadata.joint`) also see all positions after their own.

    Args:
        query: [num_tokens, num_heads, head_dim].
        kv_layer: [num_blocks, 2, num_kv_heads, block_size, head_dim], a layer's view of the cache, plain or
            quantised. num_heads is a multiple of num_kv_heads; consecutive query heads share a KV head.
        meta: the batch.
        scale: factor of the scores, usually head_dim ** -0.5.
        sliding_window: number of positions that a token sees, itself included; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: they are not capped.
        sinks: float32 [num_heads]: an additional score for every row of a head. It is not capped and has no
            value, so it only increases the softmax's denominator (gpt-oss; "Efficient Streaming Language
            Models with Attention Sinks", arXiv 2309.17453). None: there are none.
        implementation: name of the implementation to use, except for calls that it leaves to others. If it
            does not support the call, KernelError is raised. None: the one that the environment names, else
            the best one.

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
        joint=meta.joint is not None,
    )
    # Implementations without sinks need not know of them: their predicates refuse these calls.
    others = () if sinks is None else (sinks,)
    function = registry.select("paged_attention", query.device.type, query.dtype, wanted=wanted, **facts)
    out: torch.Tensor = function(query, kv_layer, meta, scale, sliding_window, softcap, *others)
    return out


def write_kv(key: torch.Tensor, value: torch.Tensor, kv_layer: KVLayer, slot_mapping: torch.Tensor) -> None:
    """Stores the keys and values of new tokens in their slots.

    A quantised layer gets one scale per token and head, max|x| / 127 (int8) or max|x| / 448 (fp8), but at
    least the smallest normal number, rounded to the scale's type. Its data is x / scale, rounded to nearest
    even. If a head of a token contains a NaN or an infinity, all of that head is NaN when read.

    Args:
        key: [num_tokens, num_kv_heads, head_dim], already rotated if the layer rotates keys.
        value: the same shape.
        kv_layer: [num_blocks, 2, num_kv_heads, block_size, head_dim], plain or quantised; written in place.
        slot_mapping: int64 [num_tokens]; every slot is valid, and no two tokens share one, except padding.
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
    """Normalises queries and keys, rotates them, and stores keys and values: `rms_norm`, `rope` and
    `write_kv` in one.

    Args:
        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values; not changed.
        num_heads: number of query heads.
        norms: weights [head_dim] of the norms over each query head and each key head; None: no norms. In
            qkv's type, or float32: then they multiply before the result is rounded.
        eps: epsilon of the norms.
        cos: float32 [num_tokens, rotary_dim / 2]; see `rope`.
        sin: as cos.
        kv_layer: see `write_kv`.
        slot_mapping: int64 [num_tokens]; see `write_kv`.

    Returns:
        [num_tokens, num_heads, head_dim]: the queries for attention.
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
    """Computes `norm_rope_write` by separate operators, each with the implementation that the registry
    chooses."""
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
    """Copies whole blocks inside the cache. All sources are read before any target is written.

    Args:
        blocks: [num_blocks, size], of any type: the cache's memory; written in place.
        source: int64 [n], block ids.
        target: int64 [n], block ids, all different; they may be sources too.
    """
    registry.select("copy_blocks", blocks.device.type, blocks.dtype)(blocks, source, target)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes x / rms(x) * weight over the last dimension, in x's type, which `weight` has too. `eps` is
    added to the mean of squares, which is float32."""
    function = registry.select("rms_norm", x.device.type, x.dtype, size=x.shape[-1])
    out: torch.Tensor = function(x, weight, eps, None)[0]
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(x + residual), x + residual). The sum has x's type."""
    function = registry.select("rms_norm", x.device.type, x.dtype, size=x.shape[-1])
    out: tuple[torch.Tensor, torch.Tensor] = function(x, weight, eps, residual)
    return out


def gated_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor) -> torch.Tensor:
    """Computes rms_norm(x) * silu(gate), as linear attention has it behind the gated delta rule.

    The norm is rounded to x's type. The product is computed in float32, and then rounded to x's type.

    Args:
        x: [num_tokens, num_heads, size]; each head is normalised.
        weight: [size] in x's type, or float32: then it multiplies before the norm is rounded.
        eps: epsilon of the norm.
        gate: [num_tokens, num_heads * size] in x's type; rows may have any stride.

    Returns:
        [num_tokens, num_heads * size] in x's type.
    """
    assert gate.shape == (x.shape[0], x.shape[1] * x.shape[2]) and gate.dtype == x.dtype, gate.shape
    function = registry.select("gated_norm", x.device.type, x.dtype, size=x.shape[2])
    out: torch.Tensor = function(x, weight, eps, gate)
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies rotary embedding to the pairs (i, i + rotary_dim / 2).

    Args:
        x: [num_tokens, num_heads, head_dim]: queries, keys, or both.
        cos: float32 [num_tokens, rotary_dim / 2]. If rotary_dim is smaller than head_dim (partial rotary
            embedding), the remaining dimensions do not change. M-RoPE differs only in how cos and sin are
            computed.
        sin: as cos.

    Returns:
        A new tensor of x's shape and type.
    """
    out: torch.Tensor = registry.select(
        "rope", x.device.type, x.dtype, head_dim=x.shape[-1], rotary_dim=2 * cos.shape[-1]
    )(x, cos, sin)
    return out


def gate_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Computes activation(gate) * up for gate_up [num_tokens, 2 * size], gate first. Returns [num_tokens,
    size].

    `activation` is "silu", "gelu", "gelu_tanh" (gelu approximated with tanh) or "clamped_swiglu" (gpt-oss).
    The last is gate * sigmoid(1.702 * gate) * (up + 1), with gate limited to at most 7 and up to [-7, 7].
    """
    out: torch.Tensor = registry.select(
        "gate_mul", gate_up.device.type, gate_up.dtype, size=gate_up.shape[-1] // 2
    )(gate_up, activation)
    return out


def argmax(x: torch.Tensor) -> torch.Tensor:
    """Returns the index of the largest number of each row; of equal numbers, the first.

    Args:
        x: float32 [n, size].

    Returns:
        int64 [n]; -1 for rows with NaN, and for rows whose largest number is not finite.
    """
    out: torch.Tensor = registry.select("argmax", x.device.type, x.dtype)(x)
    return out


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the log-probability and rank of a given token of each row, and the log-probabilities of the
    most likely tokens.

    Args:
        logits: float32 [n, vocab_size]; not changed.
        token_ids: int64 [n], the given tokens. In place of a negative one, an arbitrary token is used.
        count: number of most likely tokens to return; if there are fewer tokens, all.

    Returns:
        int64 [n, count + 1]: each row's given token, then its most likely tokens in descending order. Of
        equally likely ones the lowest id comes first, but the reference implementation gives them in any
        order; rows with NaN give any tokens. float32 [n, count + 1]: their log-probabilities. int64 [n]:
        ranks of the given tokens; 1 means that no token is more likely.
    """
    function = registry.select("top_logprobs", logits.device.type, logits.dtype)
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = function(logits, token_ids, count)
    return out


def forbid_others(logits: torch.Tensor, allowed: torch.Tensor) -> None:
    """Sets the logits of all tokens that are not allowed to -inf.

    Args:
        logits: float32 [n, vocab_size], changed in place. Each row is contiguous; rows may have gaps between
            them.
        allowed: int32 [n, ceil(vocab_size / 32)], contiguous: bit i % 32 of word i / 32 is 1 if token i is
            allowed.
    """
    registry.select("forbid_others", logits.device.type, logits.dtype)(logits, allowed)


def sample(logits: torch.Tensor, rows: SamplingTensors) -> torch.Tensor:
    """Samples a token per row. It applies penalties, biases, bans, temperature, top-k, top-p, min-p and
    typical-p, in this order, and then draws by the inverse of the cumulative distribution. With temperature
    0, the row gets its best token after the bans.

    The draw takes the first token, by id, whose cumulative probability exceeds a random number. That number
    is a pure function of the row's seed and position, so no row depends on another.

    Args:
        logits: float32 [n, vocab_size]. With `rows.edits`, rows must be contiguous and must not overlap, and
            the edits (penalties, biases and bans) are made in place. Temperature and filters do not change
            it.
        rows: sampling parameters of each row.

    Returns:
        int64 [n]; -1 for rows with NaN, and for rows whose largest logit is not finite.
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
    """Estimates the bytes that `pack_linear` will keep of a weight on this type of device, without padding.
    It supposes that GPUs have the CUDA kernels. Other arguments are those of `pack_linear`.

    Args:
        weight: see `pack_linear`. It may be on torch's "meta" device, because its values do not matter.
        device_type: "cpu" or "cuda".
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
    """Packs a linear layer's weights, once at load, into the form that its implementation reads fastest.

    Args:
        weight: [out_features, in_features]. The result may keep it, so it must not be changed afterwards.
        bias: [out_features]; None: there is none.
        activation: see `gate_mul`, which is applied to the product; the first half of the weight's rows
            computes the gate. None: the layer is not gated.
        quantization: quantisation of a weight that is a tensor, see `weights.quantize_weight`; None: none.
            "int8" and "int4" quantise weights. "w8a8" is "int8" with rows of x quantised at run time
            (`weights.quantize_rows`), but CUDA kernels do not quantise x. "w4a8" packs
            `weights.group_weight`. "fp8" quantises weights and, on GPUs whose fp8 products support the sizes,
            rows of 16-bit x at run time with a scale each; float32 results are then rounded to 16 bits in
            between. "fp8_weights" quantises weights only, for logits. With "int4", "w4a8" and, except in CUDA
            kernels, "w8a8", in_features must be a multiple of their group.
        dtype: type of x, needed if the weight is not a tensor; otherwise x has the weight's type.
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
    """Packs matrices [num_heads, out_features, in_features], one per head, into the form that the
    implementation reads fastest. The result may keep `weight`."""
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
    """Adds each row's low-rank adapter term to the layer's output: y[t] += b[slot] (a[slot] x[t]).

    (Hu et al., 2021, arXiv 2106.09685; many adapters in one batch: Chen et al., 2023, arXiv 2310.18547.) Sums
    and a[slot] x[t] are float32; y is rounded once.

    Args:
        y: [num_tokens, out_features], changed in place. Rows may have any stride, as columns of a wider
            matrix do.
        x: [num_tokens, in_features]. Rows may have any stride.
        a: [num_slots, max_rank, in_features], in x's type; each slot's matrix is contiguous.
        b: [num_slots, out_features, max_rank], in x's type, with the adapter's scaling included; each slot's
            matrix is contiguous. If an adapter's rank is smaller, the rest of both matrices is zeros. Slots
            that no row names may hold anything.
        slots: int32 [num_tokens], contiguous, on x's device: the slot of each row's adapter, below num_slots.
            Rows with -1 have no adapter, and are not changed.
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
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    meta: AttentionMetadata,
    *,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
) -> torch.Tensor:
    """Computes a causal convolution of each channel over the tokens of each sequence, by default followed by
    SiLU.

    Sums and SiLU are float32; the result is rounded once.

    Args:
        x: [num_tokens, num_channels]; rows may have any stride.
        weight: [num_taps, num_channels] in x's type, contiguous; the last tap is for the current token.
        states: [num_blocks, num_taps - 1, num_channels] in x's type, each block contiguous: the last inputs
            of a sequence, zeros before its first; written in place.
        meta: the batch. `block_table[:, 0]` is the block of each sequence's state; these must all differ. A
            sequence that has only new tokens starts from zeros, whatever its block holds.
        bias: [num_channels] in x's type, contiguous, added to the sums; None: there is none.
        activation: "silu"; None: there is none.

    Returns:
        [num_tokens, num_channels] in x's type.
    """
    assert activation in ("silu", None), activation
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous()), bias
    num_taps, num_channels = weight.shape
    assert x.shape == (meta.num_tokens, num_channels) and x.stride(1) == 1, (x.shape, x.stride())
    assert states.shape[1:] == (num_taps - 1, num_channels) and weight.is_contiguous(), states.shape
    assert states.stride()[1:] == (num_channels, 1) and x.dtype == weight.dtype == states.dtype
    function = registry.select("causal_conv", x.device.type, x.dtype, num_channels=num_channels)
    out: torch.Tensor = function(x, weight, states, meta, bias, activation)
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
    """Computes linear attention by the gated delta rule (Yang et al., 2024, arXiv 2412.06464).

    With k and q scaled to length 1, each token updates each head's state S by

        S = decay * S;  S = S + k (rate * (v - k S));  output = q S / sqrt(key_dim)

    where decay = exp(-exp(log_decay) * softplus(a + step_bias)) and rate = sigmoid(b). Everything is float32;
    the output is rounded once. Except in the reference implementation, a token's bits do not depend on how
    the tokens of its sequence were divided into batches.

    Args:
        query: [num_tokens, num_key_heads, key_dim], vectors of any length; tokens may have any stride.
        key: the same shape.
        value: [num_tokens, num_heads, value_dim]; num_heads is a multiple of num_key_heads, consecutive heads
            share a key head.
        a: [num_tokens, num_heads].
        b: [num_tokens, num_heads].
        log_decay: float32 [num_heads].
        step_bias: float32 [num_heads].
        states: float32 [num_blocks, num_heads, key_dim, value_dim], each block contiguous; written in place.
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


def mamba2(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    step: torch.Tensor,
    gate: torch.Tensor,
    space: StateSpace,
    states: torch.Tensor,
    meta: AttentionMetadata,
) -> torch.Tensor:
    """Computes a selective state space with a scalar decay per head (Mamba-2; Dao and Gu, 2024, arXiv
    2405.21060), then a gated norm.

    With dt = softplus(step + step_bias), limited to `step_limit`, each token updates each head's state S by

        S = exp(-exp(log_decay) * dt) * S + b (dt * x);  sum = c S + skip * x

    The sums are multiplied by silu(gate). Their channels are then divided by the root mean square of their
    group, and multiplied by the norm's scale. Everything is float32; the output is rounded once. Except in
    the reference implementation, a token's bits do not depend on how the tokens of its sequence were divided
    into batches.

    Args:
        x: [num_tokens, num_heads, head_dim]; tokens may have any stride, here and in b, c, step and gate.
        b: [num_tokens, num_groups, state_dim]; num_heads is a multiple of num_groups, and consecutive heads
            share a group.
        c: the same shape.
        step: [num_tokens, num_heads].
        gate: [num_tokens, num_heads * head_dim].
        space: the layer's weights.
        states: float32 [num_blocks, num_heads, state_dim, head_dim], each block contiguous; written in place.
        meta: see `causal_conv`.

    Returns:
        [num_tokens, num_heads * head_dim] in x's type.
    """
    num_tokens, num_heads, head_dim = x.shape
    num_groups, state_dim = b.shape[1:]
    assert b.shape == c.shape and num_tokens == meta.num_tokens and num_heads % num_groups == 0, b.shape
    assert step.shape == (num_tokens, num_heads) and gate.shape == (num_tokens, num_heads * head_dim)
    assert states.shape[1:] == (num_heads, state_dim, head_dim) and states.dtype == torch.float32, (
        states.shape
    )
    assert states.stride()[1:] == (state_dim * head_dim, head_dim, 1), states.stride()
    assert all(one.dtype == torch.float32 and one.is_contiguous() for one in space[:4])
    function = registry.select("mamba2", x.device.type, x.dtype, head_dim=head_dim, state_dim=state_dim)
    out: torch.Tensor = function(x, b, c, step, gate, space, states, meta)
    return out


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses each token's experts by their scores, and computes their shares.

    Args:
        logits: float32 [num_tokens, num_experts], with one more column if the routing's shared expert is
            gated.
        routing: rules of the choice and of the shares.
        bias: float32 [num_experts], added to the scores when experts are chosen, but not in the shares (Wang
            et al., 2024, arXiv 2408.15664); None: there is none.

    Returns:
        int64 [num_tokens, num_routes]: experts in descending order of the scores that decided; of equal ones
        (also among groups), the first comes first. float32 [num_tokens, num_routes]: their shares. A shared
        expert comes last; its number is num_experts. A token with a NaN logit gets any experts; at least one
        of its shares is NaN.
    """
    function = registry.select("route", logits.device.type, logits.dtype)
    out: tuple[torch.Tensor, torch.Tensor] = function(logits, routing, bias)
    return out


def pack_experts(
    gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], *, device_type: str, dtype: torch.dtype
) -> PackedExperts:
    """Joins the packed experts of a layer into one operator, `moe`.

    Each token goes through its experts' gate_up (with its activation) and down. An expert without tokens is
    not read. (Shazeer et al., 2017, arXiv 1701.06538; Fedus et al., 2021, arXiv 2101.03961.)

    Args:
        gate_up: each expert's gate and up projection, from x's size to the expert's inner size. A shared
            expert comes last. The result may keep them.
        down: each expert's down projection, from its inner size to x's size.
        device_type: type of the device that holds them.
        dtype: type of x.
    """
    # Not `select`, which keeps the facts of calls for the life of the process.
    picked = registry.pick("moe", device_type, dtype, gate_up=gate_up, down=down)
    out: PackedExperts = picked.function(gate_up, down)
    return out


def _facts(
    weight: torch.Tensor | GroupedWeight | BlockWeight | QuantizedRows, activation: str | None, **others: Any
) -> dict[str, Any]:
    """Returns the facts, besides device and type, on which implementations of a linear layer may depend."""
    return {
        "in_features": weight.shape[1],
        "out_features": weight.shape[0],
        "activation": activation,
        **others,
    }
