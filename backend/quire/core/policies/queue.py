"""QueuePolicy: the order in which waiting requests are admitted, and which may preempt a running one."""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from typing import Any

from quire.config import SchedulerConfig
from quire.core.policies.ranked_requests import RankedRequests
from quire.core.request import Request

TOKENS_PER_AGEING = 1000
"""shortest_first: tokens of work that count as much as `ageing_s` seconds of waiting."""
MAX_EXPECTED_OUTPUT = 1024
"""shortest_first: cap on the expected output tokens of each choice, and the expectation if the request states
no limit."""
PREFIX_WINDOW = 64
"""longest_prefix: number of requests, successive in rank, that are sorted together."""
PREFIX_WALKS = 32
"""longest_prefix: most calls of `cached_tokens` in one walk of `candidates`."""
MAX_IDLE_TENANTS = 4096
"""fair: most tenants without waiting requests whose counters are kept."""
OUTPUT_WEIGHT = 2
"""fair: service of an output token relative to a prompt token (as in arXiv 2401.00588)."""


class QueuePolicy(ABC):
    """Holds the waiting requests, each from push() to remove().

    The first push gives a request its `rank`: (key, arrival sequence number); a forked choice has one
    already. The rank never changes. A smaller one is served earlier, unless the policy says otherwise.
    Preempted requests return to the place of their rank. If blocks are lacking, the rank decides which
    request is preempted. Without another rule the key is 0, so that ranks follow the order of arrival at the
    engine. Among equal keys, requests from an engine that died come first.

    The scheduler must also call on_admitted() for each request that begins to run, once it is not in the
    queue and its cached prefix is known; on_left() for each request that stops running; and, at least for
    `FairQueue`, on_tokens() for the tokens of its rows.
    """

    preempts: bool = False
    """Whether an urgent waiting request may preempt a less urgent running one."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[Request, int]] = {}  # with the tokens it had when it was pushed
        self._num_tokens = 0
        self._arrivals = itertools.count(1)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterates over the waiting requests in an unspecified order."""
        return (request for request, _ in self._requests.values())

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all waiting requests, as known when each was pushed."""
        return self._num_tokens

    def push(self, request: Request) -> None:
        """Adds a request, which gets a rank if it has none."""
        assert request.request_id not in self._requests, request
        if request.rank[1] == 0:
            number = next(self._arrivals)
            if request.num_deaths:  # before all that come to this engine first, by their arrival at the last
                number += (int(request.arrival_time * 1e6) << 20) - (1 << 90)
            request.rank = (self._key(request), number)
        self._requests[request.request_id] = request, request.num_tokens
        self._num_tokens += request.num_tokens
        self._insert(request)

    def remove(self, request: Request) -> None:
        """Removes a request that is admitted or has ended."""
        _, num_tokens = self._requests.pop(request.request_id)
        self._num_tokens -= num_tokens
        self._discard(request, num_tokens)

    @abstractmethod
    def candidates(self, now: float) -> Generator[Request, None, None]:
        """Yields waiting requests whose tenants may have one more running, best first.

        The caller may remove() the request it got last and then call on_admitted(), may pass over requests,
        and may stop early. It must change nothing else meanwhile.

        Args:
            now: seconds, on the clock of `Request.arrival_time`.
        """

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Returns whether `waiting` may preempt `running`: a strict partial order."""
        return False

    def ahead(self, request: Request) -> tuple[int, int]:
        """Returns an estimate of how many waiting requests, and how many tokens of theirs, begin before a
        request that is not pushed yet."""
        return len(self._requests), self._num_tokens

    def on_tokens(self, request: Request, num_input: int, num_output: int) -> None:  # noqa: B027
        """Records service for a request: input tokens computed and output tokens sampled."""

    def on_admitted(self, request: Request) -> None:  # noqa: B027
        """Records that the request begins to run."""

    def on_left(self, request: Request) -> None:  # noqa: B027
        """Records that a running request was preempted or has ended."""

    def _key(self, request: Request) -> float:
        return 0.0

    @abstractmethod
    def _insert(self, request: Request) -> None: ...

    @abstractmethod
    def _discard(self, request: Request, num_tokens: int) -> None: ...


class FCFSQueue(QueuePolicy):
    """Serves requests in the order of rank: first come, first served, unless a subclass defines another key
    or order.

    Requests of a tenant at its limit of running requests are parked when candidates() comes to them. They
    return one by one as requests of the tenant leave or are passed over, so a tenant's long queue costs the
    others little. A tenant with parked requests either may not run another one, or has at least as many
    requests in line, or about to return, as it may start.

    Args:
        may_run: returns whether the tenant of a request may have one more running.
        cached_tokens: returns how many tokens at the beginning of a request the cache holds now.
        ageing_s: seconds of waiting that subclasses weigh; 0: no ageing.
    """

    def __init__(
        self, may_run: Callable[[Request], bool], ageing_s: float, cached_tokens: Callable[[Request], int]
    ) -> None:
        super().__init__()
        self._may_run = may_run
        self._ageing_s = ageing_s
        self._cached_tokens = cached_tokens
        self._waiting = RankedRequests()
        self._parked: dict[str, RankedRequests] = {}  # by tenant
        self._to_unpark: list[str] = []  # tenants, each time for one request

    def candidates(self, now: float) -> Generator[Request, None, None]:
        for tenant in self._to_unpark:
            parked = self._parked.get(tenant)
            if parked is not None:
                self._waiting.push(parked.pop())
                if not parked:
                    del self._parked[tenant]
        self._to_unpark.clear()
        for request in self._in_order(now):
            if self._may_run(request):
                yield request
                if request in self._waiting:  # passed over: the next of this tenant may have more luck
                    self._unpark_later(request)
            else:
                self._waiting.remove(request)
                self._parked.setdefault(request.scheduling.tenant, RankedRequests()).push(request)

    def on_left(self, request: Request) -> None:
        self._unpark_later(request)

    def _unpark_later(self, request: Request) -> None:
        if request.scheduling.tenant in self._parked:
            self._to_unpark.append(request.scheduling.tenant)

    def _in_order(self, now: float) -> Iterator[Request]:
        return self._waiting.in_order()

    def _insert(self, request: Request) -> None:
        self._waiting.push(request)

    def _discard(self, request: Request, num_tokens: int) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
            self._unpark_later(request)
        else:
            parked = self._parked[request.scheduling.tenant]
            parked.remove(request)
            if not parked:
                del self._parked[request.scheduling.tenant]


class PriorityQueue(FCFSQueue):
    """Serves smaller priority classes first, with linear ageing: `ageing_s` seconds of waiting count as one
    class.

    Two waiting requests age alike, so their order never changes: the key is priority * ageing_s + arrival.
    With ageing_s = 0 the key is the class, and a class starves while more urgent requests keep the engine
    full.

    may_preempt(w, r) holds if w is of a more urgent class and of smaller rank. Both relations are strict
    orders, so both together are one. If r is preempted only by such a w or, for memory, by a request of
    smaller rank, there is
    - no livelock: the unfinished request of smallest rank is never preempted, so it ends;
    - no starvation with ageing: a request that arrives more than 200 * ageing_s after r has a larger rank
    than r (classes are in [-100, 100]). So finitely many are ever ahead of r, and r becomes the one of
    smallest rank.
    A running request of smaller rank than newer, more urgent ones is not preempted by them.
    """

    preempts = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._classes: dict[int, list[int]] = {}  # class to number of requests and of tokens

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        more_urgent = waiting.scheduling.priority < running.scheduling.priority
        return more_urgent and waiting.rank < running.rank

    def ahead(self, request: Request) -> tuple[int, int]:
        """Counts the waiting requests of the request's class and of more urgent classes, and their tokens.
        Ignores ageing."""
        counts = [
            count for priority, count in self._classes.items() if priority <= request.scheduling.priority
        ]
        return sum(count[0] for count in counts), sum(count[1] for count in counts)

    def _key(self, request: Request) -> float:
        priority = request.scheduling.priority
        return priority * self._ageing_s + request.arrival_time if self._ageing_s else float(priority)

    def _insert(self, request: Request) -> None:
        super()._insert(request)
        count = self._classes.setdefault(request.scheduling.priority, [0, 0])
        count[0] += 1
        count[1] += request.num_tokens

    def _discard(self, request: Request, num_tokens: int) -> None:
        super()._discard(request, num_tokens)
        count = self._classes[request.scheduling.priority]
        count[0] -= 1
        count[1] -= num_tokens


class ShortestFirstQueue(FCFSQueue):
    """Serves the least work first: uncached prompt tokens, estimated on arrival, plus expected output of all
    choices or beams.

    `ageing_s` seconds of waiting count as much as TOKENS_PER_AGEING tokens, so no request starves; with 0
    some may starve.
    """

    def _key(self, request: Request) -> float:
        max_tokens = request.sampling_params.max_tokens
        output = MAX_EXPECTED_OUTPUT if max_tokens is None else min(max_tokens, MAX_EXPECTED_OUTPUT)
        work = request.num_prompt_tokens - self._cached_tokens(request) + output * request.num_sequences
        if not self._ageing_s:
            return float(work)
        return request.arrival_time + work * self._ageing_s / TOKENS_PER_AGEING


class LongestPrefixQueue(FCFSQueue):
    """Serves the most cached tokens first (SGLang's LPM), within windows of PREFIX_WINDOW requests that
    follow each other in rank.

    Requests that have waited `ageing_s` go before all others of their window, in order of arrival, so none
    starves; with 0 some may starve. Beyond FCFS, a walk of candidates() costs the sort of each window it
    reaches and at most PREFIX_WALKS calls of `cached_tokens`, each a walk over hash maps. In a window, the
    oldest look-ups are renewed first.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lengths: dict[str, tuple[int, int]] = {}  # request id to (number of the look-up, cached tokens)
        self._num_lookups = 0

    def _in_order(self, now: float) -> Iterator[Request]:
        requests, num_walks, lengths = self._waiting.in_order(), PREFIX_WALKS, self._lengths
        unknown = (0, 0)
        while window := list(itertools.islice(requests, PREFIX_WINDOW)):
            aged = []
            if self._ageing_s:
                aged = [request for request in window if now - request.arrival_time >= self._ageing_s]
                window = [request for request in window if now - request.arrival_time < self._ageing_s]
            yield from aged
            stale_first = sorted(window, key=lambda request: lengths.get(request.request_id, unknown)[0])
            for request in stale_first[:num_walks]:
                self._num_lookups += 1
                num_walks -= 1
                lengths[request.request_id] = self._num_lookups, self._cached_tokens(request)
            window.sort(key=lambda request: (-lengths.get(request.request_id, unknown)[1], request.rank))
            yield from window

    def _discard(self, request: Request, num_tokens: int) -> None:
        super()._discard(request, num_tokens)
        self._lengths.pop(request.request_id, None)


class _Account:
    """A tenant's virtual counter and its waiting requests."""

    __slots__ = ("counter", "in_heap", "number", "queue", "tenant")

    def __init__(self, tenant: str, number: int) -> None:
        self.tenant = tenant
        self.number = number
        self.counter = 0.0
        """Weighted tokens that the tenant was charged, divided by the tenant's weight; may be lifted when
        the tenant begins to wait (see FairQueue)."""
        self.queue = RankedRequests()
        self.in_heap = False


class FairQueue(QueuePolicy):
    """Virtual Token Counter (arXiv 2401.00588, algorithm 2): the tenant with the least counter is next.

    Service is uncached prompt tokens + OUTPUT_WEIGHT * output tokens; a tenant's counter adds up its service
    divided by its weight. All uncached tokens of a prompt are charged at its first admission, so they count
    for further admissions in the same step. Recomputation after a preemption is not charged, nor are the
    engine's own requests. Within a tenant, requests go in order of arrival. When a tenant begins to wait, its
    counter is lifted to at least the least counter of the waiting tenants; if none waits, to at least that of
    the tenant that left the queue last. So an idle tenant saves up no credit.

    Bound (section 4 of the paper): between two tenants that have requests waiting all the time and no limit
    of running ones, service differs by at most 2 * max(longest prompt, OUTPUT_WEIGHT * M), with M the most
    tokens of a running batch. With weights, service / weight differs by that over the smaller weight.

    push, remove and the next candidate: O(log tenants) amortised, besides the cost of RankedRequests.
    Counters only grow, so a heap of tenants with counters as they were pushed needs repair only at its top.
    Of the tenants without waiting requests, the MAX_IDLE_TENANTS most recently used keep their counters. A
    tenant whose counter is dropped loses its debt, as would a tenant under a new name.
    """

    def __init__(self, may_run: Callable[[Request], bool], weight: Callable[[str], float]) -> None:
        super().__init__()
        self._may_run = may_run
        self._weight = weight
        self._waiting: dict[str, _Account] = {}
        self._idle: OrderedDict[str, _Account] = OrderedDict()  # latest used last
        self._by_counter: list[tuple[float, int, _Account]] = []  # of all waiting and of some idle ones
        self._last_left: _Account | None = None
        self._numbers = itertools.count()

    def candidates(self, now: float) -> Generator[Request, None, None]:
        walks: dict[str, Iterator[Request]] = {}
        exhausted: list[tuple[float, int, _Account]] = []
        try:
            while (account := self._least()) is not None:
                walk = walks.get(account.tenant)
                if walk is None:
                    walk = walks[account.tenant] = account.queue.in_order()
                request = next(walk, None)
                if request is None or not self._may_run(request):
                    exhausted.append(heapq.heappop(self._by_counter))
                else:
                    yield request
        finally:
            for entry in exhausted:
                heapq.heappush(self._by_counter, entry)

    def ahead(self, request: Request) -> tuple[int, int]:
        """Counts the tenant's own requests and about as many of each other waiting tenant; tokens in
        proportion."""
        account = self._waiting.get(request.scheduling.tenant)
        num_own = 0 if account is None else len(account.queue)
        num_others = len(self._waiting) - (account is not None)
        num = min(len(self), num_own + (num_own + 1) * num_others)
        return num, self._num_tokens * num // max(1, len(self))

    def on_admitted(self, request: Request) -> None:
        if request.num_preemptions == 0:
            # A request that goes on after an engine's death may find its output in the cache, too.
            self._charge(request, max(0, request.num_prompt_tokens - request.num_cached_tokens))

    def on_tokens(self, request: Request, num_input: int, num_output: int) -> None:
        if num_output:
            self._charge(request, OUTPUT_WEIGHT * num_output)

    def _charge(self, request: Request, service: float) -> None:
        if request.scheduling.is_internal:
            return
        tenant = request.scheduling.tenant
        account = self._waiting.get(tenant) or self._touch(tenant)
        account.counter += service / self._weight(tenant)

    def _touch(self, tenant: str) -> _Account:
        """Returns the account of a tenant without waiting requests, creating it if necessary."""
        account = self._idle.get(tenant)
        if account is None:
            account = self._idle[tenant] = _Account(tenant, next(self._numbers))
            if len(self._idle) > MAX_IDLE_TENANTS:
                self._idle.popitem(last=False)
        self._idle.move_to_end(tenant)
        return account

    def _least(self) -> _Account | None:
        """Returns the account with the least counter among the waiting tenants whose entries are in the heap;
        its entry is then at the top. None: there is none."""
        heap = self._by_counter
        while heap:
            counter, number, account = heap[0]
            if not account.queue:
                heapq.heappop(heap)
                account.in_heap = False
            elif counter < account.counter:
                heapq.heapreplace(heap, (account.counter, number, account))
            else:
                return account
        return None

    def _insert(self, request: Request) -> None:
        tenant = request.scheduling.tenant
        account = self._waiting.get(tenant)
        if account is None:
            account = self._touch(tenant)
            reference = self._least() or self._last_left
            if reference is not None:
                account.counter = max(account.counter, reference.counter)
            self._waiting[tenant] = self._idle.pop(tenant)
            if not account.in_heap:
                account.in_heap = True
                heapq.heappush(self._by_counter, (account.counter, account.number, account))
        account.queue.push(request)

    def _discard(self, request: Request, num_tokens: int) -> None:
        tenant = request.scheduling.tenant
        account = self._waiting[tenant]
        account.queue.remove(request)
        if not account.queue:
            del self._waiting[tenant]
            self._idle[tenant] = self._last_left = account
            if len(self._idle) > MAX_IDLE_TENANTS:
                self._idle.popitem(last=False)


def make_queue(
    config: SchedulerConfig,
    *,
    cached_tokens: Callable[[Request], int],
    may_run: Callable[[Request], bool] = lambda request: True,
    weight: Callable[[str], float] = lambda tenant: 1.0,
) -> QueuePolicy:
    """Makes the queue that `config.queue_policy` names.

    Args:
        cached_tokens: returns how many tokens at the beginning of a request the cache holds now.
        may_run: returns whether the tenant of a request may have one more running.
        weight: returns a tenant's share, above 0.
    """
    if config.queue_policy == "fair":
        return FairQueue(may_run, weight)
    kinds: dict[str, type[FCFSQueue]] = {
        "fcfs": FCFSQueue,
        "priority": PriorityQueue,
        "shortest_first": ShortestFirstQueue,
        "longest_prefix": LongestPrefixQueue,
    }
    return kinds[config.queue_policy](may_run, config.ageing_s, cached_tokens)
