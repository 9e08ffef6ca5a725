"""Tenants: enforces each tenant's limits on requests and tokens."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping

from quire.config import TenantLimits
from quire.core.request import Request
from quire.errors import UnavailableError

DEFAULT_TENANT = "*"
MAX_IDLE_TENANTS = 10_000
"""Most tenants whose quotas are kept while they have no requests, without those that the configuration
names."""


UNLIMITED = TenantLimits()


class _Account:
    """Use of one tenant. `tokens` is the content of its token bucket at `time`; negative: debt."""

    __slots__ = ("num_running", "num_waiting", "time", "tokens")

    def __init__(self, limits: TenantLimits) -> None:
        self.tokens = float(limits.tokens_per_minute or 0)
        self.time = -math.inf
        self.num_running = 0
        self.num_waiting = 0


class Tenants:
    """Limits and use of all tenants.

    A quota is a token bucket that holds one minute's tokens and is refilled continuously. A prompt is charged
    on arrival, output as it is generated. An output's length is not known in advance, so the bucket may go
    into debt. While it holds less than one token, the tenant's new requests are refused.

    The entry "*" applies to each tenant that is not named, separately; a named tenant has only the limits it
    states. Clients may invent names, so accounts of unnamed tenants without requests are not kept for ever.
    One with a full bucket may be dropped at any time. Beyond MAX_IDLE_TENANTS tenants without requests, the
    least recently used is dropped. It returns with a full bucket, as a newly invented name would.

    All methods are O(1). The scheduler calls check_arrival before it queues a request that does not come from
    a dead engine, and on_arrival for each that is queued; on_admitted when it begins to run and on_left when
    it stops running; on_waiting when it returns to the queue or is a new choice, and on_not_waiting when it
    ends in the queue; on_tokens for its output tokens.

    Args:
        named: the configuration key `tenants`.
    """

    def __init__(self, named: Mapping[str, TenantLimits]) -> None:
        self._named = dict(named)
        self._default = self._named.pop(DEFAULT_TENANT, UNLIMITED)
        self._accounts: dict[str, _Account] = {}  # of named tenants, and of those with requests here
        self._idle: OrderedDict[str, _Account] = OrderedDict()  # of the other ones, latest used last

    def limits(self, tenant: str) -> TenantLimits:
        return self._named.get(tenant, self._default)

    def weight(self, tenant: str) -> float:
        """Returns the tenant's share, above 0."""
        return self.limits(tenant).weight

    def tokens_left(self, tenant: str, now: float) -> float:
        """Returns the tokens in the tenant's bucket, negative in debt; infinity without a quota."""
        limits = self.limits(tenant)
        if limits.tokens_per_minute is None:
            return math.inf
        return self._refilled(self._find(tenant, limits), limits.tokens_per_minute, now)

    def check_arrival(self, request: Request, now: float) -> None:
        """Raises if the tenant's limits refuse a new request; changes nothing.

        Raises:
            UnavailableError: the tenant's quota is used up, or its limit of waiting requests is reached;
                names the tenant and the limit. For a quota, `retry_after_s` is the time until the bucket
                holds a token again, if nothing more is charged until then.
        """
        tenant = request.scheduling.tenant
        limits = self._limits_of(request)
        if limits.tokens_per_minute is not None:
            tokens = self.tokens_left(tenant, now)
            if tokens < 1.0:
                raise UnavailableError(
                    f"quota of tenant {tenant!r:.80} used up: {tokens:.0f} tokens left (tokens_per_minute "
                    f"{limits.tokens_per_minute})",
                    (1.0 - tokens) * 60.0 / limits.tokens_per_minute,
                )
        if limits.max_waiting is not None:
            num_waiting = self._find(tenant, limits).num_waiting
            if num_waiting >= limits.max_waiting:
                raise UnavailableError(
                    f"queue of tenant {tenant!r:.80} full: {num_waiting} requests wait (max_waiting "
                    f"{limits.max_waiting})"
                )

    def may_run(self, request: Request) -> bool:
        """Returns whether the limit of running requests of the request's tenant lets this one run, too."""
        limits = self._limits_of(request)
        if limits.max_running is None:
            return True
        return self._find(request.scheduling.tenant, limits).num_running < limits.max_running

    def on_arrival(self, request: Request, now: float) -> None:
        """Records that a new request was queued, and charges its prompt."""
        self._count(request, 0, 1)
        self.on_tokens(request, request.num_prompt_tokens, now)

    def on_admitted(self, request: Request) -> None:
        """Records that a waiting request begins to run."""
        self._count(request, 1, -1)

    def on_left(self, request: Request) -> None:
        """Records that a running request was preempted or has ended."""
        self._count(request, -1, 0)

    def on_waiting(self, request: Request) -> None:
        """Records that a request that ran is in the queue again, or that a new choice is to wait or run."""
        self._count(request, 0, 1)

    def on_not_waiting(self, request: Request) -> None:
        """Records that a waiting request has ended."""
        self._count(request, 0, -1)

    def on_tokens(self, request: Request, num_tokens: int, now: float) -> None:
        """Charges tokens to the request's tenant if it has a quota, even if the request has just left."""
        tenant = request.scheduling.tenant
        limits = self._limits_of(request)
        if limits.tokens_per_minute is None:
            return
        account = self._find(tenant, limits)
        account.tokens = self._refilled(account, limits.tokens_per_minute, now) - num_tokens
        account.time = now
        if tenant in self._named:
            self._accounts[tenant] = account
        elif tenant not in self._accounts:
            self._keep_idle(tenant, account, now)

    def _limits_of(self, request: Request) -> TenantLimits:
        return UNLIMITED if request.scheduling.is_internal else self.limits(request.scheduling.tenant)

    @staticmethod
    def _refilled(account: _Account, tokens_per_minute: int, now: float) -> float:
        refill = max(0.0, now - account.time) * tokens_per_minute / 60.0
        return min(float(tokens_per_minute), account.tokens + refill)

    def _find(self, tenant: str, limits: TenantLimits) -> _Account:
        """Returns the account of a tenant; if there is none, a new one that is not stored yet."""
        return self._accounts.get(tenant) or self._idle.get(tenant) or _Account(limits)

    def _count(self, request: Request, running: int, waiting: int) -> None:
        tenant = request.scheduling.tenant
        limits = self._limits_of(request)
        if not limits.needs_account:
            return
        account = self._find(tenant, limits)
        account.num_running += running
        account.num_waiting += waiting
        assert account.num_running >= 0 and account.num_waiting >= 0, (tenant, running, waiting)
        if account.num_running or account.num_waiting or tenant in self._named:
            self._idle.pop(tenant, None)
            self._accounts[tenant] = account
        else:
            self._accounts.pop(tenant, None)
            if limits.tokens_per_minute is not None:
                self._keep_idle(tenant, account, account.time)

    def _keep_idle(self, tenant: str, account: _Account, now: float) -> None:
        self._idle[tenant] = account
        self._idle.move_to_end(tenant)
        quota = self._default.tokens_per_minute
        assert quota is not None
        for _ in range(2):  # one comes, two may go: what has refilled does not stay
            oldest = next(iter(self._idle))
            is_full = self._refilled(self._idle[oldest], quota, now) >= quota
            if not is_full and len(self._idle) <= MAX_IDLE_TENANTS:
                break
            del self._idle[oldest]
            if not self._idle:
                break
