"""SamplingRow: one row of a sampling batch, and the flat arrays the sampler needs of all rows.

Logits are touched only where a request asks for it: `collect_edits` turns what the rows ask for and their
histories into lists of token ids with the rows behind each other, so that a transform of the whole batch is
one gather and one scatter, or a part of a kernel, instead of a loop over rows or over the vocabulary. What a
request asks for is turned into arrays once, so that a step only joins arrays. No torch here: they are numpy.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.request.logits_processors import RowProcessors
from quire.request.sampling_params import SamplingParams
from quire.worker.grammar import DraftGrammar, RowGrammar
from quire.worker.token_history import BadWords, FloatArray, IntArray, ThinkingBudget, TokenHistory

_LEAST_REPETITION = np.finfo(np.float32).tiny
"""A penalty below the smallest normal number would turn 0 / p into NaN."""
EditArrays = dict[str, npt.NDArray[Any]]
_NO_TOKENS = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)


@dataclass(slots=True)
class SamplingRow:
    """Sampling state of the request behind one row of logits: all that the sampler must know of it.

    A runner that keeps the row of a request from step to step pays O(new tokens) per step for penalties
    and n-gram bans; a row made anew each step gives the same tokens and pays O(all tokens).
    """

    params: SamplingParams
    token_ids: list[int]
    """Prompt and output so far: a reference that grows behind our back, never copied or changed here."""
    num_prompt_tokens: int
    eos_token_ids: frozenset[int]
    seed: int
    """In [0, 2**64): the request's own, or one the runner drew when the request arrived."""
    num_pending: int = 0
    """Tokens behind `token_ids` that are drawn already, but known to the device only."""
    grammar: RowGrammar | DraftGrammar | None = None
    """Grammar of `params.structured_output`, which says what tokens may come next; only a worker has it."""
    processors: RowProcessors | None = None
    is_beam: bool = field(init=False, repr=False, compare=False)
    """True when beam search asks for candidates instead of a token."""
    has_penalties: bool = field(init=False, repr=False, compare=False)
    has_transforms: bool = field(init=False, repr=False, compare=False)
    """True when something may change the logits before the temperature."""
    wants_best_only: bool = field(init=False, repr=False, compare=False)
    """True when the largest of the model's own logits is all that matters."""
    filters: tuple[float, float, float, float] = field(init=False, repr=False, compare=False)
    """Temperature (0 where the best token is taken), top-p, min-p and typical-p."""
    _history: TokenHistory | None = field(default=None, init=False, repr=False, compare=False)
    _bad_words: BadWords | None = field(default=None, init=False, repr=False, compare=False)
    _biases: tuple[IntArray, FloatArray] | None = field(default=None, init=False, repr=False, compare=False)
    _thinking: ThinkingBudget | None = field(default=None, init=False, repr=False, compare=False)
    _ends: IntArray | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        params = self.params
        self.is_beam = params.beam_width > 1
        self.has_penalties = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self.has_transforms = bool(
            self.has_penalties
            or params.no_repeat_ngram_size
            or params.bad_words_ids
            or params.logit_bias
            or params.min_tokens
        )
        self.wants_best_only = (
            params.is_greedy
            and self.grammar is None
            and self.processors is None
            and params.thinking is None
            and not (self.is_beam or self.has_transforms or params.logprobs is not None)
        )
        temperature = 0.0 if self.is_beam else params.temperature
        self.filters = temperature, params.top_p, params.min_p, params.typical_p

    @property
    def num_candidates(self) -> int:
        """Beam search: candidates wanted of this row, so many that all ends may be among them and all beams
        go on from this one, and that `logprobs` of them can be reported."""
        ends = 0 if self.params.ignore_eos else len(self.eos_token_ids)
        ends += len(self.params.stop_token_ids)
        return max(self.params.beam_width + ends, self.params.logprobs or 0)

    @property
    def num_output_tokens(self) -> int:
        """Also the position of the token to be drawn: together with `seed` it fixes the random number."""
        return len(self.token_ids) + self.num_pending - self.num_prompt_tokens

    @property
    def lacks_tokens(self) -> bool:
        """True when the host has to know a pending token before the next one is drawn: any, or for penalties
        any but the newest, which is counted on the device."""
        if not self.num_pending:
            return False
        params = self.params
        if params.thinking is not None and not (self._thinking is not None and self._thinking.is_over):
            return True
        if params.no_repeat_ngram_size or params.bad_words_ids or self.grammar or self.processors:
            return True
        return self.has_penalties and self.num_pending > 1

    @property
    def is_uncounted(self) -> bool:
        """True when the newest token counts for penalties, but only the device knows it."""
        if not self.has_penalties:
            return False
        assert self.num_pending <= 1, "the host knows all tokens but the newest"
        return self.num_pending > 0

    def behind(self, drafts: Sequence[int]) -> list[SamplingRow]:
        """Rows of the token to be drawn next, and of those behind each of `drafts`, were these right."""
        assert not self.num_pending and self.processors is None, "drafts follow what is known"
        if self.wants_best_only:
            return [self] * (len(drafts) + 1)
        grammars = None
        if isinstance(self.grammar, RowGrammar):
            grammars = self.grammar.behind(self.token_ids, drafts)
        looks_back = self.has_transforms or self.params.thinking is not None
        rows = [self]
        for count in range(1, len(drafts) + 1):
            row = SamplingRow(
                self.params,
                [*self.token_ids, *drafts[:count]] if looks_back else self.token_ids,
                self.num_prompt_tokens,
                self.eos_token_ids,
                self.seed,
                num_pending=0 if looks_back else count,
                grammar=None if grammars is None else grammars[count - 1],
            )
            if looks_back:
                row._go_on_from(self)
            rows.append(row)
        return rows

    def _go_on_from(self, row: SamplingRow) -> None:
        """Takes what is known of a row with the first of these tokens, as long as that one stays there."""
        params = self.params
        if self.has_penalties or params.no_repeat_ngram_size:
            self._history = row.history().fork()
        if params.bad_words_ids:
            self._bad_words = row.bad_words()
        if params.logit_bias:
            self._biases = row.biases()
        if params.thinking is not None:
            row.forced_token()
            self._thinking = copy.copy(row._thinking)

    def history(self) -> TokenHistory:
        """The row's history, brought up to the newest token."""
        if self._history is None or self._history.num_seen > len(self.token_ids):
            self._history = TokenHistory(
                self.token_ids[: max(self.num_prompt_tokens, 0)],
                counts=self.has_penalties,
                ngram_size=self.params.no_repeat_ngram_size,
            )
        self._history.catch_up(self.token_ids)
        return self._history

    def forced_token(self) -> int | None:
        """The token that must come next, as `thinking_budget` is used up."""
        params = self.params
        if params.thinking is None or params.thinking_budget is None:
            return None
        if self._thinking is None or self._thinking.num_seen > len(self.token_ids):
            num_prompt_tokens = max(self.num_prompt_tokens, 0)
            self._thinking = ThinkingBudget(params.thinking, params.thinking_budget, num_prompt_tokens)
        return self._thinking.next(self.token_ids)

    def biases(self) -> tuple[IntArray, FloatArray]:
        """`logit_bias` as tokens and values, [b] each."""
        if self._biases is None:
            biases = self.params.logit_bias
            self._biases = (
                np.fromiter(biases.keys(), dtype=np.int64, count=len(biases)),
                np.fromiter(biases.values(), dtype=np.float32, count=len(biases)),
            )
        return self._biases

    def bad_words(self) -> BadWords:
        """`bad_words_ids`, ready to be looked for."""
        if self._bad_words is None:
            self._bad_words = BadWords(self.params.bad_words_ids, self.eos_token_ids)
        return self._bad_words

    def bans(self) -> list[IntArray]:
        """Tokens that must not be chosen, some maybe twice.

        They come of repeated n-grams, bad words and, until `min_tokens` tokens exist, of EOS (unless
        `ignore_eos`, which makes EOS a token like any other) and the stop ids.
        """
        params = self.params
        found: list[IntArray] = []
        if params.no_repeat_ngram_size:
            found += self.history().ngram_bans()
        if params.bad_words_ids:
            words = self.bad_words()
            found.append(words.always)
            found.append(np.array(words.bans(self.token_ids), dtype=np.int64))
        if self.num_output_tokens < params.min_tokens:
            if self._ends is None:
                ends = [*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)]
                self._ends = np.array(ends, dtype=np.int64)
            found.append(self._ends)
        return found


@dataclass(slots=True)
class TokenList:
    """Tokens of all rows behind each other."""

    sizes: list[int]
    """[n]: how many each row has."""
    token_ids: IntArray
    """[m], each in the vocabulary."""
    values: FloatArray
    """[m], or [0] where tokens have none."""


def collect_edits(rows: Sequence[SamplingRow], vocab_size: int) -> EditArrays | None:
    """The edits of all rows: the fields of `quire_kernels.sampling.LogitEdits` by name, but for `newest`.

    Where rows have a newest token that is a penalty more (`SamplingRow.is_uncounted`), there is `uncounted`,
    bool [n], too.

    Returns:
        None when no row has any edits.
    """
    if not any(row.has_transforms for row in rows):
        return None
    lists = _penalties(rows, vocab_size), _biases(rows, vocab_size), _bans(rows, vocab_size)
    if lists == (None, None, None):
        return None
    none = TokenList([0] * len(rows), *_NO_TOKENS)
    penalties, biases, bans = (one or none for one in lists)
    starts = np.zeros((3, len(rows) + 1), dtype=np.int32)
    np.cumsum([one.sizes for one in (penalties, biases, bans)], axis=1, out=starts[:, 1:])
    uncounted = np.array([row.is_uncounted for row in rows])
    return {
        "starts": starts,
        "factors": _penalty_factors(rows),
        "penalty_ids": penalties.token_ids.astype(np.int32),
        "output_counts": penalties.values,
        "bias_ids": biases.token_ids.astype(np.int32),
        "biases": biases.values,
        "ban_ids": bans.token_ids.astype(np.int32),
        **({"uncounted": uncounted} if uncounted.any() else {}),
    }


def _penalty_factors(rows: Sequence[SamplingRow]) -> FloatArray:
    """[3, n]: repetition, presence and frequency penalty of each row."""
    asked = [row.params for row in rows]
    factors = np.array(
        [(one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in asked],
        dtype=np.float32,
    ).T
    np.maximum(factors[0], _LEAST_REPETITION, out=factors[0])
    return factors


def _penalties(rows: Sequence[SamplingRow], vocab_size: int) -> TokenList | None:
    """Repetition, presence and frequency penalties: the tokens of prompt and output."""
    if not any(row.has_penalties for row in rows):
        return None
    found = [row.history().distinct() if row.has_penalties else _NO_TOKENS for row in rows]
    return _join([[ids] for ids, _ in found], [counts for _, counts in found], vocab_size)


def _biases(rows: Sequence[SamplingRow], vocab_size: int) -> TokenList | None:
    """`logit_bias` of all rows."""
    if not any(row.params.logit_bias for row in rows):
        return None
    found = [row.biases() for row in rows]
    biases = _join([[ids] for ids, _ in found], [values for _, values in found], vocab_size)
    return biases if len(biases.token_ids) else None


def _bans(rows: Sequence[SamplingRow], vocab_size: int) -> TokenList | None:
    """Tokens that must not be chosen."""
    found = [row.bans() for row in rows]
    if not any(found):
        return None
    bans = _join(found, [], vocab_size)
    return bans if len(bans.token_ids) else None


def _join(ids: list[list[IntArray]], values: list[FloatArray], vocab_size: int) -> TokenList:
    """The tokens of all rows that have a logit, which placeholders of images and the like have not.

    Args:
        ids: [n] of any number of arrays.
        values: of these tokens in this order; empty: they have none.
    """
    sizes = [sum(map(len, row)) for row in ids]
    token_ids = np.concatenate([_NO_TOKENS[0], *(part for row in ids for part in row)])
    joined = np.concatenate([_NO_TOKENS[1], *values])
    inside = (token_ids >= 0) & (token_ids < vocab_size)
    if inside.all():
        return TokenList(sizes, token_ids, joined)
    kept = np.repeat(np.arange(len(ids)), sizes)[inside]
    sizes = np.bincount(kept, minlength=len(ids)).tolist()
    return TokenList(sizes, token_ids[inside], joined[inside] if values else joined)
