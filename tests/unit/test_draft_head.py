"""Speculation by a head that reads the target's hidden states: the tokens are those without, and the head's
guesses are those of PyTorch's layer, whatever became of its keys and values meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.core.drafts import Drafter
from quire.engine.cache_commands import Sleep
from quire.engine.core import EngineCore
from quire.errors import CheckpointError, ConfigError
from quire.outputs import ScheduledRequest
from quire.plan.capacity import predict
from quire.worker.draft_head import DraftHead
from quire.worker.model_runner import ModelRunner
from quire_common.machine import available_memory
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drafters import eager
from tests.fixtures.heads import (
    Eagle3Reference,
    EagleReference,
    MTPReference,
    ReferenceHead,
    edit_config,
    make_agreeing,
    make_eagle3_head,
    make_eagle_head,
    make_mtp_checkpoint,
    read_tensors,
    write_tensors,
)
from tests.fixtures.runner_of import runner_of
from tests.unit.test_engine import random_prompts
from tests.unit.test_speculation import OPTIONS, PARAMS, PROMPTS, answers, asked


@dataclass
class Case:
    """A target and its head."""

    path: Path
    draft_model: str
    reference: ReferenceHead

    @property
    def options(self) -> dict[str, Any]:
        return {"num_draft_tokens": 3, "draft_model": self.draft_model}


def make_mtp(path: Path, family: str = "glm4_moe") -> Case:
    checkpoint = make_mtp_checkpoint(family, path)
    return Case(checkpoint, "mtp", MTPReference(checkpoint))


def make_eagle(path: Path) -> Case:
    target = make_checkpoint("llama", path / "target", tied=False)
    head = make_eagle_head(target, path / "head")
    return Case(target, str(head), EagleReference(target, head))


def make_eagle3(path: Path) -> Case:
    target = make_checkpoint("llama", path / "target", tied=False, num_hidden_layers=8)
    head = make_eagle3_head(target, path / "head")
    return Case(target, str(head), Eagle3Reference(target, head))


MAKERS: dict[str, Callable[[Path], Case]] = {"mtp": make_mtp, "eagle": make_eagle, "eagle3": make_eagle3}


@pytest.fixture(scope="module", params=MAKERS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_mtp(tmp_path_factory.mktemp("model"))


@contextmanager
def head_alone() -> Iterator[None]:
    """Prompt lookup proposes nothing, and all drafts are tried."""
    with eager(), mock.patch.object(Drafter, "uses_model", property(lambda drafter: drafter._has_model)):
        yield


def head_of(core: EngineCore) -> DraftHead:
    draft = cast(ModelRunner, runner_of(core)).draft
    assert isinstance(draft, DraftHead)
    return draft


@contextmanager
def watched(head: DraftHead, reference: ReferenceHead) -> Iterator[list[int]]:
    """Compares each guess with the reference's; yields the numbers of tokens compared."""
    compared: list[int] = []
    fill = head.fill

    def compare(rows: list[ScheduledRequest], batch: Any) -> Any:
        filled = fill(rows, batch)
        for before, row in zip(rows, filled[0], strict=True):
            if row.num_drafts and not before.draft_token_ids:
                known = batch.requests[row.request_id].token_ids
                expected = reference.guess(known, row.num_drafts)
                assert list(row.draft_token_ids)[: len(expected)] == expected, row
                compared.append(len(expected))
        return filled

    with mock.patch.object(head, "fill", compare), head_alone():
        yield compared


def compare(case: Case, params: SamplingParams, prompts: list[list[int]] = PROMPTS, **options: Any) -> LLM:
    """Generates without and with the head, whose guesses are the reference's; the engine with."""
    values = {**OPTIONS, **options}
    expected, _ = answers(LLM(case.path, **values).generate(prompts, params))
    llm = LLM(case.path, **values, **case.options)
    with watched(head_of(llm.core), case.reference) as compared:
        found, _ = answers(llm.generate(prompts, params))
    assert found == expected and sum(compared) > 60
    llm.core.scheduler.check_integrity()
    return llm


def share(llm: LLM) -> float:
    """Of the drafts that were tried, those that were right."""
    scheduler = llm.core.scheduler
    assert scheduler.num_draft_tokens > 40, "too few to tell"
    return scheduler.num_accepted_drafts / scheduler.num_draft_tokens


@pytest.mark.row("E25", clauses=("equal", "rollback", "three"))
@pytest.mark.row("E26", clauses=("equal",))
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "one ahead"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 34},
        {"max_num_batched_tokens": 24},
        {"max_num_seqs": 3},
    ],
    ids=["plain", "preemption", "chunks", "few seats"],
)  # fmt: skip
def test_guesses_are_those_of_the_layer(case: Case, options: dict[str, Any], ahead: bool) -> None:
    """Nearly all are wrong, since the head is random: each step rolls back."""
    prompts = random_prompts(4, longest=90, seed=5)
    llm = compare(case, asked(max_tokens=40), prompts, **options, async_scheduling=ahead)
    assert share(llm) < 0.3
    assert llm.core.stats().num_preemptions > 0 or "num_blocks" not in options


@pytest.mark.row("E26", clauses=("equal",))
@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_latent_attention(tmp_path: Path, family: str) -> None:
    compare(make_mtp(tmp_path / "model", family), asked(), PROMPTS[:4])


@pytest.mark.row("E25", clauses=("equal", "rollback", "three"))
@pytest.mark.row("E26", clauses=("equal",))
def test_prompts_that_the_target_finds_in_its_cache(case: Case) -> None:
    prompts = [[*range(5, 60), number] for number in range(4)]
    llm = compare(case, asked(), prompts)
    with watched(head_of(llm.core), case.reference) as compared:
        again = llm.generate(prompts, asked())
    assert all(one.num_cached_tokens >= 48 for one in again) and sum(compared) > 60
    expected = LLM(case.path, **OPTIONS).generate(prompts, asked())
    assert [one.token_ids for one in again] == [one.token_ids for one in expected]


@pytest.mark.row("E25", clauses=("equal", "rollback", "three"))
@pytest.mark.row("E26", clauses=("equal",))
def test_choices_of_a_request(case: Case) -> None:
    """They begin in a block of their own, with a copy of what the first one's holds."""
    prompts = [list(range(5, 5 + length)) for length in (19, 21)]
    compare(case, asked(n=3), prompts)


@pytest.mark.row("E25", clauses=("equal", "rollback", "three"))
@pytest.mark.row("E26", clauses=("equal",))
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "one ahead"])
@pytest.mark.parametrize("name", ["log-probabilities", "seeded", "choices", "penalties", "grammar", "beams"])
def test_each_kind_of_request_gets_what_it_gets_without(case: Case, name: str, ahead: bool) -> None:
    values = {**OPTIONS, "async_scheduling": ahead}
    expected, _ = answers(LLM(case.path, **values).generate(PROMPTS[:4], PARAMS[name]))
    llm = LLM(case.path, **values, **case.options)
    with head_alone():
        found, _ = answers(llm.generate(PROMPTS[:4], PARAMS[name]))
    assert found == expected
    assert (llm.core.scheduler.num_draft_tokens > 40) == (name != "beams")


@pytest.mark.row("E25", clauses=("equal", "rollback", "three"))
@pytest.mark.row("E26", clauses=("equal",))
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_head_that_knows_the_model_is_right(tmp_path: Path, kind: str, kv_cache_dtype: str) -> None:
    """It does so by the target's hidden states alone, and by its own for the second draft and the third."""
    case = MAKERS[kind](tmp_path)
    make_agreeing(case.path, case.path if kind == "mtp" else Path(case.draft_model))
    params, values = asked(max_tokens=150), {**OPTIONS, "kv_cache_dtype": kv_cache_dtype}
    plain = LLM(case.path, **values)
    expected, _ = answers(plain.generate(PROMPTS, params))
    llm = LLM(case.path, **values, **case.options | ({"num_draft_tokens": 1} if kind == "eagle3" else {}))
    with head_alone():
        found, _ = answers(llm.generate(PROMPTS, params))
    assert found == expected
    assert share(llm) > 0.7
    assert llm.core.num_finished_steps < plain.core.num_finished_steps * 0.7


@pytest.mark.row("E25", clauses=("equal", "rollback", "three"))
@pytest.mark.row("E26", clauses=("equal",))
def test_the_same_tokens_after_waking(case: Case) -> None:
    llm = compare(case, asked())
    llm.core.begin_sleep(Sleep())
    llm.core.sleep()
    llm.core.wake()
    with watched(head_of(llm.core), case.reference) as compared:
        after, _ = answers(llm.generate(PROMPTS, asked()))
    assert after == answers(LLM(case.path, **OPTIONS).generate(PROMPTS, asked()))[0] and sum(compared) > 60


@pytest.mark.row("E26", clauses=("equal",))
def test_the_pool_leaves_room_for_the_head(mtp: Case) -> None:
    """Bytes of a block, float32: of 3 layers and the head's one, and a hidden state for each token."""
    values = {**OPTIONS, "num_blocks": None, "kv_cache_memory": "3MiB"}
    alone, both = LLM(mtp.path, **values).core.info, LLM(mtp.path, **values, **mtp.options).core
    of_layer = 3 * 2**20 // alone.num_blocks // 3
    of_hidden = 8 * 64 * 4
    assert both.info.num_blocks == 3 * 2**20 // (4 * of_layer + of_hidden)
    head = head_of(both)
    assert head.kv_cache.nbytes == both.info.num_blocks * of_layer
    assert head.hidden.nbytes == both.info.num_blocks * of_hidden
    assert both.info.kv_cache_bytes == both.info.num_blocks * (4 * of_layer + of_hidden)
    config = EngineConfig.from_mapping({**values, **mtp.options, "model": str(mtp.path)})
    planned, plain = (predict(one, "cpu", 2**35) for one in (config, config.replace(draft_model="")))
    assert (planned.num_blocks, planned.kv_cache_bytes) == (both.info.num_blocks, both.info.kv_cache_bytes)
    weights = sum(parameter.nbytes for name, parameter in head.head.named_parameters())
    weights += sum(
        module.nbytes
        for name, module in head.model.packed_modules()
        if name not in ("embed_tokens", "lm_head")
    )
    # The embedding and the output head are the model's.
    assert planned.weight_bytes - plain.weight_bytes == pytest.approx(weights, rel=0.02)


def refusal(checkpoint: Path, draft_model: str = "mtp", **options: Any) -> str:
    """What an engine, and `quire plan`, say of a head."""
    values = {**OPTIONS, "num_draft_tokens": 3, "draft_model": draft_model, **options}
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        LLM(checkpoint, **values)
    with pytest.raises(type(caught.value)) as planned:
        predict(EngineConfig.from_mapping({**values, "model": str(checkpoint)}), "cpu", available_memory())
    assert str(planned.value) == str(caught.value)
    return str(caught.value)


@pytest.mark.row("E26", clauses=("equal",))
def test_a_checkpoint_without_a_head_is_refused(mtp: Case, tmp_path: Path) -> None:
    llama = make_checkpoint("llama", tmp_path / "llama")
    assert refusal(llama) == "draft_model=mtp: no head of LlamaForCausalLM is known"
    headless = make_checkpoint("glm4_moe", tmp_path / "headless")
    for number in (None, 0):
        edit_config(headless, num_nextn_predict_layers=number)
        assert refusal(headless).endswith("states no num_nextn_predict_layers, so the checkpoint has no head")
    assert "tensor_parallel_size=1" in refusal(mtp.path, tensor_parallel_size=2)
    broken = shutil.copytree(mtp.path, tmp_path / "broken")
    tensors = read_tensors(broken)
    write_tensors(broken, {name: one for name, one in tensors.items() if "eh_proj" not in name})
    with pytest.raises(CheckpointError, match=r"1 missing tensors: model\.eh_proj\.weight"):
        LLM(broken, **OPTIONS, **mtp.options)


@pytest.mark.row("E25", clauses=("equal", "rollback"))
def test_an_eagle_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    case = make_eagle(tmp_path)
    with pytest.raises(ConfigError, match="is a draft head: name it under draft_model"):
        LLM(case.draft_model, **OPTIONS)
    assert "tensor_parallel_size=1" in refusal(case.path, case.draft_model, tensor_parallel_size=2)
    wide = make_checkpoint("llama", tmp_path / "wide", tokenizer=False, hidden_size=128)
    assert refusal(wide, case.draft_model) == "draft_model: its hidden_size is 64, the model's 128"
    with pytest.raises(ConfigError, match="a draft head needs model_impl quire"):
        LLM(case.path, **OPTIONS, **case.options, model_impl="transformers")
    eagle3 = make_eagle3_head(case.path, tmp_path / "eagle3")
    with pytest.raises(ConfigError, match="an EAGLE-3 head needs 7 layers of the model"):
        LLM(case.path, **OPTIONS, num_draft_tokens=3, draft_model=str(eagle3))
    known = read_tensors(eagle3)
    write_tensors(eagle3, known | {"d2t": known["d2t"] + 100_000})
    with pytest.raises(ConfigError, match=r"draft_model: d2t names tokens \d+ to \d+, the vocabulary has"):
        LLM(case.path, **OPTIONS, num_draft_tokens=3, draft_model=str(eagle3))
    with pytest.raises(ConfigError, match="is a draft head: name it under draft_model"):
        LLM(case.draft_model, **OPTIONS, num_draft_tokens=3, draft_model=str(case.path))
    edit_config(Path(case.draft_model), dtype="float16")
    assert "the head's type is torch.float16" in refusal(case.path, case.draft_model, dtype="auto")
    edit_config(Path(case.draft_model), dtype="float32")
    edit_config(Path(case.draft_model), num_hidden_layers=2)
    assert "heads of one layer are supported" in refusal(case.path, case.draft_model)
