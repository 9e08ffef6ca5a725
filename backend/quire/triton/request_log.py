"""RequestLog: logs a line for each request that has ended, if the operator asks for it."""

from __future__ import annotations

import logging
from typing import Any

from quire.triton.observers import RequestEnded

logger = logging.getLogger("quire.requests")


class RequestLog:
    """Logs counts and times of ended requests at INFO, and of commands that did not fail at DEBUG. It logs no
    text of prompts or answers."""

    def ended(self, record: RequestEnded) -> None:
        is_quiet = record.is_command and not record.error_code
        level = logging.DEBUG if is_quiet else logging.INFO
        if not logger.isEnabledFor(level):
            return
        fields = request_fields(record)
        shown = " ".join(f"{name}={value}" for name, value in fields.items() if value not in (None, ""))
        logger.log(
            level,
            "request ended: %s",
            shown,
            extra={
                "request_id": record.request_id,
                "external_id": record.external_id,
                "fields": {"message": "request ended", **fields},
            },
        )


def request_fields(record: RequestEnded) -> dict[str, Any]:
    """Returns the fields of a request's log line. Times are in milliseconds since its arrival, but
    `paused_ms` is a duration."""

    def since_arrival(when: float) -> float | None:
        return round((when - record.arrived_at) * 1e3, 3) if when else None

    return {
        "model": record.model,
        "tenant": record.tenant,
        "adapter": record.adapter,
        "reason": record.finish_reason,
        "code": record.error_code,
        "stream": record.is_stream,
        "n": record.n,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "reasoning_tokens": record.num_reasoning_tokens,
        "preemptions": record.num_preemptions,
        "draft_tokens": record.num_draft_tokens,
        "accepted_draft_tokens": record.num_accepted_drafts,
        "paused_ms": round(record.paused_s * 1e3, 3),
        "admitted_ms": since_arrival(record.admitted_at),
        "first_token_ms": since_arrival(record.first_token_at),
        "first_sent_ms": since_arrival(record.first_sent_at),
        "total_ms": since_arrival(record.ended_at),
    }
