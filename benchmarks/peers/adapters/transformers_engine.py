"""transformers: `generate` on static batches, padded on the left, one batch after the other.

A batch runs until its longest output is complete, as generate does; a request's own end is when it had its
tokens. Nothing is shared between prompts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.peers.protocol import Clock, Run, RunResult, serve
from benchmarks.peers.workloads import Request


class _Watch(StoppingCriteria):
    """Tells the clock about every token, and ends the batch when each row has its own number of them."""

    def __init__(self, clock: Clock, first: int, requests: Sequence[Request]) -> None:
        self._clock = clock
        self._first = first
        self._requests = requests
        self._num_steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        newest = input_ids[:, -1].tolist()
        self._num_steps += 1
        done = []
        for row, request in enumerate(self._requests):
            if self._num_steps <= request.num_output:
                self._clock.tokens(self._first + row, newest[row : row + 1])
            done.append(self._num_steps >= request.num_output)
        return torch.tensor(done)


def load(weights: Path, options: dict[str, Any]) -> Run:
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16, **options).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def run(requests: Sequence[Request], running: int) -> RunResult:
        clock = Clock(requests)
        for first in range(0, len(requests), running):
            batch = requests[first : first + running]
            width = max(len(request.prompt) for request in batch)
            input_ids = torch.zeros(len(batch), width, dtype=torch.long)
            mask = torch.zeros_like(input_ids)
            for row, request in enumerate(batch):
                input_ids[row, -len(request.prompt) :] = torch.tensor(request.prompt)
                mask[row, -len(request.prompt) :] = 1
            model.generate(
                input_ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max(request.num_output for request in batch),
                stopping_criteria=StoppingCriteriaList([_Watch(clock, first, batch)]),
            )
        for index in range(len(requests)):
            clock.end(index)
        return clock.result()

    return run


if __name__ == "__main__":
    serve(load, ("transformers", "torch"))
