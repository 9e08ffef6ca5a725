"""Request: the engine's state of one generation, owned by the engine's one thread."""

from __future__ import annotations

import enum
import time

from quire.multimodal import PromptEmbeds
from quire.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    """Where a request is; `FINISHED` is terminal."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class FinishReason(str, enum.Enum):
    """Why a request ended. Exactly one reaches the client, on its last response."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"
    SHUTDOWN = "shutdown"

    def __str__(self) -> str:
        return self.value


class Request:
    """One sequence being generated.

    There are no phases: `num_computed_tokens` (tokens whose KV is in the cache) catches up with
    `num_tokens` (prompt and output known so far) under the scheduler's budget. A preempted request has
    `num_computed_tokens == 0` again and keeps its output.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "client_id",
        "embeds",
        "eos_token_ids",
        "external_id",
        "finish_reason",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "sampling_params",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        arrival_time: float | None = None,
        priority: int = 0,
        client_id: int = 0,
        external_id: str = "",
        embeds: PromptEmbeds | None = None,
    ) -> None:
        assert prompt_token_ids, "an empty prompt is refused before it becomes a Request"
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling_params = sampling_params
        self.eos_token_ids = eos_token_ids
        self.arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self.priority = priority
        self.client_id = client_id
        self.external_id = external_id
        self.embeds = embeds
        self.block_hashes: list[bytes] = []
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append_output(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def check_stop(self, max_model_len: int) -> bool:
        """Sets `finish_reason` if the newest token ends the request; stop strings are the frontend's."""
        params = self.sampling_params
        token_id = self.token_ids[-1]
        if self.num_output_tokens >= params.min_tokens:
            if not params.ignore_eos and token_id in self.eos_token_ids:
                self.finish_reason, self.stop_reason = FinishReason.STOP, None
                return True
            if token_id in params.stop_token_ids:
                self.finish_reason, self.stop_reason = FinishReason.STOP, token_id
                return True
        limit = max_model_len - self.num_prompt_tokens
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        if self.num_output_tokens >= limit:
            self.finish_reason = FinishReason.LENGTH
            return True
        return False

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )
