"""DraftHead: a head that guesses the next tokens of requests from the target's hidden states.

Hidden states are kept for every slot of the target's pool. So they are shared, copied and overwritten with
the target's keys and values, and the head computes inputs that its cache lacks whenever drafts are wanted,
as a draft model does: after a preemption, for a cached prefix, for a forked choice. Blocks that come from a
KV tier have none. Wrong hidden states make drafts worse and never change the output.

Input i of a request is token i + 1 with the hidden state after token i, in the slot of token i. The last
slot of a block thus depends on the token after the block. Where requests that share a block differ in that
token, the slot holds the input of the last one that computed it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.models.interface import ForwardInputs, HeadModel
from quire.worker.block_table import BlockTable
from quire.worker.draft_model import DraftModel, Wanted
from quire.worker.kv_cache import KVCache
from quire.worker.sampler import draw
from quire.worker.sampling_batch import SamplingRow


class DraftHead(DraftModel):
    """Runs a draft head. The head's result for one draft stands in for the hidden state that the next draft
    needs; later steps compute these inputs again from the target's hidden states.

    Args:
        head: the head, with weights.
        kv_cache: its KV cache, with as many blocks as the target's.
        max_tokens: most missing inputs that it computes in a step.
    """

    _SHIFT = 1

    def __init__(self, head: HeadModel, kv_cache: KVCache, max_tokens: int) -> None:
        super().__init__(head, kv_cache, max_tokens)
        self.head = head
        self.hidden = torch.empty(
            (kv_cache.num_blocks, kv_cache.block_size, head.fed_size),
            dtype=head.config.dtype,
            device=kv_cache.blocks.device,
        ).zero_()  # written now, so that a lack of memory shows at start
        """[num_blocks, block_size, fed_size]: what the head reads of the target for the token of each
        slot."""
        self._last: torch.Tensor | None = None
        """Results of the head's latest computation, one row per request that got a draft by it; None: the
        next computation is the first of a step."""

    def prepare(self, inputs: ForwardInputs) -> None:
        """See DraftModel."""
        inputs.rows, inputs.taps, inputs.tapped = None, self.head.taps, []

    def keep(self, hidden: torch.Tensor, inputs: ForwardInputs) -> None:
        """See DraftModel."""
        slots = inputs.metas[0].slot_mapping.long()
        self.hidden.flatten(0, 1)[slots] = self.head.fed(hidden, inputs.tapped)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See DraftModel."""
        sources, targets = torch.tensor(pairs, device=self.hidden.device).T
        self.hidden[targets] = self.hidden[sources]

    def _guess(self, wanted: Sequence[Wanted], table: BlockTable) -> None:
        self._last = None
        for one in wanted:  # drafts follow the last input, which is computed again if it was
            one.state.num_drafted = min(one.state.num_drafted, one.num_inputs - 1)
        super()._guess(wanted, table)

    def _num_computed(self, one: Wanted) -> int:
        return one.span.end

    def _compute(self, inputs: ForwardInputs, rows: Sequence[SamplingRow]) -> torch.Tensor:
        if self._last is None:
            hidden = self.hidden.flatten(0, 1)[inputs.metas[0].slot_mapping.long()]
        else:
            hidden = self._last[: len(inputs.input_ids)]
        self._last = self.head.guess(inputs, hidden)
        if not rows:
            return inputs.input_ids[:0]
        if all(row.wants_best_only for row in rows):
            return self.head.best_tokens(self._last).clamp(min=0)
        return draw(self.head.compute_logits(self._last), rows).token_ids.clamp(min=0)
