"""What a step reads and computes at least is counted right, and held against the limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire import LLM
from quire.roofline import DeviceLimits, ModelWork, Row, Work
from quire.worker.device_limits import measure_limits
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.runner_of import runner_of

MODEL = ModelWork(
    layer_bytes=1000,
    layer_flops=100,
    head_bytes=500,
    head_flops=50,
    kv_token_bytes=7,
    pair_flops=3,
    windows=(None, 4, None),
)


def counted(rows: list[Row]) -> Work:
    """The same, token by token."""
    keys = pairs = 0
    for window in MODEL.windows:
        for computed, count, _ in rows:
            seen = {
                key
                for query in range(computed, computed + count)
                for key in range(0 if window is None else max(0, query + 1 - window), query + 1)
            }
            keys += len(seen)
            pairs += sum(min(query + 1, window or query + 1) for query in range(computed, computed + count))
    draws = sum(samples for _, _, samples in rows)
    tokens = sum(count for _, count, _ in rows)
    return Work(
        MODEL.layer_bytes + keys * MODEL.kv_token_bytes + bool(draws) * MODEL.head_bytes,
        tokens * MODEL.layer_flops + pairs * MODEL.pair_flops + draws * MODEL.head_flops,
    )


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1, True)],
        [(0, 9, True)],
        [(2, 1, False)],
        [(2, 5, True)],
        [(3, 1, True), (17, 1, True)],
        [(0, 3, False), (4, 6, False), (30, 1, True)],
    ],
)
def test_work_is_what_is_counted_token_by_token(rows: list[Row]) -> None:
    assert MODEL.of_step(rows) == counted(rows)


def test_a_step_without_rows_takes_nothing() -> None:
    assert MODEL.of_step([]) == Work()


def test_the_nearer_limit_binds() -> None:
    limits = DeviceLimits(bytes_s=100.0, flops_s=1000.0, method="")
    assert limits.compare(Work(50.0, 100.0), 1.0) == {
        "mbu": 0.5, "mfu": 0.1, "bound": "memory", "of_limit": 0.5,
    }  # fmt: skip
    assert limits.compare(Work(10.0, 800.0), 2.0) == {
        "mbu": 0.05, "mfu": 0.4, "bound": "compute", "of_limit": 0.4,
    }  # fmt: skip


def test_the_limits_of_a_device_are_measured_once() -> None:
    limits = measure_limits(torch.device("cpu"), torch.float32, 1)
    assert 1e8 < limits.bytes_s < 1e13 and 1e8 < limits.flops_s < 1e15
    assert measure_limits(torch.device("cpu"), torch.float32, 1) is limits


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_models_work_is_that_of_its_checkpoint(tmp_path: Path, quantization: str | None) -> None:
    path = make_checkpoint("llama", tmp_path / "checkpoint")
    llm = LLM(path, max_model_len=64, num_blocks=16, num_threads=1, quantization=quantization)
    work = llm.core.info.work
    assert work is not None
    model = runner_of(llm.core).model
    config = model.config
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    each = config.hidden_size * (heads + 2 * kv_heads) + heads * config.hidden_size
    each += 3 * config.hidden_size * config.intermediate_size
    num_weights = config.num_layers * each
    assert work.layer_flops == 2 * num_weights
    assert work.head_flops == 2 * config.hidden_size * config.vocab_size
    assert work.kv_token_bytes == 2 * kv_heads * config.dtype.itemsize
    if quantization is None:
        assert work.layer_bytes == num_weights * config.dtype.itemsize
    else:
        assert num_weights <= work.layer_bytes < 1.5 * num_weights
    assert replace(work, windows=()) and len(work.windows) == config.num_layers
