"""Reference of linear attention by the gated delta rule, one token of each sequence at a time, and of the
causal convolution, one sequence at a time, for any device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from quire_kernels.metadata import AttentionMetadata
from quire_kernels.registry import implementation


@implementation("causal_conv", "reference", is_recordable=False)
def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    meta: AttentionMetadata,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """See `ops.causal_conv`."""
    outputs, blocks = [], meta.block_table[:, 0]
    num_taps = weight.shape[0]
    for own, block, seq_len in zip(x.split(meta.query_lens), blocks, meta.seq_lens_list, strict=True):
        before = states[block] if seq_len > len(own) else torch.zeros_like(states[block])
        inputs = torch.cat([before, own])
        taps = inputs.float().unfold(0, num_taps, 1)  # [query_len, num_channels, num_taps]
        sums = (taps * weight.float().T).sum(-1)
        if bias is not None:
            sums = sums + bias.float()
        outputs.append((sums if activation is None else functional.silu(sums)).to(x.dtype))
        states[block] = inputs[len(own) :]
    return torch.cat(outputs)


@implementation("gated_delta_rule", "reference", is_recordable=False)
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
    """See `ops.gated_delta_rule`. An iteration computes one token of each sequence that has one left."""
    (_, num_heads, _), key_dim = value.shape, key.shape[2]
    query, key = (
        (x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(
            num_heads // key.shape[1], 1
        )
        for x in (query, key)
    )
    decay = (-log_decay.exp() * functional.softplus(a.float() + step_bias)).exp()
    rate, values = b.float().sigmoid(), value.float()
    out = torch.empty_like(values)
    blocks, state = first_states(states, meta)
    for rows, tokens in tokens_in_turn(meta):
        before = state[rows] * decay[tokens, :, None, None]
        found = torch.einsum("shkv,shk->shv", before, key[tokens])
        delta = (values[tokens] - found) * rate[tokens, :, None]
        state[rows] = before + key[tokens].unsqueeze(-1) * delta.unsqueeze(-2)
        out[tokens] = torch.einsum("shkv,shk->shv", state[rows], query[tokens]) * key_dim**-0.5
    states[blocks] = state
    return out.to(value.dtype)


def first_states(states: torch.Tensor, meta: AttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the block of each sequence, [num_seqs], and copies of the states there, [num_seqs, ...]. A
    sequence without tokens before the step gets a state of zeros.

    Args:
        states: states of all blocks, [num_blocks, ...] with three more dimensions.
        meta: the step's metadata, whose block table has one block for each sequence.
    """
    blocks = meta.block_table[:, 0].long()
    is_new = [query == total for query, total in zip(meta.query_lens, meta.seq_lens_list, strict=True)]
    return blocks, torch.where(
        torch.tensor(is_new, device=states.device)[:, None, None, None], 0.0, states[blocks]
    )


def tokens_in_turn(meta: AttentionMetadata) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (indices of sequences, batch rows of one token of each): first the first new token of every
    sequence, then the second of all sequences that have one, and so on."""
    starts = meta.query_start_loc[:-1].long()
    query_lens = torch.tensor(meta.query_lens, device=starts.device)
    for index in range(meta.max_query_len):
        rows = (query_lens > index).nonzero()[:, 0]
        yield rows, starts[rows] + index
