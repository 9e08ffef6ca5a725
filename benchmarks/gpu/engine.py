"""The engine on a device: prompts and decode steps against floors, mixed requests, what transformers says."""

from __future__ import annotations

import bisect
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import growth
from benchmarks.peers.limits import Roofline
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.models.interface import ForwardInputs
from quire.request.sampling_params import SamplingParams
from quire.worker.timeline import Timeline, idle_fraction

GREEDY_TOKENS = 32
NUM_STEPS = 24


def prefill(core: EngineCore, limits: Roofline, count: int, length: int) -> dict[str, Any]:
    """Time to the first tokens of `count` prompts at once, against all operations that they need."""
    seconds = []
    for turn in range(3):
        rng = random.Random(turn)
        names = [f"prompt-{turn}-{index}" for index in range(count)]
        for name in names:
            prompt = [rng.randrange(3, core.info.vocab_size) for _ in range(length)]
            core.add_request(name, prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        begin = time.perf_counter()
        while core.has_work:
            core.step()
        seconds.append(time.perf_counter() - begin)
    flop = growth.step_work(core, [(0, length, True)] * count).flops
    best = min(seconds[1:])
    return {
        "prompts": count,
        "tokens": length,
        "seconds": best,
        "tokens_per_s": count * length / best,
        "of_limit": flop / best / (limits.matrix_gflop_s * 1e9),
    }


def decode(core: EngineCore, limits: Roofline, points: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Times of decode steps by (requests, context), against reading weights and KV once."""
    runner, watch, records = growth.runner_of(core), growth.Stopwatch(core), []
    for running, context in points:
        if growth.room([(running, context)], NUM_STEPS)["num_blocks"] > runner.info.num_blocks:
            records.append({"running": running, "context": context, "skipped": "the KV cache is too small"})
            continue
        runner.timeline = Timeline(runner.device, enabled=True)
        point = growth.measure(core, watch, running, context, NUM_STEPS, runner.timeline.pop_step_times)
        steps = runner.timeline.pop_step_times()
        runner.timeline = Timeline(runner.device, enabled=False)
        records.append(
            asdict(point)
            | {
                "floor_ms": point.floor_ms(limits),
                "of_floor": point.floor_ms(limits) / point.step_ms,
                "busy_ms": statistics.median(step.busy_ms for step in steps) if steps else None,
                "idle_fraction": idle_fraction(steps),
                "idle_ms": statistics.median(step.idle_ms for step in steps) if steps else None,
                "kernels_us": step_kernels(core, running) if running * context <= 70_000 else None,
            }
        )
    watch.stop()
    return records


def step_kernels(core: EngineCore, running: int) -> dict[str, list[float]] | None:
    """Of one decode step: by kernel how often it ran and for how many microseconds; None: not on a GPU."""
    if growth.runner_of(core).device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CUDA]
    profile, steps = torch.profiler.profile(activities=activities), 4
    for _ in growth.decode_steps(core, running, 256, steps, profile.start):
        pass
    torch.cuda.synchronize()
    profile.stop()
    found: dict[str, list[float]] = {}
    for event in profile.key_averages():
        if event.self_device_time_total:
            sums = found.setdefault(event.key[:90], [0.0, 0.0])  # several may begin alike
            sums[0] += event.count / steps
            sums[1] += event.self_device_time_total / steps
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


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


def repeating(core: EngineCore, count: int, num_tokens: int) -> dict[str, Any]:
    """Tokens per second of `count` requests at once, whose prompts repeat a text of 16 tokens."""
    rng, before = random.Random(count), core.stats()
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for index in range(count):
        text = [rng.randrange(3, core.info.vocab_size) for _ in range(16)]
        core.add_request(f"repeating-{index}", text * 8, params)
    begin = time.perf_counter()
    while core.has_work:
        core.step()
    seconds, after = time.perf_counter() - begin, core.stats()
    return {
        "requests": count,
        "tokens_per_s": count * num_tokens / seconds,
        "proposed": after.num_draft_tokens - before.num_draft_tokens,
        "accepted": after.num_accepted_drafts - before.num_accepted_drafts,
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
    runner = growth.runner_of(core)
    graphs, pieces = runner.graphs, runner.prompt_graphs
    differences: list[float] = []

    def compare(replayed: torch.Tensor, computed: torch.Tensor) -> None:
        differences.append(float((replayed.float() - computed.float()).abs().max()))

    def decode(size: int, is_adapted: bool, replay: Callable[[], None]) -> None:
        assert graphs is not None
        last_tokens = runner.batch.last_tokens
        before = last_tokens.clone()
        replay()
        replayed = graphs._logits[:size].clone()
        # The step has overwritten what it began with.
        last_tokens.copy_(before)
        graphs._compute(size, is_adapted)
        compare(replayed, graphs._logits[:size])

    def prompt(run: Any, inputs: ForwardInputs) -> torch.Tensor:
        assert pieces is not None
        count = inputs.metas[0].num_tokens
        size = pieces.sizes[bisect.bisect_left(pieces.sizes, count)]
        replayed = run(inputs).clone()

        def interrupt(group: int, query: torch.Tensor, attend: Any) -> torch.Tensor:
            attended = query.new_zeros(query.shape)
            attended[:count] = attend(query[:count], inputs.metas[group])
            return attended

        pieces._compute(
            [replace(meta, interrupt=partial(interrupt, i)) for i, meta in enumerate(pieces._metas(size))],
            inputs.adapters,
        )
        compare(replayed, pieces._hidden[:count])
        return pieces._hidden[:count]

    if graphs is not None:
        graphs._graphs = {key: partial(decode, *key, replay) for key, replay in graphs._graphs.items()}
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
