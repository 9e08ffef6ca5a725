"""Drafts: guesses at the next tokens, and how many of them a step verifies.

A request's row computes the newest token, followed by drafts as if they were known. The token sampled after
each of them is the one that would be sampled there anyway, since sampling is a function of seed and position.
Drafts are accepted up to the first that differs from the sampled token. So the output is the same as without
drafts, except for rounding that depends on the batch. (Leviathan et al. 2023, arXiv 2211.17192, preserve the
distribution only.)

By default prompt lookup guesses, as in Yang et al. 2023, arXiv 2304.04487: what followed the latest earlier
occurrence of the newest tokens is expected to follow again. Prompt lookup searches the request itself, then
the tenant's latest outputs. It needs no model, and its accuracy is known at no cost, even in steps that did
not verify its guess. A draft model, if there is one, guesses in the runner when prompt lookup finds nothing
or is less often right.
"""

from __future__ import annotations

import bisect
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from quire.request.scheduling_params import SchedulingParams

GRAM = 3
"""Number of newest tokens that must have occurred before, for prompt lookup to guess."""
_BITS = 21
"""Bits of one token id in a gram's key; the three ids of a gram fill 63."""
_NEWEST = (1 << GRAM * _BITS) - 1
_KEPT = 8192
"""Number of tokens that RecentOutputs keeps when it forgets older ones. It holds up to twice as many, in
about 2 MB."""
_MOST_TENANTS = 32
_WORTH_WAITING = 0.6
"""Least probability that a draft is right for which a request may wait for its newest tokens. The request
then has a row in every other step; with three such drafts, that row is expected to yield more than two
tokens."""
_MOST_BASE = 1e6
_MARGIN = 1.15
"""Factor by which a draft's expected gain must exceed its cost, since its probability is an estimate."""
_LIKELY = 0.8
_PROBED = 32
"""In one of this many steps, a row whose drafts are likely verifies one of them even if it seems too
expensive, because its cost may have changed."""
_RATED = 0.15
"""Weight of the newest rated token in the moving averages `Drafter.chance` and `Drafter.model_chance`."""
_HOPED = 0.7
"""Assumed accuracy of a draft model before its first guess is verified, and least one when it is tried again:
high enough to wait for a guess."""
_RETRY = 64
"""Number of tokens without a verified guess of the draft model after which the draft model is tried again,
unless prompt lookup guesses."""


class RecentOutputs:
    """Tokens of the latest outputs of one tenant."""

    def __init__(self) -> None:
        self._tokens = array("i")
        self._after: dict[int, int] = {}
        """Index of the token after the latest occurrence of each gram, by the gram's key."""

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds the tokens of a request that has ended: the last of its prompt, then its output."""
        if len(self._tokens) + len(token_ids) > 2 * _KEPT:
            kept, self._tokens = self._tokens[-_KEPT:], array("i")
            self._after.clear()
            self._read(kept)
        self._read(token_ids[-_KEPT:])

    def _read(self, token_ids: Sequence[int]) -> None:
        begin, key = len(self._tokens), 0
        self._tokens.extend(token_ids)
        for index, token_id in enumerate(token_ids):
            if index >= GRAM:
                self._after[key] = begin + index
            key = (key << _BITS | token_id) & _NEWEST

    def follow(self, key: int, most: int) -> list[int]:
        """Returns up to `most` tokens that followed the latest occurrence of a gram; none: it is not here."""
        found = self._after.get(key)
        return [] if found is None else self._tokens[found : found + most].tolist()


class OutputsByTenant:
    """RecentOutputs of each tenant, and of each of its cache salts, so that the speed of an answer tells
    nobody what others were answered. Those of the tenants that used theirs last are kept."""

    def __init__(self) -> None:
        self._outputs: OrderedDict[tuple[str, str], RecentOutputs] = OrderedDict()

    def get(self, scheduling: SchedulingParams) -> RecentOutputs:
        """Returns the outputs that a request may look into."""
        key = scheduling.tenant, scheduling.cache_salt
        found = self._outputs.setdefault(key, RecentOutputs())
        self._outputs.move_to_end(key)
        if len(self._outputs) > _MOST_TENANTS:
            self._outputs.popitem(last=False)
        return found


class Drafter:
    """Guesses the next tokens of one request.

    Args:
        most: most tokens in a guess.
        has_model: whether a draft model can guess, too.
        outputs: where a gram is searched that the request does not repeat; None: nowhere.
    """

    __slots__ = (
        "_after",
        "_chances",
        "_followers",
        "_has_model",
        "_is_recent",
        "_key",
        "_keys",
        "_model_tried_at",
        "_most",
        "_num_seen",
        "_outputs",
        "guess",
        "model_chance",
        "num_accepted",
        "num_tried",
    )

    def __init__(self, most: int, has_model: bool = False, outputs: RecentOutputs | None = None) -> None:
        self.guess: list[int] = []
        """Tokens that prompt lookup expects to follow those seen; empty: no guess."""
        self._chances = [0.5, 0.5]
        self._outputs = outputs
        self._is_recent = False
        """Whether the latest guess is from `outputs`."""
        self.model_chance = _HOPED
        """Same as `chance`, for the draft model; updated only by guesses that steps verified."""
        self.num_tried = self.num_accepted = 0
        """Number of guessed tokens that steps have verified, and how many were right."""
        self._most = most
        self._has_model = has_model
        self._num_seen = self._model_tried_at = 0
        self._key = 0
        """Key of the newest gram."""
        self._keys, self._followers = array("q"), array("q")
        """Keys of all grams that a token follows in the tokens of the first `see`, in ascending order, and
        the index of the token after each gram. A dictionary would need ten times the memory."""
        self._after: dict[int, int] = {}
        """Index of the token after the latest occurrence of a gram, by the gram's key, for grams whose next
        token came with a later call of `see`."""

    @property
    def chance(self) -> float:
        """Moving average of prompt lookup's accuracy: the share of guessed tokens that were right, given that
        those before them were. Guesses from the tenant's outputs have an average of their own."""
        return self._chances[self._is_recent]

    @chance.setter
    def chance(self, value: float) -> None:
        self._chances[self._is_recent] = value

    def see(self, token_ids: Sequence[int]) -> None:
        """Reads the new ones of all tokens so far, prompt and output. Rates the latest guess of prompt lookup
        by them, if there is one, and makes the next."""
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
        self.guess, self._is_recent = [], False
        if end >= GRAM:
            self.guess = self._follow(token_ids)
            if not self.guess and self._outputs is not None:
                self.guess, self._is_recent = self._outputs.follow(self._key, self._most), True

    @property
    def uses_model(self) -> bool:
        """Whether the draft model makes the next guess."""
        return self._has_model and (not self.guess or self.chance < self.model_chance)

    def next(self) -> tuple[float, int]:
        """Returns the probability that each token of the next guess is right if those before it are, and the
        most tokens in the guess; 0: no guess."""
        if not self.uses_model:
            return self.chance, len(self.guess)
        if self._num_seen - self._model_tried_at >= _RETRY:
            return max(self.model_chance, _HOPED), 1  # nothing else would tell that it has become better
        return self.model_chance, self._most

    def rate_model(self, num_tried: int, num_right: int) -> None:
        """Updates the draft model's accuracy with its latest guess. Must be called before `see` reads the
        tokens that followed."""
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
    """Returns two arrays with an entry for each gram that a token follows: the grams' keys, ascending, equal
    keys in the order of the tokens; and the indices of the tokens that follow."""
    ids = np.array(token_ids, dtype=np.int64)
    keys = ids[:-GRAM] << 2 * _BITS | ids[1 : -GRAM + 1] << _BITS | ids[2 : -GRAM + 2]
    order = np.argsort(keys, kind="stable")
    return array("q", keys[order].tobytes()), array("q", (order + GRAM).tobytes())


class StepCost:
    """Estimates the seconds of a step without prefill as a linear function of its number of tokens, fitted to
    such steps; the latest count most."""

    _FORGET = 0.98
    _TRUST = 0.1
    """Variance of the step sizes (tokens squared) at which the fitted slope counts for half."""
    _PAUSE = 10.0
    """Factor over the expected time above which a single step counts as held up and is not fitted."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._square = self._product = 0.0
        self._base = 16.0
        """Number of tokens that cost as much as a step's fixed part: a guess until steps of sufficiently
        different sizes were measured."""
        self.is_known = False
        """Whether steps of sufficiently different sizes were measured."""
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
        """Returns the estimated seconds of a step's fixed part and of each of its tokens; (0, 0) before the
        first step."""
        if not self._weight:
            return 0.0, 0.0
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        covariance = self._product / self._weight - tokens * seconds
        expected = seconds / (tokens + self._base)
        slope = (covariance + self._TRUST * expected) / (self._variance + self._TRUST)
        slope = min(max(slope, 0.0), seconds / tokens)
        return seconds - slope * tokens, slope


class DraftBudget:
    """Chooses how many drafts a step verifies: those that yield tokens at a higher rate than the step without
    them, and now and then one that seems too expensive, to learn whether its cost has changed.

    A draft costs as much as one more token in the step. It yields a token only if it and all drafts before it
    are right. So a step with few rows tends to verify many drafts, and one with many rows few or none.
    """

    def __init__(self) -> None:
        self.cost = StepCost()
        self._seconds = self._slope = 0.0
        self._expected = 0.0
        self._most = 0
        """Most drafts of a row: 1 until their cost is known, then practically unlimited."""
        self._num_steps = 0

    def begin(self, num_rows: int) -> None:
        """Starts the budget of a step with `num_rows` rows."""
        base, self._slope = self.cost.line()
        self._slope *= _MARGIN
        self._seconds = base + self._slope * num_rows
        self._expected = float(num_rows)
        self._most = sys.maxsize if self.cost.is_known else 1
        self._num_steps += 1

    def is_worth_waiting(self, drafter: Drafter) -> bool:
        """Returns whether a request is expected to gain by waiting for its newest tokens before its next row,
        although the row could run without them."""
        chance, most = drafter.next()
        return most > 0 and chance >= _WORTH_WAITING and chance * self._seconds > self._slope * self._expected

    def allocate(self, chance: float, most: int) -> int:
        """Allots drafts to a row; returns how many, at most `most`. `chance`: the probability that each is
        right if those before it are."""
        count, right, most = 0, chance, min(most, self._most)
        while count < most and right * self._seconds > self._slope * self._expected:
            count += 1
            self._seconds += self._slope
            self._expected += right
            right *= chance
        if not count and chance >= _LIKELY and not self._num_steps % _PROBED:
            return min(1, most)
        return count
