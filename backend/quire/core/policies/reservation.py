"""Reservation: decides whether the KV cache has room for a waiting request."""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable

from quire.config import SchedulerConfig
from quire.core.request import FinishReason, Request

BlocksFor = Callable[[Request, int], int]
"""Returns the number of blocks that one sequence of a request still needs to hold a number of tokens. A
waiting request holds none, so all blocks for these tokens count."""

WINDOW = 1000
"""predicted: number of the latest output lengths that are kept."""
MIN_HISTORY = 32
"""Least number of finished requests from which mode `predicted` learns; with fewer, it expects the longest
possible output of each request."""
MARGIN = 0.03
"""predicted: share of the free blocks reserved for outputs longer than expected."""


class Reservation(ABC):
    """Decides on admissions: begin() records what runs now, then try_admit() decides on each candidate in
    turn.

    Tokens of a sequence are capped to `max_model_len - 1`, because the last generated token is never in the
    cache. A request whose choices have not forked yet (`num_sequences` > 1) counts with all of them. They
    share the full blocks of the prompt, and each further choice has its own copy of the last block per KV
    group. If nothing runs, a candidate needs room only for its known tokens and one more, in one sequence;
    choices that later find no blocks wait.

    Args:
        max_model_len: most tokens of prompt and output, at most one more than the pool holds.
        num_groups: number of KV groups, each with a block table per sequence.
    """

    def __init__(self, max_model_len: int, num_groups: int) -> None:
        self._max_slots = max_model_len - 1
        self._max_model_len = max_model_len
        self._num_groups = num_groups
        self._blocks_for: BlocksFor
        self._num_held: Callable[[Request], int]
        self._num_running = 0
        self._num_free = 0
        self._available = 0

    def begin(
        self,
        running: Iterable[Request],
        num_free_blocks: int,
        blocks_for: BlocksFor,
        num_held: Callable[[Request], int],
    ) -> None:
        """Records the running requests and the free blocks.

        Args:
            num_free_blocks: blocks that can be allocated now.
            num_held: returns the number of blocks in the tables of a running request.
        """
        requests = list(running)
        self._num_running, self._num_free = len(requests), num_free_blocks
        self._blocks_for, self._num_held = blocks_for, num_held
        self._begin(requests)

    def try_admit(self, candidate: Request, num_saved_blocks: int = 0) -> bool:
        """Returns whether the candidate may be admitted, beside the running requests and those admitted since
        begin(). If so, it counts as admitted.

        Args:
            num_saved_blocks: number of its blocks that it would share with requests or pins that hold them.
        """
        alone = self._num_running == 0
        first = self._blocks_for(candidate, min(candidate.num_tokens + 1, self._max_slots))
        if first - num_saved_blocks > self._num_free or not self._try(candidate, num_saved_blocks, alone):
            return False
        self._num_running += 1
        return True

    def on_finished(self, request: Request) -> None:  # noqa: B027
        """Records a request that ended with all its output; its finish_reason is set."""

    @abstractmethod
    def _begin(self, running: list[Request]) -> None: ...

    @abstractmethod
    def _try(self, candidate: Request, num_saved_blocks: int, alone: bool) -> bool:
        """Admits the candidate if it fits or is `alone`; returns whether it did."""

    def _needed(self, request: Request, num_tokens: int) -> int:
        """Returns the number of blocks that all sequences of the request together still need, for
        `num_tokens` tokens each."""
        slots = num_tokens if num_tokens < self._max_slots else self._max_slots
        needed = self._blocks_for(request, slots)
        if request.num_sequences > 1:
            own = max(0, needed - self._blocks_for(request, request.num_prompt_tokens)) + self._num_groups
            needed += (request.num_sequences - 1) * own
        return needed

    def _needed_now(self, request: Request) -> int:
        """Returns the number of blocks that all sequences of the request together still need, for its known
        tokens and one more each."""
        num_tokens = len(request.token_ids)
        if num_tokens < request.plain_decode_until and request.num_sequences == 1:
            return 0  # as of nearly all running requests, which are asked in every step with a queue
        return self._needed(request, num_tokens + 1)

    def _most_tokens(self, request: Request) -> int:
        """Returns the most tokens that one sequence of the request has in the cache, with the longest output
        that its limits allow."""
        return request.num_prompt_tokens + request.max_output_tokens(self._max_model_len) - 1


class OnDemand(Reservation):
    """Requires room for a request's known tokens and one more; later growth may preempt.

    The blocks that running requests lack for the same are reserved first: a long prompt allocates its blocks
    chunk by chunk, and a later request must not be admitted into those still to come.
    """

    def _begin(self, running: list[Request]) -> None:
        self._available = self._num_free - sum(map(self._needed_now, running))

    def _try(self, candidate: Request, num_saved_blocks: int, alone: bool) -> bool:
        needed = self._needed_now(candidate) - num_saved_blocks
        if needed > self._available and not alone:
            return False
        self._available -= needed
        return True


class NoEvict(Reservation):
    """Requires room for each request's longest output, so that usually none is preempted for memory. An
    exception is a request admitted while nothing ran: its own choices may preempt each other."""

    def _begin(self, running: list[Request]) -> None:
        self._available = self._num_free
        for request in running:
            self._available -= self._needed(request, self._most_tokens(request))

    def _try(self, candidate: Request, num_saved_blocks: int, alone: bool) -> bool:
        needed = self._needed(candidate, self._most_tokens(candidate)) - num_saved_blocks
        if needed > self._available and not alone:
            return False
        self._available -= needed
        return True


class Predicted(Reservation):
    """The past-future scheduler of LightLLM: the expected peak of memory stays within the pool.

    The expected output of a request with g output tokens is the mean of those among the WINDOW latest outputs
    that are longer than g. If there is none, it is 2 * g. It is at least g + 1 and at most the request's
    limit; with fewer than MIN_HISTORY outputs it is that limit. The model lets all running requests grow by a
    token per step and free their blocks at their end. The times to the ends are rounded up to a grid with
    about four points per octave. So memory peaks at points of the grid, and a table of the free blocks at
    each point suffices: begin is O(running * log WINDOW + WINDOW), try_admit O(log max_model_len).

    Limits of the model: growth between two points is linear; an ending request frees the blocks of all its
    tokens, even shared ones; prefill takes no time. The history has no pooled requests, and none that
    were ended from outside. After few ends it is biased to short outputs; MIN_HISTORY makes this bias small,
    not zero.
    """

    def __init__(self, max_model_len: int, num_groups: int) -> None:
        super().__init__(max_model_len, num_groups)
        self._recent: deque[int] = deque()
        self._lengths: list[int] = []  # the same, sorted
        self._sums: list[int] = [0]  # of the first k lengths
        self._is_new = False
        self._times = [1]  # the grid, in steps from now
        while self._times[-1] < max_model_len:
            self._times.append(max(self._times[-1] + 1, int(self._times[-1] * 2**0.25)))
        self._free: list[float] = []  # at each time, just before requests end there

    def on_finished(self, request: Request) -> None:
        if request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        if request.sampling_params.dimensions:
            return  # pooled: it had no output to learn from
        if len(self._recent) == WINDOW:
            del self._lengths[bisect.bisect_left(self._lengths, self._recent.popleft())]
        self._recent.append(request.num_output_tokens)
        bisect.insort(self._lengths, request.num_output_tokens)
        self._is_new = True

    def _remaining(self, done: int, limit: int) -> int:
        """Returns the expected number of further output tokens, at least 1, of a request that has `done`
        output tokens and at most `limit` to come."""
        lengths, expected = self._lengths, limit
        if len(lengths) >= MIN_HISTORY:
            if self._is_new:
                self._sums = [0, *itertools.accumulate(lengths)]
                self._is_new = False
            first = bisect.bisect_right(lengths, done)
            num_longer = len(lengths) - first
            expected = done
            if num_longer:
                expected = round((self._sums[-1] - self._sums[first]) / num_longer) - done
            if expected > limit:
                expected = limit
        return expected if expected > 1 else 1

    def _begin(self, running: list[Request]) -> None:
        times = self._times
        # Of the requests that end at each time: blocks lacking at once, growth per step, blocks given back.
        at_once, growth, back = ([0.0] * len(times) for _ in range(3))
        for request in running:
            now = self._needed_now(request)
            end, slope = self._future(request, now)
            at_once[end] += now
            growth[end] += slope
            back[end] += self._num_held(request)
        num_now, num_per_step = sum(at_once), sum(growth)
        margin = MARGIN * self._num_free
        free = self._num_free - margin
        self._free = []
        for index, time in enumerate(times):
            self._free.append(free - num_now - num_per_step * (time - 1))
            free += back[index]
            num_now -= at_once[index]
            num_per_step -= growth[index]

    def _try(self, candidate: Request, num_saved_blocks: int, alone: bool) -> bool:
        now = self._needed_now(candidate)
        end, slope = self._future(candidate, now)
        now -= num_saved_blocks
        free = [
            left - now - slope * (time - 1)
            for left, time in zip(self._free[: end + 1], self._times, strict=False)
        ]
        if min(free) < 0 and not alone:
            return False
        self._free[: end + 1] = free
        return True

    def _future(self, request: Request, now: int) -> tuple[int, float]:
        """Returns the index of the grid point at which the request is expected to end, and the number of
        blocks by which it grows per step until then.

        Args:
            now: number of blocks that it lacks for its known tokens and one more.
        """
        num_tokens, last = len(request.token_ids), self._most_tokens(request)
        remaining = self._remaining(num_tokens - request.num_prompt_tokens, last + 1 - num_tokens)
        end = bisect.bisect_left(self._times, remaining)
        steps = self._times[end]
        growth = self._needed(request, num_tokens + steps if num_tokens + steps < last else last) - now
        return end, growth / (steps - 1 or 1) if growth > 0 else 0.0


def make_reservation(config: SchedulerConfig, max_model_len: int, num_groups: int = 1) -> Reservation:
    """Makes the reservation policy that `config.kv_reservation` names."""
    kinds: dict[str, type[Reservation]] = {
        "on_demand": OnDemand,
        "no_evict": NoEvict,
        "predicted": Predicted,
    }
    return kinds[config.kv_reservation](max_model_len, num_groups)
