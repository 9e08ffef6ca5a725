"""Registers the C++ kernels as implementations of most operators, one for each instruction set that
`supported_isas` returns."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from ctypes import byref
from functools import partial
from typing import Any

import torch

from quire_kernels.cpu.compiler import BuildError, supported_isas
from quire_kernels.cpu.linear import (
    ACTIVATIONS,
    NativeHeads,
    NativeLinear,
    pack_dense,
    pack_grouped,
    why_not_pack,
)
from quire_kernels.cpu.moe import NativeExperts, why_not_join
from quire_kernels.cpu.moe import route as native_route
from quire_kernels.cpu.native import (
    KV_TYPES,
    TYPES,
    adapter_part,
    as_rows,
    batch_struct,
    declarations,
    kv_struct,
    library,
)
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.quantized_kv import KVLayer
from quire_kernels.registry import implementation
from quire_kernels.sampling import SamplingTensors
from quire_kernels.state_space import StateSpace

logger = logging.getLogger("quire_kernels")

DTYPES = tuple(TYPES)
VECTOR = 16
"""Sizes that an operator names in `_in_vectors`, such as that of a head or a norm, must be multiples of
this."""
MAX_STATE_DIM = 256
"""Largest `state_dim` of Mamba-2; `max_state_dim` of mamba.h."""
MAX_KEY_DIM = 256
"""Largest `key_dim` of the gated delta rule; `max_key_dim` of gated_delta.h."""


def rms_norm(
    isa: str, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.add_rms_norm`; without a residual, `ops.rms_norm`, and x is returned in place of the sum."""
    size = x.shape[-1]
    rows = as_rows(x)
    # The kernel adds in place; the caller's residual stays as it is.
    total = (
        None if residual is None else residual.reshape(-1, size).clone(memory_format=torch.contiguous_format)
    )
    out = torch.empty((rows.shape[0], size), dtype=x.dtype)
    _kernels(isa).quire_rms_norm(
        TYPES[x.dtype],
        rows.data_ptr(),
        rows.stride(0),
        None if total is None else total.data_ptr(),
        weight.data_ptr(),
        eps,
        size,
        out.data_ptr(),
        rows.shape[0],
    )
    return out.view(x.shape), x if total is None else total.view(x.shape)


def gated_norm(
    isa: str, x: torch.Tensor, weight: torch.Tensor, eps: float, gate: torch.Tensor
) -> torch.Tensor:
    """See `ops.gated_norm`."""
    num_tokens, num_heads, size = x.shape
    x = x.contiguous()
    if gate.stride(1) != 1:
        gate = gate.contiguous()
    out = torch.empty((num_tokens, num_heads * size), dtype=x.dtype)
    _kernels(isa).quire_gated_norm(
        TYPES[x.dtype],
        TYPES[weight.dtype],
        x.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        weight.data_ptr(),
        eps,
        size,
        num_heads,
        out.data_ptr(),
        num_tokens,
    )
    return out


def rope(isa: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `ops.rope`."""
    num_tokens, num_heads, head_dim = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    _kernels(isa).quire_rope(
        TYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        cos.data_ptr(),
        sin.data_ptr(),
        cos.shape[1],
        num_heads,
        head_dim,
        out.data_ptr(),
        num_tokens,
    )
    return out


def write_kv(
    isa: str, key: torch.Tensor, value: torch.Tensor, kv_layer: KVLayer, slot_mapping: torch.Tensor
) -> None:
    """See `ops.write_kv`."""
    key, value = _with_heads_together(key), _with_heads_together(value)
    layer = kv_struct(kv_layer)
    _kernels(isa).quire_write_kv(
        TYPES[key.dtype],
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        byref(layer),
        slot_mapping.data_ptr(),
        key.shape[0],
    )


def gate_mul(isa: str, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """See `ops.gate_mul`."""
    size = gate_up.shape[-1] // 2
    rows = as_rows(gate_up)
    out = torch.empty((rows.shape[0], size), dtype=gate_up.dtype)
    _kernels(isa).quire_gate(
        TYPES[gate_up.dtype],
        int(ACTIVATIONS[activation]),
        rows.data_ptr(),
        rows.stride(0),
        size,
        out.data_ptr(),
        rows.shape[0],
    )
    return out.view(*gate_up.shape[:-1], size)


def paged_attention(
    isa: str,
    query: torch.Tensor,
    kv_layer: KVLayer,
    meta: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.paged_attention`."""
    query = _with_heads_together(query)
    out = torch.empty(query.shape, dtype=query.dtype)
    layer, batch = kv_struct(kv_layer), batch_struct(meta)
    _kernels(isa).quire_paged_attention(
        TYPES[query.dtype],
        query.data_ptr(),
        query.stride(0),
        query.shape[1],
        out.data_ptr(),
        byref(layer),
        byref(batch),
        scale,
        sliding_window or 0,
        softcap or 0.0,
        None if sinks is None else sinks.data_ptr(),
    )
    return out


def argmax(isa: str, x: torch.Tensor) -> torch.Tensor:
    """See `ops.argmax`."""
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape[0], dtype=torch.int64)
    _kernels(isa).quire_argmax(x.data_ptr(), x.stride(0), x.shape[1], x.shape[0], out.data_ptr())
    return out


def top_logprobs(
    isa: str, logits: torch.Tensor, token_ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops.top_logprobs`."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, size = logits.shape
    count = min(count, size)
    ids = torch.empty((num_rows, count + 1), dtype=torch.int64)
    values, ranks = torch.empty((num_rows, count + 1)), torch.empty(num_rows, dtype=torch.int64)
    _kernels(isa).quire_top_logprobs(
        logits.data_ptr(),
        logits.stride(0),
        size,
        num_rows,
        token_ids.contiguous().data_ptr(),
        count,
        values.data_ptr(),
        ids.data_ptr(),
        ranks.data_ptr(),
    )
    return ids, values, ranks


def forbid_others(isa: str, logits: torch.Tensor, allowed: torch.Tensor) -> None:
    """See `ops.forbid_others`."""
    assert logits.stride(1) == 1 and allowed.is_contiguous()
    _kernels(isa).quire_forbid_others(
        logits.data_ptr(), logits.stride(0), logits.shape[1], logits.shape[0], allowed.data_ptr()
    )


def sample(isa: str, logits: torch.Tensor, rows: SamplingTensors) -> torch.Tensor:
    """See `ops.sample`.

    All instruction sets give the same tokens. Tokens may differ from the reference's if the rounding of
    probabilities decides.
    """
    edits = rows.edits
    if logits.stride(1) != 1:
        assert edits is None, "edits are made in place, and not in a copy"
        logits = logits.contiguous()
    fields = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seeds, rows.positions)
    kept = [field.contiguous() for field in fields]
    lists = () if edits is None else edits.arguments
    requests = declarations().structure("Requests")(*(field.data_ptr() for field in kept))
    made = [None if one is None else one.data_ptr() for one in lists]
    num_rows, size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64)
    _kernels(isa).quire_sample(
        logits.data_ptr(),
        logits.stride(0),
        size,
        num_rows,
        byref(requests),
        byref(declarations().structure("Edits")(*made)) if made else None,
        out.data_ptr(),
    )
    return out


def add_lora(
    isa: str, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, slots: torch.Tensor
) -> None:
    """See `ops.add_lora`."""
    if x.stride()[1] != 1:
        x = x.contiguous()
    part = adapter_part(a, b)
    _kernels(isa).quire_add_lora(
        TYPES[y.dtype],
        y.data_ptr(),
        # All strides of a tensor take a third of the time that one does.
        y.stride()[0],
        x.data_ptr(),
        x.stride()[0],
        slots.data_ptr(),
        x.shape[0],
        byref(part),
        a.shape[1],
        a.shape[2],
    )


def causal_conv(
    isa: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    meta: AttentionMetadata,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """See `ops.causal_conv`."""
    out = torch.empty(x.shape, dtype=x.dtype)
    kept, batch = declarations().structure("States")(states.data_ptr(), states.stride(0)), batch_struct(meta)
    _kernels(isa).quire_causal_conv(
        TYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        x.shape[1],
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        weight.shape[0],
        int(activation is not None),
        byref(kept),
        byref(batch),
        out.data_ptr(),
    )
    return out


def gated_delta_rule(
    isa: str,
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
    """See `ops.gated_delta_rule`."""
    query, key, value = (_with_heads_together(each) for each in (query, key, value))
    a, b = (each if each.stride(1) == 1 else each.contiguous() for each in (a, b))
    out = torch.empty(value.shape, dtype=value.dtype)
    operands = (query, key, value, a, b)
    rule = declarations().structure("DeltaRule")(
        *(each.data_ptr() for each in operands),
        *(each.stride(0) for each in operands),
        log_decay.data_ptr(),
        step_bias.data_ptr(),
        query.shape[1],
        *(value.shape[1], query.shape[2], value.shape[2]),
    )
    kept, batch = declarations().structure("States")(states.data_ptr(), states.stride(0)), batch_struct(meta)
    _kernels(isa).quire_gated_delta_rule(
        TYPES[value.dtype], byref(rule), byref(kept), byref(batch), out.data_ptr()
    )
    return out


def mamba2(
    isa: str,
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    step: torch.Tensor,
    gate: torch.Tensor,
    space: StateSpace,
    states: torch.Tensor,
    meta: AttentionMetadata,
) -> torch.Tensor:
    """See `ops.mamba2`."""
    x, b, c = (_with_heads_together(each) for each in (x, b, c))
    step, gate = (each if each.stride(1) == 1 else each.contiguous() for each in (step, gate))
    operands = (x, b, c, step, gate)
    sums, out = torch.empty(gate.shape), torch.empty(gate.shape, dtype=x.dtype)
    operator = declarations().structure("StateSpace")(
        *(each.data_ptr() for each in operands),
        *(each.stride(0) for each in operands),
        *(weight.data_ptr() for weight in (space.log_decay, space.step_bias, space.skip, space.norm)),
        *(*space.step_limit, space.eps),
        *(*x.shape[1:], *b.shape[1:]),
    )
    kept, batch = declarations().structure("States")(states.data_ptr(), states.stride(0)), batch_struct(meta)
    _kernels(isa).quire_mamba2(
        TYPES[x.dtype], byref(operator), byref(kept), byref(batch), sums.data_ptr(), out.data_ptr()
    )
    return out


def linear(isa: str, *args: Any) -> NativeLinear:
    """See `ops.pack_linear`."""
    return pack_dense(isa, _kernels(isa), *args)


def grouped_linear(isa: str, *args: Any) -> NativeLinear:
    """See `ops.pack_linear`."""
    return pack_grouped(isa, _kernels(isa), *args)


def head_linear(isa: str, weight: torch.Tensor) -> NativeHeads:
    """See `ops.pack_heads`."""
    return NativeHeads(isa, _kernels(isa), weight)


def route(isa: str, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.route`."""
    return native_route(_kernels(isa), *args)


def moe(isa: str, *args: Any) -> NativeExperts:
    """See `ops.pack_experts`."""
    return NativeExperts(_kernels(isa), *args)


def _with_heads_together(x: torch.Tensor) -> torch.Tensor:
    """Returns x [num_tokens, num_heads, head_dim] with each token contiguous; tokens may have gaps between
    them."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _kernels(isa: str) -> ctypes.CDLL:
    found = library(isa)
    assert found is not None, f"{isa} was picked although its kernels cannot be had"
    return found


def _in_vectors(*sizes: str) -> Callable[..., str | None]:
    """Makes a function that returns why a call's facts are not supported; None: they are supported. The facts
    named in `sizes` must be multiples of VECTOR. A KV cache, if there is one, must have one of KV_TYPES."""

    def why_not(**facts: Any) -> str | None:
        if facts.get("kv_dtype", torch.float32) not in KV_TYPES:
            return f"no cache of {facts['kv_dtype']}"
        if any(facts[size] % VECTOR != 0 for size in sizes):
            return f"{' and '.join(sizes)} must be a multiple of {VECTOR}"
        return None

    return why_not


def _why_not_scan(**facts: Any) -> str | None:
    if facts["key_dim"] > MAX_KEY_DIM:
        return f"key_dim must be at most {MAX_KEY_DIM}"
    return _in_vectors("key_dim", "value_dim")(**facts)


def _why_not_scan_states(**facts: Any) -> str | None:
    if facts["state_dim"] > MAX_STATE_DIM:
        return f"state_dim must be at most {MAX_STATE_DIM}"
    return _in_vectors("head_dim", "state_dim")(**facts)


def _why_not(isa: str, shapes: Callable[..., str | None], **facts: Any) -> str | None:
    """Returns why the kernels of an instruction set do not support the call's facts, by `shapes`, or cannot
    be loaded here; None: they support them. The first call may compile the kernels."""
    reason = shapes(isa=isa, **facts)
    return reason or (None if library(isa) is not None else "its kernels cannot be compiled or loaded here")


_OPERATORS = (
    ("rms_norm", rms_norm, _in_vectors("size")),
    ("gated_norm", gated_norm, _in_vectors("size")),
    ("rope", rope, _in_vectors("head_dim")),
    ("write_kv", write_kv, _in_vectors("head_dim")),
    ("gate_mul", gate_mul, _in_vectors("size")),
    ("paged_attention", paged_attention, _in_vectors("head_dim")),
    ("argmax", argmax, _in_vectors()),
    ("top_logprobs", top_logprobs, _in_vectors()),
    ("forbid_others", forbid_others, _in_vectors()),
    ("sample", sample, _in_vectors()),
    ("add_lora", add_lora, _in_vectors()),
    ("causal_conv", causal_conv, _in_vectors("num_channels")),
    ("gated_delta_rule", gated_delta_rule, _why_not_scan),
    ("mamba2", mamba2, _why_not_scan_states),
    ("linear", linear, why_not_pack),
    ("grouped_linear", grouped_linear, why_not_pack),
    ("head_linear", head_linear, why_not_pack),
    ("route", route, _in_vectors()),
    ("moe", moe, why_not_join),
)
_LEAVES = {"sample": ("typical",)}


def _register() -> None:
    try:
        isas = supported_isas()
    except BuildError as error:
        logger.warning("%s", error)
        return
    for rank, isa in enumerate(reversed(isas), 1):
        for operator, function, shapes in _OPERATORS:
            implementation(
                operator,
                isa,
                devices=("cpu",),
                dtypes=DTYPES,
                priority=10 * rank,
                predicate=partial(_why_not, isa, shapes),
                leaves=_LEAVES.get(operator, ()),
            )(partial(function, isa))


_register()
