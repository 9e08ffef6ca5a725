"""Generation: a prompt of an open request, with the state that another engine needs to resume it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from quire.core.probation import InFlightSuspects
from quire.engine.messages import AddRequest
from quire.frontend.output_processor import RequestProcessor
from quire.triton.request_handle import RequestHandle
from quire.triton.results import Recording

MAX_CRASHES_ALONE = 2


@dataclass(slots=True)
class Generation:
    """One prompt of a request. It outlives engines: its processor keeps the generated tokens."""

    handle: RequestHandle
    processor: RequestProcessor
    message: AddRequest
    """Message to the first engine. The memory of its embeddings stays open as long as the request does."""
    recording: Recording | None = None
    """Records the engines' outputs for the result cache; None if they are not kept."""
    num_deaths: int = 0
    """Number of deaths of its engines. A death at which the request was no suspect with a row in flight
    (`core/probation.py`) sets it to 1."""
    num_crashes_alone: int = 0
    """Number of deaths in a row, up to the latest, at which the request was a suspect and no other request
    had a row in flight."""

    @property
    def is_over(self) -> bool:
        """Whether no engine must resume the prompt: it or its request has ended, or it is answered without an
        engine (`Replays`)."""
        return self.processor.finished or self.handle.is_replay or not self.handle.is_open

    def record_crash(self, suspects: InFlightSuspects) -> bool:
        """Counts a death of the prompt's engine. Returns whether `num_crashes_alone` is now
        MAX_CRASHES_ALONE, so that the request counts as the one that kills engines. A request's first death
        of an engine does not add to `num_crashes_alone`, as the request is no suspect then."""
        is_suspect = self.message.request_id in suspects.request_ids
        self.num_deaths = self.num_deaths + 1 if is_suspect else 1
        self.num_crashes_alone = self.num_crashes_alone + 1 if is_suspect and suspects.is_alone else 0
        return self.num_crashes_alone == MAX_CRASHES_ALONE

    def next_message(self) -> AddRequest:
        """Returns the message with which the next engine resumes the prompt after its tokens so far.

        Random draws go on as before, as they depend only on the seed and the token's position. A beam search
        has sent nothing, so it begins anew, as does a prompt that has no token yet.
        """
        message = msgspec.structs.replace(self.message, num_deaths=self.num_deaths)
        choices, params = self.processor.choices, message.sampling_params
        if params.is_ranked or not any(choice.num_output_tokens for choice in choices):
            return message
        # All choices have their first token of one step, and the prompt's log-probabilities came with it.
        return msgspec.structs.replace(
            message,
            sampling_params=msgspec.structs.replace(params, seed=choices[0].seed, prompt_logprobs=None),
            outputs={choice.index: choice.token_ids for choice in choices if not choice.finished},
        )
