"""Commands that clients give the engine through the input `cache_control`, and their parser."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from quire.errors import InvalidArgumentError
from quire.request.scheduling_params import MAX_NAME_LENGTH

MAX_COMMAND_BYTES = 64 * 1024
MAX_PROFILE_STEPS = 2000
"""Most steps in a profile; each takes about 1.5 kB of the answer."""
MAX_PROFILE_S = 600.0
MAX_PATH_LENGTH = 4096

_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)]
_AdapterName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_LENGTH)]


class Inspect(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="inspect"):
    """Asks for the state of the cache (`Scheduler.inspect`)."""


class Reset(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="reset"):
    """Empties the prefix cache and the KV tiers, and releases all pins; requests keep their blocks."""


class Unpin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="unpin"):
    """Releases the pin of a session or, with `all`, every pin."""

    session: _Name = ""
    tenant: _Name = ""
    """The session's tenant."""
    all: bool = False

    def __post_init__(self) -> None:
        if bool(self.session) == self.all or (self.all and self.tenant):
            raise ValueError('needs either "session" or "all"')


class Health(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="health"):
    """Asks for the number of finished steps, which keeps growing in a healthy engine that is awake: an idle
    one computes a token of its own after each such command.

    The answer contains nothing of the cache, so this is allowed even if cache commands are not.
    """


class Requests(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="requests"):
    """Lists the running and waiting requests (`core/request_list.py`) of `tenant`, or of all tenants.

    Without `tenant` and `all`, a client may give the command even if cache commands are not allowed, because
    it may cancel its own tenant's requests.
    """

    tenant: _Name = ""
    """Tenant whose requests are listed. Empty: the tenant of the request that carries the command, or with
    `all` every tenant."""
    all: bool = False

    def __post_init__(self) -> None:
        if self.all and self.tenant:
            raise ValueError('needs no "tenant" with "all"')


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="profile"):
    """Records the phases of the next steps (`engine/profile.py`); the answer comes when the recording is
    over.

    One recording at a time. It ends at `steps` or `seconds`, whichever comes first.
    """

    steps: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROFILE_STEPS)] = 100
    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_PROFILE_S)] = 10.0


class Sleep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="sleep"):
    """Frees the memory of weights and KV cache (`EngineCore.sleep`). Refused without `drain` while there are
    requests."""

    drain: bool = False
    """Whether present requests may finish first. New ones are refused meanwhile, except those that continue
    after an engine's death."""


class Wake(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="wake"):
    """Wakes a sleeping engine; the answer comes when it is awake or cannot be woken."""


class LoadAdapter(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="load_adapter"
):
    """Loads a LoRA adapter; the answer comes when requests may name it.

    An adapter of the same name and content is kept, and gets the new path. One of other content is replaced;
    the command fails (UnavailableError) while requests use it. It also fails while an adapter of this name is
    being unloaded.
    """

    name: _AdapterName
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH_LENGTH)]
    """Path of the adapter's directory, below `lora_root`; a relative path starts at `lora_root`."""


class UnloadAdapter(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="unload_adapter"
):
    """Unloads a LoRA adapter. Refused without `drain` while requests use it."""

    name: _AdapterName
    drain: bool = False
    """Whether present requests with the adapter may finish first. New ones with it are refused meanwhile."""


class Adapters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="command", tag="adapters"):
    """Lists the LoRA adapters (`adapters`: a list of AdapterStatus); also returns `max_loras` and
    `max_model_len`.

    The answer tells of requests only how many use each adapter, so this is allowed even if cache commands are
    not.
    """


CacheCommand: TypeAlias = (
    Inspect
    | Reset
    | Unpin
    | Health
    | Requests
    | Profile
    | Sleep
    | Wake
    | LoadAdapter
    | UnloadAdapter
    | Adapters
)

_decoder = msgspec.json.Decoder(CacheCommand)


def parse_cache_command(data: bytes) -> CacheCommand:
    """Parses a client's command from JSON.

    Raises:
        InvalidArgumentError: the text is too long, not JSON, or no valid command. The message names
            `cache_control` and repeats nothing of what the client sent.
    """
    if len(data) > MAX_COMMAND_BYTES:
        raise InvalidArgumentError(
            "cache_control", f"at most {MAX_COMMAND_BYTES} bytes are allowed, got {len(data)}"
        )
    try:
        return _decoder.decode(data)
    except (msgspec.ValidationError, RecursionError):
        raise InvalidArgumentError(
            "cache_control",
            'must be a JSON object whose "command" is "inspect", "reset", "health", "wake", "sleep" (also '
            'with "drain": true), "requests" (also with "tenant" or "all": true), "profile" (also with '
            f'"steps" of at most {MAX_PROFILE_STEPS} and "seconds" of at most {MAX_PROFILE_S:g}), "unpin" '
            f'with "session" and "tenant" (text of at most {MAX_NAME_LENGTH} characters) or with "all": '
            'true, "adapters", "load_adapter" with "name" and "path", or "unload_adapter" with "name" (also '
            'with "drain": true)',
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidArgumentError("cache_control", "invalid JSON") from None
