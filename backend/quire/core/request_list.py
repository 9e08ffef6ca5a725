"""Lists the running and waiting requests for operators: the progress of each and what it waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.core.request import Request, RequestStatus
from quire.request.scheduling_params import MAX_NAME_LENGTH

if TYPE_CHECKING:
    from quire.core.roster import Roster

MAX_LISTED = 256
"""Most requests in the list; further ones are only counted."""


def list_requests(roster: Roster, tenant: str | None) -> dict[str, Any]:
    """Lists clients' unfinished requests: running ones before waiting ones, both in the order of ranks.

    Args:
        tenant: lists only this tenant's requests; None: all.

    Returns:
        `num_running`, `num_waiting` (requests, whose choices count as one), `requests` (at most MAX_LISTED)
        and `num_more`. A request has `id` (the client's, at most MAX_NAME_LENGTH characters), `tenant`,
        `adapter`, `state`, `waits_for`, `position`, numbers of choices, tokens and preemptions, and `age_ms`.

        `state`: "waiting", "loading" (blocks from a KV tier), "prefilling" (no output token yet) or
        "decoding". `waits_for`: "load" while loading, empty for other running requests, else "choices" (other
        sequences of its own), "tenant" (its limit), "adapter" (a slot or its weights), "queue" (sequences of
        smaller rank), "seats" (a place in the batch), "blocks" (room in the KV cache) or "step" (the next
        one). `position` counts the waiting sequences of smaller rank, 0 for a running request; they may still
        be served later.
    """
    waiting = sorted(roster.queue, key=lambda request: request.rank)
    positions = {request.request_id: position for position, request in enumerate(waiting)}
    groups: dict[str, list[Request]] = {}
    for request in [*roster.running, *waiting]:
        if request.scheduling.is_internal:
            continue  # the engine's own
        if tenant is None or request.scheduling.tenant == tenant:
            groups.setdefault(request.group_id, []).append(request)
    num_running = sum(members[0].status is RequestStatus.RUNNING for members in groups.values())
    now = roster.clock()
    listed = [_entry(members, roster, positions, now) for members in list(groups.values())[:MAX_LISTED]]
    return {
        "num_running": num_running,
        "num_waiting": len(groups) - num_running,
        "requests": listed,
        "num_more": len(groups) - len(listed),
    }


def _entry(members: list[Request], roster: Roster, positions: dict[str, int], now: float) -> dict[str, Any]:
    """Returns the entry of one request, which counts as running if any of its sequences runs.

    Args:
        members: the request's unfinished sequences, running ones first.
    """
    first = members[0]
    state, waits_for = _state(first, roster, positions)
    return {
        "id": first.external_id[:MAX_NAME_LENGTH],
        "tenant": first.scheduling.tenant,
        "adapter": "" if first.adapter is None else first.adapter.name,
        "state": state,
        "waits_for": waits_for,
        "position": positions.get(first.request_id, 0),
        "num_choices": sum(member.num_sequences for member in members),
        "num_prompt_tokens": first.num_prompt_tokens,
        "num_computed_tokens": first.num_computed_tokens,
        "num_output_tokens": sum(member.num_output_tokens for member in members),
        "num_preemptions": sum(member.num_preemptions for member in members),
        "age_ms": round((now - first.arrival_time) * 1000),
    }


def _state(request: Request, roster: Roster, positions: dict[str, int]) -> tuple[str, str]:
    if request.load_id is not None:
        return "loading", "load"
    if request.status is RequestStatus.RUNNING:
        return "decoding" if request.num_output_tokens else "prefilling", ""
    if request.is_paused:
        return "waiting", "choices"
    if not roster.tenants.may_run(request):
        return "waiting", "tenant"
    if roster.waits_for_adapter(request):
        return "waiting", "adapter"
    if positions[request.request_id]:
        return "waiting", "queue"
    if request.num_sequences > roster.num_free_seats:
        return "waiting", "seats"
    if roster.kv.num_missing_blocks(request, request.num_tokens) > roster.kv.num_free_blocks:
        return "waiting", "blocks"
    return "waiting", "step"
