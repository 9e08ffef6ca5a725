"""ParsedRequest: a checked request, with what the responder needs to have it computed and to answer it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.engine.cache_commands import CacheCommand
from quire.engine.device_array import DeviceBuffer
from quire.engine.messages import EmbedsMessage
from quire.engine.shared_array import SharedBuffer
from quire.frontend.chat.formats import Answer
from quire.frontend.stop_matcher import StopAutomaton
from quire.request.sampling_params import SamplingParams
from quire.request.scheduling_params import SchedulingParams
from quire.triton.results import Recording, Results

CHAT_OUTPUTS = frozenset({"reasoning_output", "tool_calls"})
"""Outputs that an answer to chat messages may have besides its text."""


@dataclass(slots=True)
class ParsedRequest:
    """A checked request or command. A request has its first prompt, its settings and its further prompts."""

    prompt_token_ids: list[int]
    params: SamplingParams
    external_id: str
    outputs: frozenset[str]
    """Names of the output tensors in a choice's responses before its last. `prompt_logprobs` may be added;
    for `skips_empty` see there."""
    final_outputs: frozenset[str]
    """Names of the output tensors in a choice's last response, with the same exceptions."""
    stream: bool = False
    stream_interval: int = 0
    """Number of tokens at which the next response of a stream is due; 0: not by number."""
    stream_interval_ms: int = 0
    """Milliseconds from a response of a stream until its next one is due; 0: not by time. If
    `stream_interval` is 0 as well, the load decides (`triton/sending/pacing.py`)."""
    cancel: bool = False
    """Whether this is a cancellation, which ends the tenant's requests with the same external id and
    generates nothing."""
    cache_control: CacheCommand | None = None
    """A command of the input `cache_control`, instead of a generation; None: there is none."""
    stops: StopAutomaton | None = None
    """Automaton for the strings in `params.stop`; None: there are none. The intake makes it, as that costs
    milliseconds that the responder's other requests should not wait for."""
    scheduling: SchedulingParams = field(default_factory=SchedulingParams)
    arrived_at: float = 0.0
    """When the request was read, in CLOCK_MONOTONIC seconds; 0 for a command."""
    form: str = "quire"
    """Form of the output tensors: "batched" if the model has a batch dimension, else the model's dialect."""
    hides_logprobs: bool = False
    """Whether the request states no `logprobs`. The output `logprobs` in vllm_backend's form is null then."""
    cumulative: bool = False
    """Whether each response of a choice repeats the text and tokens of the choice's earlier responses."""
    is_chat: bool = False
    """Whether the answer is one to chat messages; false where an embedding or scores are wanted."""
    num_best: int = 0
    """Number of best choices to answer with, for each prompt; 0: all."""
    new_answer: Callable[[], Answer] | None = None
    """Makes the parser of a choice's answer to chat messages; None: the text is not parsed."""
    skips_empty: bool = False
    """Whether outputs of CHAT_OUTPUTS are left out of responses for which they are empty."""
    labels: tuple[str, ...] = ()
    """Labels of the model's scores, in order; empty: tokens are wanted, or the model has no labels."""
    others: list[ParsedRequest] = field(default_factory=list)
    """The second and further prompts of a request with several, each as a request of its own."""
    echo: str = ""
    """Prompt text with which the output's text begins; empty: none."""
    is_prompt_alone: bool = False
    """Whether the client wants no tokens (max_tokens 0). If the engine generates one all the same, it is not
    sent."""
    embeds: EmbedsMessage | None = None
    """Location and spans of the embeddings of images or of the prompt; None: there are none. The rows are in
    the memory of `buffer`."""
    buffer: SharedBuffer | DeviceBuffer | None = None
    adapter: str = ""
    """Name of the LoRA adapter; empty: none."""
    adapter_digest: str = ""
    """Digest of the adapter's content, hexadecimal; empty: not known here, or no adapter."""
    results: Results | None = None
    """Results to replay instead of asking the engine, for all prompts together; None: there are none."""
    recording: Recording | None = None
    """Recording of the engine's outputs for the result cache; None: they are not recorded."""

    def of_item(self, item: int) -> ParsedRequest:
        return self.others[item - 1] if item else self


UNPARSED = ParsedRequest([], SamplingParams(), "", frozenset(), frozenset())
"""Stands for a request that is not parsed yet, or is refused before."""
