"""SamplingRow: one row of a sampling batch, and the flat arrays the sampler needs of all rows.

Logits are touched only where a request asks for it: `collect_edits` turns what the rows ask for and their
histories into lists of token ids with the rows behind each other, so that a transform of the whole batch is
one gather and one scatter, or a part of a kernel, instead of a loop over rows or over the vocabulary. No
torch here: the arrays are numpy and small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

_NGRAM_KEY_TOKENS = 3
_LEAST_REPETITION = np.finfo(np.float32).tiny
"""A penalty below the smallest normal number would turn 0 / p into NaN."""
_NO_TOKENS = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)


@dataclass(slots=True)
class SamplingRow:
    """What the sampler must know of the request behind one row of logits.

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
    is_beam: bool = field(init=False, repr=False, compare=False)
    """True when beam search asks for candidates instead of a token."""
    has_penalties: bool = field(init=False, repr=False, compare=False)
    has_transforms: bool = field(init=False, repr=False, compare=False)
    """True when something may change the logits before the temperature."""
    has_filters: bool = field(init=False, repr=False, compare=False)
    """True when top-k, top-p, min-p or typical-p may remove tokens."""
    _history: TokenHistory | None = field(default=None, init=False, repr=False, compare=False)

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
        self.has_filters = (
            params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 or params.typical_p < 1.0
        )

    @property
    def wants_best_only(self) -> bool:
        """True when the largest of the model's own logits is all that matters."""
        params = self.params
        return params.is_greedy and not (self.is_beam or self.has_transforms or params.logprobs is not None)

    @property
    def num_candidates(self) -> int:
        """Beam search: candidates wanted of this row, so many that all beams may end and all go on, and that
        `logprobs` of them can be reported."""
        ends = 0 if self.params.ignore_eos else len(self.eos_token_ids)
        ends += len(self.params.stop_token_ids)
        return max(self.params.beam_width * max(2, 1 + ends), self.params.logprobs or 0)

    @property
    def num_output_tokens(self) -> int:
        """Also the position of the token to be drawn: together with `seed` it fixes the random number."""
        return len(self.token_ids) + self.num_pending - self.num_prompt_tokens

    @property
    def needs_tokens(self) -> bool:
        """True when the host has to know all tokens before one is drawn, beyond what the model sees."""
        return bool(self.params.no_repeat_ngram_size or self.params.bad_words_ids)

    @property
    def is_uncounted(self) -> bool:
        """True when the newest token counts for penalties, but only the device knows it."""
        assert self.num_pending <= 1, "two steps are in flight at most"
        return self.has_penalties and self.num_pending > 0

    def history(self) -> TokenHistory:
        """The row's history, brought up to the newest token."""
        if self._history is None or self._history.num_seen > len(self.token_ids):
            self._history = TokenHistory(self)
        self._history.catch_up(self.token_ids)
        return self._history


class TokenHistory:
    """Running statistics of one request's tokens: distinct ids, output counts, n-gram index, bad words.

    Invariant: everything describes exactly `token_ids[:num_seen]`.
    """

    __slots__ = (
        "_counts",
        "_ids",
        "_key_tokens",
        "_long_bad_words",
        "_ngram_size",
        "_num_prompt_tokens",
        "_positions",
        "_short_bad_words",
        "_slots",
        "_tracks_counts",
        "num_seen",
    )

    def __init__(self, row: SamplingRow) -> None:
        params = row.params
        self.num_seen = 0
        self._num_prompt_tokens = row.num_prompt_tokens
        self._tracks_counts = row.has_penalties
        self._slots: dict[int, int] = {}
        self._ids: IntArray = np.empty(64, dtype=np.int64)
        self._counts: FloatArray = np.zeros(64, dtype=np.float32)
        self._ngram_size = params.no_repeat_ngram_size
        # A short key keeps memory linear for any n; what it leaves open is compared token by token.
        self._key_tokens = min(max(self._ngram_size - 1, 0), _NGRAM_KEY_TOKENS)
        self._positions: dict[tuple[int, ...], list[int]] = {}
        # As in transformers, a bad word that is just EOS is not banned: it would never let a request end.
        self._short_bad_words = [
            word[0] for word in params.bad_words_ids if len(word) == 1 and word[0] not in row.eos_token_ids
        ]
        self._long_bad_words: dict[int, list[tuple[int, ...]]] = {}
        for word in params.bad_words_ids:
            if len(word) > 1:
                self._long_bad_words.setdefault(word[-2], []).append(tuple(word))

    def catch_up(self, token_ids: Sequence[int]) -> None:
        if self._tracks_counts:
            for position in range(self.num_seen, len(token_ids)):
                self._count(token_ids[position], position >= self._num_prompt_tokens)
        if self._ngram_size:
            for position in range(max(self.num_seen, self._ngram_size - 1), len(token_ids)):
                key = tuple(token_ids[position - self._key_tokens : position])
                self._positions.setdefault(key, []).append(position)
        self.num_seen = len(token_ids)

    def _count(self, token_id: int, is_output: bool) -> None:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
        if is_output:
            self._counts[slot] += 1

    def distinct(self) -> tuple[IntArray, FloatArray]:
        """Distinct ids of prompt and output, and how often each occurs in the output: [d], [d]."""
        size = len(self._slots)
        return self._ids[:size], self._counts[:size]

    def ngram_bans(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens that would repeat an n-gram of prompt and output."""
        n = self._ngram_size
        if not n or len(token_ids) < n:
            return []
        end = len(token_ids)
        positions = self._positions.get(tuple(token_ids[end - self._key_tokens :] if n > 1 else ()), ())
        if n - 1 <= self._key_tokens:
            return list(dict.fromkeys(token_ids[position] for position in positions))
        prefix = token_ids[end - n + 1 :]
        return list(
            dict.fromkeys(
                token_ids[position]
                for position in positions
                if token_ids[position - n + 1 : position] == prefix
            )
        )

    def bad_word_bans(self, token_ids: Sequence[int]) -> list[int]:
        """Last tokens of the bad words whose other tokens are the newest tokens."""
        bans = list(self._short_bad_words)
        if token_ids:
            for word in self._long_bad_words.get(token_ids[-1], ()):
                prefix = len(word) - 1
                if prefix <= len(token_ids) and tuple(token_ids[-prefix:]) == word[:-1]:
                    bans.append(word[-1])
        return bans


@dataclass(slots=True)
class TokenList:
    """Tokens of all rows behind each other."""

    sizes: list[int]
    """[n]: how many each row has."""
    token_ids: IntArray
    """[m], each in the vocabulary."""
    values: FloatArray
    """[m], or [0] where tokens have none."""


@dataclass(slots=True)
class Edits:
    """What rows change of single logits: see `quire_kernels.sampling.LogitEdits`; None: nothing of a kind."""

    penalties: TokenList | None
    """Values are output counts; tokens are distinct within a row."""
    biases: TokenList | None
    """Values are biases; tokens are distinct within a row."""
    bans: TokenList | None
    """Without values; tokens may repeat."""
    uncounted: npt.NDArray[np.bool_] | None
    """[n]: whose newest token is a penalty more, see `SamplingRow.is_uncounted`; None: no row's."""


def collect_edits(rows: Sequence[SamplingRow], vocab_size: int) -> Edits | None:
    """The edits of all rows; None when no row has any."""
    if not any(row.has_transforms for row in rows):
        return None
    uncounted = np.array([row.is_uncounted for row in rows])
    edits = Edits(
        _penalties(rows, vocab_size),
        _biases(rows, vocab_size),
        _bans(rows, vocab_size),
        uncounted if uncounted.any() else None,
    )
    return edits if edits.penalties or edits.biases or edits.bans else None


def _penalty_factors(rows: Sequence[SamplingRow]) -> FloatArray:
    """[3, n]: repetition, presence and frequency penalty of each row."""
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    factors = np.array([[getattr(row.params, name) for row in rows] for name in names], dtype=np.float32)
    np.maximum(factors[0], _LEAST_REPETITION, out=factors[0])
    return factors


def edit_arrays(rows: Sequence[SamplingRow], edits: Edits) -> dict[str, npt.NDArray[Any]]:
    """The fields of `LogitEdits` by name, but for `newest`; and `uncounted`, if there is."""
    none = TokenList([0] * len(rows), *_NO_TOKENS)
    penalties, biases, bans = (one or none for one in (edits.penalties, edits.biases, edits.bans))
    starts = np.zeros((3, len(rows) + 1), dtype=np.int32)
    np.cumsum([one.sizes for one in (penalties, biases, bans)], axis=1, out=starts[:, 1:])
    masks = {} if edits.uncounted is None else {"uncounted": edits.uncounted}
    return {
        "starts": starts,
        "factors": _penalty_factors(rows),
        "penalty_ids": penalties.token_ids.astype(np.int32),
        "output_counts": penalties.values,
        "bias_ids": biases.token_ids.astype(np.int32),
        "biases": biases.values,
        "ban_ids": bans.token_ids.astype(np.int32),
        **masks,
    }


def _penalties(rows: Sequence[SamplingRow], vocab_size: int) -> TokenList | None:
    """Repetition, presence and frequency penalties: the tokens of prompt and output."""
    if not any(row.has_penalties for row in rows):
        return None
    found = [row.history().distinct() if row.has_penalties else _NO_TOKENS for row in rows]
    sizes = [len(row_ids) for row_ids, _ in found]
    token_ids = np.concatenate([row_ids for row_ids, _ in found])
    counts = np.concatenate([row_counts for _, row_counts in found])
    inside = (token_ids >= 0) & (token_ids < vocab_size)
    if inside.all():
        return TokenList(sizes, token_ids, counts)
    # Placeholders of images and the like have no logit.
    kept = np.repeat(np.arange(len(rows)), sizes)[inside]
    return TokenList(np.bincount(kept, minlength=len(rows)).tolist(), token_ids[inside], counts[inside])


def _biases(rows: Sequence[SamplingRow], vocab_size: int) -> TokenList | None:
    """`logit_bias` of all rows."""
    kept = [
        {token_id: bias for token_id, bias in row.params.logit_bias.items() if token_id < vocab_size}
        for row in rows
    ]
    if not any(kept):
        return None
    return TokenList(
        [len(biases) for biases in kept],
        np.array([token_id for biases in kept for token_id in biases], dtype=np.int64),
        np.array([bias for biases in kept for bias in biases.values()], dtype=np.float32),
    )


def _bans(rows: Sequence[SamplingRow], vocab_size: int) -> TokenList | None:
    """Tokens that must not be chosen.

    Bans come of repeated n-grams, bad words and, until `min_tokens` tokens exist, of EOS (unless
    `ignore_eos`, which makes EOS a token like any other) and the stop ids.
    """
    sizes: list[int] = []
    ids: list[int] = []
    for row in rows:
        params = row.params
        bans: list[int] = []
        if params.no_repeat_ngram_size or params.bad_words_ids:
            history = row.history()
            bans += history.ngram_bans(row.token_ids)
            bans += history.bad_word_bans(row.token_ids)
        if row.num_output_tokens < params.min_tokens:
            bans += params.stop_token_ids
            if not params.ignore_eos:
                bans += row.eos_token_ids
        bans = [token_id for token_id in bans if 0 <= token_id < vocab_size]
        sizes.append(len(bans))
        ids += bans
    return TokenList(sizes, np.array(ids, dtype=np.int64), _NO_TOKENS[1]) if ids else None
