"""CostModel: computes the duration of a step from its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

RowSpan = tuple[int, int]
"""(num_computed_tokens, num_scheduled_tokens) of a row."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Parameters of the duration of a step, in seconds:

        base_s + max(weights_s, prefill_token_s * prefill tokens + decode_row_s * decode rows)
               + kv_token_s * tokens of KV cache that are read + pair_s * pairs of attention in prompts

    A row of one token counts as decode and reads the cache of all its tokens. A row of several tokens counts
    as a chunk of a prompt. It reads the tokens before it once; each of its tokens forms a pair with every
    token of the sequence up to and including itself. A step without rows takes no time.
    """

    base_s: float = 0.0
    weights_s: float = 0.0
    """Seconds to read the weights: a lower bound for small batches."""
    prefill_token_s: float = 0.0
    decode_row_s: float = 0.0
    kv_token_s: float = 0.0
    pair_s: float = 0.0

    def seconds(self, rows: Iterable[RowSpan]) -> float:
        """Returns the duration of one step in seconds; 0 for an empty one."""
        prefill = decode = cached = pairs = 0
        for computed, count in rows:
            if count == 1:
                decode += 1
                cached += computed + 1
            else:
                prefill += count
                cached += computed
                pairs += count * computed + count * (count + 1) // 2
        if not prefill and not decode:
            return 0.0
        matrices = self.prefill_token_s * prefill + self.decode_row_s * decode
        return self.base_s + max(self.weights_s, matrices) + self.kv_token_s * cached + self.pair_s * pairs

    def as_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)


PRESETS: dict[str, CostModel] = {
    # Llama-3.1-8B in bf16 on an H100. Decode is vLLM's published fit, 6.44 ms + 43.7 ns per cached token,
    # of which 15.0 GB of weights at 3.0 TB/s are 5.0 ms. Matrices: 2 * 7.5e9 FLOP per token at 650 TFLOP/s;
    # attention in prompts: 4 * 32 layers * 32 heads * 128 FLOP per pair at 500 TFLOP/s.
    "h100-8b": CostModel(1.44e-3, 5.0e-3, 23.1e-6, 23.1e-6, 43.7e-9, 1.05e-9),
    # The same model at the limit of an H200: 4.4 TB/s, 790 TFLOP/s, no time between steps.
    "h200-8b-limit": CostModel(0.0, 3.41e-3, 19.0e-6, 19.0e-6, 29.8e-9, 0.87e-9),
    # Qwen3-0.6B in bf16 on two Zen4 cores as the best peers there do it: 48 ms per token
    # alone, 95 ms per step of 16 rows, 420 prompt tokens per second; KV of 114688 bytes per token at 40 GB/s;
    # 4 * 28 layers * 16 heads * 128 FLOP per pair at 200 GFLOP/s.
    "cpu-0.6b": CostModel(2.0e-3, 46e-3, 2.4e-3, 5.8e-3, 2.9e-6, 1.1e-6),
}
"""Cost models for planning, by name. They are not fitted to measurements of this engine."""
