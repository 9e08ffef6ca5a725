"""A model that shares nothing with DecoderModel, through loader, engine, scheduler and runner."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quire
from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import CheckpointError, ConfigError
from quire.models.registry import ENTRY_POINTS
from quire.triton.config_completion import read_engine_config
from quire.worker.model_runner import ModelRunner
from tests.fixtures.drafters import eager
from tests.fixtures.graphs import recorded_steps
from tests.fixtures.plain_checkpoint import make_plain_checkpoint
from tests.fixtures.plain_model import HEADS, KV_HEADS, SIZE, PlainModel
from tests.fixtures.runner_of import runner_of
from tests.unit.test_engine import random_prompts

DECODER = "quire.models.decoder"


PROMPTS = [[*range(10, 34), *prompt] for prompt in random_prompts(6, longest=30, seed=5)]
"""They begin alike, for three blocks."""
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3, logprobs=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_plain_checkpoint(tmp_path_factory.mktemp("plain"))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the entry point of a package that is installed."""
    found = EntryPoint("PlainForCausalLM", "tests.fixtures.plain_model:PlainModel", ENTRY_POINTS)
    monkeypatch.setattr(
        metadata,
        "entry_points",
        lambda group, name: [found] if (group, name) == (found.group, found.name) else [],
    )


def engine(path: Path, **options: Any) -> LLM:
    values = {"max_model_len": 128, "num_blocks": 200, "block_size": 8, "num_threads": 1, **options}
    return LLM(path, **values)


def alone(path: Path, params: SamplingParams) -> list[list[int]]:
    """Tokens of each request by itself, its prompt computed at once and nothing found in the cache."""
    llm = engine(path, enable_prefix_caching=False)
    return [llm.generate([prompt], params)[0].token_ids for prompt in PROMPTS]


def test_the_model_is_what_its_formulas_say(checkpoint: Path) -> None:
    llm = engine(checkpoint)
    model = runner_of(llm.core).model
    assert isinstance(model, PlainModel) and not model.is_fused
    token_ids = list(PROMPTS[0])
    for _ in range(GREEDY.max_tokens):
        x = model.tokens[torch.tensor(token_ids)] + model.positions[: len(token_ids)]
        heads = (x @ model.projection).view(len(x), -1, SIZE).transpose(0, 1)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS])
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        hidden = x + attended.transpose(0, 1).flatten(1)
        token_ids.append(int((hidden[-1] @ model.head).argmax()))
    assert llm.generate(PROMPTS[:1], GREEDY)[0].token_ids == token_ids[len(PROMPTS[0]) :]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("way", ["in turns", "launched ahead", "recorded", "draft model"])
def test_cached_chunked_and_preempted_it_generates_what_it_does_alone(
    checkpoint: Path, way: str, params: SamplingParams
) -> None:
    expected = alone(checkpoint, params)
    options: dict[str, Any] = {"async_scheduling": way != "in turns"}
    if way == "draft model":
        options |= {"draft_model": str(checkpoint), "num_draft_tokens": 3}
    with recorded_steps() if way == "recorded" else nullcontext(), eager():
        llm = engine(checkpoint, max_num_batched_tokens=16, num_blocks=16, **options)
        for _ in range(2):
            assert [output.token_ids for output in llm.generate(PROMPTS, params)] == expected
        stats, runner = llm.core.stats(), runner_of(llm.core)
    assert stats.num_cached_tokens > 0 and stats.num_preemptions > 0
    assert stats.num_recomputed_tokens > 0 and stats.num_free_blocks == stats.num_blocks
    if way == "draft model":
        assert stats.num_accepted_drafts > 20
    if way == "recorded":
        assert isinstance(runner, ModelRunner) and runner.graphs and runner.prompt_graphs
        assert runner.graphs.num_replays > 10 and runner.prompt_graphs.num_replays > 10


def test_nobody_but_families_knows_the_decoder() -> None:
    root = Path(quire.__file__).parent
    users = {path.relative_to(root).parts[0] for path in root.rglob("*.py") if DECODER in path.read_text()}
    assert users == {"models"}


def test_hidden_states_of_all_tokens_are_there_on_request(checkpoint: Path) -> None:
    """As embeddings and heads that guess need them: log-probabilities of the prompt are made of them."""
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    output = engine(checkpoint, max_num_batched_tokens=16).generate(PROMPTS[:1], params)[0]
    whole = engine(checkpoint).generate(PROMPTS[:1], params)[0]
    assert output.prompt_logprobs is not None and whole.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPTS[0])
    found = [entry.logprobs[0] for entry in output.prompt_logprobs[1:] if entry]
    assert found == pytest.approx(
        [entry.logprobs[0] for entry in whole.prompt_logprobs[1:] if entry], abs=1e-4
    )


@pytest.mark.row("E13", clauses=("sample", "allowed"))
def test_a_file_beside_the_checkpoint_is_loaded_where_the_configuration_names_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = "plain_model.py:PlainModel"
    expected = alone(checkpoint, GREEDY)
    monkeypatch.setattr(metadata, "entry_points", lambda group, name: [])
    with pytest.raises(CheckpointError, match="architecture 'PlainForCausalLM' is not supported"):
        engine(checkpoint)
    config = read_engine_config({"parameters": {"model_class": {"string_value": named}}}, checkpoint)
    assert config.model.model_class.startswith(f"{checkpoint}/{named}#")
    llm = engine(checkpoint, model_class=config.model.model_class)
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
    model = runner_of(llm.core).model
    assert type(model).__name__ == "PlainModel" and not isinstance(model, PlainModel), "the file's own"


@pytest.mark.row("E13", clauses=("allowed",))
def test_code_elsewhere_and_what_is_no_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "plain_model.py").write_text("raise AssertionError('this was run')")

    def read(named: str) -> EngineConfig:
        return read_engine_config({"parameters": {"model_class": {"string_value": named}}}, checkpoint)

    for elsewhere in (tmp_path / "plain_model.py", Path("..", "plain_model.py"), Path("none.py")):
        with pytest.raises(ConfigError, match="model_class: no file"):
            read(f"{elsewhere}:PlainModel")
    for named, reason in (
        ("plain_model.py:kv_groups", "does not inherit from quire.models.interface.Model"),
        ("plain_model.py:Other", "model_class cannot be loaded from .*: AttributeError"),
        ("collections:OrderedDict", "does not inherit from quire.models.interface.Model"),
    ):
        with pytest.raises(ConfigError, match=reason):
            engine(checkpoint, model_class=read(named).model.model_class)
