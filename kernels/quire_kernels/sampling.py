"""SamplingTensors and LogitEdits: what `ops.sample` needs of each row, on the device of the logits."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from quire_kernels.registry import Declined


@dataclass(frozen=True, kw_only=True)
class LogitEdits:
    """Changes of single logits, made before anything else: penalties, then biases, then bans.

    Three lists of token ids in the vocabulary, each with the tokens of all rows behind each other. A token's
    logit x becomes

    - as a penalty (at most one per row and token): x / repetition, or x * repetition if x is negative, then
      less frequency * its output count, and less presence if that count is not 0; at most the largest finite
      float32. An infinite x stays. The row's newest token counts once more than its list says, or is a
      penalty with a count of 1 if it is not in there.
    - as a bias (at most one per row and token): x + bias.
    - as a ban (any number per row and token): -inf, unless the row's bans leave it nothing above -inf: then
      none of them counts.
    """

    starts: torch.Tensor
    """int32 [3, n + 1], contiguous: row i's penalties, biases and bans are those of the three lists from
    starts[list, i] to before starts[list, i + 1]; starts[list, 0] is 0, starts[list, n] the list's length."""
    factors: torch.Tensor
    """float32 [3, n], contiguous: repetition (a positive normal number), presence, frequency of each row."""
    penalty_ids: torch.Tensor
    """int32 [num_penalties]"""
    output_counts: torch.Tensor
    """float32 [num_penalties]: how often the token occurs in the row's output."""
    bias_ids: torch.Tensor
    """int32 [num_biases]"""
    biases: torch.Tensor
    """float32 [num_biases]"""
    ban_ids: torch.Tensor
    """int32 [num_bans]"""
    newest: torch.Tensor | None = None
    """int64 [n]: an output token that the lists do not count, as the host does not know it yet; negative, or
    None for all rows: there is none."""

    @property
    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        """Arguments of the kernels: the fields in their order, then float32 [num_bans] of scratch memory."""
        saved = torch.empty_like(self.ban_ids, dtype=torch.float32)
        return (*(getattr(self, field.name) for field in fields(self)), saved)


@dataclass(frozen=True, kw_only=True)
class SamplingTensors:
    """One entry per row of logits: all but `edits` are [n] and on the logits' device. Filters apply in the
    order of the fields."""

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
    typical_p: torch.Tensor | None = None
    """float32 in (0, 1]; 1, or None for all rows: all. The smallest set, by how near a token's surprise is to
    the entropy of what the others left, whose mass reaches it; with ties."""
    edits: LogitEdits | None = None
    """None: no row has any."""

    def select_rows(self, index: torch.Tensor) -> SamplingTensors:
        """The entries of the rows `index`, int64, without their edits."""
        columns = {name: value for name, value in vars(self).items() if name != "edits" and value is not None}
        return SamplingTensors(**{name: value[index] for name, value in columns.items()})


def is_not_typical(typical: bool = False, **_: object) -> bool | Declined:
    """True where kernels without typical-p can draw every row; Declined: a row asks for typical-p."""
    return Declined("a row asks for typical-p") if typical else True
