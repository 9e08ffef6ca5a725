"""Messages between frontends and the engine process (msgpack through msgspec, over ZeroMQ).

A frontend uses a DEALER socket, the engine one ROUTER; each message is one frame. Times are CLOCK_MONOTONIC
seconds, which all processes of a machine share.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.adapters import AdapterStatus
from quire.engine.cache_commands import CacheCommand
from quire.engine.device_array import DeviceArray
from quire.engine.shared_array import SharedArray
from quire.layers.pooling import Pooling
from quire.outputs import EngineCoreOutput, SchedulerStats
from quire.request.sampling_params import SamplingParams
from quire.request.scheduling_params import SchedulingParams, Seconds


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a frontend over a connection. `pid` is the frontend's process: when it ends, the
    engine drops the frontend's requests."""

    pid: int


class EmbedsMessage(msgspec.Struct, frozen=True):
    """PromptEmbeds in a message; `position_ids`: int32 [3, prompt tokens] in C order, or empty."""

    embeds: SharedArray | DeviceArray
    spans: list[tuple[int, int]]
    hashes: list[str]
    position_ids: bytes = b""
    is_joint: bool = False


class AddRequest(msgspec.Struct, frozen=True, tag="add", omit_defaults=True):
    """A request with one prompt that has passed the frontend's checks. `request_id` is the frontend's, and no
    other open request has it. `external_id` is the client's; empty: the client gave none."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    scheduling: SchedulingParams = SchedulingParams()
    external_id: str = ""
    arrival_time: Seconds = 0.0
    embeds: EmbedsMessage | None = None
    num_deaths: int = 0
    """Number of deaths of its engines, as `Generation.num_deaths` counts them. Above 0, limits of the queue
    and quotas do not refuse the request."""
    outputs: dict[int, list[int]] | None = None
    """Tokens so far of each open choice, by its index; None: the request begins, or begins anew."""
    adapter: str = ""
    """Name of the LoRA adapter; empty: none."""
    adapter_digest: str = ""
    """Hexadecimal digest of the adapter's content, as the frontend knows it; empty: not known. If it is
    known, a request with `num_deaths` above 0 accepts only this content."""


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Ends requests of this frontend, or single choices of them ("<request id>#<index>").

    `learned_at` is when the frontend decided to abort, for the trace.
    """

    request_ids: list[str]
    reason: str
    learned_at: float = 0.0


class CancelByExternalId(msgspec.Struct, frozen=True, tag="cancel_external"):
    """Cancels the engine's unfinished requests of `tenant` with the client's id, whichever frontends sent
    them.

    The answer holds their number (`num_cancelled`), in which each prompt counts; NOT_FOUND if there are none.
    """

    external_id: str
    token: str
    """Token chosen by the sender; the answer repeats it."""
    learned_at: float = 0.0
    tenant: str = ""


class Control(msgspec.Struct, frozen=True, tag="control"):
    """A command of `cache_control` to the engine."""

    command: CacheCommand
    token: str
    """Token chosen by the sender; the answer repeats it."""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The frontend is being unloaded. The engine ends with its last frontend."""


FrontendMessage = Hello | AddRequest | AbortRequests | CancelByExternalId | Control | Goodbye


class EngineInfo(msgspec.Struct, frozen=True, tag="info"):
    """Answer to Hello: properties of the engine that a frontend needs."""

    pid: int
    max_model_len: int
    vocab_size: int
    hidden_size: int
    takes_position_ids: bool
    """Whether prompt positions may have three axes (M-RoPE)."""
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    dtype: str
    device: str
    num_threads: int = 0
    """Number of CPU threads that compute steps, for each tensor-parallel rank; 0: another device computes
    them."""
    num_cpus: int = 1
    """Number of cores that the engine may use."""
    fingerprint: str = ""
    """Fingerprint of everything besides the request and its adapter (whose `digest` is in `adapters`) that
    decides the tokens of a deterministic request; empty: results are not cached."""
    adapters: list[AdapterStatus] = []
    """The LoRA adapters when the answer was sent. `EngineLink` replaces them by those of later `Stats`."""
    deepstack_levels: int = 0
    """Number of layers, from the first on, after which image features are added to the hidden states
    again."""
    accepts_image_embeds: bool = True
    """Whether requests may give `image_embeds`."""
    has_joint_images: bool = False
    """Whether the tokens of an image see each other in both directions."""

    pooling: Pooling = Pooling()
    """How prompts are pooled to embeddings or scores."""

    @property
    def embeds_size(self) -> int:
        """Length of a row of `image_embeds`, in floats."""
        return self.hidden_size * (1 + self.deepstack_levels)


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Outputs for requests of one frontend, such as those of a step, or of aborted or refused requests."""

    outputs: list[EngineCoreOutput]


class CommandResult(msgspec.Struct, frozen=True, tag="command_result"):
    """Result of a `Control` or a `CancelByExternalId`, or the error that prevented it."""

    token: str
    result: dict[str, Any]
    error: str = ""
    error_code: str = ""


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Engine state: sent at most about twice a second, and besides before the answer to a command that
    changes the adapters."""

    scheduler: SchedulerStats
    adapters: list[AdapterStatus] = []
    """The LoRA adapters, in the order of their names; one that is being unloaded is among them."""


EngineMessage = EngineInfo | Outputs | CommandResult | Stats


COMMANDS = ("cancel_external", "control")
"""Types of messages that are answered with a CommandResult."""


class MessageHeader(msgspec.Struct):
    """Type and ids of a message; empty: the message has none. It can be decoded from many messages that are
    invalid otherwise, so that these can be answered."""

    type: str = ""
    request_id: str = ""
    token: str = ""


encoder = msgspec.msgpack.Encoder()
frontend_message_decoder = msgspec.msgpack.Decoder(FrontendMessage)
header_decoder = msgspec.msgpack.Decoder(MessageHeader)
engine_message_decoder = msgspec.msgpack.Decoder(EngineMessage)
