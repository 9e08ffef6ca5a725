"""Families: what rows of requests with several sequences bring."""

from __future__ import annotations

from collections.abc import Callable

from quire.core.choices import BeamSearch, Choices
from quire.core.roster import Roster
from quire.outputs import EngineCoreOutput, RowOutput
from quire.request import FinishReason, Request, RequestStatus

Take = Callable[[Request, RowOutput], EngineCoreOutput]
"""Appends what a row has sampled to its request, ends that where it is due, and says so."""
Complete = Callable[[Request, FinishReason], None]
"""Ends a request that has all its tokens."""


class Families:
    """Forks requests into their choices, and moves beam searches on.

    Args:
        max_model_len: most tokens of prompt and output together.
    """

    def __init__(self, roster: Roster, max_model_len: int) -> None:
        self._roster = roster
        self._max_model_len = max_model_len

    def take(
        self, request: Request, result: RowOutput, take: Take, complete: Complete
    ) -> list[EngineCoreOutput]:
        """What the caller is to see of the result of a row that has sampled.

        Args:
            take, complete: the scheduler's; no engine is to be kept alive by a cycle.
        """
        choices = request.choices
        assert choices is not None, request
        if isinstance(choices, BeamSearch):
            return self._take_candidates(request, choices, result, complete)
        others = [] if choices.has_forked else self._fork(request, choices, result, take)
        return choices.pass_on([take(request, result), *others])

    def _fork(
        self, request: Request, choices: Choices, result: RowOutput, take: Take
    ) -> list[EngineCoreOutput]:
        """Makes each choice but the first, which the request becomes, a request of its own."""
        outputs = []
        self._roster.take_one_seat(request)
        for child, drawn in zip(choices.fork(), result.choices, strict=True):
            # Not by what the request has computed: its next row may be in flight.
            self._roster.fork(request, child, request.num_prompt_tokens)
            outputs.append(take(child, drawn))
        return outputs

    def _take_candidates(
        self, request: Request, beams: BeamSearch, result: RowOutput, complete: Complete
    ) -> list[EngineCoreOutput]:
        """A beam has reported; when all have, they become those of the next step, or the request ends."""
        assert result.logprobs, f"{request}: no candidates"
        if not beams.report(request, result.logprobs[0]):
            return []
        self._roster.take_one_seat(request)
        step = beams.advance(self._max_model_len)
        if beams.is_over:
            outputs = beams.results()
            for beam in list(beams.live.values()):
                complete(beam, FinishReason.LENGTH)  # of what the search has still in hand
            return outputs
        # What is freed here may be the target of a copy at once: copies come before all that is computed.
        for beam in step.dropped:
            self._roster.discard(beam)
        for parent, child in step.forks:
            self._roster.fork(parent, child, parent.num_computed_tokens)
        for beam, token_id in step.continued:
            beam.token_ids.append(token_id)
            if beam.status is RequestStatus.RUNNING:
                beam.num_given_tokens = 1
        return []
