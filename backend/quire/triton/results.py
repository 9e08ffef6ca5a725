"""Results: an engine's outputs for a request, as the result cache records and keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from quire.core.request import FinishReason
from quire.frontend.output_processor import OutputProcessor
from quire.outputs import EngineCoreOutput, TokenLogprobs

LASTING = (FinishReason.STOP.value, FinishReason.LENGTH.value)
"""Engines' finish reasons with which results may be cached: the same request would end so again."""


class ChoiceResult(msgspec.Struct, array_like=True):
    """Output for one choice of a request, over all its steps."""

    item: int
    index: int
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cumulative_logprob: float | None = None
    num_cached_tokens: int = 0
    embedding: bytes = b""

    def is_sound(self, vocab_size: int) -> bool:
        """Whether finish reason, token ids, log-probabilities and number of cached tokens are valid.

        Cache entries are not trusted.
        """
        entries = [*(self.logprobs or ()), *(one for one in self.prompt_logprobs or () if one is not None)]
        return (
            self.finish_reason in LASTING
            and self.num_cached_tokens >= 0
            and all(0 <= token < vocab_size for token in self.token_ids)
            and (self.logprobs is None or len(self.logprobs) == len(self.token_ids))
            and all(len(one.token_ids) == len(one.logprobs) > 0 for one in entries)
            and all(0 <= token < vocab_size for one in entries for token in one.token_ids)
        )


class Results(msgspec.Struct, array_like=True):
    """The results of one request, as an entry of the result cache."""

    version: int
    choices: list[ChoiceResult]


@dataclass
class Recording:
    """Outputs of the engine for a request that was not found in the cache, collected by choice."""

    key: bytes
    fingerprint: str
    """Fingerprint (`EngineInfo`) of the engine at the look-up."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Digest of the content of each adapter of the request at the look-up, by the adapter's name."""
    choices: dict[tuple[int, int], ChoiceResult] = field(default_factory=dict)

    def add_output(self, choice: OutputProcessor, output: EngineCoreOutput) -> None:
        """Records an engine output, unless `choice` has ended. Call it before `choice` processes the
        output."""
        if choice.finished:
            return  # what was on its way when a stop string ended it
        place = choice.item, choice.index
        result = self.choices.get(place)
        if result is None:
            result = self.choices[place] = ChoiceResult(*place, [], "")
            result.prompt_logprobs = output.prompt_logprobs
        result.token_ids += output.new_token_ids
        if output.logprobs is not None:
            result.logprobs = result.logprobs or []
            result.logprobs += output.logprobs
        result.num_cached_tokens = max(result.num_cached_tokens, output.num_cached_tokens)
        if output.cumulative_logprob is not None:
            result.cumulative_logprob = output.cumulative_logprob
        result.stop_reason, result.embedding = output.stop_reason, output.embedding
