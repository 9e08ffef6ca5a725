"""OpenVINO GenAI: its continuous batching pipeline, with prefix caching."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.peers.protocol import Run, drive, serve
from benchmarks.peers.workloads import KV_TOKENS, MAX_RUNNING, Request

BLOCK_SIZE = 32
"""OpenVINO's for CPUs."""


class OpenVINOEngine:
    """A `StepEngine` over ContinuousBatchingPipeline."""

    def __init__(self, weights: Path, options: dict[str, Any]) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = KV_TOKENS // BLOCK_SIZE
        scheduler.max_num_seqs = MAX_RUNNING
        scheduler.enable_prefix_caching = True
        for key, value in options.items():
            setattr(scheduler, key, value)
        self._pipeline = genai.ContinuousBatchingPipeline(str(weights), scheduler, "CPU")
        self._open: dict[int, tuple[Any, int]] = {}
        self._num_added = 0

    def add(self, index: int, request: Request) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = request.num_output
        config.ignore_eos = True
        config.do_sample = False
        tensor = ov.Tensor(np.array([request.prompt], dtype=np.int64))
        handle = self._pipeline.add_request(self._num_added, tensor, config)
        self._num_added += 1
        self._open[index] = (handle, request.num_output)

    def step(self) -> Iterator[tuple[int, list[int], bool]]:
        self._pipeline.step()
        for index, (handle, num_left) in list(self._open.items()):
            token_ids: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    token_ids += output.generated_ids
            if not token_ids:
                continue
            num_left -= len(token_ids)
            if num_left > 0:
                self._open[index] = (handle, num_left)
            else:
                del self._open[index]
            yield index, token_ids, num_left <= 0


def load(weights: Path, options: dict[str, Any]) -> Run:
    return partial(drive, OpenVINOEngine(weights, options))


if __name__ == "__main__":
    serve(load, ("openvino-genai", "openvino"))
