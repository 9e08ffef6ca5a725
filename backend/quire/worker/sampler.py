"""Sampling: turns logits into one token per row.

Each row is computed by operations that look at that row only, and its random number is a pure function of
(seed, output position). So the sampler does not make a request's tokens depend on the batch around it or on a
preemption.

Order of the transforms: logits processors, the grammar's mask, repetition penalty, presence and frequency
penalties, logit bias, bans (n-grams, bad words, min-tokens masks), then for rows that sample temperature,
top-k, top-p, min-p, typical-p. A bias cannot revive a banned token. Ties: greedy chooses the lowest id; a
filter keeps every token tied with the last one it keeps, so the outcome does not depend on the order of a
sort.

A token forced by `thinking_budget` usually replaces the sampled one, unless a grammar forbids it.

If the bans leave a row no token at all, they are lifted for that step: a request that asked for the
impossible gets a violation instead of an error in mid-stream. Tokens that a grammar forbids are not allowed
again.

Log-probabilities are those of the model (log-softmax of the logits before any transform), except in beam
search.

Rows of beam search get their best candidates instead of a sampled token. Their log-probabilities are those
after penalties, biases and bans, and are not normalised again, as in transformers. `TokenLogprobs` then holds
the best token first, followed by the row's `num_candidates` best ones (all tokens if there are fewer) in
descending order, which include that first one.

Sampling uses the inverse CDF with one Philox number per draw, not Gumbel-max. Gumbel-max needs a random
number per vocabulary entry (10 million for 64 rows of 150k), while one number per row is computed by the same
integers on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from quire.outputs import RowOutput
from quire.worker.device import to_device, to_device_together
from quire.worker.sampling_batch import EditArrays, SamplingRow, collect_edits
from quire.worker.top_logprobs import TopLogprobs, entries
from quire_kernels import ops
from quire_kernels.sampling import LogitEdits, SamplingTensors

_EDITS = [field.name for field in fields(LogitEdits) if field.name != "newest"]
_BAD_LOGITS = "the model's logits for this request are NaN or have no finite maximum"


@dataclass(slots=True)
class Draw:
    """Sampled tokens and log-probabilities, still on the device of the logits. Only `outputs` needs them on
    the host."""

    token_ids: torch.Tensor
    """int64 [N]; -1 where the logits hold NaN or have no finite maximum."""
    logprobs: list[tuple[list[int], list[int], TopLogprobs]] = field(default_factory=list)
    """Groups of rows: the indices of n rows, the number of entries that each reports after its first, and the
    log-probabilities of the n rows. The first entry is that of the sampled token, or of a beam's best
    token."""
    errors: dict[int, RowOutput] = field(default_factory=dict)
    """Output with the error of each sample whose grammar or logits processor failed, by index of the
    sample."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the result."""
        return [self.token_ids, *(tensor for _, _, found in self.logprobs for tensor in found.tensors)]

    def outputs(self, tensors: Sequence[torch.Tensor] | None = None) -> list[RowOutput]:
        """Returns one output per row, with one token or an error; `tensors`: host copies of `self.tensors`,
        if any."""
        token_ids, *rest = self.tensors if tensors is None else tensors
        outputs = [
            RowOutput([token_id]) if token_id >= 0 else RowOutput(error=_BAD_LOGITS)
            for token_id in token_ids.tolist()
        ]
        for row, output in self.errors.items():
            outputs[row] = output
        for rows, counts, _ in self.logprobs:
            for row, entry in zip(rows, entries(rest[:3], counts), strict=True):
                if not outputs[row].error:
                    outputs[row].logprobs = [entry]
            del rest[:3]
        return outputs


def join_drafts(
    outputs: Sequence[RowOutput], rows: Sequence[int], drafts: Mapping[int, Sequence[int]]
) -> tuple[list[RowOutput], list[int]]:
    """Joins the samples after a row's newest token and after its drafts to one output. It keeps samples up to
    and including the first that differs from the draft in its place. A sample that failed after a draft is
    dropped, with those after it.

    Args:
        outputs: [N], each with one token or an error. The first of a row is extended in place.
        rows: [N], for each output the index of its row in the step.
        drafts: draft tokens by index of the row; a row with drafts has one sample more than drafts.

    Returns:
        The joined outputs, and the index of each one's first sample.
    """
    joined, firsts = [], []
    number = 0
    while number < len(outputs):
        output, guessed = outputs[number], drafts.get(rows[number], ())
        joined.append(output)
        firsts.append(number)
        for draft, behind in zip(guessed, outputs[number + 1 :], strict=False):
            # A sample that fails only after a draft is drawn again by a later step, which knows the draft.
            if output.error or behind.error or output.token_ids[-1] != draft:
                break
            output.token_ids += behind.token_ids
            if output.logprobs is not None:
                output.logprobs += behind.logprobs or []
        number += len(guessed) + 1
    return joined, firsts


def draw(logits: torch.Tensor, rows: Sequence[SamplingRow], newest: torch.Tensor | None = None) -> Draw:
    """Samples one token per row.

    Args:
        logits: [N, vocab_size] float32, any device; may be changed in place.
        rows: N rows.
        newest: int64 [N], on the device of the logits: the newest token of rows that are `is_uncounted`;
            None: there are no such rows.
    """
    assert logits.shape[0] == len(rows), (logits.shape, len(rows))
    assert logits.dtype == torch.float32, logits.dtype
    if not rows:
        return Draw(torch.empty(0, dtype=torch.int64))

    beams = [i for i, row in enumerate(rows) if row.is_beam]
    if beams:
        logits[_index(beams, logits)] = torch.log_softmax(_select_rows(logits, beams), dim=-1)
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None and not row.is_beam]
    edits = collect_edits(rows, logits.shape[1])
    is_bound = any(row.grammar is not None for row in rows)
    processed = [i for i, row in enumerate(rows) if row.processors is not None]
    raw = logits  # without edits, grammars and processors they stay as they are
    if wanted and (edits is not None or is_bound or processed or len(wanted) < len(rows)):
        raw = _select_rows(logits, wanted)
    errors = _process(logits, rows, processed) if processed else {}
    if is_bound:
        errors |= _follow_grammars(logits, rows)

    assert newest is not None or "uncounted" not in (edits or {}), "the newest tokens are needed"
    thinking = [i for i, row in enumerate(rows) if row.params.thinking is not None]
    forced = _forced(logits, rows, thinking) if thinking else []
    drawn = Draw(_choose(logits, rows, edits, newest), errors=errors)
    if forced:
        _force(drawn.token_ids, forced)
    if wanted:
        counts = [rows[i].params.logprobs or 0 for i in wanted]
        chosen = _select_rows(drawn.token_ids, wanted)
        drawn.logprobs.append((wanted, counts, TopLogprobs.compute(raw, chosen, max(counts))))
    if beams:
        counts = [rows[i].num_candidates for i in beams]
        values, ids = _select_rows(logits, beams).topk(min(max(counts), logits.shape[1]))
        ids, values = (torch.cat([found[:, :1], found], dim=1) for found in (ids, values))
        drawn.logprobs.append((beams, counts, TopLogprobs(ids, values, torch.zeros_like(ids[:, 0]))))
    return drawn


def _forced(
    logits: torch.Tensor, rows: Sequence[SamplingRow], thinking: Sequence[int]
) -> list[tuple[int, int]]:
    """Returns (row, token) of the rows among `thinking` that must get a certain token. Leaves out a row with
    a grammar if the token's logit is -inf."""
    wanted = [(i, rows[i].forced_token()) for i in thinking]
    return [
        (i, token_id)
        for i, token_id in wanted
        if token_id is not None and (rows[i].grammar is None or bool(logits[i, token_id] > -torch.inf))
    ]


def _force(token_ids: torch.Tensor, forced: Sequence[tuple[int, int]]) -> None:
    """Replaces sampled tokens by the forced (row, token), except in rows that failed."""
    rows, values = (_index(list(column), token_ids) for column in zip(*forced, strict=True))
    token_ids[rows] = torch.where(token_ids[rows] < 0, -1, values)


def _follow_grammars(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> dict[int, RowOutput]:
    """Masks the tokens that the rows' grammars forbid; returns, by row, the errors of grammars that failed.

    Called before all edits: no bias may revive a forbidden token, and bans that leave a row no token are
    lifted only for tokens that its grammar allows.
    """
    errors = {}
    masks = np.full((len(rows), -(-logits.shape[1] // 32)), -1, dtype=np.int32)
    for number, row in enumerate(rows):
        if row.grammar is None:
            continue
        allowed = row.grammar.allowed(row.token_ids)
        if row.grammar.error:
            errors[number] = RowOutput(error=row.grammar.error)
            masks[number] = 0
        elif allowed is not None:
            masks[number, : len(allowed)] = allowed
            masks[number, len(allowed) :] = 0
    ops.forbid_others(logits, to_device(masks, logits.device))
    return errors


def _process(logits: torch.Tensor, rows: Sequence[SamplingRow], processed: list[int]) -> dict[int, RowOutput]:
    """Calls the requests' logits processors on their rows, in place; returns, by row, the errors of those
    that failed. The logits of their rows become NaN."""
    errors = {}
    for i in processed:
        processors = rows[i].processors
        assert processors is not None and not rows[i].num_pending, "it sees all tokens"
        processors(rows[i].token_ids, logits[i])
        if processors.error:
            errors[i] = RowOutput(error=processors.error, error_code=processors.error_code)
            logits[i] = torch.nan
    return errors


def _choose(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    edits: EditArrays | None,
    newest: torch.Tensor | None,
) -> torch.Tensor:
    """Applies the edits and samples: [N, V] -> int64 [N]."""
    if edits is None and all(row.params.is_greedy or row.is_beam for row in rows):
        return ops.argmax(logits)
    return ops.sample(logits, sampling_tensors(rows, edits, newest, logits.device))


def sampling_tensors(
    rows: Sequence[SamplingRow], edits: EditArrays | None, newest: torch.Tensor | None, device: torch.device
) -> SamplingTensors:
    """Returns the tensors that `ops.sample` needs, sent to the device in one copy. Rows of beam search count
    as greedy.

    Args:
        rows: N rows.
        edits: edits of these rows, from `collect_edits`.
        newest: see `draw`.
        device: device of the logits.
    """
    floats = np.array([row.filters for row in rows], dtype=np.float32).T
    words = np.array([(row.params.top_k, row.seed, row.num_output_tokens) for row in rows], dtype=np.uint64).T
    there = to_device_together({"words": words.view(np.int64), "floats": floats, **(edits or {})}, device)
    top_k, seeds, positions = there["words"].unbind()
    temperature, top_p, min_p, typical_p = there["floats"].unbind()
    return SamplingTensors(
        temperature=temperature,
        top_k=top_k.int(),
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p if ((floats[3] < 1) & (floats[0] > 0)).any() else None,
        seeds=seeds,
        positions=positions,
        edits=None if edits is None else _logit_edits(there, newest),
    )


def _logit_edits(there: Mapping[str, torch.Tensor], newest: torch.Tensor | None) -> LogitEdits:
    """Returns the LogitEdits, made from the arrays of `collect_edits` on the device."""
    uncounted = there.get("uncounted")
    known = None if newest is None or uncounted is None else torch.where(uncounted, newest, -1)
    return LogitEdits(**{name: there[name] for name in _EDITS}, newest=known)


def _index(values: list[int], like: torch.Tensor) -> torch.Tensor:
    return to_device(np.array(values, dtype=np.int64), like.device)


def _select_rows(tensor: torch.Tensor, index: list[int]) -> torch.Tensor:
    """Returns a copy of the rows `index` of `tensor`."""
    if tensor.device.type == "cpu":  # by this thread alone: torch would wake all of its own, which then spin
        return torch.from_numpy(tensor.numpy()[index])
    return tensor.index_select(0, _index(index, tensor))
