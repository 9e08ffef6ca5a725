"""Messages between frontends and the engine process (msgpack through msgspec, over ZeroMQ).

A frontend talks through a DEALER socket, the engine through one ROUTER; a message is one frame. Times are
CLOCK_MONOTONIC seconds, which all processes of a machine share.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.adapters import AdapterStatus
from quire.engine.cache_commands import CacheCommand
from quire.engine.device_array import DeviceArray
from quire.engine.shared_array import SharedArray
from quire.outputs import EngineCoreOutput, SchedulerStats
from quire.request.sampling_params import SamplingParams
from quire.request.scheduling_params import SchedulingParams, Seconds


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a frontend: the engine watches `pid` and drops its requests when it goes."""

    pid: int


class EmbedsMessage(msgspec.Struct, frozen=True):
    """PromptEmbeds on their way; `position_ids`: int32 [3, prompt tokens] in C order, or empty."""

    embeds: SharedArray | DeviceArray
    spans: list[tuple[int, int]]
    hashes: list[str]
    position_ids: bytes = b""


class AddRequest(msgspec.Struct, frozen=True, tag="add", omit_defaults=True):
    """A validated request: `request_id` is the frontend's and unique, `external_id` the client's, if any."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    scheduling: SchedulingParams = SchedulingParams()
    external_id: str = ""
    arrival_time: Seconds = 0.0
    embeds: EmbedsMessage | None = None
    num_deaths: int = 0
    """Engines that died and had it; above 0 it goes on where it was, and no limit refuses it."""
    outputs: dict[int, list[int]] | None = None
    """Tokens so far of each choice that is open; None: none has any, and the request begins anew."""
    adapter: str = ""
    """Name of the LoRA adapter that it is computed with; empty: none."""
    adapter_digest: str = ""
    """Digest of the adapter's content as the frontend knew it; empty: not known. A request that goes on after
    an engine's death (`num_deaths`) goes on with this content alone."""


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Ends requests of this frontend, or single choices of them ("<request id>#<index>").

    `learned_at` is when it knew, for the trace.
    """

    request_ids: list[str]
    reason: str
    learned_at: float = 0.0


class CancelByExternalId(msgspec.Struct, frozen=True, tag="cancel_external"):
    """Ends every request of `tenant` that carries the client's id, whichever frontend it came through.

    The answer says how many these are (`num_cancelled`); NOT_FOUND where there is none.
    """

    external_id: str
    token: str
    """Token of the sender, echoed in the answer."""
    learned_at: float = 0.0
    tenant: str = ""


class Control(msgspec.Struct, frozen=True, tag="control"):
    """A command to the engine, as `EngineCore.control` takes it."""

    command: CacheCommand
    token: str
    """Token of the sender, echoed in the answer."""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The frontend is being unloaded; the engine ends with its last frontend."""


FrontendMessage = Hello | AddRequest | AbortRequests | CancelByExternalId | Control | Goodbye


class EngineInfo(msgspec.Struct, frozen=True, tag="info"):
    """Answer to Hello: what a frontend needs to know of the engine."""

    pid: int
    max_model_len: int
    vocab_size: int
    hidden_size: int
    takes_position_ids: bool
    """Whether positions have three axes (M-RoPE)."""
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    dtype: str
    device: str
    num_threads: int = 0
    """Threads that compute steps on the CPU; 0: another device does."""
    num_cpus: int = 1
    """Cores that the engine may use."""
    fingerprint: str = ""
    """Stands for all that decides the tokens of a deterministic request but its adapter (whose `digest` is in
    `adapters`); empty: they are not cached."""
    adapters: list[AdapterStatus] = []
    """The LoRA adapters at the time; later ones come with `Stats`."""
    deepstack_levels: int = 0
    """Layers, from the first on, behind which the rows of images add to the hidden states once more."""

    @property
    def embeds_size(self) -> int:
        """Length of a row of `image_embeds`."""
        return self.hidden_size * (1 + self.deepstack_levels)


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Outputs of the engine for the requests of one frontend: of a step, or of requests that were aborted or
    refused."""

    outputs: list[EngineCoreOutput]


class CommandResult(msgspec.Struct, frozen=True, tag="command_result"):
    """The answer to a `Control` or a `CancelByExternalId`, or why it could not be carried out."""

    token: str
    result: dict[str, Any]
    error: str = ""
    error_code: str = ""


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Engine state, about twice a second while something changes, and before the answer to a command that
    changes the adapters."""

    scheduler: SchedulerStats
    adapters: list[AdapterStatus] = []
    """The LoRA adapters that requests may name, in the order of their names."""


EngineMessage = EngineInfo | Outputs | CommandResult | Stats


COMMANDS = ("cancel_external", "control")
"""Types of the messages that a CommandResult answers."""


class MessageHeader(msgspec.Struct):
    """Type and ids of a message, as far as readable: enough to answer one that is wrong otherwise."""

    type: str = ""
    request_id: str = ""
    token: str = ""


encoder = msgspec.msgpack.Encoder()
frontend_message_decoder = msgspec.msgpack.Decoder(FrontendMessage)
header_decoder = msgspec.msgpack.Decoder(MessageHeader)
engine_message_decoder = msgspec.msgpack.Decoder(EngineMessage)
