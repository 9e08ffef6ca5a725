"""Named logits processors: code of the operator's choice, on the rows that ask for it and no others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.errors import ConfigError, EngineError, InvalidArgumentError
from quire.named_code import resolved
from quire.request.logits_processors import MAX_PROCESSORS, NamedProcessor, load_logits_processors
from quire.request.sampling_params import parse_sampling_params
from quire.triton.config_completion import read_engine_config
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.graphs import recorded_steps
from tests.unit.test_engine import random_prompts
from tests.unit.test_oracle_matrix import AHEAD, small_pool

PLUGIN = '''
"""What an operator may write."""

class Ban:
    def __init__(self, token=5, **more):
        self.tokens = [token, *more.get("also", [])]

    def __call__(self, token_ids, logits):
        logits[self.tokens] = float("-inf")


class Follow:
    """Wants the token that the sum of all before says, which needs every one of them."""

    def __call__(self, token_ids, logits):
        logits[sum(token_ids) % len(logits)] = 1000.0


class Counts:
    """Is made anew with its request: it has seen what token_ids hold, or nothing."""

    def __init__(self):
        self.seen = None

    def __call__(self, token_ids, logits):
        assert self.seen is None or len(token_ids) == self.seen + 1, (self.seen, len(token_ids))
        self.seen = len(token_ids)


class Raises:
    def __call__(self, token_ids, logits):
        raise RuntimeError(f"not today, after {len(token_ids)}")


class NothingLeft:
    def __call__(self, token_ids, logits):
        logits[:] = float("-inf")
'''
PROMPTS = random_prompts(12, longest=20, seed=3)
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    file = tmp_path_factory.mktemp("plugins") / "plugin.py"
    file.write_text(PLUGIN)
    names = ("Ban", "Follow", "Counts", "Raises", "NothingLeft")
    return {name.lower(): resolved("listed", f"plugin.py:{name}", file.parent) for name in names}


def engine(path: Path, listed: dict[str, str], **options: Any) -> LLM:
    values = {"max_model_len": 128, "num_blocks": 400, "block_size": 8, "num_threads": 1, "dtype": "float32"}
    return LLM(path, logits_processors=listed, **{**values, **options})


def asks(*named: Any, **params: Any) -> SamplingParams:
    return parse_sampling_params(
        {"max_tokens": 16, "ignore_eos": True, "logits_processors": list(named), **params}
    )


@pytest.fixture(params=AHEAD)
def ahead(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    with recorded_steps() if request.param == "recorded" else nullcontext():
        yield AHEAD[request.param]


def follow(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % 512)
    return tokens[len(prompt) :]


@pytest.mark.row("A34")
def test_rows_that_name_one_get_it_and_others_do_not(
    checkpoint: Path, listed: dict[str, str], ahead: dict[str, Any]
) -> None:
    llm = engine(checkpoint, listed, max_num_batched_tokens=24, **ahead)
    plain = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    favourite = plain[0][3]
    ban = asks({"name": "ban", "args": {"token": favourite}}, "counts", logprobs=1)
    sampled = asks("follow", "counts", temperature=1.0, seed=4, n=3, repetition_penalty=1.1)
    params = [GREEDY, ban, sampled] * 4
    outputs = llm.generate(PROMPTS, params)
    for index, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        if index % 3 == 0:
            assert output.token_ids == plain[index]
        elif index % 3 == 1:
            assert favourite not in output.token_ids
            assert output.logprobs is not None and len(output.logprobs) == 16
        else:
            assert [one.token_ids for one in (output, *output.others)] == [follow(prompt, 16)] * 3
    banned = llm.generate([PROMPTS[0]], ban)[0]
    assert banned.token_ids[:3] == plain[0][:3] and banned.token_ids[3] != favourite
    assert banned.logprobs is not None
    assert banned.logprobs[3].token_ids[1] == favourite, "log-probabilities are the model's own"
    assert banned.logprobs[3].rank > 1
    llm.core.close()


@pytest.mark.row("A34")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_after_a_preemption_a_new_one_sees_all_tokens(
    checkpoint: Path, listed: dict[str, str], mode: str
) -> None:
    host = {} if mode == "recompute" else {"host_cache_memory": "64MiB"}
    llm = engine(checkpoint, listed, preemption_mode=mode, **small_pool(checkpoint), **host)
    prompts = random_prompts(8, longest=6, seed=8)
    for prompt, output in zip(
        prompts, llm.generate(prompts, asks("counts", "follow", max_tokens=60)), strict=True
    ):
        assert output.token_ids == follow(prompt, 60)
    assert llm.core.stats().num_preemptions > 0
    llm.core.close()


@pytest.mark.row("A34")
@pytest.mark.parametrize(
    ("entry", "words", "code"),
    [
        ("raises", "raises failed: .*not today, after 3", "INTERNAL"),
        ("nothingleft", "no finite maximum", "INTERNAL"),
        (
            {"name": "counts", "args": {"unknown": 1}},
            "counts does not take these args: .*unknown",
            "INVALID_ARG",
        ),
        ({"name": "ban", "args": {"token": 99999}}, "ban failed", "INTERNAL"),
    ],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_what_it_raises_ends_its_request_alone(
    checkpoint: Path, listed: dict[str, str], entry: Any, words: str, code: str, ahead: bool
) -> None:
    """Also where the next step is planned before it is known, as on a GPU."""
    llm = engine(checkpoint, listed, async_scheduling=ahead)
    expected = llm.generate([PROMPTS[0]], GREEDY)[0].token_ids
    core, tokens = llm.core, list[int]()
    core.add_request("good", PROMPTS[0], GREEDY)
    core.add_request("bad", [5, 6, 7], asks(entry, n=2))
    errors = []
    while core.has_work:
        for output in core.step():
            if output.request_id == "good":
                tokens += output.new_token_ids
                assert output.error is None
            elif output.error is not None:
                errors.append(output)
    assert tokens == expected
    (error,) = errors
    assert error.error_code == code
    with pytest.raises(EngineError, match=words):
        llm.generate([[5, 6, 7]], asks(entry))
    assert core.stats().num_free_blocks == core.stats().num_blocks


@pytest.mark.row("A34")
def test_what_is_not_listed_is_refused(checkpoint: Path, listed: dict[str, str]) -> None:
    llm = engine(checkpoint, listed)
    for name in ("Ban", "os", "plugin.py:Ban", "", "ban "):
        with pytest.raises(InvalidArgumentError, match="logits_processors"):
            llm.generate([[5]], SamplingParams(logits_processors=(NamedProcessor(name),)))
    assert not llm.core.has_work


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[", "invalid JSON"),
        ("{}", "must be a list"),
        (5, "must be a list"),
        ([5], "entries must be a name"),
        ([{"args": {}}], "entries must be a name"),
        ([{"name": "a", "more": 1}], "entries must be a name"),
        ([{"name": 5}], "a name must be a string"),
        ([{"name": "x" * 129}], "a name must be a string"),
        ([{"name": "\ud800"}], "a name must be a string"),
        ([{"name": "a", "args": []}], "must be an object"),
        ([{"name": "a", "args": {"x": "y" * 20000}}], "limited to 16384"),
        (["a"] * (MAX_PROCESSORS + 1), "at most 8"),
    ],
)
def test_bad_lists_are_refused(value: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"logits_processors.*{words}"):
        parse_sampling_params({"logits_processors": value})
    text = '["a", {"name": "b", "args": {"x": 1e400}}]'
    assert parse_sampling_params({"logits_processors": "[]"}).logits_processors == ()
    with pytest.raises(InvalidArgumentError, match="beam_width"):
        parse_sampling_params({"logits_processors": '["a"]', "beam_width": 2})
    assert len(parse_sampling_params({"logits_processors": text}).logits_processors) == 2


@pytest.mark.row("A34")
def test_files_are_those_of_the_version_directory(tmp_path: Path, checkpoint: Path) -> None:
    """And a changed one is another engine's."""
    version = tmp_path / "model" / "1"
    version.mkdir(parents=True)
    (tmp_path / "model" / "outside.py").write_text(PLUGIN)
    (version / "link.py").symlink_to(tmp_path / "model" / "outside.py")
    (version / "plugin.py").write_text(PLUGIN)

    def config(where: str) -> EngineConfig:
        values = {
            "model": {"string_value": str(checkpoint)},
            "logits_processors": {"string_value": json.dumps({"p": where})},
        }
        return read_engine_config({"parameters": values}, version)

    for where in ("../outside.py:Ban", "link.py:Ban", "/etc/passwd.py:Ban", "missing.py:Ban"):
        with pytest.raises(ConfigError, match="logits_processors: 'p': no file"):
            config(where)
    first = config("plugin.py:Ban").model.logits_processors
    assert load_logits_processors(first)["p"].__name__ == "Ban"
    (version / "plugin.py").write_text(PLUGIN + "\n")
    assert config("plugin.py:Ban").model.logits_processors != first
    assert config("json:JSONDecoder").model.logits_processors == {"p": "json:JSONDecoder"}
    for where in ("plugin.py:Missing", "no_such_module:X", "json", "json:"):
        with pytest.raises(ConfigError, match="cannot be loaded"):
            load_logits_processors(config(where).model.logits_processors)
