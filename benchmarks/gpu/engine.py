"""The engine on a device: decode steps against their floor, a mix of requests, what transformers says."""

from __future__ import annotations

import bisect
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.executor import RunnerExecutor
from quire.sampling_params import SamplingParams
from quire.worker.input_batch import StepInputs
from quire.worker.model_runner import ModelRunner
from quire.worker.timeline import Timeline, idle_fraction

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}
SMALL = LLAMA_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
GREEDY_TOKENS = 32


@contextmanager
def engine(folder: Path, device: torch.device, small: bool, **options: Any) -> Iterator[EngineCore]:
    """An engine with random weights of the 8B shape."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SMALL if small else LLAMA_8B), encoding="utf-8")
    values = {
        "model": str(folder),
        "load_format": "dummy",
        "device": device.type,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        **options,
    }
    if small:
        values |= {"max_num_seqs": 8, "num_blocks": 600, "async_scheduling": True}
    core = EngineCore(EngineConfig.from_mapping(values))
    core.warm_up()
    try:
        yield core
    finally:
        core.close()
        del core
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _runner(core: EngineCore) -> ModelRunner:
    assert isinstance(core.executor, RunnerExecutor) and isinstance(core.executor.runner, ModelRunner)
    return core.executor.runner


def decode_steps(
    core: EngineCore, limits: dict[str, float], points: list[tuple[int, int]]
) -> list[dict[str, Any]]:
    """Times of decode steps by (requests, context), against reading weights and KV once."""
    runner = _runner(core)
    config = runner.model.config
    weights = sum(p.nbytes for p in runner.model.parameters()) + _packed_bytes(runner)
    kv = runner.kv_cache.block_bytes / core.config.cache.block_size * len(runner.info.kv_groups)
    records = []
    for running, context in points:
        needed = running * (context + 64) / core.config.cache.block_size
        if needed > runner.info.num_blocks:
            records.append({"running": running, "context": context, "skipped": "the KV cache is too small"})
            continue
        times, steps = _decode(core, runner, running, context)
        floor = (weights + running * context * kv) / limits["read_bytes_per_s"]
        flop = 2.0 * weights / config.dtype.itemsize * running / limits["bf16_flop_per_s"]
        records.append(
            {
                "running": running,
                "context": context,
                "step_ms": 1000 * statistics.median(times),
                "floor_ms": 1000 * max(floor, flop),
                "of_floor": max(floor, flop) / statistics.median(times),
                "idle_fraction": idle_fraction(steps),
                "idle_ms": statistics.median(step.idle_ms for step in steps) if steps else None,
            }
        )
    return records


def _packed_bytes(runner: ModelRunner) -> int:
    """Bytes of the matrices that a decode step reads, the table of embeddings excluded."""
    from quire.layers.linear import Linear

    packed = [m.packed for m in runner.model.modules() if isinstance(m, Linear) and m.packed is not None]
    head = (
        runner.model.config.vocab_size * runner.model.config.hidden_size * runner.model.config.dtype.itemsize
    )
    return sum(one.nbytes for one in packed) + head - (0 if runner.model.config.tie_word_embeddings else head)


def _decode(core: EngineCore, runner: ModelRunner, running: int, context: int) -> tuple[list[float], Any]:
    rng = random.Random(running * 100_003 + context)
    names = [f"{running}-{context}-{index}" for index in range(running)]
    for name in names:
        prompt = [rng.randrange(3, core.info.vocab_size) for _ in range(context)]
        core.add_request(name, prompt, SamplingParams(max_tokens=64, ignore_eos=True))
    decoding: set[str] = set()
    while len(decoding) < running:
        decoding |= {output.request_id for output in core.step()}
    for _ in range(4):
        core.step()
    runner.timeline = Timeline(runner.device, enabled=True)
    times = []
    for _ in range(24):
        begin = time.perf_counter()
        core.step()
        times.append(time.perf_counter() - begin)
    steps = runner.timeline.take()
    core.abort(names)
    while core.has_work:
        core.step()
    return times, steps


def mix(core: EngineCore, count: int) -> dict[str, Any]:
    """Requests with lengths like ShareGPT's (log-normal, about 200 in and 180 out), all at once."""
    rng = random.Random(7)
    total_in = total_out = 0
    for index in range(count):
        num_in = min(1024, max(4, round(rng.lognormvariate(4.7, 1.1))))
        num_out = min(800, max(4, round(rng.lognormvariate(4.8, 0.9))))
        if core.info.max_model_len < 2048:
            num_in, num_out = min(num_in, 60), min(num_out, 20)
        prompt = [rng.randrange(3, core.info.vocab_size) for _ in range(num_in)]
        core.add_request(f"mix-{index}", prompt, SamplingParams(max_tokens=num_out, ignore_eos=True))
        total_in, total_out = total_in + num_in, total_out + num_out
    begin = time.perf_counter()
    produced = 0
    while core.has_work:
        produced += sum(len(output.new_token_ids) for output in core.step())
    seconds = time.perf_counter() - begin
    assert produced == total_out, (produced, total_out)
    return {
        "requests": count,
        "input_tokens": total_in,
        "output_tokens": total_out,
        "seconds": seconds,
        "output_tokens_per_s": total_out / seconds,
        "requests_per_s": count / seconds,
    }


def agreement(folder: Path, device: torch.device, families: list[str]) -> list[dict[str, Any]]:
    """Greedy tokens of small checkpoints in bf16: this engine's eagerly, replayed, one step ahead.

    A replay is to equal the same step computed. Tokens may part where bf16 rounds two near logits apart:
    padding may change which kernel multiplies, and transformers multiplies in another order. There what
    counts is the log-probability that transformers gives the engine's tokens, step by step, against its own
    best ones.
    """
    from transformers import AutoModelForCausalLM

    from tests.fixtures.checkpoints import VOCAB_SIZE, make_checkpoint

    records = []
    for family in families:
        path = make_checkpoint(family, folder / family)
        rng = random.Random(1)
        prompts = [[rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(2, 60))] for _ in range(12)]
        found = {
            name: _generate(path, device, prompts, **options)
            for name, options in {
                "eager": {"enforce_eager": True, "async_scheduling": False},
                "graphs": {"async_scheduling": False},
                "graphs, one ahead": {"async_scheduling": True},
            }.items()
        }
        difference = difference_of_replays(path, device, prompts)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()
        worst = 0.0
        with torch.inference_mode():
            for prompt, tokens in zip(prompts, found["eager"], strict=True):
                ids = torch.tensor([prompt + tokens], device=device)
                logprobs = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
                own = logprobs.gather(1, torch.tensor(tokens, device=device)[:, None]).squeeze(1)
                worst = max(worst, float((logprobs.max(-1).values - own).max()))
        records.append(
            {
                "family": family,
                "difference_of_replays": difference,
                "graphs_equal_eager": found["graphs"] == found["eager"],
                "ahead_equal_eager": found["graphs, one ahead"] == found["eager"],
                "worst_logprob_gap_to_transformers": worst,
            }
        )
        del model
    return records


def difference_of_replays(path: Path, device: torch.device, prompts: list[list[int]]) -> float | None:
    """The most by which a replayed step differs from the same one computed; None: nothing is recorded."""
    core = _small_engine(path, device, async_scheduling=False, max_num_batched_tokens=100)
    runner = _runner(core)
    graphs, pieces = runner.graphs, runner.prompt_graphs
    differences: list[float] = []

    def compare(replayed: torch.Tensor, computed: torch.Tensor) -> None:
        differences.append(float((replayed.float() - computed.float()).abs().max()))

    def decode(size: int, replay: Callable[[], None]) -> None:
        assert graphs is not None
        last_tokens = runner.batch.last_tokens
        before = last_tokens.clone()
        replay()
        replayed = graphs._logits[:size].clone()
        # The step has overwritten what it began with.
        last_tokens.copy_(before)
        graphs._compute(size)
        compare(replayed, graphs._logits[:size])

    def prompt(run: Any, inputs: StepInputs, embeds: Any) -> torch.Tensor:
        assert pieces is not None
        count = inputs.metas[0].num_tokens
        size = pieces.sizes[bisect.bisect_left(pieces.sizes, count)]
        replayed = run(inputs, embeds).clone()

        def interrupt(group: int, query: torch.Tensor, attend: Any) -> torch.Tensor:
            pieces._attended[:count] = attend(query[:count], inputs.metas[group])
            return pieces._attended[:size]

        pieces._compute(
            [replace(meta, interrupt=partial(interrupt, i)) for i, meta in enumerate(pieces._metas(size))]
        )
        compare(replayed, pieces._hidden[:count])
        return pieces._hidden[:count]

    if graphs is not None:
        graphs._graphs = {size: partial(decode, size, replay) for size, replay in graphs._graphs.items()}
    if pieces is not None:
        pieces.run = partial(prompt, pieces.run)  # type: ignore[method-assign]
    _greedy(core, prompts)
    return max(differences, default=None)


def _generate(path: Path, device: torch.device, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    return _greedy(_small_engine(path, device, **options), prompts)


def _small_engine(path: Path, device: torch.device, **options: Any) -> EngineCore:
    values = {"model": str(path), "device": device.type, "dtype": "bfloat16", "num_blocks": 256, **options}
    core = EngineCore(EngineConfig.from_mapping({"max_model_len": 256, "max_num_seqs": 16, **values}))
    core.warm_up()
    return core


def _greedy(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens of all prompts at once; closes the engine."""
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        core.add_request(f"r{index}", prompt, SamplingParams(max_tokens=GREEDY_TOKENS, ignore_eos=True))
        found[f"r{index}"] = []
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            found[output.request_id] += output.new_token_ids
    core.close()
    return list(found.values())
