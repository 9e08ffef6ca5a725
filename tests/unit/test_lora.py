"""LoRA adapters in the engine: tokens are those of merged weights in transformers, whatever the batch."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import zmq

from quire.adapters import SavedAdapter
from quire.config import AdapterConfig, EngineConfig
from quire.core.kv_events import BlockStored, KVEventCollector
from quire.engine.adapter_registry import AdapterRegistry
from quire.engine.cache_commands import Adapters, LoadAdapter, Reset, UnloadAdapter
from quire.engine.connection import EngineConnection, connect
from quire.engine.core import EngineCore
from quire.engine.messages import AddRequest, CommandResult, Control, Outputs, Stats
from quire.engine.processes import wait_readable
from quire.engine.supervisor import EngineSupervisor
from quire.errors import CheckpointError, InvalidArgumentError, NotFoundError, QuireError, UnavailableError
from quire.llm import LLM
from quire.outputs import RequestOutput
from quire.request.logits_processors import parse_logits_processors
from quire.request.sampling_params import SamplingParams
from quire.worker.adapter_memory import adaptable, slot_bytes
from tests.fixtures.adapters import ATTENTION, make_adapter, merge
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import hf_greedy, hf_logits, hf_model
from tests.fixtures.graphs import recorded_steps
from tests.fixtures.pace import PACED, PACED_ENV, paced
from tests.fixtures.runner_of import runner_of
from tests.fixtures.waiting import wait_until

MAX_TOKENS = 12
NAMES = ("", "a", "b", "c")
PROMPTS = {
    name: torch.randint(5, 500, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for name, length in zip(NAMES, (21, 30, 9, 40), strict=True)
}
SETTINGS: dict[str, Any] = {
    "enable_lora": True, "max_num_seqs": 16, "num_blocks": 256, "block_size": 8, "max_model_len": 256,
}  # fmt: skip


class Adapted(NamedTuple):
    """A checkpoint, adapters of it, and what is right with each ("": without one)."""

    path: Path
    modules: dict[str, str]
    models: dict[str, Any]
    expected: dict[str, list[int]]


def make_adapted(family: str, path: Path) -> Adapted:
    checkpoint = make_checkpoint(family, path / "model", tokenizer=False)
    base = hf_model(checkpoint)
    kinds: dict[str, dict[str, Any]] = {
        "a": {"rank": 4},
        "b": {"rank": 8, "targets": ATTENTION, "use_rslora": True, "rank_pattern": {"q_proj": 3}},
        "c": {
            "rank": 16, "targets": ("q_proj", "gate_proj", "down_proj"), "layers_to_transform": [1],
            "alpha_pattern": {"gate_proj": 5},
        },
    }  # fmt: skip
    modules = {
        name: str(make_adapter(path / name, base, seed=number, **kind))
        for number, (name, kind) in enumerate(kinds.items())
    }
    models = {"": base} | {name: merge(hf_model(checkpoint), path / name) for name in kinds}
    expected = {name: hf_greedy(models[name], PROMPTS[name], MAX_TOKENS) for name in NAMES}
    bare = {name: hf_greedy(base, PROMPTS[name], MAX_TOKENS) for name in NAMES}
    assert all(bare[name] != expected[name] for name in kinds), (
        "an adapter that changes nothing proves nothing"
    )
    return Adapted(checkpoint, modules, models, expected)


@pytest.fixture(scope="module", params=["llama", "qwen2", "ernie4_5"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted(request.param, tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted("llama", tmp_path_factory.mktemp("lora"))


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True} | values)


def start(adapted: Adapted, **options: Any) -> LLM:
    return LLM(adapted.path, **SETTINGS | {"lora_modules": adapted.modules} | options)


def run(llm: LLM, names: list[str], **values: Any) -> list[RequestOutput]:
    return llm.generate([PROMPTS[name] for name in names], params(**values), adapters=list(names))


@pytest.mark.row("E19", whole=True)
def test_a_batch_of_three_adapters_and_the_base(adapted: Adapted) -> None:
    llm = start(adapted)
    outputs = run(llm, list(NAMES), logprobs=0, prompt_logprobs=0)
    for name, output in zip(NAMES, outputs, strict=True):
        assert output.token_ids == adapted.expected[name], name
        tokens = PROMPTS[name] + output.token_ids
        right = hf_logits(adapted.models[name], tokens).log_softmax(-1)
        found = [*output.prompt_logprobs[1:], *output.logprobs]  # type: ignore[index, misc]
        ours = torch.tensor([one.logprobs[0] for one in found])
        theirs = right[range(len(tokens) - 1), tokens[1:]]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.row("E19")
@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16},
        {"async_scheduling": True, "max_num_batched_tokens": 24},
        {"num_blocks": 12, "max_model_len": 64, "enable_prefix_caching": False},
        {
            "num_blocks": 11,
            "max_model_len": 64,
            "preemption_mode": "swap",
            "host_cache_memory": "8MiB",
            "async_scheduling": True,
        },
        {"max_loras": 1},
    ],
    ids=lambda options: "-".join(options),
)
def test_however_it_is_computed(llama: Adapted, options: dict[str, Any]) -> None:
    llm = start(llama, **options)
    try:
        names = [*NAMES, "b", "", "a"]
        for _ in range(2):
            outputs = run(llm, names)
            assert [one.token_ids for one in outputs] == [llama.expected[name] for name in names]
        stats = llm.core.stats()
        if "num_blocks" in options:
            assert stats.num_preemptions
        if options.get("enable_prefix_caching", True) and "num_blocks" not in options:
            assert outputs[0].num_cached_tokens and outputs[1].num_cached_tokens
    finally:
        llm.core.close()


@pytest.mark.row("E19")
def test_recorded_steps(llama: Adapted) -> None:
    with recorded_steps() as recorded:
        llm = start(llama)
        for _ in range(2):
            outputs = run(llm, list(NAMES))
            assert [one.token_ids for one in outputs] == [llama.expected[name] for name in NAMES]
        (plain,) = run(llm, [""])
    assert plain.token_ids == llama.expected[""] and recorded.num_replays


@pytest.mark.row("E19")
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "w8a8"}], ids=str)
def test_no_row_depends_on_the_batch(llama: Adapted, options: dict[str, Any]) -> None:
    """Bit for bit, also those without an adapter, which are computed in one call where none has one."""
    llm = start(llama, enable_prefix_caching=False, **options)
    names = list(NAMES) * 4
    together = run(llm, names, logprobs=2)
    for name, found in zip(names[:4], together, strict=False):
        (alone,) = run(llm, [name], logprobs=2)
        assert (alone.token_ids, alone.logprobs) == (found.token_ids, found.logprobs), name
    assert together[:4] != together[4:8] and [one.logprobs for one in together[4:8]] == [
        one.logprobs for one in together[:4]
    ]
    if "quantization" in options:
        plain = LLM(llama.path, **SETTINGS | {"enable_lora": False}, **options)
        (bare,) = plain.generate([PROMPTS[""]], params(logprobs=2))
        assert bare.logprobs == together[0].logprobs


@pytest.mark.row("E19")
def test_choices_and_seeds(llama: Adapted) -> None:
    llm, cold = start(llama, max_loras=1), start(llama)
    asked = {"n": 3, "temperature": 0.9, "seed": 5}
    outputs = run(llm, list(NAMES), **asked)
    for name, output in zip(NAMES, outputs, strict=True):
        (alone,) = run(cold, [name], **asked)
        assert [one.token_ids for one in (output, *output.others)] == [
            one.token_ids for one in (alone, *alone.others)
        ]
    llm.core.scheduler.check_integrity()


@pytest.mark.row("E21", clauses=("slots",))
def test_twenty_adapters_over_four_slots_and_six_places_in_memory(llama: Adapted, tmp_path: Path) -> None:
    base = llama.models[""]
    paths = {
        f"t{n}": make_adapter(tmp_path / f"t{n}", base, rank=2, seed=100 + n, size=2.0) for n in range(20)
    }
    modules = {name: str(path) for name, path in paths.items()}
    llm = LLM(llama.path, **SETTINGS, lora_modules=modules, max_cpu_loras=6)
    names, prompt = [name for name in modules for _ in "12"], PROMPTS["b"]
    outputs = llm.generate([prompt] * len(names), params(max_tokens=6), adapters=names)
    right = {name: hf_greedy(merge(hf_model(llama.path), path), prompt, 6) for name, path in paths.items()}
    assert len({tuple(tokens) for tokens in right.values()}) > 10
    assert [one.token_ids for one in outputs] == [right[name] for name in names]
    stats = llm.core.stats()
    assert stats.num_adapter_hits + stats.num_adapter_loads >= len(names) and stats.num_adapter_hits >= 10
    assert stats.num_adapter_loads >= 20 and stats.num_adapter_evictions == stats.num_adapter_loads - 4
    listed = llm.core.control(Adapters())["adapters"]
    assert [one["name"] for one in listed] == sorted(modules)
    assert sum(one["slot"] >= 0 for one in listed) == 4
    assert sum(one["num_hits"] for one in listed) == stats.num_adapter_hits


def command(core: EngineCore, command: LoadAdapter | UnloadAdapter) -> dict[str, Any] | QuireError:
    """What it comes to, with steps until then."""
    answers: list[dict[str, Any] | QuireError] = []
    core.adapters.begin(command, answers.append)
    return wait_until(lambda: core.step() is not None and answers, poll_s=0.0)[0]


@pytest.mark.row("E20", clauses=("unload",))
@pytest.mark.row("C22")
def test_load_replace_and_unload_at_run_time(llama: Adapted, tmp_path: Path) -> None:
    base = llama.models[""]
    for name, seed in (("x", 0), ("y", 1)):
        make_adapter(tmp_path / name, base, seed=seed, size=2.0)
    right = {
        name: hf_greedy(merge(hf_model(llama.path), tmp_path / name), PROMPTS["c"], MAX_TOKENS)
        for name in "xy"
    }
    options = {"disk_cache_directory": str(tmp_path / "disk"), "host_cache_memory": "4MiB"}
    llm = LLM(llama.path, **SETTINGS, lora_root=str(tmp_path), **options)
    core = llm.core

    def tokens(adapter: str) -> list[int]:
        return llm.generate([PROMPTS["c"]], params(), adapters=adapter)[0].token_ids

    with pytest.raises(InvalidArgumentError, match="lora_name: 'm' is not the name of an adapter"):
        tokens("m")
    status = command(core, LoadAdapter("m", "x"))
    assert isinstance(status, dict) and status["rank"] == 4 and status["slot"] == -1
    for _ in range(2):
        assert tokens("m") == right["x"]
    again = command(core, LoadAdapter("m", str(tmp_path / "x")))
    assert isinstance(again, dict) and again["num_loads"] == 1, "the same content: nothing happens"
    moved = command(core, LoadAdapter("m", str(shutil.copytree(tmp_path / "x", tmp_path / "moved"))))
    assert isinstance(moved, dict) and moved["num_loads"] == 1
    assert moved["path"] == core.adapters.saved()["m"].path == str(tmp_path / "moved"), (
        "to be read again there"
    )

    # In use, it is neither replaced nor unloaded; draining waits.
    # Long enough for an adapter to be read beside its steps, also where a core is taken away meanwhile.
    core.add_request("open", PROMPTS["c"], params(max_tokens=255 - len(PROMPTS["c"])), adapter="m")
    core.step()
    busy = command(core, LoadAdapter("m", "y"))
    assert isinstance(busy, UnavailableError) and "in use by 1 request, and this one has another" in str(busy)
    with pytest.raises(UnavailableError, match="in use by 1 request"):
        core.adapters.begin(UnloadAdapter("m"), lambda _: None)
    answers: list[Any] = []
    core.adapters.begin(UnloadAdapter("m", drain=True), answers.append)
    with pytest.raises(UnavailableError, match="'m' is being unloaded"):
        tokens("m")
    leaving = command(core, LoadAdapter("m", "x"))
    assert isinstance(leaving, UnavailableError) and "'m' is being unloaded" in str(leaving)
    assert not answers
    while core.has_work:
        core.step()
    assert answers == [{"name": "m"}]

    # The name means another content now: nothing that lies in pool or tiers is taken for its own.
    assert isinstance(command(core, LoadAdapter("m", "y")), dict)
    assert tokens("m") == right["y"]
    num_loaded = core.stats().num_loaded_tokens
    assert isinstance(command(core, UnloadAdapter("m")), dict)
    core.control(Reset())
    with pytest.raises(NotFoundError):
        core.adapters.begin(UnloadAdapter("m"), lambda _: None)
    assert num_loaded == 0
    core.close()


@pytest.mark.row("C22", clauses=("adapter",))
def test_no_prefix_is_found_of_another_adapter(llama: Adapted, tmp_path: Path) -> None:
    """Not in the pool, nor on disk by the next engine; of equal weights it is, whatever their names."""
    twin = shutil.copytree(llama.modules["a"], tmp_path / "twin")
    modules = {**llama.modules, "twin": str(twin)}
    options = {"disk_cache_directory": str(tmp_path / "disk"), "lora_modules": modules}
    prompt = PROMPTS["c"]

    def cached(llm: LLM, adapter: str | None) -> tuple[int, list[int]]:
        (output,) = llm.generate([prompt], params(), adapters=adapter)
        return output.num_cached_tokens, output.token_ids

    found: dict[str | None, tuple[int, list[int]]] = {}
    for _ in range(2):
        llm = LLM(llama.path, **SETTINGS, **options)
        for adapter in (None, "a", "b"):
            count, tokens = cached(llm, adapter)
            assert count == (32 if found.get(adapter) else 0)
            assert found.setdefault(adapter, (1, tokens))[1] == tokens
        assert cached(llm, "twin") == (32, found["a"][1])
        llm.core.close()
    assert len({tuple(tokens) for _, tokens in found.values()}) == 3


@pytest.mark.row("E20", clauses=("traffic",))
def test_traffic_goes_on_while_adapters_come_and_go(llama: Adapted) -> None:
    """No step waits for a directory, and the tokens are those of an engine that is left alone."""
    modules = {name: llama.modules[name] for name in "ab"}
    root = str(Path(llama.modules["a"]).parent)
    llm = LLM(llama.path, **SETTINGS | {"max_num_seqs": 6}, lora_modules=modules, lora_root=root)
    core, tokens = llm.core, dict[str, list[int]]()
    answers: list[Any] = []
    commands: Iterator[LoadAdapter | UnloadAdapter] = itertools.cycle(
        (LoadAdapter("late", "c"), UnloadAdapter("late", drain=True))
    )
    num_begun = asked = 0
    while asked < 80 or len(answers) < 4 or core.has_work or num_begun > len(answers):
        is_there = num_begun == len(answers) and num_begun % 2 == 1
        if asked < 80 or len(answers) < 4:
            assert asked < 8000, "a directory is read in less time than these take"
            name = ("", "a", "b", "late")[asked % (4 if is_there else 3)]
            core.add_request(f"{asked} {name}", PROMPTS[name.replace("late", "c")], params(), adapter=name)
            asked += 1
            if num_begun == len(answers) and asked % 8 == 0:
                core.adapters.begin(next(commands), answers.append)
                num_begun += 1
        for output in core.step():
            assert output.error is None, output
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert len(tokens) == asked and len(answers) > 3
    assert not any(isinstance(answer, QuireError) for answer in answers)
    assert {request_id.split(" ")[1] for request_id in tokens} == {"", "a", "b", "late"}
    for request_id, found in tokens.items():
        assert found == llama.expected[request_id.split(" ")[1].replace("late", "c")], request_id


@pytest.mark.row("E20")
def test_paths_outside_the_root_and_engines_without_adapters(llama: Adapted, tmp_path: Path) -> None:
    llm = LLM(llama.path, **SETTINGS, lora_root=str(tmp_path / "root"))
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(llama.modules["a"])
    for path in (llama.modules["a"], "../a", "link", "/"):
        with pytest.raises(InvalidArgumentError, match="path: must lie below lora_root"):
            llm.core.adapters.begin(LoadAdapter("m", path), lambda _: None)
    for path, target in (("loop", "loop"), ("a\0b", None)):
        if target is not None:
            (tmp_path / "root" / path).symlink_to(target)
        with pytest.raises(QuireError) as refused:
            answer = command(llm.core, LoadAdapter("m", path))
            raise answer if isinstance(answer, QuireError) else AssertionError(answer)
        assert refused.value.code == "INVALID_ARG"
    failed = command(llm.core, LoadAdapter("m", "nowhere"))
    assert isinstance(failed, CheckpointError) and "no such file" in str(failed)
    fixed = start(llama)
    with pytest.raises(InvalidArgumentError, match="lora_root is not set"):
        fixed.core.adapters.begin(LoadAdapter("m", "a"), lambda _: None)
    off = LLM(llama.path, **SETTINGS | {"enable_lora": False})
    with pytest.raises(InvalidArgumentError, match="enable_lora is not set"):
        off.generate([[5]], adapters="a")
    with pytest.raises(InvalidArgumentError, match="enable_lora is not set"):
        off.core.adapters.begin(UnloadAdapter("a"), lambda _: None)
    with pytest.raises(CheckpointError, match="not the directory of a LoRA adapter"):
        LLM(llama.path, **SETTINGS, lora_modules={"a": str(tmp_path)})


@pytest.mark.row("E21")
def test_an_adapter_that_changed_while_its_weights_were_not_in_memory(llama: Adapted, tmp_path: Path) -> None:
    """Its requests end with an error, and others go on."""
    for name in ("x", "y"):
        shutil.copytree(llama.modules[{"x": "a", "y": "b"}[name]], tmp_path / name)
    modules = {name: str(tmp_path / name) for name in ("x", "y")}
    llm = LLM(llama.path, **SETTINGS, lora_modules=modules, max_loras=1, max_cpu_loras=1)
    shutil.copy(Path(llama.modules["c"]) / "adapter_config.json", tmp_path / "x")
    shutil.copy(Path(llama.modules["c"]) / "adapter_model.safetensors", tmp_path / "x")
    llm.core.add_request("x", PROMPTS["a"], params(), adapter="x")
    llm.core.add_request("y", PROMPTS["b"], params(), adapter="y")
    outputs = []
    while llm.core.has_work:
        outputs += llm.core.step()
    (error,) = [one for one in outputs if one.request_id == "x"]
    assert error.error is not None and "has changed since it was loaded" in error.error
    tokens = [token for one in outputs if one.request_id == "y" for token in one.new_token_ids]
    assert tokens == llama.expected["b"]


def test_weights_that_come_when_their_adapter_is_gone_are_not_kept(llama: Adapted) -> None:
    modules = {name: llama.modules[name] for name in "ab"}
    core = LLM(llama.path, **SETTINGS, lora_modules=modules, max_loras=1, max_cpu_loras=1).core
    core.add_request("a", PROMPTS["a"], params(), adapter="a")
    released = threading.Event()
    core.adapters._pool.submit(released.wait, 60.0)  # type: ignore[union-attr]
    core.step()
    core.abort(["a"])
    assert command(core, UnloadAdapter("a")) == {"name": "a"} and core.adapters._reads
    released.set()
    while core.adapters._reads:
        core.step()
    assert [one.name for one in core.adapters._weights] == ["b"]


def test_an_engine_misses_what_has_changed_since_another_died(llama: Adapted, tmp_path: Path) -> None:
    """Its requests are refused, no stream goes on with other weights, the next engine may have it again."""
    path = shutil.copytree(llama.modules["a"], tmp_path / "a")
    saved = {"a": SavedAdapter(str(path), "00" * 16), "b": SavedAdapter(llama.modules["b"], "")}
    saved["c"] = SavedAdapter("a\0b", "")  # whatever comes of it
    config, info = AdapterConfig(enable_lora=True, lora_modules={"a": str(path)}), start(llama).core.info
    registry = AdapterRegistry(config, info, saved)
    with pytest.raises(InvalidArgumentError, match="has changed since it was loaded: load it again"):
        registry.get("a")
    assert registry.saved() == saved
    there = AdapterRegistry(config, info).get("a").digest.hex()
    assert there != "00" * 16

    # Nor does it, where the name was loaded with another content before its frontend knew of the engine.
    core = start(llama).core
    core.add_request("new", PROMPTS["a"], params(), adapter="a", adapter_digest="00" * 16)
    core.add_request("same", PROMPTS["a"], params(), adapter="a", adapter_digest=there, num_deaths=1)
    with pytest.raises(InvalidArgumentError, match="lora_name: 'a' has another content by now"):
        core.add_request("r", PROMPTS["a"], params(), adapter="a", adapter_digest="00" * 16, num_deaths=1)


def loaded(registry: AdapterRegistry, name: str, path: str) -> dict[str, Any]:
    answers: list[Any] = []
    registry.begin(LoadAdapter(name, path), answers.append)
    wait_until(lambda: registry.has_news)
    assert registry.poll() == [] and not isinstance(answers[0], QuireError)
    return dict(answers[0])


def test_the_same_content_at_another_path_is_read_there_by_the_next_engine(
    llama: Adapted, tmp_path: Path
) -> None:
    for name in ("before", "after"):
        shutil.copytree(llama.modules["a"], tmp_path / name)
    config, info = AdapterConfig(enable_lora=True, lora_root=str(tmp_path)), start(llama).core.info
    registry, kept = AdapterRegistry(config, info), []
    registry.on_change = kept.append
    assert loaded(registry, "x", "before")["path"] == str(tmp_path / "before")
    assert loaded(registry, "x", "after")["path"] == str(tmp_path / "after")
    shutil.rmtree(tmp_path / "before")
    assert AdapterRegistry(config, info, kept[-1]).get("x").path == str(tmp_path / "after")


def test_weights_in_host_memory_that_were_just_used_stay(llama: Adapted, tmp_path: Path) -> None:
    for name in "abc":
        shutil.copytree(llama.modules[name], tmp_path / name)
    config = AdapterConfig(enable_lora=True, lora_root=str(tmp_path), max_loras=1, max_cpu_loras=2)
    registry = AdapterRegistry(config, start(llama).core.info)
    for name in "ab":
        loaded(registry, name, name)
    assert registry._find_weights(registry.get("a")) is not None
    loaded(registry, "c", "c")
    assert [one.name for one in registry._weights] == ["a", "c"]


@pytest.mark.row("E19")
def test_after_a_sleep(llama: Adapted) -> None:
    llm = start(llama)
    model, config = runner_of(llm.core).model, llm.config.adapters
    linears = [linear for _, linear in adaptable(model)]
    taken = sum(part.nbytes for linear in linears for part in linear.slots)
    assert taken == slot_bytes(model, config) > 0, "what `quire plan` counts"
    for _ in range(2):
        outputs = run(llm, list(NAMES))
        assert [one.token_ids for one in outputs] == [llama.expected[name] for name in NAMES]
        llm.core.sleep()
        llm.core.wake()


def test_an_engine_that_sleeps_loads_and_unloads(llama: Adapted, tmp_path: Path) -> None:
    """It made a step for that, which told a runner without a batch to drop the rows of requests long ended:
    the step failed, and the engine with it. The next one was awake, with memory that others had by then."""
    shutil.copytree(llama.modules["c"], tmp_path / "late")
    llm = start(llama, lora_root=str(tmp_path))
    core = llm.core
    run(llm, ["a"])
    core.sleep()
    for loaded in (LoadAdapter("late", "late"), UnloadAdapter("a")):
        assert isinstance(command(core, loaded), dict)
    assert core.is_asleep and not core._num_failures
    core.wake()
    (output,) = llm.generate([PROMPTS["c"]], params(), adapters="late")
    assert output.token_ids == llama.expected["c"]
    core.scheduler.check_integrity()


def test_events_name_the_adapter(llama: Adapted) -> None:
    llm = start(llama)
    llm.core.kv.events = events = KVEventCollector()
    run(llm, ["", "a"])
    batch = events.pop_batch()
    assert batch is not None
    stored = [event for event in batch.events if isinstance(event, BlockStored)]
    assert {(event.lora_name, event.lora_id) for event in stored} == {(None, None), ("a", 1)}


@pytest.mark.row("E20")
def test_an_engine_that_was_killed_has_its_adapters_again(
    llama: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was loaded at run time, too: the stream goes on with the same tokens."""
    monkeypatch.setenv("PYTHONPATH", PACED_ENV["PYTHONPATH"])
    shutil.copytree(llama.modules["c"], tmp_path / "root" / "late")
    config = EngineConfig.from_mapping(
        {
            "model": str(llama.path), **SETTINGS, "lora_modules": {"a": llama.modules["a"]},
            "lora_root": str(tmp_path / "root"), **PACED,
        }
    )  # fmt: skip
    supervisor, context = EngineSupervisor(config, os.getpid()), zmq.Context()
    supervisor.directory = tmp_path / "engine"
    is_killed = tmp_path / "is killed"  # until then a token takes a while
    slow = parse_logits_processors("logits_processors", paced(is_killed, 0.1))
    asked = params(max_tokens=200, logits_processors=slow)
    expected = hf_greedy(llama.models["c"], PROMPTS["c"], 200)
    received: list[Any] = []

    def wait(connection: EngineConnection, kind: type, until: Callable[[], bool]) -> None:
        def come() -> bool:
            connection.socket.poll(1000)
            received.extend(one for one in connection.receive() if isinstance(one, kind))
            return until()

        wait_until(come, lambda: received, poll_s=0.0)

    def tokens() -> list[int]:
        return [token for one in received for output in one.outputs for token in output.new_token_ids]

    try:
        first, info = connect(context, supervisor)
        assert [one.name for one in info.adapters] == ["a"]
        first.send(Control(LoadAdapter("late", "late"), "token"))
        wait(first, Stats | CommandResult, lambda: bool(received) and isinstance(received[-1], CommandResult))
        assert not received[-1].error and [one.name for one in received[-2].adapters] == ["a", "late"]
        received.clear()
        first.send(AddRequest("r", PROMPTS["c"], asked, adapter="late"))
        wait(first, Outputs, lambda: len(tokens()) >= 5)
        os.kill(info.pid, signal.SIGKILL)
        is_killed.touch()
        assert wait_readable(first.pidfd, 60.0)
        received.extend(one for one in first.receive() if isinstance(one, Outputs))
        first.close(goodbye=False)
        known = tokens()
        assert known == expected[: len(known)] and len(known) < 200
        second, info = connect(context, supervisor)
        assert [one.name for one in info.adapters] == ["a", "late"]
        second.send(AddRequest("r", PROMPTS["c"], asked, num_deaths=1, outputs={0: known}, adapter="late"))
        wait(second, Outputs, lambda: bool(received[-1].outputs[-1].finish_reason))
        assert tokens() == expected
        second.close(goodbye=True)
    finally:
        supervisor.close(10)
        context.destroy(linger=0)
