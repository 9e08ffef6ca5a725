"""SamplingTensors and LogitEdits: the sampling parameters of each row for `ops.sample`, on the device of the
logits."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, kw_only=True)
class LogitEdits:
    """Changes of single logits that are made before sampling: penalties, then biases, then bans.

    There are three lists of token ids, one per kind of change. Each list holds the tokens of row 0, then
    those of row 1, and so on. A listed token's logit x changes as follows:

    - penalty (at most one per row and token): x / repetition, or x * repetition if x is negative; then
      frequency * its output count is subtracted, and presence if that count is not 0. The result is at most
      the largest finite float32. An infinite x stays. The row's token in `newest` counts once more than the
      list says; if it is not listed, it gets a penalty with a count of 1.
    - bias (at most one per row and token): x + bias.
    - ban (any number per row and token): -inf. If the row's bans would leave no logit above -inf, none of
      them applies.
    """

    starts: torch.Tensor
    """int32 [3, n + 1], contiguous: row i's entries in each list are those from starts[list, i] up to, but
    not including, starts[list, i + 1]. starts[list, 0] is 0, and starts[list, n] is the list's length."""
    factors: torch.Tensor
    """float32 [3, n], contiguous: each row's repetition (a positive normal number), presence and frequency
    penalty."""
    penalty_ids: torch.Tensor
    """int32 [num_penalties]: token ids."""
    output_counts: torch.Tensor
    """float32 [num_penalties]: number of occurrences of the token in the row's output, without `newest`."""
    bias_ids: torch.Tensor
    """int32 [num_biases]: token ids."""
    biases: torch.Tensor
    """float32 [num_biases]: numbers added to the logits."""
    ban_ids: torch.Tensor
    """int32 [num_bans]: token ids."""
    newest: torch.Tensor | None = None
    """int64 [n]: a row's newest output token, if the lists do not count it because the host does not know it
    yet. Negative: the row has no such token. None: no row has one."""

    @property
    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        """Returns the kernels' arguments: the fields in order, then float32 scratch memory [num_bans]."""
        saved = torch.empty_like(self.ban_ids, dtype=torch.float32)
        return (*(getattr(self, field.name) for field in fields(self)), saved)


@dataclass(frozen=True, kw_only=True)
class SamplingTensors:
    """Sampling parameters of each row of logits. Tensors are [n] on the logits' device. Filters apply in the
    order of the fields."""

    temperature: torch.Tensor
    """float32; 0: the row gets its best token, and filters have no effect."""
    top_k: torch.Tensor
    """int32: number of most likely tokens to keep; 0: all. Tokens tied with the last one are kept too."""
    top_p: torch.Tensor
    """float32 in (0, 1]: keeps the smallest set of most likely tokens whose probabilities, among the tokens
    that top-k kept, sum up to at least this; 1: all of these. Tokens tied with the last one are kept too."""
    min_p: torch.Tensor
    """float32: drops tokens less likely than min_p times the most likely one; 0: keeps all."""
    seeds: torch.Tensor
    """int64: key of the Philox generator; its bits are an unsigned number."""
    positions: torch.Tensor
    """int64: number of output tokens before the one that is sampled, used as Philox's counter."""
    typical_p: torch.Tensor | None = None
    """float32 in (0, 1]: keeps the smallest set of tokens whose probabilities sum up to at least this, in
    order of how close a token's surprise is to the entropy after the other filters; ties are kept. 1, or None
    for all rows: keeps all."""
    edits: LogitEdits | None = None
    """Changes of single logits; None: no row has any."""

    def select_rows(self, index: torch.Tensor) -> SamplingTensors:
        """Returns the entries of the rows `index`, int64, without edits."""
        columns = {name: value for name, value in vars(self).items() if name != "edits" and value is not None}
        return SamplingTensors(**{name: value[index] for name, value in columns.items()})
