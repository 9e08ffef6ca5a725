"""Speculation by a draft model: the tokens are those without, and drafts of a model that is the target's twin
are right."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, cast
from unittest import mock

import jsonschema
import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.core.drafts import Drafter, StepCost
from quire.engine.cache_commands import Sleep
from quire.engine.core import EngineCore
from quire.engine.executor import RunnerExecutor
from quire.engine.supervisor import EngineSupervisor
from quire.errors import CheckpointError, ConfigError
from quire.models.decoder import DecoderModel
from quire.outputs import ScheduledRequest
from quire.plan.capacity import predict
from quire.plan.checks import read
from quire.request.structured_output import StructuredOutput
from quire.worker.draft_model import DraftModel
from quire.worker.model_runner import ModelRunner
from quire_common.machine import available_memory
from tests.fixtures.adapters import make_adapter
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drafters import eager, make_forgetful
from tests.fixtures.gguf_files import write_gguf
from tests.fixtures.graphs import recorded_steps
from tests.fixtures.schemas import SCHEMAS
from tests.unit.test_engine import random_prompts
from tests.unit.test_speculation import OPTIONS, PARAMS, PROMPTS, answers, asked


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model that knows nothing of the target."""
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_checkpoint("llama", tmp_path_factory.mktemp("other"), seed=3, tokenizer=False, **shape)


def compare(
    path: Path, draft: Path, params: SamplingParams, prompts: list[list[int]] = PROMPTS, **options: Any
) -> LLM:
    """Generates without and with drafts of a model; the engine with."""
    values = {**OPTIONS, **options}
    expected, numbers = answers(LLM(path, **values).generate(prompts, params))
    llm = LLM(path, **values, num_draft_tokens=4, draft_model=str(draft))
    with eager():
        found, other_numbers = answers(llm.generate(prompts, params))
    assert found == expected
    for one, another in zip(numbers, other_numbers, strict=True):
        assert np.abs(one - another).max() < 1e-4
    llm.core.scheduler.check_integrity()
    return llm


def draft_of(core: EngineCore) -> DraftModel:
    draft = cast(ModelRunner, cast(RunnerExecutor, core.executor).runner).draft
    assert draft is not None
    return draft


def share(llm: LLM) -> float:
    """Of the drafts that were tried, those that were right."""
    scheduler = llm.core.scheduler
    assert scheduler.num_draft_tokens > 40, "too few to tell"
    return scheduler.num_accepted_drafts / scheduler.num_draft_tokens


@pytest.mark.row("E23", clauses=("equal",))
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "one ahead"])
@pytest.mark.parametrize("name", PARAMS)
def test_each_kind_of_request_gets_what_it_gets_without(
    checkpoint: Path, other: Path, name: str, ahead: bool
) -> None:
    """A twin is right wherever nothing but the model's logits and the random numbers count."""
    twin = compare(checkpoint, checkpoint, PARAMS[name], async_scheduling=ahead)
    stranger = compare(checkpoint, other, PARAMS[name], async_scheduling=ahead)
    if name == "beams":
        assert twin.core.scheduler.num_draft_tokens == 0
        return
    assert share(stranger) < 0.3
    if name in ("greedy", "log-probabilities", "seeded", "best of"):
        assert share(twin) > 0.8
    elif not name.startswith("grammar"):
        assert share(twin) > share(stranger)


@pytest.mark.row("E23", clauses=("acceptance",))
@pytest.mark.parametrize("name", ["greedy", "choices"])
def test_counts_of_drafts_are_those_of_the_steps(checkpoint: Path, name: str) -> None:
    """Each row that has some brings one token more than were right; those that were not made do not count."""
    options = {"num_draft_tokens": 4, "draft_model": str(checkpoint), "max_num_batched_tokens": 24}
    core = LLM(checkpoint, **OPTIONS, **options).core
    draft = draft_of(core)
    tried, right, told_of = Counter[str](), Counter[str](), dict[str, tuple[int, int]]()
    fill = draft.fill

    def watched(rows: list[ScheduledRequest], batch: Any) -> Any:
        filled = fill(rows, batch)
        for row in filled[0]:
            assert row.num_drafts == len(row.draft_token_ids)
            tried[row.request_id.replace("#0", "")] += row.num_drafts
        return filled

    draft.fill = watched  # type: ignore[method-assign]
    with eager():
        for number, prompt in enumerate(PROMPTS):
            core.add_request(str(number), prompt, PARAMS[name])
        while core.has_work:
            for output in core.step():
                choice = f"{output.request_id}#{output.index}" if output.index else output.request_id
                right[choice] += len(output.new_token_ids) - 1
                told_of[choice] = output.num_draft_tokens, output.num_accepted_drafts
    assert told_of == {choice: (tried[choice], right[choice]) for choice in told_of}
    stats = core.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_drafts) == (tried.total(), right.total())
    assert stats.num_draft_tokens > 40


@pytest.mark.row("E23")
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "one ahead"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 34},
        {"num_blocks": 34, "host_cache_memory": "4MiB", "preemption_mode": "swap"},
        {"max_num_batched_tokens": 24},
        {"kv_cache_dtype": "int8", "block_size": 16},
        {"max_num_seqs": 3},
    ],
    ids=["preemption", "swap", "chunks", "int8", "few seats"],
)  # fmt: skip
def test_a_twin_is_right_wherever_the_target_computes(
    checkpoint: Path, options: dict[str, Any], ahead: bool
) -> None:
    """It computes again what was preempted, and long prompts bit by bit."""
    prompts = random_prompts(4, longest=90, seed=5)
    llm = compare(checkpoint, checkpoint, asked(max_tokens=60), prompts, **options, async_scheduling=ahead)
    assert share(llm) > 0.8
    assert llm.core.stats().num_preemptions > 0 or options.get("num_blocks") != 34


@pytest.mark.row("E23")
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "one ahead"])
def test_both_sources_of_drafts_in_one_request(tmp_path: Path, ahead: bool) -> None:
    """What prompt lookup brought the draft model has missed, and computes when it is asked again."""
    forgetful = make_forgetful(tmp_path / "llama")
    sources = Counter[bool]()

    def uses_model(drafter: Drafter) -> bool:
        uses = drafter._num_seen % 3 > 0 or not drafter.guess
        sources[uses] += 1
        return uses

    with mock.patch.object(Drafter, "uses_model", property(uses_model)):
        llm = compare(forgetful, forgetful, asked(max_tokens=150), async_scheduling=ahead)
    assert share(llm) > 0.8 and min(sources.values()) > 100


@pytest.mark.row("E23")
def test_prompts_that_the_target_finds_in_its_cache(checkpoint: Path) -> None:
    prompts = [[*range(5, 60), number] for number in range(5)]
    llm = compare(checkpoint, checkpoint, asked(), prompts)
    with eager():
        again = llm.generate(prompts, asked(temperature=1.0, seed=4))
    assert all(one.num_cached_tokens >= 48 for one in again)
    expected = LLM(checkpoint, **OPTIONS).generate(prompts, asked(temperature=1.0, seed=4))
    assert [one.token_ids for one in again] == [one.token_ids for one in expected]
    assert share(llm) > 0.8


@pytest.mark.row("E23")
@pytest.mark.parametrize(
    ("family", "draft"),
    [("gemma3", "llama"), ("llama", "mistral"), ("qwen3_moe", "qwen3"), ("qwen3", "qwen3_moe")],
)
def test_models_of_all_kinds(tmp_path: Path, family: str, draft: str) -> None:
    """Windows in some layers of the target, in all of the draft, experts in either."""
    paths = (make_checkpoint(name, tmp_path / name) for name in (family, draft))
    llm = compare(*paths, asked())
    assert llm.core.scheduler.num_draft_tokens > 40


@pytest.mark.row("E23")
def test_a_draft_of_fewer_bits(checkpoint: Path, tmp_path: Path) -> None:
    file = write_gguf(checkpoint, tmp_path / "model.gguf", "Q8_0")
    assert share(compare(checkpoint, file, asked())) > 0.5


@pytest.mark.row("E23")
@pytest.mark.parametrize("draft", ["twin", "other"])
def test_recorded_steps_go_on_beside_drafts(checkpoint: Path, other: Path, draft: str) -> None:
    with recorded_steps():
        compare(checkpoint, checkpoint if draft == "twin" else other, PARAMS["seeded"], async_scheduling=True)


@pytest.mark.row("E23")
def test_adapters_change_the_target_alone(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    adapter = make_adapter(tmp_path / "a", LlamaForCausalLM.from_pretrained(checkpoint), seed=1)
    options = {**OPTIONS, "enable_lora": True, "lora_modules": {"a": str(adapter)}}
    adapters = ["a", None] * 4
    expected = LLM(checkpoint, **options).generate(PROMPTS, asked(), adapters=adapters)
    llm = LLM(checkpoint, **options, num_draft_tokens=4, draft_model=str(checkpoint))
    with eager():
        found = llm.generate(PROMPTS, asked(), adapters=adapters)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert 0.1 < share(llm) < 0.5, "those with the adapter need many more steps"


@pytest.mark.row("E23")
def test_a_model_that_is_never_right_is_hardly_asked(checkpoint: Path, other: Path) -> None:
    """Of 300 tokens some at the beginning, and one in 64."""
    options = {**OPTIONS, "max_model_len": 400, "num_draft_tokens": 4}
    core = LLM(checkpoint, **options, draft_model=str(other)).core
    core.add_request("r", PROMPTS[0], asked(max_tokens=300))
    num_tried = []
    with mock.patch.object(StepCost, "line", lambda _: (0.02, 0.001)):
        while core.has_work:
            core.step()
            num_tried.append(core.stats().num_draft_tokens)
    assert num_tried[60] > 4
    assert [num_tried[120] - num_tried[60], num_tried[-1] - num_tried[120]] in ([0, 2], [1, 2], [1, 3])


@pytest.mark.row("E23")
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "one ahead"])
def test_a_model_that_is_right_saves_steps(checkpoint: Path, ahead: bool) -> None:
    options = {**OPTIONS, "async_scheduling": ahead}
    steps = []
    for more in ({}, {"num_draft_tokens": 4, "draft_model": str(checkpoint)}):
        llm = LLM(checkpoint, **options, **more)
        with mock.patch.object(StepCost, "line", lambda _: (0.02, 0.001)):
            llm.generate(PROMPTS, asked(max_tokens=60))
        steps.append(llm.core.num_finished_steps)
    # Rows that wait for their tokens are in every other step, which others fill.
    assert steps[1] < steps[0] * (0.8 if ahead else 0.5)


@pytest.mark.row("E23")
def test_a_step_that_computes_prompts_for_the_draft_does_not_say_what_steps_cost(checkpoint: Path) -> None:
    core = LLM(checkpoint, **OPTIONS, num_draft_tokens=4, draft_model=str(checkpoint)).core
    draft, caught_up = draft_of(core), list[bool]()
    fill = draft.fill

    def watched(rows: list[ScheduledRequest], batch: Any) -> Any:
        filled = fill(rows, batch)
        caught_up.append(filled[1])
        return filled

    draft.fill = watched  # type: ignore[method-assign]
    core.add_request("r", list(range(5, 55)), asked())
    with eager(), mock.patch.object(StepCost, "add") as add:
        while core.has_work:
            core.step()
    assert caught_up == [False, True, *[False] * (len(caught_up) - 2)]
    assert add.call_count == len(caught_up) - 2, "nor does one that computes prompts for the model"


def refusal(checkpoint: Path, draft: Path, **options: Any) -> str:
    """What an engine, and `quire plan`, say of a draft model."""
    values = {**OPTIONS, "num_draft_tokens": 4, "draft_model": str(draft), **options}
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        LLM(checkpoint, **values)
    with pytest.raises(type(caught.value)) as planned:
        predict(EngineConfig.from_mapping({**values, "model": str(checkpoint)}), "cpu", available_memory())
    assert str(planned.value) == str(caught.value)
    return str(caught.value)


@pytest.mark.row("E23")
def test_what_cannot_guess_for_a_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    families = {name: make_checkpoint(name, tmp_path / name) for name in ("gemma3", "mistral")}
    small = make_checkpoint("llama", tmp_path / "small", vocab_size=500, tokenizer=False)
    assert refusal(checkpoint, small) == "draft_model: its vocabulary has 500 tokens, the model's 512"
    assert "draft_model: its layers need 3 KV groups" in refusal(checkpoint, families["gemma3"])
    assert "draft_model: all layers of the model have a sliding window" in refusal(
        families["mistral"], checkpoint
    )
    assert "missing: no such checkpoint" in refusal(checkpoint, tmp_path / "missing")
    assert "num_draft_tokens above 0" in refusal(checkpoint, checkpoint, num_draft_tokens=0)
    (planned,) = read(checkpoint, {"draft_model": str(checkpoint)})
    assert planned.problems == ["draft_model needs num_draft_tokens above 0"]


@pytest.mark.row("E23")
def test_the_pool_leaves_room_for_both(checkpoint: Path, other: Path) -> None:
    """Bytes of a block, float32: 2 layers of 2 heads of 16, and 1 of 1 of 16, of a key and a value each."""
    values = {**OPTIONS, "num_blocks": None, "kv_cache_memory": "3MiB"}
    with_draft = {"num_draft_tokens": 4, "draft_model": str(other)}
    alone = LLM(checkpoint, **values).core.info
    both = LLM(checkpoint, **values, **with_draft).core
    of_target, of_draft = (8 * 4 * 2 * layers * heads * 16 for layers, heads in ((2, 2), (1, 1)))
    assert alone.num_blocks == 3 * 2**20 // of_target
    assert both.info.num_blocks == 3 * 2**20 // (of_target + of_draft)
    assert both.info.kv_cache_bytes == both.info.num_blocks * (of_target + of_draft)
    assert draft_of(both).kv_cache.nbytes == both.info.num_blocks * of_draft
    config = EngineConfig.from_mapping({**values, **with_draft, "model": str(checkpoint)})
    planned, plain = (predict(one, "cpu", 2**35) for one in (config, config.replace(draft_model="")))
    assert (planned.num_blocks, planned.kv_cache_bytes) == (both.info.num_blocks, both.info.kv_cache_bytes)
    assert plain.num_blocks == alone.num_blocks
    weights = sum(parameter.nbytes for parameter in draft_of(both).model.parameters())
    weights += sum(module.nbytes for _, module in draft_of(both).model.packed_modules())
    assert planned.weight_bytes - plain.weight_bytes == pytest.approx(weights, rel=0.01)


@pytest.mark.row("E23")
def test_the_same_tokens_after_waking(checkpoint: Path, tmp_path: Path) -> None:
    draft = shutil.copytree(checkpoint, tmp_path / "draft")
    llm = LLM(checkpoint, **OPTIONS, num_draft_tokens=4, draft_model=str(draft))
    with eager():
        tokens, _ = answers(llm.generate(PROMPTS, PARAMS["seeded"]))
        llm.core.begin_sleep(Sleep())
        llm.core.sleep()
        llm.core.wake()
        after, _ = answers(llm.generate(PROMPTS, PARAMS["seeded"]))
    assert tokens == after and share(llm) > 0.8
    llm.core.begin_sleep(Sleep())
    llm.core.sleep()
    assert not hasattr(cast(RunnerExecutor, llm.core.executor).runner, "draft")
    config = llm.config
    before = EngineSupervisor(config, os.getpid()).directory
    (draft / "config.json").touch()
    assert EngineSupervisor(config, os.getpid()).directory != before, "another checkpoint is another engine"
    with pytest.raises(CheckpointError, match="has changed since it was loaded"):
        llm.core.wake()


@pytest.mark.row("A24", clauses=("speculation",))
def test_200_of_200_grammars_by_either_kind_of_drafts(checkpoint: Path) -> None:
    """Of prompts that hold an answer, so that prompt lookup is often right; the same answers as without."""
    names = [list(SCHEMAS)[number % len(SCHEMAS)] for number in range(200)]
    params = [
        SamplingParams(
            max_tokens=500,
            temperature=2.0,
            seed=number,
            structured_output=StructuredOutput(json=json.dumps(SCHEMAS[name], separators=(",", ":"))),
        )
        for number, name in enumerate(names)
    ]
    options = {**OPTIONS, "max_model_len": 1024, "num_blocks": 4000}
    llm = LLM(checkpoint, **options)
    first = llm.generate([f"{number}" for number in range(200)], params)
    prompts = [llm.encode(one.text + one.text + str(number)) for number, one in enumerate(first)]
    expected = llm.generate(prompts, params)
    for name, one in zip(names, expected, strict=True):
        assert one.finish_reason == "stop"
        jsonschema.validate(json.loads(one.text), SCHEMAS[name])
    for more in ({}, {"draft_model": str(checkpoint)}):
        llm = LLM(checkpoint, **options, num_draft_tokens=4, **more)
        with eager():
            found = llm.generate(prompts, params)
        assert [one.text for one in found] == [one.text for one in expected]
        assert llm.core.scheduler.num_accepted_drafts > 200


def test_operators_of_a_draft_that_is_not_one_call_save_nothing_for_gradients(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without inference_mode each of them asks autograd first: a share of the time of a small draft."""
    fuse, seen = DecoderModel._fuse, list[bool]()
    forward = DecoderModel.forward

    def watched(self: DecoderModel, *args: Any, **kwargs: Any) -> Any:
        if not self.is_fused:
            seen.append(torch.is_inference_mode_enabled())
        return forward(self, *args, **kwargs)

    made: list[DecoderModel] = []

    def first_alone(self: DecoderModel) -> Any:
        made.append(self)
        return fuse(self) if self is made[0] else None

    monkeypatch.setattr(DecoderModel, "_fuse", first_alone)
    monkeypatch.setattr(DecoderModel, "forward", watched)
    llm = LLM(checkpoint, **OPTIONS, num_draft_tokens=4, draft_model=str(checkpoint))
    runner = cast(ModelRunner, cast(RunnerExecutor, llm.core.executor).runner)
    assert runner.model.is_fused and runner.draft is not None and not runner.draft.model.is_fused
    with eager():
        llm.generate(PROMPTS[:2], SamplingParams(max_tokens=8, ignore_eos=True))
    assert seen and all(seen)
