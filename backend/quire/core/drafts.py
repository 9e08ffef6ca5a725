"""Drafts: guesses of the tokens that come next, and how many of them a step tries.

A row computes its newest token, and behind it drafts as if they were known. What is drawn behind each of
them is what would be drawn there anyway, as draws are a function of seed and position. So drafts are right up
to the first that is not what was drawn, and the output is the same as without. (Leviathan et al. 2023,
arXiv 2211.17192, have the same distribution.)

The guess is that what followed the newest tokens before follows them again: prompt lookup, as in Yang et al.
2023, arXiv 2304.04487. It costs no model, and whether it would have been right is known for free also where
it was not tried. Where there is a draft model, it guesses in the runner what prompt lookup knows nothing of,
or is less often right about.
"""

from __future__ import annotations

import bisect
import sys
from array import array
from collections.abc import Sequence

import numpy as np

GRAM = 3
"""Newest tokens that must have occurred before."""
_BITS = 21
"""Bits of a token id in a gram's key: those of three ids fill 63."""
_NEWEST = (1 << GRAM * _BITS) - 1
_WORTH_WAITING = 0.6
"""Chance from which on more than one token is to be expected of every other step."""
_MOST_BASE = 1e6
_MARGIN = 1.15
"""How much more than its cost a draft must bring, as its chance is an estimate."""
_LIKELY = 0.8
_PROBED = 32
"""One step in so many tries likely drafts that it would not, as what they cost may have changed."""
_RATED = 0.15
"""Weight of the newest guess in `Drafter.chance`."""
_HOPED = 0.7
"""Chance of a draft model's guesses before any was tried: enough to wait for."""
_RETRY = 64
"""Tokens after which a draft model is tried again that had not been worth it."""


class Drafter:
    """Guesses for one request.

    Args:
        most: tokens of a guess.
        has_model: whether a draft model can guess, too.
    """

    __slots__ = (
        "_after",
        "_followers",
        "_has_model",
        "_key",
        "_keys",
        "_model_tried_at",
        "_most",
        "_num_seen",
        "chance",
        "guess",
        "model_chance",
        "num_accepted",
        "num_tried",
    )

    def __init__(self, most: int, has_model: bool = False) -> None:
        self.guess: list[int] = []
        """Tokens that may follow all those seen, as many as known."""
        self.chance = 0.5
        """Share of the guessed tokens that were right of late, where those before them were."""
        self.model_chance = _HOPED
        """The same of the draft model's, which is known where they were tried."""
        self.num_tried = self.num_accepted = 0
        """Tokens of guesses that steps have tried, and how many were right."""
        self._most = most
        self._has_model = has_model
        self._num_seen = self._model_tried_at = 0
        self._key = 0
        """Key of the newest gram."""
        self._keys, self._followers = array("q"), array("q")
        """Keys of all grams in the tokens that were first seen, in ascending order, and the index of the
        token after each gram. A dictionary would take ten times the memory."""
        self._after: dict[int, int] = {}
        """Index of the token after the latest occurrence of each later gram, by the gram's key."""

    def see(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens so far, prompt and output: rates the latest guess by them, and makes another."""
        begin, end = self._num_seen, len(token_ids)
        self._num_seen = end
        if not begin:
            self._model_tried_at = end
            self._keys, self._followers = _index(token_ids)
            for token_id in token_ids[-GRAM:]:
                self._key = self._key << _BITS | token_id
        else:
            for index, guessed in zip(range(begin, end), self.guess, strict=False):
                is_right = guessed == token_ids[index]
                self.chance += _RATED * (is_right - self.chance)
                if not is_right:
                    break
            for index in range(begin, end):
                if index >= GRAM:
                    self._after[self._key] = index
                self._key = (self._key << _BITS | token_ids[index]) & _NEWEST
        self.guess = self._follow(token_ids) if end >= GRAM else []

    @property
    def uses_model(self) -> bool:
        """Whether the draft model makes the next guess."""
        return self._has_model and (not self.guess or self.chance < self.model_chance)

    def next(self) -> tuple[float, int]:
        """Chance of each token of the next guess, and how many it has, maybe none."""
        if not self.uses_model:
            return self.chance, len(self.guess)
        if self._num_seen - self._model_tried_at >= _RETRY:
            return max(self.model_chance, _HOPED), 1  # nothing else would tell that it has become better
        return self.model_chance, self._most

    def rate_model(self, num_tried: int, num_right: int) -> None:
        """Takes in how the draft model's latest guess did, before the tokens that followed are seen."""
        if not num_tried:
            return
        self._model_tried_at = self._num_seen
        for right in range(min(num_right + 1, num_tried)):
            self.model_chance += _RATED * ((right < num_right) - self.model_chance)

    def _follow(self, token_ids: Sequence[int]) -> list[int]:
        found = self._after.get(self._key)
        if found is None:
            at = bisect.bisect_right(self._keys, self._key) - 1
            if at < 0 or self._keys[at] != self._key:
                return []
            found = self._followers[at]
        guess = list(token_ids[found : found + self._most])
        while len(guess) < self._most:  # what it copies from ends here: it goes on with itself
            guess += guess[: self._most - len(guess)]
        return guess


def _index(token_ids: Sequence[int]) -> tuple[array[int], array[int]]:
    """[n] keys of all grams that something follows, ascending, equal ones in the order of the tokens; [n]
    indices of what follows."""
    ids = np.array(token_ids, dtype=np.int64)
    keys = ids[:-GRAM] << 2 * _BITS | ids[1 : -GRAM + 1] << _BITS | ids[2 : -GRAM + 2]
    order = np.argsort(keys, kind="stable")
    return array("q", keys[order].tobytes()), array("q", (order + GRAM).tobytes())


class StepCost:
    """Seconds of a step without prefill by the number of its tokens: a line through the latest such steps."""

    _FORGET = 0.98
    _TRUST = 0.1
    """How much the sizes of steps must vary (tokens squared) for half of the slope to be theirs."""
    _PAUSE = 10.0
    """Times what is expected: one step alone that takes longer was held up, and is no measure."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._square = self._product = 0.0
        self._base = 16.0
        """How many tokens cost what a step without any does: a guess until steps of several sizes show it."""
        self.is_known = False
        """Whether there were steps of several sizes."""
        self._was_held_up = False

    def add(self, num_tokens: int, seconds: float) -> None:
        base, slope = self.line()
        self._was_held_up = 0 < self._PAUSE * (base + slope * num_tokens) < seconds and not self._was_held_up
        if self._was_held_up:
            return
        keep = self._FORGET
        self._weight = keep * self._weight + 1
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds
        self._square = keep * self._square + num_tokens * num_tokens
        self._product = keep * self._product + num_tokens * seconds
        if self._variance >= self._TRUST:
            base, slope = self.line()
            self._base = min(base / slope, _MOST_BASE) if slope else _MOST_BASE
            self.is_known = True

    @property
    def _variance(self) -> float:
        mean = self._tokens / self._weight
        return max(self._square / self._weight - mean * mean, 0.0)

    def line(self) -> tuple[float, float]:
        """Seconds of a step without tokens, and of each of its tokens; (0, 0) before the first."""
        if not self._weight:
            return 0.0, 0.0
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        covariance = self._product / self._weight - tokens * seconds
        expected = seconds / (tokens + self._base)
        slope = (covariance + self._TRUST * expected) / (self._variance + self._TRUST)
        slope = min(max(slope, 0.0), seconds / tokens)
        return seconds - slope * tokens, slope


class DraftBudget:
    """How many drafts a step tries: those that bring tokens at a higher rate than the step without them.

    A draft costs what a token more costs, and brings a token with the chance that it and all drafts before it
    are right. So few rows try much, many rows nothing.
    """

    def __init__(self) -> None:
        self.cost = StepCost()
        self._seconds = self._slope = 0.0
        self._expected = 0.0
        self._most = 0
        """Drafts of a row; one at a time until it is known what they cost."""
        self._num_steps = 0

    def begin(self, num_rows: int) -> None:
        """A step of so many rows is planned."""
        base, self._slope = self.cost.line()
        self._slope *= _MARGIN
        self._seconds = base + self._slope * num_rows
        self._expected = float(num_rows)
        self._most = sys.maxsize if self.cost.is_known else 1
        self._num_steps += 1

    def is_worth_waiting(self, drafter: Drafter) -> bool:
        """Whether a request gains by waiting for its newest tokens, where its next row could do without."""
        chance, most = drafter.next()
        return most > 0 and chance >= _WORTH_WAITING and chance * self._seconds > self._slope * self._expected

    def allocate(self, chance: float, most: int) -> int:
        """How many drafts a row tries, each right with `chance` if those before are."""
        count, right, most = 0, chance, min(most, self._most)
        while count < most and right * self._seconds > self._slope * self._expected:
            count += 1
            self._seconds += self._slope
            self._expected += right
            right *= chance
        if not count and chance >= _LIKELY and not self._num_steps % _PROBED:
            return min(1, most)
        return count
