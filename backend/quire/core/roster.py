"""Roster: the known requests, which of them wait, and which run."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Iterator

from quire.config import SchedulerConfig
from quire.core.adapter_slots import AdapterSlots
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.policies.admission import DeadlineHeap
from quire.core.policies.queue import make_queue
from quire.core.policies.tenants import Tenants
from quire.core.prefix import CachedPrefix
from quire.core.request import FinishReason, Request, RequestStatus
from quire.core.trace import SchedulerTrace
from quire.core.transfers import BlockTransfers
from quire.outputs import SchedulerOutput, WaitingCounts
from quire.request.scheduling_params import MAX_PIN_TTL_S

logger = logging.getLogger("quire")


class Roster:
    """Makes every change of a request's status.

    It informs the queue, the tenants' accounts, the block manager, the transfers, and the runner (through the
    next step's output). Running requests are kept in the order of their ranks.

    Args:
        clock: returns monotonic seconds.
        session_ttl_s: most seconds that a conversation stays pinned after its latest use.
        adapters: the runner's adapter slots; None: no request has an adapter.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        transfers: BlockTransfers,
        *,
        clock: Callable[[], float],
        session_ttl_s: float,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.kv = kv
        self.adapters = adapters
        self.transfers = transfers
        self.clock = clock
        self.trace: SchedulerTrace | None = None
        self.tenants = Tenants(config.tenants)
        self.queue = make_queue(
            config,
            cached_tokens=lambda request: kv.find_prefix(request).num_tokens,
            may_run=self.tenants.may_run,
            weight=self.tenants.weight,
        )
        self.requests: dict[str, Request] = {}
        """Unfinished requests by id; a forked choice is a request with id "id#index"."""
        self.sequences: dict[str, dict[int, Request]] = {}
        """Unfinished sequences by `group_id` and choice index; a request that has not forked is its only
        sequence."""
        self.running: list[Request] = []
        self.num_free_seats = config.max_num_seqs
        """Number of seats that no running request occupies (`Request.num_sequences`)."""
        self.num_preemptions = 0
        self._by_external_id: dict[tuple[str, str], dict[str, None]] = {}
        """Ids of requests by (tenant, client's id). A client's id may stand for several requests."""
        self._deadlines = DeadlineHeap()
        self._session_ttl_s = session_ttl_s
        self._dropped: list[str] = []
        self._copies: list[tuple[int, int]] = []
        self.cached_after_plan: list[tuple[bytes, int]] = []
        """(key, block id) of blocks that became findable after the newest step was planned, because their
        requests ended."""

    def add(self, request: Request) -> None:
        """Adds a new request, already checked, to the queue."""
        self.requests[request.request_id] = request
        self.sequences[request.group_id] = {request.index: request}
        if request.external_id:
            key = request.scheduling.tenant, request.external_id
            self._by_external_id.setdefault(key, {})[request.request_id] = None
        self._deadlines.push(request)
        self.queue.push(request)
        self.tenants.on_arrival(request, self.clock())

    def find(self, external_id: str, tenant: str = "") -> list[str]:
        """Returns the ids of a tenant's unfinished requests with this client id, oldest first."""
        return list(self._by_external_id.get((tenant, external_id), ()))

    def overdue(self) -> Iterator[Request]:
        """Yields each unfinished request that has missed a deadline; a missed deadline counts in one call
        only."""
        return (request for request, _ in self._deadlines.expired(self.clock()) if not request.is_finished)

    @property
    def num_prompt_tokens_left(self) -> int:
        """Number of tokens that the running requests have still to compute, without the first of each
        request."""
        missing = (request.num_missing for request in self.running)
        return sum(count - 1 for count in missing if count > 1)

    def waiting_by_reason(self, admission_blocked_by: str) -> WaitingCounts:
        """Counts the sequences in the queue by what they wait for; O(waiting).

        Args:
            admission_blocked_by: why the latest plan admitted no further request
                (`Planner.admission_blocked_by`). Sequences that wait for nothing of their own are counted
                under it, or under "step" if it is empty.
        """
        choices = tenant = adapter = others = 0
        for request in self.queue:
            if request.is_paused:
                choices += 1
            elif not self.tenants.may_run(request):
                tenant += 1
            elif self.waits_for_adapter(request):
                adapter += 1
            else:
                others += 1
        rest = {admission_blocked_by or "step": others}
        return WaitingCounts(choices=choices, tenant=tenant, adapter=adapter, **rest)

    def waits_for_adapter(self, request: Request) -> bool:
        """Returns whether the latest plan passed over a request with this request's adapter, because of the
        adapter (`AdapterSlots.waiting`)."""
        return self.adapters is not None and request.adapter in self.adapters.waiting

    def take_changes(self, output: SchedulerOutput) -> None:
        """Moves the pending drops, block copies and adapter loads into a step's output, and clears
        `cached_after_plan`."""
        output.dropped_request_ids, self._dropped = self._dropped, []
        output.block_copies, self._copies = self._copies + self.kv.pop_copies(), []
        if self.adapters is not None:
            output.adapter_loads = self.adapters.take_loads()
        self.cached_after_plan = []

    def drop_again(self, request_ids: list[str]) -> None:
        """Drops these rows in the next step as well, because the step that carried the drops failed."""
        self._dropped += [request_id for request_id in request_ids if request_id not in self._dropped]

    # Between waiting and running.

    def admit(self, request: Request, prefix: CachedPrefix) -> None:
        """Starts a waiting request from its cached prefix."""
        self.queue.remove(request)
        self.tenants.on_admitted(request)
        is_new = not request.num_preemptions and request.index == 0
        if is_new:
            request.num_cached_tokens = prefix.num_tokens
            self.kv.num_cached_tokens += prefix.num_tokens
            if not request.scheduling.is_internal:
                self.kv.num_queried_tokens += request.num_tokens
        self._seat(request, is_new=is_new)
        self.transfers.begin(request, prefix)
        if request.scheduling.session:
            self.kv.pins.touch(session_pin(request), self.clock() + self._session_ttl_s)
        if not request.admitted_at:
            request.admitted_at = self.clock()

    def preempt(self, request: Request) -> None:
        """Preempts a running request and frees its blocks. Swaps them out first if `BlockTransfers.swap_out`
        decides to and none of them is still to be filled by a copy."""
        assert request.load_id is None, request
        if request.drafter is not None:
            # What a step under way computes behind its known tokens may be wrong drafts.
            known = request.num_tokens + request.num_pending_tokens - 1
            request.num_computed_tokens = min(request.num_computed_tokens, known)
        self.transfers.drop(request)
        # A block that is still to be copied for a choice holds nothing yet, and saves go before copies.
        targets = {target for _, target in self._copies}
        if not targets or targets.isdisjoint(b for ids in self.kv.block_ids(request) for b in ids):
            self.transfers.swap_out(request)
        self.requeue(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        if self.trace is not None:
            self.trace.on_preemption(request)

    def requeue(self, request: Request) -> None:
        """Frees a running request's blocks and returns it to the queue at the place of its rank."""
        self._unseat(request)
        request.status = RequestStatus.WAITING
        self.queue.push(request)
        self.tenants.on_waiting(request)

    def restart(self) -> None:
        """Requeues running requests without a row in the runner, because shared blocks that they hold may be
        invalid. For such a request that is loading blocks, calls `BlockTransfers.invalidate_load` instead.
        """
        for request in [request for request in self.running if not request.in_runner]:
            if request.load_id is not None:
                self.transfers.invalidate_load(request)
                continue
            self.requeue(request)
            request.num_preemptions += 1

    def fork(self, parent: Request, child: Request, num_computed: int) -> None:
        """Starts a choice beside its parent. The choice is queued instead if its parent does not run, or if
        seats or blocks are lacking.

        Args:
            num_computed: number of computed tokens of `parent` that `child` shares.
        """
        self.requests[child.request_id] = child
        self.sequences[child.group_id][child.index] = child
        self._deadlines.push(child)
        self.tenants.on_waiting(child)
        child.num_computed_tokens = num_computed
        may_run = parent.status is RequestStatus.RUNNING and self.num_free_seats > 0
        copies = self.kv.fork(parent, child) if may_run else None
        if copies is None:
            child.num_computed_tokens = 0
            self.queue.push(child)
            return
        self._copies += copies
        self.tenants.on_admitted(child)
        self._seat(child)

    def take_one_seat(self, request: Request) -> None:
        """Reduces the request to one seat, because its other choices are requests of their own."""
        if request.status is RequestStatus.RUNNING:
            self.num_free_seats += request.num_sequences - 1
        request.num_sequences = 1

    # Ends.

    def finish(self, request: Request, reason: FinishReason, *, is_external: bool) -> None:
        """Ends a waiting or running request. First caches the computed blocks of a running request, and pins
        them if the request asks for that. With `session_end`, releases its session's pin.

        Args:
            is_external: whether it was aborted, or ended by a deadline; for the trace.
        """
        has_tokens = request.load_id is None and request.num_computed_tokens > 0
        if request.status is RequestStatus.RUNNING and has_tokens:
            self._keep(request)
        elif request.scheduling.session_end:
            self.kv.pins.release(session_pin(request))
        self.discard(request)
        request.finish_reason = reason
        if self.trace is not None:
            self.trace.on_finish(request, reason, is_external=is_external)

    def discard(self, request: Request) -> None:
        """Ends a waiting or running request, without keeping or reporting anything of it."""
        if request.status is RequestStatus.RUNNING:
            self._unseat(request)
        else:
            self.queue.remove(request)
            self.tenants.on_not_waiting(request)
        if request.load_id is None:
            self.transfers.drop(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]
        group_id, external_id = request.group_id, request.external_id
        del self.sequences[group_id][request.index]
        if self.sequences[group_id]:
            return
        del self.sequences[group_id]
        if external_id:
            key = request.scheduling.tenant, external_id
            same = self._by_external_id[key]
            del same[group_id]
            if not same:
                del self._by_external_id[key]

    def _seat(self, request: Request, *, is_new: bool = False) -> None:
        if request.adapter is not None and self.adapters is not None:
            self.adapters.hold(request.adapter, is_new=is_new)
        request.status = RequestStatus.RUNNING
        self.num_free_seats -= request.num_sequences
        bisect.insort(self.running, request, key=lambda other: other.rank)
        self.queue.on_admitted(request)

    def _unseat(self, request: Request) -> None:
        """Removes a running request from the batch and frees its blocks; blocks being loaded stay with the
        load."""
        if self._copies:  # those into its blocks have no purpose any more, and others may get the blocks
            own = {block_id for ids in self.kv.block_ids(request) for block_id in ids}
            self._copies = [pair for pair in self._copies if pair[1] not in own]
        index = bisect.bisect_left(self.running, request.rank, key=lambda other: other.rank)
        assert self.running[index] is request, request
        del self.running[index]
        self.num_free_seats += request.num_sequences
        if request.adapter is not None and self.adapters is not None:
            self.adapters.release(request.adapter)
        self.tenants.on_left(request)
        self.queue.on_left(request)
        if request.in_runner:
            self._dropped.append(request.request_id)
            request.in_runner = False
        if request.load_id is None:
            self.kv.free(request, self.clock())
            request.num_computed_before_preemption = max(
                request.num_computed_before_preemption, request.num_computed_tokens
            )
        request.num_computed_tokens = request.plain_decode_until = 0

    def _keep(self, request: Request) -> None:
        """Makes the full blocks of an ending request findable, plans their saves to the KV tiers, and pins
        them if the request asks for that. Logs a failure instead of raising it."""
        try:
            newly_cached = self.kv.cache_blocks(request, is_over=True)
            self.transfers.save(newly_cached)
            self.cached_after_plan += newly_cached
            self._pin(request)
        except Exception:
            logger.exception("what a request has computed is not kept", extra=request.log_fields)

    def _pin(self, request: Request) -> None:
        scheduling, now = request.scheduling, self.clock()
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        if scheduling.session:
            name = session_pin(request)
            if scheduling.session_end:
                self.kv.pins.release(name)
            else:
                self.kv.pin(request, num_tokens, name, now + self._session_ttl_s)
        if scheduling.pin:
            num_tokens = min(num_tokens, request.num_prompt_tokens)
            count = num_tokens // self.kv.block_size
            if count and len(request.block_hashes) >= count:
                ttl_s = scheduling.cache_ttl_s or MAX_PIN_TTL_S
                name = f"prefix {request.block_hashes[count - 1].hex()}"
                self.kv.pin(request, num_tokens, name, now + min(ttl_s, MAX_PIN_TTL_S))

    def check_integrity(self, max_num_seqs: int) -> None:
        """Asserts the invariants that hold between any two calls; O(requests + blocks), for tests."""
        ended = [request for request in self.transfers.loading if request.is_finished]
        self.kv.check_integrity([*self.running, *ended])
        running = {request.request_id: request for request in self.running}
        waiting = {request.request_id: request for request in self.queue}
        assert self.requests == {**running, **waiting} and len(running) == len(self.running)
        assert all(request.status is RequestStatus.RUNNING for request in self.running)
        ranks = [request.rank for request in self.running]
        assert ranks == sorted(ranks) and len(set(ranks)) == len(ranks), ranks
        for request in waiting.values():
            assert request.status is RequestStatus.WAITING, request
            assert request.num_computed_tokens == request.plain_decode_until == 0, request
        for request in self.running:
            is_plain_decode = request.num_computed_tokens < request.plain_decode_until
            assert not is_plain_decode or (request.in_runner and not request.num_forced_tokens), request
        if self.adapters is not None:
            self.adapters.check_integrity([one.adapter for one in self.running if one.adapter is not None])
        seats = sum(request.num_sequences for request in self.running)
        assert self.num_free_seats == max_num_seqs - seats >= 0, (self.num_free_seats, seats)
        for group_id, sequences in self.sequences.items():
            assert sequences and all(sequences[r.index] is r for r in sequences.values())
            assert all(request.group_id == group_id for request in sequences.values())
        listed = [request for sequences in self.sequences.values() for request in sequences.values()]
        assert {request.request_id: request for request in listed} == self.requests
        assert {id for ids in self._by_external_id.values() for id in ids} <= self.sequences.keys()


def session_pin(request: Request) -> str:
    """Returns the name of the pin that holds the request's conversation; it differs between tenants."""
    return session_name(request.scheduling.tenant, request.scheduling.session)


def session_name(tenant: str, session: str) -> str:
    """Returns the name of a conversation's pin, as `inspect` shows it; unique to this tenant and session."""
    tenant, session = (text.replace("%", "%25").replace("/", "%2F") for text in (tenant, session))
    return f"session {tenant}/{session}" if tenant else f"session {session}"
