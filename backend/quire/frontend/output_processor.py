"""Turns token deltas into text: the frontend's half of a request, for `quire.LLM` and the Triton adapter.

The engine detokenizes nothing. Stop strings are therefore found here; the caller then aborts the choice
in the engine, and its outputs that were already on their way are ignored.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any

import msgspec

from quire.core.request import FinishReason
from quire.frontend.chat.formats import Answer
from quire.frontend.detokenizer import IncrementalDetokenizer
from quire.frontend.stop_matcher import StopAutomaton
from quire.outputs import EngineCoreOutput, RequestOutput, TokenLogprobs
from quire.request.sampling_params import SamplingParams

MAX_UNDECODED = 256
"""Number of undecoded tokens from which on a choice decodes them before a response is wanted. Many at a time
would hold up other choices."""


@dataclass(slots=True, eq=False)
class OutputProcessor:
    """State of one choice of a request between engine outputs and responses.

    `process` adds an engine output, `pop_output` returns what may be sent to the client. Any number of
    outputs may be merged between two calls of `pop_output`. Without stop strings their tokens are decoded
    when a response is made or there are MAX_UNDECODED. `append` is a fast `process` for most outputs.

    Args:
        tokenizer: anything IncrementalDetokenizer accepts; None: token ids only, no text.
        stops: automaton of the request's stop strings; None: it is made here, if there are any.
    """

    request_id: str
    num_prompt_tokens: int
    params: SamplingParams
    tokenizer: InitVar[Any | None]
    index: int = 0
    stops: InitVar[StopAutomaton | None] = None
    num_wanted: int = sys.maxsize
    """Number of pending tokens from which on a response is wanted: `append` then refuses outputs."""
    item: int = 0
    """Index of the prompt in its request."""
    answer: Answer | None = None
    """Parser of an answer to chat messages; None: the text is not parsed."""
    result_index: int | None = None
    """Index of the choice in its responses, where choices are ranked here; None: `index`."""
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    """Draft tokens tried for the choice, as told by the latest output that `process` got;
    `num_accepted_drafts`: those that were right. After an engine's death, the next counts from 0."""
    num_accepted_drafts: int = 0
    seed: int | None = None
    """Seed of the request's draws. Choice 0 alone gets it, with its first output. None: another choice, no
    output yet, a greedy request that states no seed, or a result from the result cache."""
    num_continuations: int = 0
    """Number of deaths of engines, before the choice ended, that `pause` was told of."""
    paused_s: float = 0.0
    """Seconds lost to deaths of engines: from each death to the choice's next output or end. A pause that
    still lasts is not counted."""
    paused_at: float = 0.0
    """When the death of its engine paused the choice, CLOCK_MONOTONIC seconds; 0: it is not paused."""
    admitted_at: float = 0.0
    """When the request began to run; `first_token_at`: when the engine had the choice's first token or its
    embedding. Both are those of the first outputs that tell them, in CLOCK_MONOTONIC seconds; 0: none has."""
    first_token_at: float = 0.0
    taken_at: float = 0.0
    """When `triton/vllm_metrics.py` last saw new tokens or an embedding of the choice, in CLOCK_MONOTONIC
    seconds; 0: not yet, or those metrics are off."""
    num_counted: int = 0
    """Number of the choice's tokens that `triton/vllm_metrics.py` has counted."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    error_code: str = ""
    cumulative_logprob: float | None = None
    _detokenizer: IncrementalDetokenizer | None = None
    _has_stops: bool = False
    _text: str = ""
    _token_ids: list[int] = field(default_factory=list)
    _taken_ids: array[int] = field(default_factory=lambda: array("i"))
    _num_decoded: int = 0
    _num_hidden: int = 0
    """Number of newest tokens that are no part of the text: 1 if one of `stop_token_ids` ended the choice and
    `include_stop_str_in_output` is false, else 0."""
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    _embedding: bytes = b""
    _prompt_logprobs: list[TokenLogprobs | None] | None = None

    def __post_init__(self, tokenizer: Any | None, stops: StopAutomaton | None) -> None:
        params = self.params
        self._has_stops = bool(params.stop)
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer if self.answer is None else self.answer.decoder,
                skip_special_tokens=params.skip_special_tokens,
                stop=params.stop if stops is None else stops,
                include_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
            )

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the choice's tokens; 0 if unknown."""
        return (self.cumulative_logprob or 0.0) / max(self.num_output_tokens, 1)

    @property
    def num_reasoning_tokens(self) -> int:
        """Reasoning tokens among those that have become text; 0 where answers are not parsed."""
        return 0 if self.answer is None else self.answer.num_reasoning_tokens

    @property
    def token_ids(self) -> list[int]:
        """The choice's tokens so far, as a new list. Once its last output is popped, that output's tokens are
        missing."""
        return [*self._taken_ids, *self._token_ids]

    def pause(self, now: float) -> None:
        """Counts a death of the engine and begins a pause. The next output or the choice's end ends it.

        Does nothing if the choice is finished.
        """
        if not self.finished:
            self.num_continuations += 1
            self.paused_at = self.paused_at or now

    def _go_on(self) -> None:
        self.paused_s += time.monotonic() - self.paused_at
        self.paused_at = 0.0

    def append(self, output: EngineCoreOutput) -> bool:
        """Adds an output that has only tokens, if nothing else is to be done for it yet.

        Returns:
            False: nothing was added, because the output needs more. So it is, for example, for a first or
            last output, one with log-probabilities or an error, with stop strings, after a pause, and when
            the pending tokens reach `num_wanted` or MAX_UNDECODED. `process` adds what is no error.
        """
        num_tokens = len(self._token_ids) + len(output.new_token_ids)
        if (
            output.finish_reason is not None
            or output.logprobs is not None
            or output.error is not None
            or self._has_stops
            or self.finish_reason is not None
            or num_tokens >= self.num_wanted
            or self.paused_at
            or num_tokens - self._num_decoded >= MAX_UNDECODED
            or not self.num_output_tokens
        ):
            return False
        self._token_ids += output.new_token_ids
        self.num_output_tokens += len(output.new_token_ids)
        return True

    def process(self, output: EngineCoreOutput) -> bool:
        """Adds an engine output that is no error. Outputs after the end are ignored.

        Returns:
            True if a stop string ended the choice and the engine did not, so that the caller must abort it
            there.
        """
        if len(output.new_token_ids) > 1 and self._has_stops and not self.params.is_ranked:
            # Of the result cache, or a step with drafts. A stop string may be decided some tokens behind its
            # own, which were told by then: so they are taken one by one. (Beams come whole each time.)
            return any(self.process(one) for one in output.by_token()) and output.finish_reason is None
        if self.finished:
            return False
        if self.paused_at:
            self._go_on()
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.admitted_at = self.admitted_at or output.admitted_at
        self.first_token_at = self.first_token_at or output.first_token_at
        self.num_preemptions = output.num_preemptions
        self.num_draft_tokens = output.num_draft_tokens
        self.num_accepted_drafts = output.num_accepted_drafts
        if not self.num_output_tokens:
            self._prompt_logprobs, self.seed = output.prompt_logprobs, output.seed
            self._embedding = output.embedding
        num_before = len(self._token_ids)
        self._token_ids += output.new_token_ids
        self._num_hidden = int(self._ends_unseen(output))
        stopped = False
        if self._detokenizer is not None:
            if self._has_stops or len(self._token_ids) - self._num_decoded >= MAX_UNDECODED:
                # At the end held-back text is decided, and a stop string may be found in it.
                self._decode(flush=output.finish_reason is not None)
            matched = self._detokenizer.matched_stop
            if matched is not None:
                used = self._detokenizer.num_tokens_used - self.num_output_tokens
                del self._token_ids[num_before + max(used, 0) :]
                self.finish_reason, self.stop_reason = FinishReason.STOP.value, matched
                stopped = output.finish_reason is None
        num_new = len(self._token_ids) - num_before
        self.num_output_tokens += num_new
        if output.logprobs:
            logprobs = output.logprobs[:num_new]
            self._logprobs.extend(logprobs)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(e.logprobs[0] for e in logprobs)
        if output.cumulative_logprob is not None:
            self.cumulative_logprob = output.cumulative_logprob
        if self.finish_reason is None and output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        return stopped

    @property
    def has_wanted(self) -> bool:
        """Whether at least `num_wanted` tokens are pending."""
        return len(self._token_ids) >= self.num_wanted

    def _decode(self, *, flush: bool) -> None:
        if self._detokenizer is not None:
            undecoded = self._token_ids[self._num_decoded : len(self._token_ids) - self._num_hidden]
            self._num_decoded = len(self._token_ids)
            if self.answer is not None:
                self._parse(self.answer, self._detokenizer, undecoded, flush=flush)
                return
            if undecoded:
                self._detokenizer.append(undecoded)
            if undecoded or flush:
                self._text += self._detokenizer.take_delta(flush=flush)

    @staticmethod
    def _parse(
        answer: Answer, detokenizer: IncrementalDetokenizer, token_ids: list[int], *, flush: bool
    ) -> None:
        """Decodes tokens and feeds their text to the answer's parser.

        Feeds token by token while reasoning tokens must be counted. With `flush` the answer is finished.
        """
        position = 0
        while position < len(token_ids) and detokenizer.matched_stop is None:
            size = 1 if answer.counts_tokens else len(token_ids) - position
            answer.num_reasoning_tokens += answer.is_reasoning
            detokenizer.append(token_ids[position : position + size])
            answer.feed(detokenizer.take_delta())
            position += size
        if flush:
            answer.feed(detokenizer.take_delta(flush=True))
            answer.finish()

    def take_prompt_logprobs(self, other: OutputProcessor) -> None:
        """Moves the prompt's log-probabilities here from `other`, if it has them."""
        found, other._prompt_logprobs = other._prompt_logprobs, None
        self._prompt_logprobs = found or self._prompt_logprobs

    def _ends_unseen(self, output: EngineCoreOutput) -> bool:
        return (
            output.finish_reason == FinishReason.STOP.value
            and isinstance(output.stop_reason, int)
            and not self.params.include_stop_str_in_output
        )

    def finish(self, reason: FinishReason, error: str | None = None, error_code: str = "") -> None:
        """Ends the choice from outside (cancelled, engine gone). Does nothing if it is finished."""
        if not self.finished:
            if self.paused_at:
                self._go_on()
            self.finish_reason = reason.value
            self.error, self.error_code = error, error_code

    def pop_ready(self) -> RequestOutput | None:
        """Returns what `pop_output` returns if there is something to send, else None.

        There is something to send if the choice has ended, has text, reasoning or calls, or has token ids and
        no tokenizer.
        """
        self._decode(flush=self.finished)
        has_parts = self.answer is not None and not self.answer.is_empty
        if self._text or has_parts or self.finished or (self._detokenizer is None and self._token_ids):
            return self._pop_output()
        return None

    def pop_output(self) -> RequestOutput:
        """Returns what was added since an output was last popped: text, tokens, log-probabilities, the end
        and more."""
        self._decode(flush=self.finished)
        return self._pop_output()

    def _pop_output(self) -> RequestOutput:
        text, self._text = self._text, ""
        if not self.finished:
            self._taken_ids.extend(self._token_ids)
        token_ids, self._token_ids, self._num_decoded = self._token_ids, [], 0
        logprobs, self._logprobs = self._logprobs, []
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        output = RequestOutput(
            request_id=self.request_id,
            text=text,
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            logprobs=logprobs or None,
            error=self.error,
            error_code=self.error_code,
            index=self.index if self.result_index is None else self.result_index,
            cumulative_logprob=self.cumulative_logprob,
            item=self.item,
            prompt_logprobs=prompt_logprobs,
            embedding=self._embedding,
        )
        if self.answer is not None:
            output.text, output.reasoning, output.tool_calls = self.answer.pop_deltas()
            output.num_reasoning_tokens = self.num_reasoning_tokens
            if self.finish_reason == FinishReason.STOP.value and self.answer.has_all_calls:
                output.finish_reason = FinishReason.TOOL_CALLS.value
        return output


def split_ranking(params: SamplingParams) -> tuple[SamplingParams, int]:
    """Returns sampling parameters for the engine, and the number of best choices to answer with; 0: all.

    With `best_of` above `n` the engine generates `best_of` choices with log-probabilities. They are ranked
    here, as stop strings may end them here. The best have the highest mean log-probability of their tokens,
    including the token that ended the choice. Log-probabilities are as the sampler reports them: before
    temperature, filters, penalties and bans.
    """
    if (params.best_of or 0) <= params.n:
        return params, 0
    logprobs = params.logprobs or 0
    return msgspec.structs.replace(params, n=params.best_of, logprobs=logprobs), params.n


class RequestProcessor:
    """The choices of one prompt of a request.

    Args:
        request_id, num_prompt_tokens, params, tokenizer, num_wanted, item: as in `OutputProcessor`.
        stops: automaton of `params.stop`; None: it is made here, if there are any.
        new_answer: makes the parser of each choice's answer; None: the text is not parsed.
        num_best: number of best choices to answer with, from `split_ranking`; 0: all.
    """

    __slots__ = ("choices", "num_best", "request_id")

    def __init__(
        self,
        request_id: str,
        num_prompt_tokens: int,
        params: SamplingParams,
        tokenizer: Any | None,
        stops: StopAutomaton | None = None,
        num_wanted: int = sys.maxsize,
        item: int = 0,
        new_answer: Callable[[], Answer] | None = None,
        num_best: int = 0,
    ) -> None:
        self.request_id, self.num_best = request_id, num_best
        if stops is None and params.stop:
            stops = StopAutomaton(params.stop)
        self.choices = [
            OutputProcessor(
                request_id,
                num_prompt_tokens,
                params,
                tokenizer,
                index,
                stops,
                num_wanted,
                item,
                None if new_answer is None else new_answer(),
            )
            for index in range(params.n)
        ]

    @property
    def finished(self) -> bool:
        return all(choice.finished for choice in self.choices)

    @property
    def num_results(self) -> int:
        """Number of choices in the answer: `num_best`, or all without it."""
        return self.num_best or len(self.choices)

    @property
    def results(self) -> list[OutputProcessor]:
        """The choices in the answer, in order. With `num_best`, none until all have ended, then the best;
        ties go to the lower index."""
        if not self.num_best:
            return self.choices
        if not self.finished:
            return []
        best = sorted(self.choices, key=lambda choice: -choice.mean_logprob)[: self.num_best]
        for index, choice in enumerate(best):
            choice.result_index = index
        best[0].take_prompt_logprobs(self.choices[0])
        return best

    def process(self, output: EngineCoreOutput) -> str | None:
        """Adds an engine output to its choice. An error ends all choices.

        Returns:
            Id for the engine to abort, if a stop string ended the choice here: the request's id when all
            its choices have ended, "<request id>#<index>" when others go on. None: nothing is to be aborted.
        """
        if output.error is not None:
            for choice in self.choices:  # it is told once
                choice.finish(FinishReason.ERROR, output.error, output.error_code)
            return None
        choice = self.choices[output.index]
        if not choice.process(output):
            return None
        return self.request_id if self.finished else f"{self.request_id}#{choice.index}"
