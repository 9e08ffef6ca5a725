"""Operators on rows of logits, for any device."""

from __future__ import annotations

import torch

from quire_kernels.registry import implementation


@implementation("top_logprobs", "reference")
def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `ops.top_logprobs`."""
    ids = token_ids.clamp(min=0)[:, None]
    ranks = (logits > logits.gather(1, ids)).sum(dim=-1) + 1
    if count:
        ids = torch.cat([ids, logits.topk(min(count, logits.shape[1])).indices], dim=1)
    # Faster than logsumexp, though it writes all.
    return ids, torch.log_softmax(logits, dim=-1).gather(1, ids), ranks


@implementation("forbid_others", "reference")
def forbid_others(logits: torch.Tensor, allowed: torch.Tensor) -> None:
    """See `ops.forbid_others`."""
    bits = allowed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=allowed.device)
    logits.masked_fill_((bits & 1).flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
