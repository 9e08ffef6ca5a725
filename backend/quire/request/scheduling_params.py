"""SchedulingParams: a request's parameters for when it runs and what stays in the cache after it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_PRIORITY = 100
MAX_NAME_LENGTH = 256
MAX_DRAFT_TOKENS = 64
MAX_RETENTION = 100
DEFAULT_RETENTION = 35
MAX_PIN_TTL_S = 3600.0
"""Most seconds that a prompt stays pinned (`pin`) after its request ends; a later request may renew the
pin."""


Seconds = Annotated[float, Meta(ge=-1e18, le=1e18)]
"""A finite number of seconds."""


class SchedulingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one request for its scheduling and caching."""

    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Priority class, for the queue policy `priority`; a smaller number is more urgent (as in vLLM)."""
    tenant: str = ""
    """Tenant whose quota and limits apply; empty: the one that all requests without a tenant share."""
    cache_salt: str = ""
    """Salt of the block hashes: requests share cached blocks only if their salts are equal."""
    retention: Annotated[int, Meta(ge=0, le=MAX_RETENTION)] = DEFAULT_RETENTION
    """Retention priority: blocks with a higher one are evicted later (as in TensorRT-LLM)."""
    cache_ttl_s: Seconds | None = None
    """Seconds without use after which blocks that this request adds to the cache are forgotten; None: the
    engine's `cache_ttl_s`."""
    pin: bool = False
    """Whether to pin the prompt's full blocks when the request ends, usually for `cache_ttl_s` seconds. The
    longest time is MAX_PIN_TTL_S, which is used as well if `cache_ttl_s` is None or 0."""
    session: str = ""
    """Conversation whose blocks stay pinned from turn to turn, for at most the engine's `session_ttl_s`
    seconds; empty: none."""
    session_end: bool = False
    """Whether to unpin the conversation's blocks when this request ends."""
    ttft_deadline: Seconds | None = None
    """Time (CLOCK_MONOTONIC seconds) at which the request ends with finish reason `timeout` if it has no
    token yet; None: no such time of its own."""
    cache_result: bool = True
    """Whether the result may be read from, and stored in, the result cache."""
    num_draft: Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)] | None = None
    """Most draft tokens per step for each choice of this request, capped by the engine's `num_draft_tokens`;
    None: that number."""
    is_internal: bool = msgspec.field(default=False, name="exempt")
    """Whether the request is the engine's own (warm-up, probe): tenants' limits and a full queue do not
    refuse it, and no tenant pays for it. This field's name in messages and traces is `exempt`."""
    deadline: Seconds | None = None
    """Time (CLOCK_MONOTONIC seconds) at which the request ends with finish reason `timeout` if it has not
    ended before; None: no such time of its own."""
