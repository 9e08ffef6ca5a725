"""However a request gets its tokens, they are those of transformers: cold, cached, chunked, preempted by
recomputation or by swapping, loaded from the host tier or (by another engine) from disk, planned ahead.

Checkpoints: full attention, full attention with query and key norms, sliding windows in all layers and in
some of them, layers with a state; prompts are much longer than the windows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.worker_group import WorkerGroup
from quire.outputs import RequestOutput
from tests.fixtures.checkpoints import HYBRID_FAMILIES, VOCAB_SIZE, make_checkpoint
from tests.fixtures.drive import hf_greedy, hf_model
from tests.fixtures.graphs import recorded_steps
from tests.fixtures.runner_of import runner_of
from tests.unit.test_engine import random_prompts

FAMILIES = (
    *("llama", "qwen3", "mistral", "gemma3", "gemma4", "llama4", "deepseek_v3", "qwen3_next", "qwen3_5"),
    *("lfm2", "nemotron_h", "granitemoehybrid", "deepseek_v32", "glm_moe_dsa"),
)
MAX_TOKENS = 16
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
BEGINNING = random_prompts(1, longest=1, seed=7)[0] * 40
SHORT = random_prompts(5, longest=6, seed=8)
"""One after the other at the end: they all fit at first, and then push each other out."""
PROMPTS = [
    BEGINNING[:keep] + prompt for keep, prompt in zip([0, 40, 16, 33] * 2, random_prompts(8), strict=True)
] + SHORT


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: make_checkpoint(family, root / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> dict[str, list[list[int]]]:
    models = {family: hf_model(path) for family, path in checkpoints.items()}
    return {
        family: [hf_greedy(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
        for family, model in models.items()
    }


def engine(path: Path, **options: Any) -> LLM:
    values = {
        "max_model_len": 128,
        "num_blocks": 1024,
        "block_size": 8,
        "num_threads": 1,
        "dtype": "float32",
        "max_num_batched_tokens": 64,
        **options,
    }
    return LLM(path, **values)


def small_pool(path: Path) -> dict[str, int]:
    """Options of a pool so small that requests push each other out: not much more than one sequence needs."""
    # Small windows need so few blocks of 8 that two requests rarely want them at once.
    size = 2 if path.name == "mistral" else 8
    options = {"max_model_len": 112, "max_num_batched_tokens": 16, "block_size": size}
    kv = engine(path, **options).core.kv
    return {**options, "num_blocks": kv.num_blocks_for(112)}


AHEAD: dict[str, dict[str, Any]] = {
    "in turns": {},
    "launched ahead": {"async_scheduling": True},
    "recorded": {"async_scheduling": True},
    "two ranks": {"tensor_parallel_size": 2},
}
"""How steps follow each other; "recorded": as CUDA graphs, of torch's operations."""


def starts_processes(options: dict[str, Any]) -> bool:
    """Whether an engine with these options takes seconds to start."""
    return "tensor_parallel_size" in options


def each_way(names: str, cases: Sequence[Any], few: Sequence[Any]) -> pytest.MarkDecorator:
    """Every way of AHEAD with cases of these names; with a few of them, where it starts processes."""
    return pytest.mark.parametrize(
        f"ahead,{names}",
        [
            pytest.param(way, *case, id="-".join((way, *case)))
            for way, options in AHEAD.items()
            for case in (few if starts_processes(options) else cases)
        ],
        indirect=["ahead"],
    )


each_way_and_family = pytest.mark.parametrize(
    ("ahead", "family"),
    [
        pytest.param(way, family, id=f"{way}-{family}")
        for way, options in AHEAD.items()
        for family in FAMILIES
        # What goes to a process differs by the windows alone: here layers have both.
        if (not starts_processes(options) or family == "gemma3")
        # Heads of several sizes and keys that layers share, and chunks, as steps that are recorded have them.
        and (way == "recorded" or family not in ("gemma4", "llama4"))
        # Layers with a state are never recorded.
        and (way != "recorded" or family not in HYBRID_FAMILIES)
        # Models with indexers are never recorded, and differ from deepseek_v3 in one step alone.
        and (way == "in turns" or family not in ("deepseek_v32", "glm_moe_dsa"))
    ],
    indirect=["ahead"],
)


@pytest.fixture
def ahead(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Options of the engine."""
    with recorded_steps() if request.param == "recorded" else nullcontext():
        yield AHEAD[request.param]


def check_recorded(llm: LLM) -> None:
    """Where steps are recorded, most were replayed."""
    runner = runner_of(llm.core)
    if isinstance(runner, WorkerGroup):
        return
    assert runner.graphs is None or runner.graphs.num_replays > 10
    assert runner.prompt_graphs is None or runner.prompt_graphs.num_replays >= 2


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.mark.row("C14", "B17")
@pytest.mark.row("C23", clauses=("hits",))
@each_way_and_family
def test_cold_cached_chunked(
    checkpoints: dict[str, Path], expected: dict[str, list[list[int]]], family: str, ahead: dict[str, Any]
) -> None:
    # A worker takes seconds to start, and does not know how large a step may be.
    for budget in (7,) if starts_processes(ahead) else (7, 64, 4096):
        llm = engine(checkpoints[family], max_num_batched_tokens=budget, **ahead)
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected[family], f"cold, {budget} tokens a step"
        before = llm.core.stats()
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected[family], f"cached, {budget} tokens a step"
        after = llm.core.stats()
        check_recorded(llm)
        # All but the last, unfinished block of each prompt was there.
        assert after.num_cached_tokens - before.num_cached_tokens >= sum(
            (len(p) - 1) // 8 * 8 for p in PROMPTS
        )
        llm.core.close()


@pytest.mark.row("B10", clauses=("swap",))
@pytest.mark.row("B9")
@pytest.mark.row("C23", clauses=("preempted",))
@pytest.mark.row("E9", clauses=("preempted",))
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@each_way_and_family
def test_preempted(
    checkpoints: dict[str, Path],
    expected: dict[str, list[list[int]]],
    family: str,
    mode: str,
    ahead: dict[str, Any],
) -> None:
    host = {} if mode == "recompute" else {"host_cache_memory": "64MiB", "enable_prefix_caching": False}
    pool = small_pool(checkpoints[family])
    llm = engine(checkpoints[family], preemption_mode=mode, **ahead, **pool, **host)
    assert ids(llm.generate(PROMPTS, GREEDY)) == expected[family]
    stats = llm.core.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks
    if mode == "swap":
        assert stats.num_swaps == stats.num_preemptions
        assert stats.num_recomputed_tokens == 0
    else:
        assert stats.num_swaps == 0 and stats.num_recomputed_tokens > 0
    llm.core.close()


@pytest.mark.row("B10", clauses=("auto",))
def test_auto_swaps_or_computes_by_what_is_cheaper(
    checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    """Whichever way was slowed down, the other one is taken; the outputs do not tell."""
    path = checkpoints["llama"]
    for slow in ("copies", "steps"):
        llm = engine(
            path,
            preemption_mode="auto",
            host_cache_memory="64MiB",
            enable_prefix_caching=False,
            **small_pool(path),
        )
        cost, tiers = llm.core.scheduler.preemption_cost, llm.core.tiers
        assert tiers is not None
        for _ in range(1000):
            cost.on_prefill(1000, 1e-6 if slow == "copies" else 1e6)
        tiers.save_bytes_per_s = tiers.load_bytes_per_s = 1e9
        cost.on_prefill = lambda num_tokens, seconds: None  # type: ignore[method-assign]
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected["llama"]
        stats = llm.core.stats()
        assert stats.num_preemptions > 0
        assert stats.num_swaps == (0 if slow == "copies" else stats.num_preemptions)
        llm.core.close()


@pytest.mark.row("C9", clauses=("returns",))
@each_way_and_family
def test_evicted_prefixes_return_from_the_host(
    checkpoints: dict[str, Path], expected: dict[str, list[list[int]]], family: str, ahead: dict[str, Any]
) -> None:
    llm = engine(
        checkpoints[family],
        host_cache_memory="64MiB",
        **ahead,
        **small_pool(checkpoints[family]),
    )
    assert ids(llm.generate(PROMPTS, GREEDY)) == expected[family]
    before = llm.core.stats()
    # One at a time, so that what the second round does not compute was not left in the pool by chance.
    assert [llm.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS] == expected[family]
    after = llm.core.stats()
    assert after.num_loaded_tokens > before.num_loaded_tokens
    computed = after.num_scheduled_tokens - before.num_scheduled_tokens
    size = llm.core.kv.block_size
    tails = sum(len(prompt) - (len(prompt) - 1) // size * size for prompt in PROMPTS)
    # A preempted request goes on from another border than its prompt's last one: no snapshot is taken there.
    most_lost = size * before.num_preemptions if family in HYBRID_FAMILIES else 0
    assert 0 <= computed - (tails + (MAX_TOKENS - 1) * len(PROMPTS)) <= most_lost
    llm.core.close()


@pytest.mark.row("C10")
@pytest.mark.parametrize("family", FAMILIES)
def test_another_engine_finds_prefixes_on_disk(
    checkpoints: dict[str, Path], expected: dict[str, list[list[int]]], family: str, tmp_path: Path
) -> None:
    first = engine(checkpoints[family], disk_cache_directory=str(tmp_path))
    assert ids(first.generate(PROMPTS, GREEDY)) == expected[family]
    first.core.close()
    second = engine(checkpoints[family], disk_cache_directory=str(tmp_path))
    assert ids(second.generate(PROMPTS, GREEDY)) == expected[family]
    stats = second.core.stats()
    assert stats.num_loaded_tokens > 0.5 * sum(map(len, PROMPTS))
    second.core.close()


@pytest.mark.row("C5", clauses=("tail", "logits"))
def test_a_prefix_of_512_tokens_is_computed_once_and_nothing_differs(checkpoints: dict[str, Path]) -> None:
    options = {"max_model_len": 600, "block_size": 16, "max_num_batched_tokens": 1024}
    rng = random.Random(3)
    prefix = [rng.randrange(4, VOCAB_SIZE) for _ in range(512)]
    first, second = ([*prefix, *tail] for tail in random_prompts(2, longest=20, seed=4))
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=20)
    cold = engine(checkpoints["llama"], enable_prefix_caching=False, **options).generate([second], params)[0]
    llm = engine(checkpoints["llama"], **options)
    llm.generate([first], params)
    before = llm.core.stats().num_scheduled_tokens
    warm = llm.generate([second], params)[0]
    assert llm.core.stats().num_scheduled_tokens - before == len(second) - 512 + 7
    assert (warm.num_cached_tokens, cold.num_cached_tokens) == (512, 0)
    assert warm.token_ids == cold.token_ids
    assert warm.logprobs is not None and cold.logprobs is not None
    for ours, theirs in zip(warm.logprobs, cold.logprobs, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


@pytest.mark.row("C14", clauses=("bounded",))
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_blocks_outside_the_window_are_given_back(tmp_path: Path, family: str) -> None:
    """A pool far too small for the sequence without that: what the layers see holds, and tokens are right."""
    path = make_checkpoint(family, tmp_path / family)
    prompt = random_prompts(1, longest=1, seed=5)[0] + PROMPTS[3] + PROMPTS[7]
    wanted = hf_greedy(hf_model(path), prompt, 100)
    llm = engine(path, max_model_len=256, max_num_batched_tokens=16, block_size=8)
    kv = llm.core.kv
    length = len(prompt) + 100
    # A window of 12 lies in at most three blocks of 8; a chunk of 16 needs two more.
    bound = kv.num_full_groups * -(-length // 8) + 5 * (len(kv.groups) - kv.num_full_groups)
    assert bound < len(kv.groups) * -(-length // 8)
    llm.core.add_request("r", prompt, SamplingParams(max_tokens=100, ignore_eos=True))
    token_ids: list[int] = []
    while llm.core.has_work:
        token_ids += [token for output in llm.core.step() for token in output.new_token_ids]
        assert kv.pool.num_in_use <= bound
    assert token_ids == wanted
