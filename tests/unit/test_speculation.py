"""Speculation on real models: the tokens are those without, whatever a request asks for, and fewer steps."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.drafts import StepCost
from quire.engine.executor import RunnerExecutor
from quire.outputs import RequestOutput, SchedulerOutput
from quire.request.sampling_params import Thinking
from quire.request.scheduling_params import SchedulingParams
from quire.request.structured_output import StructuredOutput
from quire.worker import grammar, token_history
from quire.worker.sampler import draw, join_drafts
from quire.worker.sampling_batch import SamplingRow, collect_edits
from tests.fixtures import drafters
from tests.fixtures.adapters import make_adapter
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drafters import make_forgetful, told
from tests.fixtures.graphs import RecordedOperations, recorded_steps
from tests.fixtures.runner_of import runner_of
from tests.fixtures.waiting import PATIENT_S
from tests.unit.test_engine import random_prompts

PROMPTS = random_prompts(8, longest=30, seed=3)
OPTIONS = {"max_model_len": 256, "num_blocks": 200, "block_size": 8, "num_threads": 1, "dtype": "float32"}
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"}},"required":["a","b"]}'

WORDS = StructuredOutput(regex="([ab]{3}c|d{9}){8}")


def asked(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **values})


PARAMS = {
    "greedy": asked(),
    "log-probabilities": asked(logprobs=3, prompt_logprobs=1),
    "ends": asked(max_tokens=60, stop_token_ids=tuple(range(0, 500, 9))),
    "seeded": asked(temperature=1.0, seed=5, top_k=50, top_p=0.9, min_p=0.01, logprobs=0),
    "penalties": asked(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 1.0}),
    "choices": asked(n=3, temperature=1.0, seed=8, repetition_penalty=1.3),
    "best of": asked(best_of=3, temperature=1.0, seed=8),
    "bans": asked(no_repeat_ngram_size=2, bad_words_ids=((5,), (6, 7)), temperature=0.7, seed=1),
    "least": asked(min_tokens=15, ignore_eos=False, stop_token_ids=tuple(range(0, 500, 3))),
    "grammar": asked(structured_output=StructuredOutput(json=SCHEMA), ignore_eos=False, max_tokens=60),
    "grammar, seeded": asked(structured_output=WORDS, temperature=1.5, seed=3, ignore_eos=False),
    "beams": asked(beam_width=3, n=2),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def recorded() -> Iterator[RecordedOperations]:
    with recorded_steps() as backend:
        yield backend


def known(outputs: list[RequestOutput], prompts: list[list[int]]) -> list[list[int]]:
    return [
        prompt + one.token_ids
        for prompt, output in zip(prompts, outputs, strict=True)
        for one in (output, *output.others)
    ]


def answers(outputs: list[RequestOutput]) -> tuple[list[Any], list[np.ndarray]]:
    """What a caller sees, and log-probabilities apart."""
    seen, numbers = [], []
    for output in outputs:
        for one in (output, *output.others):
            seen.append((one.token_ids, one.text, one.finish_reason, one.stop_reason, one.num_output_tokens))
            entries = [*(one.logprobs or []), *(one.prompt_logprobs or [None])[1:]]
            seen[-1] += tuple((tuple(entry.token_ids), entry.rank) for entry in entries if entry)
            numbers += [np.array(entry.logprobs) for entry in entries if entry]
    return seen, numbers


def compare(path: Path, params: SamplingParams, prompts: list[list[int]] = PROMPTS, **options: Any) -> LLM:
    """Generates without and with drafts that are often right; the engine with."""
    expected = LLM(path, **OPTIONS, **options).generate(prompts, params)
    llm = LLM(path, **OPTIONS, **options, num_draft_tokens=6)
    with told(known(expected, prompts), 512):
        found = llm.generate(prompts, params)
    (tokens, numbers), (others, other_numbers) = answers(expected), answers(found)
    assert others == tokens
    for one, other in zip(numbers, other_numbers, strict=True):
        assert np.abs(one - other).max() < 1e-4
    return llm


@pytest.mark.row("E24", clauses=("equal",))
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "one ahead"])
@pytest.mark.parametrize("name", PARAMS)
def test_each_kind_of_request_gets_what_it_gets_without(checkpoint: Path, name: str, ahead: bool) -> None:
    scheduler = compare(checkpoint, PARAMS[name], async_scheduling=ahead).core.scheduler
    if name == "beams":
        assert scheduler.num_draft_tokens == 0
    else:
        assert scheduler.num_accepted_drafts > 40, (scheduler.num_draft_tokens, scheduler.num_accepted_drafts)
        assert scheduler.num_draft_tokens > scheduler.num_accepted_drafts


@pytest.mark.row("E24")
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("family", "num_blocks"), [("llama", 30), ("gemma3", 70)])
def test_all_kinds_at_once_get_what_they_get_without(
    tmp_path: Path, family: str, num_blocks: int, depth: int
) -> None:
    """Guesses that are right, wrong and both in turn, with preemptions and chunks; with windows, or with
    prefixes in the cache in the second round."""
    path, params = make_checkpoint(family, tmp_path), list(PARAMS.values())
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(params))]
    expected = LLM(path, **OPTIONS).generate(prompts, params)
    small = {**OPTIONS, "num_blocks": num_blocks, "max_num_batched_tokens": 40, "max_model_len": 128}
    llm = LLM(path, **small, num_draft_tokens=5, async_scheduling=depth > 1)
    llm.core.executor = RunnerExecutor(runner_of(llm.core), depth=depth, threaded=True)
    (tokens, numbers), scheduler = answers(expected), llm.core.scheduler
    with told(known(expected, prompts), 512):
        for _ in range(2):
            others, other_numbers = answers(llm.generate(prompts, params))
            assert others == tokens
            for one, other in zip(numbers, other_numbers, strict=True):
                assert np.abs(one - other).max() < 1e-4
    scheduler.check_integrity()
    llm.core.close()
    stats = llm.core.stats()
    assert stats.num_preemptions > 0 and (stats.num_cached_tokens > 0 or family == "gemma3")
    assert scheduler.num_draft_tokens > scheduler.num_accepted_drafts > 100


@pytest.mark.row("E24")
def test_a_grammar_takes_what_it_has_not_seen_before_drafts(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed again after a preemption token by token, the last of them with drafts."""
    monkeypatch.setattr(drafters, "WRONG_AT", (99,))
    params = asked(
        structured_output=StructuredOutput(regex="[ab]{20}[cd]{20}[ef]{10}"),
        max_tokens=64,
        temperature=1.0,
        seed=4,
        ignore_eos=False,
    )
    options = {**OPTIONS, "block_size": 128, "max_prefill_tokens_per_request": 1}
    expected = LLM(checkpoint, **options).generate(PROMPTS[:3], params)
    llm = LLM(checkpoint, **options, num_draft_tokens=24)
    scheduler = llm.core.scheduler
    schedule = scheduler.schedule

    def preempting() -> SchedulerOutput:
        for request in list(scheduler.roster.running):
            if request.num_output_tokens and not request.num_preemptions:
                scheduler.roster.preempt(request)
        return schedule()

    monkeypatch.setattr(scheduler, "schedule", preempting)
    with told(known(expected, PROMPTS[:3]), 512):
        found = llm.generate(PROMPTS[:3], params)
    assert [one.text for one in found] == [one.text for one in expected]
    assert scheduler.roster.num_preemptions == 3


@pytest.mark.row("E24")
def test_a_step_waits_for_masks_behind_drafts_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many drafts there are: what hangs is not drawn."""
    params = PARAMS["grammar, seeded"]
    expected = LLM(checkpoint, **OPTIONS).generate(PROMPTS[:1], params)
    llm = LLM(checkpoint, **OPTIONS, num_draft_tokens=6)
    now, waits, released = [100.0], list[float](), threading.Event()
    step, masks_behind = llm.core.step, grammar.RowGrammar._masks_behind
    submit, result = grammar.Lane.submit, Future.result
    hanging: list[Future[Any]] = []

    def hangs(self: grammar.RowGrammar, drafts: list[int]) -> Any:
        assert released.wait(PATIENT_S)
        return masks_behind(self, drafts)

    def submitted(self: grammar.Lane, task: Any) -> Future[Any]:
        future = submit(self, task)
        if getattr(task, "func", None) is hangs and not released.is_set():
            hanging.append(future)
        return future

    def waited(future: Future[Any], timeout: float | None = None) -> Any:
        if any(future is one for one in hanging):
            assert timeout is not None
            waits.append(timeout)
            now[0] += timeout
            raise FutureTimeoutError
        return result(future, timeout)

    def first_hangs() -> Any:
        outputs = step()
        if waits:
            hanging.clear()
            released.set()
        return outputs

    monkeypatch.setattr(grammar, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(grammar.RowGrammar, "_masks_behind", hangs)
    monkeypatch.setattr(grammar.Lane, "submit", submitted)
    monkeypatch.setattr(Future, "result", waited)
    monkeypatch.setattr(llm.core, "step", first_hangs)
    with told(known(expected, PROMPTS[:1]), 512):
        found = llm.generate(PROMPTS[:1], params)
    assert found[0].text == expected[0].text
    assert len(waits) > 1 and sum(waits) == grammar.MAX_WAIT_S, "not the time of each draft"


@pytest.mark.row("E24")
def test_recorded_steps_go_on_beside_drafts(checkpoint: Path, recorded: RecordedOperations) -> None:
    scheduler = compare(checkpoint, PARAMS["seeded"], async_scheduling=True).core.scheduler
    assert scheduler.num_accepted_drafts > 40


@pytest.mark.row("E24")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma3", {}),
        ("mistral", {"enable_prefix_caching": True}),
        ("qwen3", {"num_blocks": 40}),
        ("qwen3_moe", {"max_num_batched_tokens": 32}),
        ("llama", {"kv_cache_dtype": "int8", "block_size": 16}),
    ],
)
def test_models_of_all_kinds(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    path = make_checkpoint(family, tmp_path / family)
    values = {**OPTIONS, **options}
    expected = LLM(path, **values).generate(PROMPTS, asked(max_tokens=40))
    llm = LLM(path, **values, num_draft_tokens=5)
    with told(known(expected, PROMPTS), 512):
        found = llm.generate(PROMPTS, asked(max_tokens=40))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert llm.core.scheduler.num_accepted_drafts > 60


@pytest.mark.row("E24", clauses=("speed",))
@pytest.mark.row("E29", clauses=("off",))
def test_repeated_text_takes_less_than_half_of_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likeliest tokens come to a circle; those that are drawn from all alike do not. Steps cost what they
    cost on a device, whatever they take here."""
    monkeypatch.setattr(StepCost, "line", lambda _: (0.02, 0.001))
    checkpoint = make_forgetful(tmp_path / "llama")
    steps = {}
    for most in (0, 8):
        llm = LLM(checkpoint, **OPTIONS, num_draft_tokens=most)
        begin = llm.core.num_finished_steps
        output = llm.generate(PROMPTS[:1], asked(max_tokens=200))[0]
        steps[most] = llm.core.num_finished_steps - begin, output.token_ids
    assert steps[8][1] == steps[0][1]
    assert steps[8][0] < steps[0][0] / 2, steps
    tried = llm.core.scheduler.num_draft_tokens
    llm.generate(PROMPTS[:1], asked(max_tokens=200, temperature=5.0, seed=1))
    assert llm.core.scheduler.num_draft_tokens - tried < 10, "it turns itself off"


@pytest.mark.row("E29", clauses=("parameter",))
def test_a_request_states_how_many_drafts_it_wants(checkpoint: Path) -> None:
    expected = LLM(checkpoint, **OPTIONS).generate(PROMPTS, PARAMS["greedy"])
    for asked_for, most in ((0, 0), (2, 2), (64, 5), (None, 5)):
        llm = LLM(checkpoint, **OPTIONS, num_draft_tokens=5)
        core, tried = llm.core, [0]
        launch = core.executor.launch

        def watched(output: Any, launch: Any = launch, tried: Any = tried) -> None:
            tried += [len(row.draft_token_ids) for row in output.scheduled]
            launch(output)

        core.executor.launch = watched  # type: ignore[method-assign]
        with told(known(expected, PROMPTS), 512):
            found = llm.generate(PROMPTS, PARAMS["greedy"], scheduling=SchedulingParams(num_draft=asked_for))
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert max(tried) == most


EDITS = asked(
    repetition_penalty=1.3,
    frequency_penalty=0.5,
    no_repeat_ngram_size=3,
    bad_words_ids=((1, 2), (3,), (4, 5, 6)),
    logit_bias={2: 1.0},
    min_tokens=60,
    stop_token_ids=(7,),
    thinking_budget=20,
    thinking=Thinking(is_open=True, open_ids=(8,), end_ids=(9, 9), forced_ids=(9, 9, 1)),
)


def edits(row: SamplingRow) -> tuple[dict[str, Any], int | None]:
    found = collect_edits([row], 10)
    assert found is not None
    return {name: np.unique(found[name], axis=-1).tolist() for name in found if name != "starts"}, (
        row.forced_token()
    )


@pytest.mark.row("E24", clauses=("equal",))
def test_rows_behind_drafts_know_what_rows_made_anew_do() -> None:
    rng = random.Random(0)
    row = SamplingRow(EDITS, [rng.randrange(10) for _ in range(30)], 30, frozenset({2}), 5)
    for _ in range(60):
        rows = row.behind([rng.randrange(10) for _ in range(rng.randrange(1, 9))])
        for one in rows:
            anew = SamplingRow(EDITS, list(one.token_ids), 30, frozenset({2}), 5)
            assert edits(one) == edits(anew)
        row.token_ids += rows[rng.randrange(len(rows))].token_ids[len(row.token_ids) :]
        row.token_ids.append(rng.randrange(10))


@pytest.mark.row("E24", clauses=("speed",))
def test_what_drafts_cost_does_not_grow_with_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Counter[str]()

    def counted(kind: type, name: str, number: Callable[..., int]) -> None:
        method = getattr(kind, name)

        def counting(*args: Any) -> Any:
            read[name] += number(*args)
            return method(*args)

        monkeypatch.setattr(kind, name, counting)

    row = SamplingRow(EDITS, [number % 10 for number in range(5000)], 1000, frozenset({2}), 5)
    edits(row)
    counted(token_history.TokenSet, "add", lambda *_: 1)
    counted(token_history.NgramIndex, "extend", lambda _, token_ids: len(token_ids))
    counted(token_history.ThinkingBudget, "_see", lambda *_: 1)
    counted(token_history.BadWords, "__init__", lambda *_: 1)
    for one in row.behind([1, 2, 3, 4]):
        edits(one)
    assert max(read.values()) < 30, read


@pytest.mark.row("E28", clauses=("distribution",))
def test_50_000_draws_behind_drafts_are_distributed_as_the_model_says() -> None:
    """A draft, right or wrong, changes neither the token in its place nor the one behind it."""
    torch.manual_seed(0)
    vocab_size, count = 12, 50_000
    table = torch.randn(vocab_size + 1, vocab_size) * 1.5
    params, draft = asked(temperature=0.8), 3
    rows: list[SamplingRow] = []
    for seed in range(count):
        base = SamplingRow(params, [1, 2], 2, frozenset(), seed * 0x9E3779B97F4A7C15 % 2**64)
        rows += base.behind([draft])
    logits = torch.stack([table[vocab_size], table[draft]]).repeat(count, 1)
    outputs = draw(logits, rows).outputs()
    owners = [index // 2 for index in range(2 * count)]
    joined, _ = join_drafts(outputs, owners, {index: [draft] for index in range(count)})
    first, second = Counter(one.token_ids[0] for one in joined), Counter[int]()
    second.update(one.token_ids[1] for one in joined if len(one.token_ids) > 1)
    assert sum(second.values()) == first[draft] > 500
    for seen, row in ((first, vocab_size), (second, draft)):
        expected = torch.softmax(table[row] / 0.8, 0).double().numpy() * sum(seen.values())
        chi_square = sum((seen[i] - expected[i]) ** 2 / expected[i] for i in range(vocab_size))
        assert chi_square < 31.3, "11 degrees of freedom, p 0.001"


@pytest.mark.row("E28", clauses=("together",))
@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "one ahead"])
def test_adapters_grammars_penalties_and_logprobs_in_one_batch(tmp_path: Path, ahead: bool) -> None:
    from transformers import LlamaForCausalLM

    path = make_checkpoint("llama", tmp_path / "llama")
    model = LlamaForCausalLM.from_pretrained(path)
    modules = {name: str(make_adapter(tmp_path / name, model, seed=seed)) for seed, name in enumerate("ab")}
    options = {**OPTIONS, "enable_lora": True, "lora_modules": modules, "async_scheduling": ahead}
    params = [
        PARAMS["penalties"],
        PARAMS["grammar, seeded"],
        PARAMS["seeded"],
        PARAMS["log-probabilities"],
    ] * 2
    adapters = ["a", "b", None, "a", "b", "a", "b", None]
    expected = LLM(path, **options).generate(PROMPTS, params, adapters=adapters)
    llm = LLM(path, **options, num_draft_tokens=6)
    with told(known(expected, PROMPTS), 512):
        found = llm.generate(PROMPTS, params, adapters=adapters)
    (tokens, numbers), (others, other_numbers) = answers(expected), answers(found)
    assert others == tokens
    assert all(np.abs(one - other).max() < 1e-4 for one, other in zip(numbers, other_numbers, strict=True))
    assert llm.core.scheduler.num_accepted_drafts > 40


def test_counts_of_drafts_are_those_of_the_steps(checkpoint: Path) -> None:
    """Each row that tries some brings one token more than drafts were right, and no row is hidden."""
    expected = LLM(checkpoint, **OPTIONS).generate(PROMPTS, PARAMS["choices"])
    core = LLM(checkpoint, **OPTIONS, num_draft_tokens=6).core
    more, told_of = Counter[tuple[str, int]](), dict[tuple[str, int], int]()
    with told(known(expected, PROMPTS), 512):
        for number, prompt in enumerate(PROMPTS):
            core.add_request(str(number), prompt, PARAMS["choices"])
        while core.has_work:
            for output in core.step():
                more[output.request_id, output.index] += len(output.new_token_ids) - 1
                told_of[output.request_id, output.index] = output.num_accepted_drafts
    assert more == told_of
    assert sum(told_of.values()) == core.stats().num_accepted_drafts > 40
