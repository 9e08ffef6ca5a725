"""SamplingRow: one row of a sampling batch, and the flat arrays that the sampler needs of all rows.

Penalties, biases and bans change only the logits of certain tokens. `collect_edits` joins these tokens of all
rows into flat lists, so that a transform of the whole batch needs no loop over rows or the vocabulary. Arrays
of a request's parameters are kept from step to step. No torch here: the arrays are numpy.
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
"""Smallest repetition penalty: below the smallest normal number, 0 / p could be NaN."""
EditArrays = dict[str, npt.NDArray[Any]]
_NO_TOKENS = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)


@dataclass(slots=True)
class SamplingRow:
    """Sampling state of a request, or of one of its choices: what the sampler needs besides logits.

    The runner keeps a request's row from step to step, so that the history for penalties and n-gram bans is
    not made anew from all tokens.
    """

    params: SamplingParams
    token_ids: list[int]
    """Prompt and output so far: a list that its owner extends, and that is never changed here."""
    num_prompt_tokens: int
    eos_token_ids: frozenset[int]
    seed: int
    """Seed of this choice in [0, 2**64), by `choice_seed` from the request's seed, or from one that the
    engine chose when the request arrived. Greedy rows do not use it."""
    num_pending: int = 0
    """Number of tokens that follow `token_ids` and are not in it yet: sampled ones that the host does not
    know, or drafts. A step in flight counts as one token, even with drafts."""
    grammar: RowGrammar | DraftGrammar | None = None
    """Grammar of `params.structured_output`; None: no grammar restricts this row."""
    processors: RowProcessors | None = None
    is_beam: bool = field(init=False, repr=False, compare=False)
    """Whether beam search wants candidates instead of a token."""
    has_penalties: bool = field(init=False, repr=False, compare=False)
    has_transforms: bool = field(init=False, repr=False, compare=False)
    """Whether penalties, biases or bans may change the logits; leaves out grammars and logits processors."""
    wants_best_only: bool = field(init=False, repr=False, compare=False)
    """Whether only the largest of the model's untransformed logits matters."""
    filters: tuple[float, float, float, float] = field(init=False, repr=False, compare=False)
    """Temperature (0: greedy), top-p, min-p and typical-p."""
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
        """Number of candidates that beam search wants of this row. Enough that all beams can continue from
        this row even if every end token is among them, and that `logprobs` of them can be reported."""
        ends = 0 if self.params.ignore_eos else len(self.eos_token_ids)
        ends += len(self.params.stop_token_ids)
        return max(self.params.beam_width + ends, self.params.logprobs or 0)

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens, pending ones included. This is the position of the next one; with `seed`
        it determines the random number."""
        return len(self.token_ids) + self.num_pending - self.num_prompt_tokens

    @property
    def lacks_tokens(self) -> bool:
        """Whether the host must know a pending token before the next one is sampled. Penalties alone need all
        but the newest, which the device counts."""
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
        """Whether penalties must count the newest token, but only the device knows it."""
        if not self.has_penalties:
            return False
        assert self.num_pending <= 1, "the host knows all tokens but the newest"
        return self.num_pending > 0

    def behind(self, drafts: Sequence[int]) -> list[SamplingRow]:
        """Returns the rows for the next token and for the token after each of `drafts`, assuming that the
        drafts are right."""
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
        """Copies the state of `row`, whose tokens are the first tokens of this one. `row` must not change
        while this row is used."""
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
        """Returns the row's history, updated to the end of `token_ids`."""
        if self._history is None or self._history.num_seen > len(self.token_ids):
            self._history = TokenHistory(
                self.token_ids[: max(self.num_prompt_tokens, 0)],
                counts=self.has_penalties,
                ngram_size=self.params.no_repeat_ngram_size,
            )
        self._history.catch_up(self.token_ids)
        return self._history

    def forced_token(self) -> int | None:
        """Returns the token that must come next because `thinking_budget` is used up; None: there is none."""
        params = self.params
        if params.thinking is None or params.thinking_budget is None:
            return None
        if self._thinking is None or self._thinking.num_seen > len(self.token_ids):
            num_prompt_tokens = max(self.num_prompt_tokens, 0)
            self._thinking = ThinkingBudget(params.thinking, params.thinking_budget, num_prompt_tokens)
        return self._thinking.next(self.token_ids)

    def biases(self) -> tuple[IntArray, FloatArray]:
        """Returns `logit_bias` as token ids and values, [b] each."""
        if self._biases is None:
            biases = self.params.logit_bias
            self._biases = (
                np.fromiter(biases.keys(), dtype=np.int64, count=len(biases)),
                np.fromiter(biases.values(), dtype=np.float32, count=len(biases)),
            )
        return self._biases

    def bad_words(self) -> BadWords:
        """Returns `bad_words_ids`, prepared for matching."""
        if self._bad_words is None:
            self._bad_words = BadWords(self.params.bad_words_ids, self.eos_token_ids)
        return self._bad_words

    def bans(self) -> list[IntArray]:
        """Returns the token ids that must not be chosen, possibly with duplicates.

        They come from repeated n-grams, bad words and, until `min_tokens` tokens exist, EOS (unless
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
    """Token ids of all rows, one row after another."""

    sizes: list[int]
    """[n]: number of tokens of each row."""
    token_ids: IntArray
    """[m]: token ids, each in the vocabulary."""
    values: FloatArray
    """[m]: value of each token; [0] if tokens have none."""


def collect_edits(rows: Sequence[SamplingRow], vocab_size: int) -> EditArrays | None:
    """Returns the edits of all rows: the fields of `quire_kernels.sampling.LogitEdits` by name, except
    `newest`.

    If penalties must count a row's newest token on the device (`SamplingRow.is_uncounted`), the result also
    has `uncounted`, bool [n].

    Returns:
        None: no row has any edits.
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
    """Returns [3, n]: repetition, presence and frequency penalty of each row."""
    asked = [row.params for row in rows]
    factors = np.array(
        [(one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in asked],
        dtype=np.float32,
    ).T
    np.maximum(factors[0], _LEAST_REPETITION, out=factors[0])
    return factors


def _penalties(rows: Sequence[SamplingRow], vocab_size: int) -> TokenList | None:
    """Returns the tokens of prompt and output that penalties apply to, with their counts in the output; None:
    no row has penalties."""
    if not any(row.has_penalties for row in rows):
        return None
    found = [row.history().distinct() if row.has_penalties else _NO_TOKENS for row in rows]
    return _join([[ids] for ids, _ in found], [counts for _, counts in found], vocab_size)


def _biases(rows: Sequence[SamplingRow], vocab_size: int) -> TokenList | None:
    """Returns the `logit_bias` of all rows, for tokens in the vocabulary; None: there is none."""
    if not any(row.params.logit_bias for row in rows):
        return None
    found = [row.biases() for row in rows]
    biases = _join([[ids] for ids, _ in found], [values for _, values in found], vocab_size)
    return biases if len(biases.token_ids) else None


def _bans(rows: Sequence[SamplingRow], vocab_size: int) -> TokenList | None:
    """Returns the tokens of `SamplingRow.bans` of all rows; None: no row bans a token in the vocabulary."""
    found = [row.bans() for row in rows]
    if not any(found):
        return None
    bans = _join(found, [], vocab_size)
    return bans if len(bans.token_ids) else None


def _join(ids: list[list[IntArray]], values: list[FloatArray], vocab_size: int) -> TokenList:
    """Joins the tokens of all rows, without ids outside the vocabulary.

    Args:
        ids: [n], any number of arrays for each row.
        values: values of these tokens in the same order; empty: they have none.
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
