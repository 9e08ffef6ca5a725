"""Metrics of vllm_backend at /metrics, for models that ask for them (`vllm_config.shows_metrics`).

Names, labels, buckets and meanings are those of vllm_backend and vLLM: in most of them a choice of a request
counts as a request, and a token counts when it comes. The histograms are Triton's, which need a call for each
value.
"""

from __future__ import annotations

import time

from quire.frontend.output_processor import OutputProcessor
from quire.outputs import EngineCoreOutput
from quire.triton.metrics_board import FINISHED, OBSERVATIONS, MetricsBoard
from quire.triton.request_handle import RequestHandle

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_WHOLE = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_NUMBERS = (1.0, 2.0, 5.0, 10.0, 20.0)


def buckets_1_2_5(largest: int) -> tuple[float, ...]:
    """Returns the bucket bounds 1, 2, 5, 10, 20, 50, ... up to `largest`."""
    decades = range(len(str(largest)))
    return tuple(float(m * 10**d) for d in decades for m in (1, 2, 5) if m * 10**d <= largest)


class VllmBackendMetrics:
    """The eight metric families of vllm_backend, for one model. The responder's thread updates them; the
    board's thread sends them.

    Args:
        model, version: labels of all metrics.
        max_model_len: limit of the bucket bounds in the histograms of token counts.
    """

    def __init__(self, board: MetricsBoard, model: str, version: str, max_model_len: int) -> None:
        self._board = board
        labels = {"model": model, "version": version}
        self._prompt_tokens = board.counter("vllm:prompt_tokens_total", **labels)
        self._generation_tokens = board.counter("vllm:generation_tokens_total", **labels)
        sizes = buckets_1_2_5(max_model_len)
        self._first, self._token, self._whole, self._prompt, self._output, self._n = (
            board.observations(name, buckets, **labels).observe
            for name, buckets in zip(
                OBSERVATIONS, (_FIRST, _TOKEN, _WHOLE, sizes, sizes, _NUMBERS), strict=True
            )
        )

    def on_output(self, handle: RequestHandle, choice: OutputProcessor, output: EngineCoreOutput) -> None:
        """Updates the metrics after a choice has processed an engine output."""
        now = time.monotonic()
        if output.new_token_ids or output.embedding:  # else it has ended without: in the queue, perhaps
            last, choice.taken_at = choice.taken_at, now
            self._generation_tokens.value += choice.num_output_tokens - choice.num_counted
            choice.num_counted = choice.num_output_tokens
            if not last:
                self._prompt_tokens.value += choice.num_prompt_tokens
                self._first(now - handle.arrived_at)
            else:
                self._token(now - last)
        if choice.finished and choice.finish_reason in FINISHED:
            self._whole(now - handle.arrived_at)
            self._prompt(choice.num_prompt_tokens)
            self._output(choice.num_output_tokens)
            if all(one.finished for processor in handle.processors for one in processor.choices):
                self._n(choice.params.n)
        self._board.touch()
