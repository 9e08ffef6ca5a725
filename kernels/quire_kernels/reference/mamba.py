"""Mamba-2, one token of each sequence at a time, for any device."""

from __future__ import annotations

import torch
from torch.nn import functional

from quire_kernels.metadata import AttentionMetadata
from quire_kernels.reference.gated_delta import first_states, tokens_in_turn
from quire_kernels.registry import implementation
from quire_kernels.state_space import StateSpace


@implementation("mamba2", "reference", is_recordable=False)
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
    """See `ops.mamba2`. An iteration computes one token of each sequence that has one left."""
    num_heads, num_groups = x.shape[1], b.shape[1]
    keys, queries = (one.float().repeat_interleave(num_heads // num_groups, 1) for one in (b, c))
    least, most = space.step_limit
    steps = functional.softplus(step.float() + space.step_bias).clamp(least, most)
    decay, values = (-space.log_decay.exp() * steps).exp(), x.float()
    out = space.skip[:, None] * values
    blocks, state = first_states(states, meta)
    for rows, tokens in tokens_in_turn(meta):
        term = keys[tokens].unsqueeze(-1) * (values[tokens] * steps[tokens].unsqueeze(-1)).unsqueeze(-2)
        state[rows] = state[rows] * decay[tokens, :, None, None] + term
        out[tokens] += torch.einsum("shnp,shn->shp", state[rows], queries[tokens])
    states[blocks] = state
    gated = (out.flatten(1) * functional.silu(gate.float())).unflatten(1, (num_groups, -1))
    normed = gated * (gated.square().mean(-1, keepdim=True) + space.eps).rsqrt()
    return (normed.flatten(1) * space.norm).to(x.dtype)
