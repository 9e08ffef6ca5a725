"""SequenceGroup: the choices of a request that has several. BeamSearch: beams, which compete."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from quire.core.request import FinishReason, Request, RequestStatus
from quire.core.roster import Roster
from quire.outputs import EngineCoreOutput, RowOutput, TokenLogprobs
from quire.request.sampling_params import SamplingParams, choice_seed

ApplyResult = Callable[[Request, RowOutput], EngineCoreOutput]
"""Appends the sampled tokens of a row to its request, up to one that ends it, ends the request then, and
returns the output."""
Complete = Callable[[Request, FinishReason], None]
"""Ends a request with this reason, because nothing is left to compute for it."""


class SequenceGroup:
    """The sequences of a request that has several (`SamplingParams.num_sequences`).

    A new request has one sequence until its prompt is computed. Then every choice becomes a request of its
    own. Choices can share the full blocks of the prompt and have an id in common. They are sampled
    independently (beams are not: see `BeamSearch`), but an error of one ends all.

    Args:
        request: the first choice; before the fork it stands for all of them.
        live: the roster's unfinished sequences of the request, by index.
    """

    is_ranked = False
    """Whether the choices are the best of a search. They are then known only at its end, and cannot be ended
    one by one."""

    def __init__(self, request: Request, live: Mapping[int, Request]) -> None:
        self.request_id = request.request_id
        self.count = request.num_sequences
        self.has_forked = False
        self.live = live

    @property
    def open_indices(self) -> list[int]:
        """Indices of the choices without a final output yet."""
        return list(self.live) if self.has_forked else list(range(self.count))

    def apply_result(
        self,
        request: Request,
        result: RowOutput,
        roster: Roster,
        apply: ApplyResult,
        complete: Complete,
    ) -> list[EngineCoreOutput]:
        """Processes the result of a row that has sampled; returns the outputs for the caller.

        Args:
            apply, complete: the scheduler's methods, passed each time so that no reference cycle keeps an
                engine alive.
        """
        others = [] if self.has_forked else self._fork(request, result.choices, roster, apply)
        return [apply(request, result), *others]

    def _fork(
        self, parent: Request, drawn: list[RowOutput], roster: Roster, apply: ApplyResult
    ) -> list[EngineCoreOutput]:
        """Creates a request with the prompt and its first sampled token for each choice but the first, which
        the parent is. Returns the outputs of the new requests."""
        self.has_forked = True
        roster.take_one_seat(parent)
        outputs = []
        for index, first in enumerate(drawn, 1):
            child = self._choice(parent, index, [])
            # Not by what the parent has computed: its next row may be in flight.
            roster.fork(parent, child, parent.num_prompt_tokens)
            outputs.append(apply(child, first))
        return outputs

    def resume(self, parent: Request, outputs: dict[int, list[int]], roster: Roster) -> None:
        """Forks a waiting request as the engine that died had done. The output of choice 0 so far is already
        in `parent`.

        Args:
            outputs: tokens so far of the open choices by index. Without an entry for index 0, the first
                choice has ended, and the parent is discarded.
        """
        self.has_forked = True
        roster.take_one_seat(parent)
        for index in outputs.keys() - {0}:
            child = self._choice(parent, index, outputs[index])
            child.block_hashes.clear()  # the queue may have hashed the output of the parent
            roster.fork(parent, child, 0)
        if 0 not in outputs:
            roster.discard(parent)

    def _choice(self, parent: Request, index: int, output: list[int]) -> Request:
        params = parent.sampling_params
        seed = None if params.seed is None else choice_seed(params.seed, index)
        own = msgspec.structs.replace(params, seed=seed, n=1, best_of=None)
        token_ids = [*parent.token_ids[: parent.num_prompt_tokens], *output]
        return self._continue(parent, index, token_ids, own)

    def _continue(self, parent: Request, index: int, token_ids: list[int], params: SamplingParams) -> Request:
        """Returns a new request for the choice or beam `index`, with the given tokens and parameters, and in
        most else like `parent`. It takes over the block hashes of `parent`. If its tokens differ in a block
        that has a hash, the caller must clear them."""
        child = Request(
            f"{self.request_id}#{index}",
            token_ids[: parent.num_prompt_tokens],
            params,
            eos_token_ids=parent.eos_token_ids,
            arrival_time=parent.arrival_time,
            scheduling=parent.scheduling,
            external_id=parent.external_id,
            embeds=parent.embeds,
            adapter=parent.adapter,
        )
        child.token_ids = token_ids
        child.num_sequences = 1
        child.rank = (*parent.rank[:2], index)
        child.block_hashes = list(parent.block_hashes)
        child.index, child.group_id, child.admitted_at = index, self.request_id, parent.admitted_at
        child.num_cached_tokens = parent.num_prompt_tokens
        child.prompt_logprobs = None
        return child


class _Ended(NamedTuple):
    score: float
    cumulative_logprob: float
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    reason: FinishReason
    stop_reason: int | None


class _Candidate(NamedTuple):
    cumulative_logprob: float
    beam: int
    """Index of the beam that the candidate extends."""
    token_id: int
    logprob: float


class BeamSearch(SequenceGroup):
    """Beam search as `transformers` 5 does it (`GenerationMixin._beam_search`), for one request.

    Each beam is a request of its own. When its row samples, it reports its best candidates and pauses. When
    all have reported, the best continuations of all beams are ranked by their sum of log-probabilities. Among
    the first `beam_width`, those that end are kept, with the score sum / length ** length_penalty; the length
    counts all generated tokens. The `beam_width` best that do not end continue. The search is over when no
    beam continues, or when `beam_width` ended ones are kept and
    - early_stopping is True, or
    - the first beam would not score higher than the worst of them at its present length (if early_stopping is
    None and length_penalty > 0: at the greatest possible length).

    In transformers a place can stay empty, because scores below -1e9 lose against its padding; here the
    search continues. Among equal candidates, those of the older beam come first, so nothing depends on the
    order in which beams report.
    """

    is_ranked = True

    def __init__(self, request: Request, live: Mapping[int, Request], max_model_len: int) -> None:
        super().__init__(request, live)
        self._max_model_len = max_model_len
        self._params = request.sampling_params
        self._num_cached_tokens = 0
        self._first_token_at = 0.0
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_beams = 1  # ever made
        self._sums = {0: 0.0}  # by beam, as all below
        self._reports: dict[int, TokenLogprobs] = {}
        self._logprobs: dict[int, list[TokenLogprobs]] = {0: []}
        self._ended: list[_Ended] = []  # best first

    @property
    def open_indices(self) -> list[int]:
        return list(range(self._params.n))

    def apply_result(
        self,
        request: Request,
        result: RowOutput,
        roster: Roster,
        apply: ApplyResult,
        complete: Complete,
    ) -> list[EngineCoreOutput]:
        """Records the candidates of a beam. In `result.logprobs[0]` the first entry is the sampled token; the
        candidates follow, best first.

        When all beams have reported, their continuations become the beams of the next step, or the request
        ends. Only the end of the request has outputs: one for each of the `n` sequences.
        """
        assert result.logprobs, f"{request}: no candidates"
        if request.num_output_tokens == 0:
            self._num_cached_tokens = request.num_cached_tokens
            self._first_token_at = self._first_token_at or roster.clock()
            self._prompt_logprobs = request.take_prompt_logprobs(result.prompt_logprobs)
        self._reports[request.index] = result.logprobs[0]
        request.is_paused = True
        if len(self._reports) < len(self.live):
            return []
        roster.take_one_seat(request)
        self.has_forked = True
        going_on = self._choose(request)
        if going_on:
            self._replace(going_on, roster)
            return []
        outputs = self._results()
        for beam in list(self.live.values()):
            complete(beam, FinishReason.LENGTH)  # of what the search has still in hand
        return outputs

    def _choose(self, request: Request) -> list[_Candidate]:
        """Keeps candidates that end, if they are among the first `beam_width`. Returns those that become the
        next beams, best first; empty: the search is over. `request`: any present beam."""
        width = self._params.beam_width
        num_output = request.num_output_tokens + 1
        going_on: list[_Candidate] = []
        for place, candidate in enumerate(self._ranked()):
            end = request.end_by(candidate.token_id, num_output, self._max_model_len)
            if end is None and len(going_on) < width:
                going_on.append(candidate)
            elif end is not None and place < width:
                self._keep(candidate, *end)
        del self._ended[width:]
        max_output = request.max_output_tokens(self._max_model_len)
        if going_on and self._is_settled(going_on[0].cumulative_logprob, num_output, max_output):
            return []
        return going_on

    def _results(self) -> list[EngineCoreOutput]:
        """Returns the outputs of the `n` best ended sequences, best first. If fewer have ended, the
        remaining outputs have no tokens and end with LENGTH."""
        wanted = self._params.logprobs
        outputs = []
        for index in self.open_indices:
            output = EngineCoreOutput(self.request_id, index=index, finish_reason=str(FinishReason.LENGTH))
            if index < len(self._ended):
                ended = self._ended[index]
                output.new_token_ids = ended.token_ids
                output.finish_reason, output.stop_reason = str(ended.reason), ended.stop_reason
                output.cumulative_logprob = ended.cumulative_logprob
                output.logprobs = None if wanted is None else ended.logprobs
            one = next(iter(self.live.values()))
            output.num_cached_tokens = one.num_prompt_tokens if index else self._num_cached_tokens
            output.admitted_at, output.first_token_at = one.admitted_at, self._first_token_at
            output.num_preemptions = max(beam.num_preemptions for beam in self.live.values())
            outputs.append(output)
        outputs[0].prompt_logprobs = self._prompt_logprobs
        return outputs

    def _ranked(self) -> list[_Candidate]:
        found = []
        for index in self.live:
            report, before = self._reports[index], self._sums[index]
            found += [
                _Candidate(before + logprob, index, token_id, logprob)
                for token_id, logprob in zip(report.token_ids[1:], report.logprobs[1:], strict=True)
                if logprob > -float("inf")  # a banned token
            ]
        return sorted(found, key=lambda candidate: -candidate.cumulative_logprob)

    def _keep(self, candidate: _Candidate, reason: FinishReason, stop_reason: int | None) -> None:
        token_ids = [*self.live[candidate.beam].output_token_ids, candidate.token_id]
        score = candidate.cumulative_logprob / len(token_ids) ** self._params.length_penalty
        logprobs = self._extended(candidate)
        ended = _Ended(score, candidate.cumulative_logprob, token_ids, logprobs, reason, stop_reason)
        self._ended.append(ended)
        self._ended.sort(key=lambda other: -other.score)

    def _is_settled(self, best: float, num_output: int, max_output: int) -> bool:
        """Returns whether enough sequences are kept, and the search may stop then by the rule of
        `early_stopping`. `best`: sum of log-probabilities of the best candidate that would continue."""
        params = self._params
        if len(self._ended) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        at_end = params.early_stopping is None and params.length_penalty > 0
        length = max_output if at_end else num_output
        return best / length**params.length_penalty <= self._ended[-1].score

    def _replace(self, going_on: list[_Candidate], roster: Roster) -> None:
        """Replaces the beams by those of the next step."""
        # What is freed here may be the target of a copy at once: copies come before all that is computed.
        parents = {candidate.beam for candidate in going_on}
        for beam in [beam for index, beam in self.live.items() if index not in parents]:
            del self._sums[beam.index], self._logprobs[beam.index]
            roster.discard(beam)
        continued: dict[int, _Candidate] = {}
        for candidate in going_on:
            if continued.setdefault(candidate.beam, candidate) is candidate:
                continue
            parent, index = self.live[candidate.beam], self._num_beams
            self._num_beams += 1
            self._sums[index] = candidate.cumulative_logprob
            self._logprobs[index] = self._extended(candidate)
            token_ids = [*parent.token_ids, candidate.token_id]
            child = self._continue(parent, index, token_ids, parent.sampling_params)
            roster.fork(parent, child, parent.num_computed_tokens)
        for index, candidate in continued.items():
            self._sums[index] = candidate.cumulative_logprob
            self._logprobs[index] = self._extended(candidate)
            beam = self.live[index]
            beam.is_paused = False
            beam.token_ids.append(candidate.token_id)
            if beam.status is RequestStatus.RUNNING:
                beam.num_forced_tokens = 1
        self._reports.clear()

    def _extended(self, candidate: _Candidate) -> list[TokenLogprobs]:
        """Returns the log-probabilities of the output tokens of the candidate's beam and of its own token;
        empty: they are not wanted."""
        if self._params.logprobs is None:
            return []
        report, wanted = self._reports[candidate.beam], self._params.logprobs
        entry = TokenLogprobs(
            [candidate.token_id, *report.token_ids[1 : wanted + 1]],
            [candidate.logprob, *report.logprobs[1 : wanted + 1]],
        )
        return [*self._logprobs[candidate.beam], entry]


def make_sequence_group(
    request: Request, live: Mapping[int, Request], max_model_len: int
) -> SequenceGroup | None:
    """Returns the group of a request with several sequences; None: it has one sequence."""
    params = request.sampling_params
    if params.num_sequences == 1:
        return None
    if params.beam_width > 1:
        return BeamSearch(request, live, max_model_len)
    assert not params.is_ranked, "the frontend ranks choices (`split_ranking`)"
    return SequenceGroup(request, live)
