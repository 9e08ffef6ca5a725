"""Grammars: matchers of the rows whose output follows a grammar, and their token masks, computed on other
threads.

A row's matcher, and with it the mask of the first token, is started when the row is made. The mask of a
later token is started when the token before is known, so it is computed beside the model, and only sampling
waits for it. The latest compiled grammars are cached, so that requests with the same schema usually need not
compile it. No torch here.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidArgumentError, describe
from quire.grammar import Vocabulary, reason_of
from quire.request.structured_output import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_COMPILED = 64
"""Most compiled grammars that are kept."""
MAX_WAIT_S = 5.0
"""Most seconds that a step waits for one task of a row's grammar: ten times the limit for compiling a
client's grammar, and far more than advancing a grammar by one token takes."""
Mask = npt.NDArray[np.int32]
"""Bit i % 32 of word i // 32 is set if token i may follow. Tokens after the last word may not follow."""


T = TypeVar("T")


class Lane:
    """A thread that runs tasks one after the other, and is abandoned with a task that takes too long."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: ThreadPoolExecutor | None = None

    def submit(self, task: Callable[[], T]) -> Future[T]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        return self._thread.submit(task)

    def give_up(self) -> None:
        """Cancels tasks that have not begun; later tasks get a new thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None


class Grammars:
    """Caches the compiled grammars of a worker.

    Args:
        make_vocabulary: called at warm-up or for the first grammar; after an error, for the next one again.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary]) -> None:
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        self.makes, self.masks = Lane("quire-grammar"), Lane("quire-masks")
        """Two threads, so that masks do not wait for compilation."""

    def warm_up(self) -> None:
        """Reads the vocabulary before requests wait for it. Reading holds the interpreter lock."""
        with contextlib.suppress(InvalidArgumentError):  # requests with a grammar get this error
            self._vocabulary = self._make_vocabulary()

    def begin(self, structured: StructuredOutput, num_prompt_tokens: int, ignore_eos: bool) -> RowGrammar:
        """Returns the grammar state of a new row, and starts to make its matcher."""
        return RowGrammar(self, structured, num_prompt_tokens, ignore_eos)

    def make(self, structured: StructuredOutput) -> tuple[LLMatcher, Vocabulary]:
        """Returns a matcher before the first token, with the vocabulary; runs on the thread of `makes`."""
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        compiled = self._compiled.get(structured)
        if compiled is None:
            compiled = self._compiled[structured] = self._vocabulary.compile(structured)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(structured)
        return compiled.deep_copy(), self._vocabulary


class DraftGrammar:
    """Grammar after one draft of a row, for a single step: which tokens may follow that draft."""

    __slots__ = ("_deadline", "_masks", "_number", "error")

    def __init__(self, masks: Future[list[Mask | None]], number: int, deadline: float) -> None:
        self._masks, self._number, self._deadline = masks, number, deadline
        self.error = ""
        """Why the mask is not known; no token after the draft is then kept. Empty: no error."""

    def allowed(self, token_ids: Sequence[int]) -> Mask | None:
        """Returns the mask of the tokens that may follow the draft; None: it is not known, and `error` is
        set."""
        mask = None
        try:
            mask = self._masks.result(max(0.0, self._deadline - time.monotonic()))[self._number]
        except FutureTimeoutError:
            self._masks.cancel()  # it would find a matcher that has gone on
        except (Exception, CancelledError):
            pass
        if mask is None:
            self.error = "not known"
        return mask


class RowGrammar:
    """The state of one row in its grammar.

    Invariants: the matcher has consumed exactly the output tokens among the row's first `_num_seen` tokens,
    or has failed, or has ended. Only the task under way may use the matcher; after `_wait` the caller may.
    """

    __slots__ = (
        "_grammars",
        "_ignore_eos",
        "_lane",
        "_mask",
        "_matcher",
        "_num_seen",
        "_structured",
        "_task",
        "_vocabulary",
        "error",
    )

    def __init__(
        self, grammars: Grammars, structured: StructuredOutput, num_prompt_tokens: int, ignore_eos: bool
    ) -> None:
        self._grammars, self._structured = grammars, structured
        self._num_seen = num_prompt_tokens
        self._ignore_eos = ignore_eos
        self.error = ""
        """Why the row cannot continue; empty: it can."""
        self._begin(grammars.makes, RowGrammar._make)

    def allowed(self, token_ids: Sequence[int]) -> Mask | None:
        """Returns the mask of the tokens that may follow. None: the grammar has failed and `error` is set, or
        it has ended and the step's sampled token is dropped."""
        self._catch_up(token_ids)
        return self._wait()

    def accept(self, token_ids: Sequence[int]) -> tuple[int, bool]:
        """Consumes tokens sampled after those consumed before. Starts the next mask, unless the grammar has
        ended or failed.

        Returns:
            The number of tokens to keep, and whether the grammar has ended. Tokens after the one that ends it
            are not kept. If it had ended before, 1 is returned. If it has failed, all tokens are kept.
        """
        self._wait()
        if self.error:
            return len(token_ids), False
        for count, token_id in enumerate(token_ids, 1):
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token_id)
                self._num_seen += 1
            if self._matcher.is_stopped() and not self._matcher.is_error():
                return count, True
        self._begin(self._grammars.masks, RowGrammar._next)
        return len(token_ids), False

    def behind(self, token_ids: Sequence[int], drafts: Sequence[int]) -> list[DraftGrammar]:
        """Returns a grammar for each of the drafts after `token_ids`; their masks are computed after the
        row's next mask."""
        self._catch_up(token_ids)
        masks = self._grammars.masks.submit(partial(RowGrammar._masks_behind, self, list(drafts)))
        deadline = time.monotonic() + MAX_WAIT_S
        return [DraftGrammar(masks, number, deadline) for number in range(len(drafts))]

    def _catch_up(self, token_ids: Sequence[int]) -> None:
        """Consumes the output tokens in `token_ids` (prompt and output) that are not consumed yet. If there
        are any, begins to compute the next mask. After a preemption no token is consumed yet. Does nothing
        if the grammar has failed."""
        new = token_ids[self._num_seen :]
        if not new:
            return
        self._wait()
        if self.error:
            return
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(new))
        self._num_seen = len(token_ids)
        self._begin(self._grammars.masks, RowGrammar._next)

    def _masks_behind(self, drafts: list[int]) -> list[Mask | None]:
        """Returns the mask after each draft that may follow; None after one that may not, after all later
        ones, and after the grammar's end."""
        found: list[Mask | None] = [None] * len(drafts)
        if self.error or self._matcher.is_stopped():
            return found
        matcher = self._matcher.deep_copy()
        for number, token_id in enumerate(drafts):
            if matcher.is_stopped() or not matcher.try_consume_tokens([token_id]):
                break
            found[number] = self._mask_of(matcher)
        return found

    def _begin(self, lane: Lane, task: Callable[[RowGrammar], Mask | None]) -> None:
        # No bound method: in a cycle the matcher's memory would wait for a garbage collection.
        self._lane, self._task, self._mask = lane, task, lane.submit(partial(task, self))

    def _wait(self) -> Mask | None:
        """Waits for the mask of the task under way; sets `error` if that fails or takes too long."""
        while not self.error:
            try:
                return self._mask.result(MAX_WAIT_S)
            except CancelledError:  # behind one that took too long
                self._begin(self._lane, self._task)
            except FutureTimeoutError:
                self._lane.give_up()
                if not self._mask.done():
                    self.error = f"structured_output: takes more than {MAX_WAIT_S:g} s to follow"
            except Exception as error:
                told = isinstance(error, InvalidArgumentError)
                self.error = str(error) if told else f"structured_output: {describe(error)}"
        return None

    def _make(self) -> Mask | None:
        self._matcher, self._vocabulary = self._grammars.make(self._structured)
        return self._next()

    def _next(self) -> Mask | None:
        """Returns the mask after the tokens that the matcher has consumed; None: the grammar has ended.

        Raises:
            InvalidArgumentError: the matcher has failed.
        """
        return self._mask_of(self._matcher)

    def _mask_of(self, matcher: LLMatcher) -> Mask | None:
        vocabulary = self._vocabulary
        if matcher.is_stopped() and not matcher.is_error():
            return None  # launched before its end was known: the result is dropped
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            raise InvalidArgumentError("structured_output", reason_of(matcher))
        size = vocabulary.num_tokens
        mask = np.zeros(-(-size // 32), dtype=np.int32)
        found = mask.view(np.uint8)
        found[: len(bits)] = bits[: len(found)]
        if size % 32:
            mask.view(np.uint32)[-1] &= 2 ** (size % 32) - 1
        if self._ignore_eos:
            ends = [one for one in vocabulary.tokenizer.eos_tokens if one < size]
            kept = mask.copy()
            for one in ends:
                found[one // 8] &= ~(1 << one % 8) & 255
            if not mask.any():
                return kept
        return mask
