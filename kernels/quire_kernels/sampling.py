"""SamplingTensors: what `ops.sample` needs of each row, on the device of the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class SamplingTensors:
    """One entry per row of logits, all [n] and on the logits' device."""

    temperature: torch.Tensor
    """float32; 0: the best token, whatever the filters say."""
    top_k: torch.Tensor
    """int32; 0: all. Tokens tied with the last one kept are kept too."""
    top_p: torch.Tensor
    """float32 in (0, 1]; 1: all. The smallest set, by descending probability, whose mass reaches it; tokens
    tied with the last one kept are kept too."""
    min_p: torch.Tensor
    """float32; 0: all. Tokens less likely than min_p times the likeliest are dropped."""
    seeds: torch.Tensor
    """int64: the bits of an unsigned number, Philox's key."""
    positions: torch.Tensor
    """int64: how many tokens the request has drawn, Philox's counter."""
