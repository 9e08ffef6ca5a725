"""SchedulingParams: what a request may say about when it runs and what stays in the cache after it."""

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
"""Longest time that a pin lasts after the request that asks for it; the next request may ask again."""


Seconds = Annotated[float, Meta(ge=-1e18, le=1e18)]
"""Not infinite, and a number."""


class SchedulingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Validated by the frontend; nothing in it changes which tokens are generated."""

    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Class; a smaller number is more urgent (as in vLLM)."""
    tenant: str = ""
    """The account that the request runs on; empty: the common one."""
    cache_salt: str = ""
    """Requests share cached blocks only with those of the same salt."""
    retention: Annotated[int, Meta(ge=0, le=MAX_RETENTION)] = DEFAULT_RETENTION
    """Retention priority: blocks of a higher one are evicted later (as in TensorRT-LLM)."""
    cache_ttl_s: Seconds | None = None
    """Seconds unused after which its cached blocks are forgotten; None: the engine's `cache_ttl_s`."""
    pin: bool = False
    """Keeps the blocks of the prompt from eviction for `cache_ttl_s`, at most MAX_PIN_TTL_S, or until
    `unpin`."""
    session: str = ""
    """Conversation whose blocks are pinned from turn to turn, for `session_ttl_s`."""
    session_end: bool = False
    """Releases the conversation's blocks when this request ends."""
    ttft_deadline: Seconds | None = None
    """CLOCK_MONOTONIC seconds: without a token by then, the request ends with finish_reason timeout."""
    cache_result: bool = True
    """Whether its result may come from the result cache, and be kept there."""
    num_draft: Annotated[int, Meta(ge=0, le=MAX_DRAFT_TOKENS)] | None = None
    """Most tokens that a step tries of it beyond the next one, at most the engine's `num_draft_tokens`; None:
    as many as that."""
    is_internal: bool = msgspec.field(default=False, name="exempt")
    """The engine's own (warm-up, probe): no limit refuses, delays or ends it, and no tenant pays for
    it. Its name in messages and traces is `exempt`."""
    deadline: Seconds | None = None
    """CLOCK_MONOTONIC seconds: unfinished by then, the request ends with finish_reason timeout."""
