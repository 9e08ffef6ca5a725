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
"""Most seconds that a prompt stays pinned (`pin`) after its request ends; the next request may renew the
pin."""


Seconds = Annotated[float, Meta(ge=-1e18, le=1e18)]
"""A finite number of seconds."""


class SchedulingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Scheduling and caching of one request, validated by the frontend; it never changes which tokens are
    generated."""

    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Priority class; a smaller number is more urgent (as in vLLM)."""
    tenant: str = ""
    """Tenant whose quota and limits apply; empty: the tenant that all unnamed requests share."""
    cache_salt: str = ""
    """Salt of the block hashes: requests share cached blocks only if their salts are equal."""
    retention: Annotated[int, Meta(ge=0, le=MAX_RETENTION)] = DEFAULT_RETENTION
    """Retention priority: blocks with a higher one are evicted later (as in TensorRT-LLM)."""
    cache_ttl_s: Seconds | None = None
    """Seconds unused after which its cached blocks are forgotten; None: the engine's `cache_ttl_s`."""
    pin: bool = False
    """Whether the prompt's blocks are pinned after the request, for `cache_ttl_s` seconds but at most
    MAX_PIN_TTL_S. If the request states no `cache_ttl_s`, or 0, they are pinned for MAX_PIN_TTL_S."""
    session: str = ""
    """Conversation whose blocks stay pinned from turn to turn, for the engine's `session_ttl_s` seconds;
    empty: none."""
    session_end: bool = False
    """Whether the conversation's blocks are unpinned when this request ends."""
    ttft_deadline: Seconds | None = None
    """CLOCK_MONOTONIC seconds by which a first token must exist, else the request ends with finish_reason
    timeout; None: no deadline of its own."""
    cache_result: bool = True
    """Whether the result may be read from, and stored in, the result cache."""
    num_draft: Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)] | None = None
    """Most draft tokens per step for this request, capped by the engine's `num_draft_tokens`; None: that
    number."""
    is_internal: bool = msgspec.field(default=False, name="exempt")
    """Whether the request is the engine's own (warm-up, probe): no limit refuses, delays or ends it, and no
    tenant pays for it. Its name in messages and traces is `exempt`."""
    deadline: Seconds | None = None
    """CLOCK_MONOTONIC seconds by which the request must be finished, else it ends with finish_reason timeout;
    None: no deadline of its own."""
