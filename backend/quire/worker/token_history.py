"""TokenHistory: statistics of a request's tokens for penalties and n-gram bans. BadWords: matches bad words.
ThinkingBudget: limits reasoning.

Statistics are extended by new tokens, at about the same cost for any length of the prompt. Ids outside the
vocabulary are not filtered here.
"""

from __future__ import annotations

import functools
import secrets
from array import array
from collections.abc import Iterable, Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from quire.request.sampling_params import Thinking

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

_MODULUS = 2**61 - 1
_FACTOR = 2**32 + secrets.randbelow(2**60)
"""Base of the hash, random, so that clients cannot know which n-grams collide."""


class TokenSet:
    """Distinct token ids, each with a count, in growing arrays."""

    __slots__ = ("_counts", "_ids", "_num_shared", "_shared", "_slots")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        """Adds these ids, each once and with count 0."""
        self._shared: tuple[dict[int, int], ...] = ()
        self._num_shared = 0
        self._slots = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(token_ids))}
        self._ids: IntArray = np.fromiter(self._slots, dtype=np.int64, count=len(self._slots))
        self._counts: FloatArray = np.zeros(len(self._slots), dtype=np.float32)

    def fork(self) -> TokenSet:
        """Returns a set with the same content. This one must not change while the returned one is used."""
        forked = TokenSet()
        forked._shared, forked._num_shared = (*self._shared, self._slots), len(self)
        forked._ids, forked._counts = self.ids, self.counts.copy()
        return forked

    def __len__(self) -> int:
        return self._num_shared + len(self._slots)

    def add(self, token_id: int, count: int = 0) -> None:
        slot = self._slots.get(token_id)
        for slots in self._shared:
            if slot is None:
                slot = slots.get(token_id)
        if slot is None:
            slot = len(self)
            self._slots[token_id] = slot
            if slot == len(self._ids):
                room = max(slot, 8)
                self._ids = np.concatenate([self._ids, np.empty(room, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
            self._ids[slot] = token_id
        if count:
            self._counts[slot] += count

    @property
    def ids(self) -> IntArray:
        """Token ids, int64 [n]."""
        return self._ids[: len(self)]

    @property
    def counts(self) -> FloatArray:
        """Count of each token id, float32 [n]."""
        return self._counts[: len(self)]


class NgramIndex:
    """Index of the tokens that followed each sequence of n - 1 tokens (a gram).

    A gram is found by a rolling hash, and then compared with the gram that has this hash.
    """

    __slots__ = ("_found", "_gram_size", "_hash", "_leaving", "_shared", "_tokens")

    def __init__(self, n: int, token_ids: Iterable[int] = ()) -> None:
        self._gram_size = n - 1
        self._leaving = pow(_FACTOR, n - 1, _MODULUS)
        self._tokens = array("q")
        self._hash = 0
        """Hash of the newest n - 1 tokens, or of all tokens if there are fewer."""
        self._shared: tuple[dict[int, tuple[int, int | TokenSet]], ...] = ()
        self._found: dict[int, tuple[int, int | TokenSet]] = {}
        """Entry of each gram by its hash: the index after the gram where it was added, and the token or
        tokens that followed it. If another gram has that hash, the next free number is the key."""
        self.extend(token_ids)

    def fork(self) -> NgramIndex:
        """Returns an index with the same content. This one must not change while the returned one is used."""
        forked = NgramIndex(self._gram_size + 1)
        forked._shared, forked._hash = (*self._shared, self._found), self._hash
        forked._tokens = self._tokens[:]
        return forked

    def extend(self, token_ids: Iterable[int]) -> None:
        size, tokens, found = self._gram_size, self._tokens, self._found
        for token_id in token_ids:
            end = len(tokens)
            if end >= size:
                place, entry = self._look_up(found)
                if entry is None:
                    found[place] = end, token_id
                else:
                    behind = entry[1]
                    if isinstance(behind, TokenSet):
                        behind.add(token_id)
                    elif behind != token_id:
                        found[place] = entry[0], TokenSet((behind, token_id))
            tokens.append(token_id)
            leaving = tokens[end - size] * self._leaving if end >= size else 0
            self._hash = (self._hash * _FACTOR + token_id - leaving) % _MODULUS

    def followers(self) -> list[IntArray]:
        """Returns the tokens that followed earlier occurrences of the newest n - 1 tokens, possibly with
        duplicates."""
        if len(self._tokens) < self._gram_size:
            return []
        entries = (self._look_up(found)[1] for found in (*self._shared, self._found))
        return [
            entry[1].ids if isinstance(entry[1], TokenSet) else np.array([entry[1]], dtype=np.int64)
            for entry in entries
            if entry is not None
        ]

    def _look_up(
        self, found: dict[int, tuple[int, int | TokenSet]]
    ) -> tuple[int, tuple[int, int | TokenSet] | None]:
        """Returns the key of the newest gram in `found`, and its entry there, or None if it has none."""
        tokens, size, place = self._tokens, self._gram_size, self._hash
        entry = found.get(place)
        if entry is None:
            return place, None
        gram = tokens[len(tokens) - size :]
        while entry is not None and tokens[entry[0] - size : entry[0]] != gram:
            place += 1
            entry = found.get(place)
        return place, entry


class BadWords:
    """Token ids of words that must not appear."""

    __slots__ = ("_after", "_longest", "always")

    def __init__(self, words: Iterable[Sequence[int]], eos_token_ids: frozenset[int]) -> None:
        # As in transformers, a bad word that is just EOS is not banned: it would never let a request end.
        short = [word[0] for word in words if len(word) == 1 and word[0] not in eos_token_ids]
        self.always: IntArray = np.array(short, dtype=np.int64)
        """Token ids of the words that have one token, without EOS."""
        self._after: dict[int, list[tuple[bytes, int]]] = {}
        self._longest = 0
        for word in words:
            if len(word) > 1:
                # Bytes, since the end of bytes is compared at the speed of memory.
                self._after.setdefault(word[-2], []).append((array("q", word[:-1]).tobytes(), word[-1]))
                self._longest = max(self._longest, len(word) - 1)

    def bans(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the last token of each longer word whose other tokens are the newest tokens."""
        words = self._after.get(token_ids[-1]) if token_ids else None
        if words is None:
            return []
        newest = array("q", token_ids[-self._longest :]).tobytes()
        return [last for others, last in words if newest.endswith(others)]


class _Prompt:
    """Statistics of a prompt, shared by histories with this prompt, so that each choice of a request need not
    read it again."""

    living: ClassVar[WeakValueDictionary[bytes, _Prompt]] = WeakValueDictionary()

    def __init__(self, tokens: array[int]) -> None:
        self._tokens = tokens
        self._ngrams: dict[int, NgramIndex] = {}

    @classmethod
    def get_or_create(cls, token_ids: Sequence[int]) -> _Prompt:
        tokens = array("q", token_ids)
        return cls.living.setdefault(tokens.tobytes(), cls(tokens))

    @functools.cached_property
    def distinct(self) -> TokenSet:
        return TokenSet(self._tokens)

    def ngrams(self, n: int) -> NgramIndex:
        if n not in self._ngrams:
            self._ngrams[n] = NgramIndex(n, self._tokens)
        return self._ngrams[n]


class TokenHistory:
    """Statistics of one sequence's tokens: of its first `num_seen` tokens, prompt and output."""

    __slots__ = ("_distinct", "_ngrams", "_prompt", "num_seen")

    def __init__(self, prompt: Sequence[int], *, counts: bool, ngram_size: int) -> None:
        """Args:
        counts: whether `distinct` may be called.
        ngram_size: n for `ngram_bans`; 0: there are no n-gram bans.
        """
        self.num_seen = len(prompt)
        self._prompt = _Prompt.get_or_create(prompt) if counts or ngram_size else None
        self._distinct = self._prompt.distinct.fork() if self._prompt and counts else None
        self._ngrams = self._prompt.ngrams(ngram_size).fork() if self._prompt and ngram_size else None

    def fork(self) -> TokenHistory:
        """Returns a history with the same content. This one must not change while the returned one is
        used."""
        forked = TokenHistory((), counts=False, ngram_size=0)
        forked.num_seen, forked._prompt = self.num_seen, self._prompt
        forked._distinct = None if self._distinct is None else self._distinct.fork()
        forked._ngrams = None if self._ngrams is None else self._ngrams.fork()
        return forked

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Adds the tokens of `token_ids` (prompt and output) that it has not seen yet, as output."""
        new = token_ids[self.num_seen :]
        if self._distinct is not None:
            for token_id in new:
                self._distinct.add(token_id, 1)
        if self._ngrams is not None:
            self._ngrams.extend(new)
        self.num_seen = len(token_ids)

    def distinct(self) -> tuple[IntArray, FloatArray]:
        """Returns the distinct ids of prompt and output, and how often each occurs in the output: [d],
        [d]."""
        assert self._distinct is not None, "the history was made without counts"
        return self._distinct.ids, self._distinct.counts

    def ngram_bans(self) -> list[IntArray]:
        """Returns the tokens that would repeat an n-gram of prompt and output, possibly with duplicates."""
        return [] if self._ngrams is None else self._ngrams.followers()


class ThinkingBudget:
    """Determines the forced tokens of a request whose reasoning has used up its budget.

    Reasoning begins after the opening tag, or with the output if reasoning is open at the prompt's end. It
    ends with the closing tag. After its `budget`-th token the forced tokens follow, without those that the
    model has just written itself. The state depends on the tokens alone, so a resumed request continues in
    the same way.
    """

    __slots__ = (
        "_begin",
        "_budget",
        "_num_forced",
        "_num_prompt",
        "_num_refused",
        "_tags",
        "is_over",
        "num_seen",
    )

    _SLACK = 4
    """Most tokens, such as line feeds, that may precede the opening tag."""
    _PATIENCE = 4
    """Most tokens that may come in place of forced ones; after more, none is forced any more. A grammar may
    delay a forced token, for example within a character of several bytes."""

    def __init__(self, tags: Thinking, budget: int, num_prompt_tokens: int) -> None:
        self._tags, self._budget, self._num_prompt = tags, budget, num_prompt_tokens
        self.num_seen = num_prompt_tokens
        self._begin = num_prompt_tokens if tags.is_open else -1
        """Index of the first token of reasoning; -1: it has not begun."""
        self._num_forced = 0 if tags.is_open and not budget else -1
        """Number of forced tokens that are already there; -1: none need be forced yet."""
        self._num_refused = 0
        self.is_over = False
        """Whether no token will be forced any more."""

    def next(self, token_ids: Sequence[int]) -> int | None:
        """Returns the token that must follow `token_ids` (prompt and output); None: none is forced."""
        for index in range(self.num_seen, len(token_ids)):
            if self.is_over:
                break
            self._see(token_ids, index + 1)
        self.num_seen = len(token_ids)
        return None if self.is_over or self._num_forced < 0 else self._tags.forced_ids[self._num_forced]

    def _see(self, token_ids: Sequence[int], end: int) -> None:
        """Processes the token before index `end`."""
        tags = self._tags
        if self._num_forced >= 0 and token_ids[end - 1] == tags.forced_ids[self._num_forced]:
            self._num_forced += 1
            self.is_over = self._num_forced == len(tags.forced_ids)
            return
        if self._num_forced >= 0:
            self._num_refused += 1
        if self._begin < 0:
            size = len(tags.open_ids)
            begin = end - size
            if begin >= self._num_prompt and tuple(token_ids[begin:end]) == tags.open_ids:
                self._begin = end
            else:
                self.is_over = begin >= self._num_prompt + self._SLACK
                return
        size = len(tags.end_ids)
        if (
            end - self._begin >= size and tuple(token_ids[end - size : end]) == tags.end_ids
        ) or self._num_refused > self._PATIENCE:
            self.is_over = True
        elif end - self._begin >= self._budget:
            written = min(len(tags.forced_ids) - 1, end - self._begin)
            while tuple(token_ids[end - written : end]) != tags.forced_ids[:written]:
                written -= 1
            self._num_forced = written
