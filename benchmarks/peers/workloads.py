"""W1 to W5 and G25: what every engine is asked to do. Standard library only.

Token ids are random but seeded by workload and round: all engines get the same ones in a round, and no engine
finds the prompts of an earlier round in its prefix cache. Lengths do not depend on the round, so every round
is the same work. All requests are there at once; an engine holds at most `running` of them at a time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

FIRST_TOKEN_ID = 16
"""Smallest token id of prompts: special tokens of the checkpoints are below it."""


@dataclass(frozen=True)
class Request:
    """Token ids in, and exactly how many are to be generated: greedy, EOS ignored."""

    prompt: list[int]
    num_output: int


@dataclass(frozen=True)
class Workload:
    """Lengths of the requests, in the order in which they wait."""

    name: str
    title: str
    lengths: tuple[tuple[int, int], ...]
    """Prompt and output tokens of each request. The shared prefix is part of the prompt."""
    running: int
    """Most requests that an engine holds at a time."""
    num_shared: int = 0
    """Tokens at the beginning of every prompt that are the same in all of them."""

    @property
    def num_output_tokens(self) -> int:
        return sum(num_output for _, num_output in self.lengths)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(num_prompt for num_prompt, _ in self.lengths)

    @property
    def num_distinct_prompt_tokens(self) -> int:
        """Prompt tokens that must be computed when the shared prefix is computed once."""
        return self.num_prompt_tokens - self.num_shared * (len(self.lengths) - 1)

    def requests(self, round_number: int, vocab_size: int) -> list[Request]:
        """The requests of a round; equal arguments give equal requests in every process and version."""
        source = random.Random(f"{self.name}/{round_number}")

        def draw(count: int) -> list[int]:
            return [source.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(count)]

        shared = draw(self.num_shared)
        return [
            Request(shared + draw(num_prompt - self.num_shared), num_output)
            for num_prompt, num_output in self.lengths
        ]

    def scaled(self, factor: float) -> Workload:
        """The same number of requests, all lengths multiplied, at least 2 in and 2 out: for trying out."""
        if factor == 1.0:
            return self
        shared = round(self.num_shared * factor)
        return replace(
            self,
            title=f"{self.title}, lengths x {factor:g}",
            lengths=tuple(
                (max(shared + 1, 2, round(prompt * factor)), max(2, round(output * factor)))
                for prompt, output in self.lengths
            ),
            num_shared=shared,
        )


def _mixed_lengths() -> tuple[tuple[int, int], ...]:
    source = random.Random("W4 lengths")
    return tuple((source.randint(16, 512), source.randint(8, 192)) for _ in range(48))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "batch decode: 16 x (64 in, 128 out)", ((64, 128),) * 16, 16),
        Workload("W2", "single stream: 1 x (128, 64)", ((128, 64),), 1),
        Workload("W3", "prefill: 8 x (512, 8)", ((512, 8),) * 8, 8),
        Workload("W4-16", "continuous batching: 48 x (16..512, 8..192), 16 running", _mixed_lengths(), 16),
        Workload("W4-32", "continuous batching: 48 x (16..512, 8..192), 32 running", _mixed_lengths(), 32),
        Workload("W5", "shared prefix: 16 x (448 shared + 64, 16)", ((512, 16),) * 16, 16, 448),
        Workload("G25", "8 streams: 8 x (64, 64)", ((64, 64),) * 8, 8),
    )
}
WARM_UP = Workload("warm-up", "not measured", ((64, 6),) * 14 + ((512, 3),) * 2, 16)
"""Warm-up before an engine's first measured run: batches of several sizes and one long prompt."""
MAX_RUNNING = 32
MAX_MODEL_LEN = 1024
KV_TOKENS = 24 * 1024
"""Every engine's KV cache: holds 32 running requests of W4 at their longest (704 tokens each)."""
