"""Arrival: one request of a simulation, with the content of its tokens.

A sequence's tokens are computed rather than stored. A number identifies the content of a block and of all
blocks before it, and is the block's last token; the other tokens carry no information. So requests with the
same numbers share a prefix, and sequences that diverge inside a block differ once the block is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.request.sampling_params import SamplingParams
from quire.request.scheduling_params import SchedulingParams

END_TOKEN = -1
_SCHEDULING = SchedulingParams()
_OWN = 1 << 62
"""Smallest block number that belongs to one stream alone; numbers in `hash_ids` must be smaller."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a simulation."""

    request_id: str
    at: float
    """Arrival time in seconds since the beginning."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Number of output tokens of a choice that no limit ends earlier. The last of them is END_TOKEN, unless
    this number equals `max_tokens`."""
    stream: int = 0
    """Number of the content after `hash_ids`, below 2**30; requests with the same number have equal content
    there."""
    hash_ids: Sequence[int] = ()
    """Numbers of the content of the leading blocks of `block_size` tokens each, prompt and output."""
    block_size: int = 16
    """Tokens per block of `hash_ids`. It must be at most the engine's block size, because contents of a block
    differ only in its last token."""
    scheduling: SchedulingParams = _SCHEDULING
    """Scheduling parameters; their deadlines are seconds since the beginning."""
    max_tokens: int | None = None
    """Limit of output tokens that the request states; None: it states none."""
    num_sequences: int = 1
    """Number of choices (n)."""

    def token_at(self, position: int, choice: int = 0) -> int:
        """Returns the token at a position. Choices differ in the last tokens of generated blocks."""
        block, offset = divmod(position, self.block_size)
        if offset + 1 < self.block_size:
            return offset
        if choice and position >= self.num_prompt_tokens:
            return _OWN + (self.stream << 30) + (choice << 24) + block
        return self.hash_ids[block] if block < len(self.hash_ids) else _OWN + (self.stream << 30) + block

    def prompt_token_ids(self) -> list[int]:
        size, known = self.block_size, len(self.hash_ids)
        rest = list(range(size - 1))
        own = _OWN + (self.stream << 30)
        tokens: list[int] = []
        for block in range(-(-self.num_prompt_tokens // size)):
            tokens += rest
            tokens.append(self.hash_ids[block] if block < known else own + block)
        del tokens[self.num_prompt_tokens :]
        return tokens

    def sampled_token(self, position: int, choice: int = 0) -> int:
        """Returns the same as `token_at`, but END_TOKEN for the last of `num_output_tokens` tokens, unless
        that number equals `max_tokens`."""
        ends = position + 1 == self.num_prompt_tokens + self.num_output_tokens
        if ends and self.num_output_tokens != self.max_tokens:
            return END_TOKEN
        return self.token_at(position, choice)

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, n=self.num_sequences)
