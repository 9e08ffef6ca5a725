"""Beam search: on a fake runner against sequences written out, and on a checkpoint against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from quire.config import EngineConfig
from quire.core.request import FinishReason, Request
from quire.engine.core import EngineCore
from quire.errors import InvalidArgumentError
from quire.models.kv_groups import KVGroup
from quire.outputs import EngineCoreOutput
from quire.request.sampling_params import SamplingParams
from quire.request.scheduling_params import SchedulingParams
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.fake_runner import generate_ranked_alone

Beams = list[tuple[list[int], float]]
"""Token ids and score of each sequence, the best first."""
PROMPT = list(range(10, 24))  # three and a half blocks of four
HYBRID = (KVGroup(None, (2,)), KVGroup(9, (0,)), KVGroup(9, (1,)))


def add(engine: FakeEngine, request_id: str, max_tokens: int = 12, **options: Any) -> Request:
    return engine.add(
        request_id, 0, max_tokens, **{"prompt": PROMPT, "beam_width": 3, "ignore_eos": False, **options}
    )


def check(engine: FakeEngine) -> None:
    """Sequences, finish reasons and sums are those of the search alone; nothing is left over."""
    engine.check_outputs()
    for name, request in engine.requests.items():
        if not request.sampling_params.is_ranked:
            continue
        prompt = request.token_ids[: request.num_prompt_tokens]
        ranked = generate_ranked_alone(prompt, request.sampling_params, engine.scheduler.max_model_len)
        for index, (_, _, total) in enumerate(ranked):
            assert engine.sums[f"{name}#{index}" if index else name] == pytest.approx(total)
    engine.step()  # what ended last is dropped
    assert not engine.runner.rows and engine.kv.num_free_blocks == engine.kv.num_blocks


def variants() -> list[dict[str, Any]]:
    return [
        {
            "beam_width": width,
            "n": n,
            "length_penalty": penalty,
            "early_stopping": early,
            "ignore_eos": ignores,
        }
        for width, n in ((2, 1), (2, 2), (3, 2), (5, 5))
        for penalty in (-0.5, 0.0, 1.0, 2.0)
        for early in (True, False, None)
        for ignores in (False, True)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lookahead": True},
        {"max_num_batched_tokens": 9, "max_num_seqs": 6},
        {"cache": {"enable_prefix_caching": True}, "max_num_seqs": 12, "lookahead": True},
        {"groups": HYBRID, "num_blocks": 400},
        {"block_size": 1, "num_blocks": 300},
    ],
    ids=["plain", "lookahead", "chunks", "caching", "hybrid", "blocks of one token"],
)
def test_results_are_those_of_the_search_alone(options: dict[str, Any]) -> None:
    engine = FakeEngine(**{"num_blocks": 128, **options})
    for number, variant in enumerate(variants()):
        prompt = [(number * 7 + position * position) % 50 for position in range(1 + number % 11)]
        add(engine, f"r{number}", 1 + number % 14, prompt=prompt, **variant)
    engine.run()
    check(engine)
    assert {engine.reasons[name] for name in engine.requests} == {"stop", "length"}


def test_stop_ids_end_a_beam_and_min_tokens_keep_it_going() -> None:
    engine = FakeEngine()
    add(engine, "a", 15, n=3, stop_token_ids=(7, 8, 9, 11), ignore_eos=True, length_penalty=-1.0)
    add(engine, "b", 15, n=3, min_tokens=6)
    engine.run()
    check(engine)
    assert "stop" in {engine.reasons[name] for name in ("a", "a#1", "a#2")}
    assert all(len(engine.outputs[name]) >= 6 for name in ("b", "b#1", "b#2"))


@pytest.mark.row("A17", clauses=("cow",))
@pytest.mark.row("C4", clauses=("beams",))
def test_beams_share_the_prompt_and_copy_only_the_block_they_write() -> None:
    engine = FakeEngine(block_size=4)
    request = add(engine, "a", 20, beam_width=4, ignore_eos=True)
    first = engine.step()
    assert [row.num_scheduled_tokens for row in first.scheduled] == [14], "one prefill"
    tables = [engine.kv.block_ids(one)[0] for one in engine.scheduler.roster.running]
    assert all(table[:3] == tables[0][:3] for table in tables)
    assert [engine.kv.pool.ref_count(block_id) for block_id in tables[0][:3]] == [4, 4, 4]
    assert len({table[3] for table in tables}) == 4
    num_copies = 0
    step = 1
    while engine.scheduler.has_unfinished():
        before = set(engine.runner.rows)
        plan = engine.step()
        step += 1
        new = {row.request_id for row in plan.scheduled} - before
        position = len(PROMPT) + step - 2  # of the token that this step computes
        assert len(plan.scheduled) == 4 and {row.num_scheduled_tokens for row in plan.scheduled} == {1}
        # A beam that came of another's begins with a copy of its last block, unless that is full.
        assert len(plan.block_copies) == (len(new) if position % 4 else 0)
        num_copies += len(plan.block_copies)
    assert engine.runner.num_computed_tokens == 14 + 4 * 19, "no token is computed twice"
    assert num_copies > 3, "no beams were exchanged: nothing was tested"
    assert request.num_preemptions == 0
    check(engine)


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("tiers", [{}, {"host_blocks": 64, "preemption_mode": "swap"}], ids=["", "swap"])
def test_preempted_beams_compute_again_and_change_nothing(
    lookahead: bool, caching: bool, tiers: dict[str, Any]
) -> None:
    engine = FakeEngine(
        num_blocks=20,
        max_num_seqs=16,
        max_num_batched_tokens=11,
        lookahead=lookahead,
        cache={"enable_prefix_caching": caching},
        **tiers,
    )
    for number in range(8):
        prompt = [*PROMPT[number:], number]
        add(
            engine,
            f"r{number}",
            14,
            prompt=prompt,
            beam_width=2 + number % 2,
            n=2,
            ignore_eos=number % 2 == 0,
        )
        engine.add(f"s{number}", 5 + number, 10)
    engine.run()
    check(engine)
    assert engine.scheduler.roster.num_preemptions > 3
    if tiers:
        assert engine.scheduler.stats().num_swaps > 0
        engine.runner.tiers.close()  # type: ignore[union-attr]


def test_beams_and_new_choices_are_in_every_step() -> None:
    engine = FakeEngine(num_blocks=200)
    engine.add("other", 5, 100)
    add(engine, "a", 20, ignore_eos=True)
    engine.add("b", 9, 20, n=3, seed=1, temperature=1.0)
    for _ in range(20):
        assert not engine.reasons
        engine.step()
    assert set(engine.reasons) == {"a", "b", "b#1", "b#2"}


def test_beams_that_do_not_fit_together_come_one_after_the_other() -> None:
    """Liveness by itself: with the refusal out of the way, a pool for one beam is enough."""
    engine = FakeEngine(num_blocks=8, max_num_seqs=4)
    engine.scheduler._check_beams = lambda request: None  # type: ignore[method-assign]
    add(engine, "a", 16, beam_width=4, n=4)
    add(engine, "b", 16, beam_width=3, n=1, ignore_eos=True)
    engine.run()
    check(engine)
    assert engine.scheduler.roster.num_preemptions > 0


def test_beams_that_can_never_fit_are_refused_by_name() -> None:
    # The prompt has 3 full blocks; a beam of 14 + 12 tokens, the last of which is never stored, has 7.
    engine = FakeEngine(num_blocks=3 + 4 * 4 - 1)
    with pytest.raises(InvalidArgumentError, match=r"beam_width.*19 KV blocks, there are 18"):
        add(engine, "a", 12, beam_width=4)
    assert not engine.scheduler.has_work
    with pytest.raises(InvalidArgumentError, match="beam_width"):
        add(FakeEngine(max_num_seqs=3), "a", 2, beam_width=4)
    engine = FakeEngine(num_blocks=3 + 4 * 4)
    add(engine, "a", 12, beam_width=4, ignore_eos=True)
    engine.run()
    check(engine)
    assert engine.scheduler.roster.num_preemptions == 0


@pytest.mark.parametrize("lookahead", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_an_abort_ends_all_beams_with_one_output_per_result(num_steps: int, lookahead: bool) -> None:
    engine = FakeEngine(lookahead=lookahead)
    add(engine, "a", 30, beam_width=4, n=2, external_id="x", ignore_eos=True)
    add(engine, "b", 9)
    for _ in range(num_steps):
        engine.step()
    assert engine.scheduler.roster.find("x") == ["a"]
    outputs = engine.abort("a")
    assert [(o.request_id, o.index, o.finish_reason, o.new_token_ids) for o in outputs] == [
        ("a", 0, "cancelled", []),
        ("a", 1, "cancelled", []),
    ]
    assert engine.scheduler.roster.find("x") == []
    del engine.requests["a"]
    engine.run()
    check(engine)


def test_a_deadline_holds_also_when_the_first_beam_is_gone() -> None:
    engine = FakeEngine(step_s=1.0, num_blocks=128)
    add(engine, "a", 100, n=2, scheduling=SchedulingParams(deadline=40.0), ignore_eos=True)
    engine.run()
    assert engine.reasons == {"a": "timeout", "a#1": "timeout"}
    assert engine.clock() == pytest.approx(40.0, abs=1.0)
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


def test_one_failed_beam_ends_the_request() -> None:
    engine = FakeEngine()
    add(engine, "a", 30, n=2, ignore_eos=True)
    for _ in range(3):
        engine.step()
    plan = engine.scheduler.schedule()
    result = engine.runner.execute(plan)
    result.rows[1].error = "no finite logit"
    (output,) = engine.scheduler.update(plan, result)
    assert (output.request_id, output.error) == ("a", "no finite logit")
    assert not engine.scheduler.has_unfinished()
    engine.scheduler.check_integrity()


# Against transformers.

WIDTHS, PENALTIES, EARLY = (2, 3, 5), (0.5, 1.0, 2.0), (True, False, None)
PROMPTS = [[5, 9, 11, 300, 12, 77, 8], [40, 41, 42], [400, 17, 23, 9, 9, 81, 33, 12, 101, 7, 250, 3]]
MAX_TOKENS = 14
END = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that ends now and then: the row of `lm_head` that says so is nearer to all others."""
    from safetensors.torch import load_file, save_file

    path = make_checkpoint("llama", tmp_path_factory.mktemp("beams") / "llama", tokenizer=False)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][END] *= 2.2
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    generation = json.loads((path / "generation_config.json").read_text())
    generation["eos_token_id"] = [END]
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.fixture(scope="module")
def beams_of_transformers(checkpoint: Path) -> Callable[[list[int], SamplingParams], Beams]:
    """Searches with transformers; a search is made once, for all options of engines."""
    model, made = LlamaForCausalLM.from_pretrained(checkpoint).eval(), dict[str, Beams]()

    def search(prompt: list[int], params: SamplingParams) -> Beams:
        key = f"{prompt} {params}"
        if key not in made:
            made[key] = _search(model, prompt, params)
        return made[key]

    return search


def _search(model: LlamaForCausalLM, prompt: list[int], params: SamplingParams) -> Beams:
    early_stopping = "never" if params.early_stopping is None else params.early_stopping
    result = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        length_penalty=params.length_penalty,
        early_stopping=early_stopping,
        repetition_penalty=params.repetition_penalty,
        eos_token_id=None if params.ignore_eos else [END, *params.stop_token_ids],
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sequences = []
    for row, indices in zip(result.sequences.tolist(), result.beam_indices.tolist(), strict=True):
        length = sum(index >= 0 for index in indices)
        sequences.append(row[len(prompt) : len(prompt) + length])
    return list(zip(sequences, result.sequences_scores.tolist(), strict=True))


def run(core: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {}
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


@pytest.mark.row("A17", clauses=("equal",))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True, "max_num_batched_tokens": 24, "max_num_seqs": 10},
        {"num_blocks": 26, "enable_prefix_caching": False},
    ],
    ids=["roomy", "lookahead, chunks, few seats", "preempted"],
)
def test_sequences_and_scores_are_those_of_transformers(
    checkpoint: Path,
    beams_of_transformers: Callable[[list[int], SamplingParams], Beams],
    options: dict[str, Any],
) -> None:
    requests: dict[str, tuple[list[int], SamplingParams]] = {}
    for prompt in PROMPTS:
        for width in WIDTHS:
            for penalty in PENALTIES:
                for early in EARLY:
                    params = SamplingParams(
                        max_tokens=MAX_TOKENS,
                        beam_width=width,
                        n=width - 1,
                        length_penalty=penalty,
                        early_stopping=early,
                    )
                    requests[f"r{len(requests)}"] = prompt, params
    for more in (
        {"stop_token_ids": (17, 300)},
        {"min_tokens": 5},
        {"ignore_eos": True},
        {"repetition_penalty": 1.3},
        {"length_penalty": -1.0, "early_stopping": None},
        {"length_penalty": 0.0},
    ):
        for prompt in PROMPTS:
            params = SamplingParams(**{"max_tokens": MAX_TOKENS, "beam_width": 4, "n": 4, **more})
            requests[f"r{len(requests)}"] = prompt, params
    defaults = {"model": str(checkpoint), "block_size": 4, "num_blocks": 256, "max_model_len": 64}
    core = EngineCore(EngineConfig.from_mapping({**defaults, "max_num_seqs": 32, **options}))
    try:
        for name, (prompt, params) in requests.items():
            core.add_request(name, prompt, params)
        outputs = run(core)
    finally:
        core.close()
    if "num_blocks" in options:
        assert core.scheduler.roster.num_preemptions > 0
    reasons = set()
    for name, (prompt, params) in requests.items():
        expected = beams_of_transformers(prompt, params)
        assert [output.index for output in outputs[name]] == list(range(params.n)), (name, params)
        for output, (sequence, score) in zip(outputs[name], expected, strict=True):
            assert output.new_token_ids == sequence, (name, params, output.index)
            assert output.cumulative_logprob is not None
            own = output.cumulative_logprob / len(sequence) ** params.length_penalty
            assert own == pytest.approx(score, abs=3e-4), (name, params, output.index)
            reasons.add((output.finish_reason, len(sequence) < MAX_TOKENS))
    assert {("stop", True), ("length", False)} <= reasons, "no end was found early, or none late"


def test_log_probabilities_of_the_best_beam(checkpoint: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint).eval()
    core = EngineCore(EngineConfig.from_mapping({"model": str(checkpoint), "num_blocks": 128}))
    params = SamplingParams(max_tokens=8, beam_width=3, n=2, logprobs=20)
    core.add_request("a", PROMPTS[0], params)
    for output in run(core)["a"]:
        tokens = [*PROMPTS[0], *output.new_token_ids]
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0]
        expected = torch.log_softmax(logits[len(PROMPTS[0]) - 1 : -1].float(), dim=-1)
        assert output.logprobs is not None and len(output.logprobs) == len(output.new_token_ids)
        for token_id, entry, row in zip(output.new_token_ids, output.logprobs, expected, strict=True):
            assert entry.token_ids[0] == token_id and len(entry.token_ids) == 21
            assert entry.logprobs[0] == pytest.approx(float(row[token_id]), abs=1e-4)
            assert entry.logprobs[1:] == pytest.approx(row.topk(20).values.tolist(), abs=1e-4)
        total = sum(entry.logprobs[0] for entry in output.logprobs)
        assert output.cumulative_logprob == pytest.approx(total)


def test_a_failing_step_ends_the_search_with_an_error() -> None:
    engine = FakeEngine()
    add(engine, "a", 30, n=2, ignore_eos=True)
    engine.step()
    engine.scheduler.schedule()
    (output,) = engine.scheduler.fail("broken")
    assert output.error == "broken" and output.finish_reason == str(FinishReason.ERROR)
    assert not engine.scheduler.has_unfinished()
    engine.scheduler.check_integrity()
