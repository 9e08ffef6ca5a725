"""Quire in process: EngineCore, as `quire.LLM` runs it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from benchmarks.peers.protocol import Run, drive, serve
from benchmarks.peers.workloads import KV_TOKENS, MAX_MODEL_LEN, MAX_RUNNING, Request
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.request.sampling_params import SamplingParams

BLOCK_SIZE = 16


def engine_options(weights: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Configuration of the engine for these weights; `options` go before ours."""
    return {
        "model": str(weights),
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_RUNNING,
        "block_size": BLOCK_SIZE,
        "num_blocks": KV_TOKENS // BLOCK_SIZE,
        **options,
    }


class QuireEngine:
    """A `StepEngine` over an EngineCore."""

    def __init__(self, weights: Path, options: dict[str, Any]) -> None:
        self._core = EngineCore(EngineConfig.from_mapping(engine_options(weights, options)))
        self._core.warm_up()
        self._indices: dict[str, int] = {}
        self._num_added = 0

    def add(self, index: int, request: Request) -> None:
        request_id = str(self._num_added)
        self._num_added += 1
        self._indices[request_id] = index
        params = SamplingParams(max_tokens=request.num_output, ignore_eos=True)
        self._core.add_request(request_id, request.prompt, params)

    def step(self) -> Iterator[tuple[int, list[int], bool]]:
        for output in self._core.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            ended = output.finish_reason is not None
            index = self._indices.pop(output.request_id) if ended else self._indices[output.request_id]
            yield index, output.new_token_ids, ended


def load(weights: Path, options: dict[str, Any]) -> Run:
    return partial(drive, QuireEngine(weights, options))


if __name__ == "__main__":
    serve(load, ("quire-triton", "torch"))
