"""Grammars: matchers of the rows whose output follows a grammar, made off the step's thread.

A row is made some steps before it first samples where its prompt is long; its matcher is made meanwhile, and
only the sampling waits. What is compiled is kept by the grammar, so that of many requests with one schema the
first alone compiles it. No torch here.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidArgumentError, describe
from quire.grammar import Vocabulary, reason_of
from quire.structured_output import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_COMPILED = 64
"""Compiled grammars that are kept."""


class Grammars:
    """Compiled grammars of a worker.

    Args:
        make_vocabulary: called once, at warm-up or when there is a first grammar.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()

    def warm_up(self) -> None:
        """Reads the vocabulary, which takes the interpreter lock, as long as nobody waits."""
        with contextlib.suppress(InvalidArgumentError):  # told to who has a grammar
            self._vocabulary = self._make_vocabulary()

    def begin(self, structured: StructuredOutput, num_prompt_tokens: int, ignore_eos: bool) -> RowGrammar:
        """The state of a new row, whose matcher is under way."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")
        made = self._thread.submit(self._make, structured)
        return RowGrammar(made, num_prompt_tokens, ignore_eos)

    def _make(self, structured: StructuredOutput) -> tuple[LLMatcher, Vocabulary]:
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        compiled = self._compiled.get(structured)
        if compiled is None:
            compiled = self._compiled[structured] = self._vocabulary.compile(structured)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(structured)
        return compiled.deep_copy(), self._vocabulary


class RowGrammar:
    """Where one row is in its grammar.

    Invariant: the matcher has taken exactly `token_ids[:_num_seen]`, or has failed, or is at its end.
    """

    __slots__ = ("_ignore_eos", "_made", "_num_seen", "error")

    def __init__(
        self, made: Future[tuple[LLMatcher, Vocabulary]], num_prompt_tokens: int, ignore_eos: bool
    ) -> None:
        self._made = made
        self._num_seen = num_prompt_tokens
        self._ignore_eos = ignore_eos
        self.error = ""
        """Why the row cannot go on."""

    def allowed(self, token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.bool_] | None:
        """[vocab_size]: which tokens may follow; None where it does not matter any more. Sets `error`."""
        try:
            matcher, vocabulary = self._made.result()
        except Exception as error:
            told = isinstance(error, InvalidArgumentError)
            self.error = str(error) if told else f"structured_output: {describe(error)}"
            return None
        new = token_ids[self._num_seen :]
        if new and not matcher.is_stopped():  # after a preemption all its output
            matcher.consume_tokens(list(new))
        self._num_seen = len(token_ids)
        if matcher.is_stopped() and not matcher.is_error():
            return None  # launched before its end was known: the result is dropped
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            self.error = f"structured_output: {reason_of(matcher)}"
            return None
        found = np.zeros(vocab_size, dtype=np.bool_)
        known = np.unpackbits(bits, bitorder="little")[: vocabulary.num_tokens]
        found[: len(known)] = known
        if self._ignore_eos:
            ends = [one for one in vocabulary.tokenizer.eos_tokens if one < vocab_size]
            kept = found[ends]
            found[ends] = False
            if not found.any():
                found[ends] = kept
        return found

    def accept(self, token_id: int) -> bool:
        """Takes a token that was drawn behind all those seen; whether none can follow it."""
        matcher, _ = self._made.result()
        if not matcher.is_stopped():
            matcher.consume_token(token_id)
            self._num_seen += 1
        return bool(matcher.is_stopped() and not matcher.is_error())
