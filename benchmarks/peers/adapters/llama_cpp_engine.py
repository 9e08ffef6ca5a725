"""llama.cpp through the C interface in llama-cpp-python; the batching loop is ours, over llama_batch.

As in llama-server every running request has a sequence of its own, tokens of running requests go first in a
batch, and prompts fill it up. More than llama-server does: a prompt that begins as that of another sequence
waits for it and copies its KV, so that a shared prefix is computed once.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import llama_cpp
import numpy as np

from benchmarks.peers.protocol import Run, drive, serve
from benchmarks.peers.workloads import MAX_RUNNING, Request

SEQUENCE_LEN = 768
"""Room of each sequence; the longest request has 704 tokens."""
MIN_SHARED = 64
"""Shorter common beginnings are computed again."""


@dataclass
class _Sequence:
    index: int
    request: Request
    num_computed: int = 0
    outputs: list[int] = field(default_factory=list)
    source: int | None = None
    """Sequence whose KV will be copied."""
    num_shared: int = 0


class LlamaCppEngine:
    """A `StepEngine` over one llama_context."""

    def __init__(self, weights: Path, options: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(weights).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {weights}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = SEQUENCE_LEN * MAX_RUNNING
        params.n_seq_max = MAX_RUNNING
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        for key, value in options.items():
            setattr(params, key, value)
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch_size = llama_cpp.llama_n_batch(self._context)
        self._batch = llama_cpp.llama_batch_init(self._batch_size, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._sequences: dict[int, _Sequence] = {}
        self._free = list(range(MAX_RUNNING))

    def add(self, index: int, request: Request) -> None:
        sequence = _Sequence(index, request)
        for seq_id, other in self._sequences.items():
            shared = min(_common_length(request.prompt, other.request.prompt), len(request.prompt) - 1)
            if shared >= MIN_SHARED and shared > sequence.num_shared:
                sequence.source, sequence.num_shared = seq_id, shared
        self._sequences[self._free.pop(0)] = sequence

    def step(self) -> Iterator[tuple[int, list[int], bool]]:
        self._copy_shared()
        self._batch.n_tokens = 0
        rows = []
        for seq_id, sequence in self._sequences.items():
            if sequence.outputs:
                rows.append((seq_id, self._append(seq_id, sequence.outputs[-1], sequence.num_computed, True)))
                sequence.num_computed += 1
        for seq_id, sequence in self._sequences.items():
            if sequence.source is not None:
                continue
            prompt = sequence.request.prompt
            while sequence.num_computed < len(prompt) and self._batch.n_tokens < self._batch_size:
                at = sequence.num_computed
                is_last = at == len(prompt) - 1
                row = self._append(seq_id, prompt[at], at, is_last)
                sequence.num_computed += 1
                if is_last:
                    rows.append((seq_id, row))
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")
        for seq_id, row in rows:
            logits = llama_cpp.llama_get_logits_ith(self._context, row)
            token_id = int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab_size,))))
            sequence = self._sequences[seq_id]
            sequence.outputs.append(token_id)
            ended = len(sequence.outputs) == sequence.request.num_output
            if ended:
                self._remove(seq_id)
            yield sequence.index, [token_id], ended

    def _append(self, seq_id: int, token_id: int, position: int, wants_logits: bool) -> int:
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row] = token_id
        batch.pos[row] = position
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = seq_id
        batch.logits[row] = wants_logits
        batch.n_tokens = row + 1
        return row

    def _copy_shared(self) -> None:
        """Copies prefixes that are computed by now: the whole sequence, then what is too much is cut."""
        for seq_id, sequence in self._sequences.items():
            if sequence.source is None:
                continue
            if self._sequences[sequence.source].num_computed >= sequence.num_shared:
                llama_cpp.llama_memory_seq_cp(self._memory, sequence.source, seq_id, -1, -1)
                llama_cpp.llama_memory_seq_rm(self._memory, seq_id, sequence.num_shared, -1)
                sequence.num_computed, sequence.source = sequence.num_shared, None

    def _remove(self, seq_id: int) -> None:
        del self._sequences[seq_id]
        for sequence in self._sequences.values():
            assert sequence.source != seq_id, "it has been copied a step after its prompt was computed"
        llama_cpp.llama_memory_seq_rm(self._memory, seq_id, -1, -1)
        self._free.append(seq_id)


def _common_length(a: list[int], b: list[int]) -> int:
    for at, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return at
    return min(len(a), len(b))


def load(weights: Path, options: dict[str, Any]) -> Run:
    return partial(drive, LlamaCppEngine(weights, options))


def _system_info() -> str:
    return ctypes.string_at(llama_cpp.llama_print_system_info()).decode()


if __name__ == "__main__":
    serve(load, ("llama-cpp-python",), facts=_system_info)
