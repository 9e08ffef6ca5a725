"""LoRA adapters at the surface: how requests name them, who may load them, and where their names are told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.fixtures import fake_pb_utils
from tests.fixtures.fake_metrics import FakeMetric, FakeMetricFamily

fake_pb_utils.install()

from quire.adapters import AdapterStatus  # noqa: E402
from quire.config import AdapterConfig, FrontendConfig, ResultCacheConfig  # noqa: E402
from quire.engine.cache_commands import Adapters, LoadAdapter, UnloadAdapter  # noqa: E402
from quire.engine.messages import EngineInfo  # noqa: E402
from quire.errors import ConfigError, InvalidArgumentError  # noqa: E402
from quire.frontend.output_processor import RequestProcessor  # noqa: E402
from quire.outputs import EngineCoreOutput, SchedulerStats  # noqa: E402
from quire.request.sampling_params import SamplingParams  # noqa: E402
from quire.triton import adapter_metrics, metrics  # noqa: E402
from quire.triton.config_completion import read_engine_config  # noqa: E402
from quire.triton.metrics import EngineMetrics, RequestMetrics  # noqa: E402
from quire.triton.metrics_board import MetricsBoard  # noqa: E402
from quire.triton.observers import RequestEnded  # noqa: E402
from quire.triton.parsed_request import ParsedRequest  # noqa: E402
from quire.triton.request_handle import RequestHandle  # noqa: E402
from quire.triton.request_log import request_fields  # noqa: E402
from quire.triton.request_parser import RequestParser  # noqa: E402
from quire.triton.request_traces import attributes_of  # noqa: E402
from quire.triton.result_cache import ResultCache, add_request  # noqa: E402
from quire.triton.sending.generation import Generation  # noqa: E402
from tests.fixtures.fake_pb_utils import InferenceRequest  # noqa: E402


def status(name: str, digest: str = "d", slot: int = -1, **values: int) -> AdapterStatus:
    counts = dict.fromkeys(("num_running", "num_waiting", "num_hits", "num_loads"), 0)
    return AdapterStatus(name, f"/loras/{name}", 8, digest, slot, **{**counts, **values})


def info(*adapters: AdapterStatus, pid: int = 1) -> EngineInfo:
    return EngineInfo(
        pid, 64, 600, 8, False, 100, 16, 1, "float32", "cpu", fingerprint="f", adapters=list(adapters)
    )


LOADED = info(status("doll", "d1"), status("sheep", "d2"))
ON = AdapterConfig(enable_lora=True, lora_root="/loras")


def parse(
    inputs: dict[str, Any],
    parameters: dict[str, Any] | None = None,
    *,
    adapters: AdapterConfig = ON,
    **frontend: Any,
) -> ParsedRequest:
    arrays = {
        name: np.array([value.encode()], dtype=np.object_) if isinstance(value, str) else np.array(value)
        for name, value in {"input_ids": np.array([5, 6], np.int32), **inputs}.items()
    }
    if "cache_control" in arrays:
        del arrays["input_ids"]
    config = FrontendConfig(**frontend)
    parser = RequestParser(None, SamplingParams(), lambda: LOADED, config, decoupled=True, adapters=adapters)
    request = InferenceRequest(arrays, parameters=json.dumps(parameters or {}))
    return parser.parse(parser.read(request))


# --- requests ---


@pytest.mark.parametrize("dialect", ["quire", "vllm", "tensorrt_llm"])
def test_an_adapter_is_named_as_tensor_in_json_or_as_parameter(dialect: Any) -> None:
    in_json = {"sampling_parameters": '{"lora_name": "sheep"}'}
    for given in (parse({"lora_name": "sheep"}, dialect=dialect), parse(in_json, dialect=dialect)):
        assert (given.adapter, given.adapter_digest) == ("sheep", "d2")
    given = parse({}, {"lora_name": "doll"}, dialect=dialect)
    assert (given.adapter, given.adapter_digest) == ("doll", "d1")
    assert parse({"lora_name": "doll", **in_json}, dialect=dialect).adapter == "doll"
    for none in ({}, {"lora_name": ""}, {"sampling_parameters": '{"lora_name": null}'}):
        assert parse(none, dialect=dialect).adapter == ""
    message = add_request("r", given, 0.0)
    assert message.adapter == "doll"


def test_who_speaks_as_vllm_backend_is_answered_in_its_words() -> None:
    named = {"sampling_parameters": '{"lora_name": "bactrian"}'}
    with pytest.raises(InvalidArgumentError) as refused:
        parse(named, dialect="vllm")
    assert str(refused.value) == ("LoRA bactrian is not supported, we currently support ['doll', 'sheep']")
    with pytest.raises(InvalidArgumentError) as refused:
        parse(named, dialect="vllm", adapters=AdapterConfig())
    assert str(refused.value) == "LoRA feature is not enabled."
    # The engine knows better than a frontend what there is.
    assert parse(named).adapter == "bactrian" and parse(named).adapter_digest == ""


@pytest.mark.parametrize("field", ["lora_task_id", "lora_weights", "lora_config"])
def test_what_tensorrt_llm_has_beside_names_is_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        parse({}, {field: 3})


def test_a_name_that_is_no_text_is_refused() -> None:
    for wrong, words in ((["a"], "must be text"), ("x" * 1000, "at most")):
        with pytest.raises(InvalidArgumentError, match=f"lora_name.*{words}"):
            parse({"sampling_parameters": json.dumps({"lora_name": wrong})})


def test_loading_and_unloading_needs_the_operator_s_word() -> None:
    load = {"cache_control": '{"command": "load_adapter", "name": "a", "path": "b"}'}
    unload = {"cache_control": '{"command": "unload_adapter", "name": "a"}'}
    listing = {"cache_control": '{"command": "adapters"}'}
    assert parse(load).cache_control == LoadAdapter("a", "b")
    assert parse(unload).cache_control == UnloadAdapter("a")
    for command in (load, unload):
        with pytest.raises(InvalidArgumentError, match="lora_root"):
            parse(command, adapters=AdapterConfig(enable_lora=True))
        with pytest.raises(InvalidArgumentError, match="allow_cache_control"):
            parse(command, allow_cache_control=False)
    assert parse(listing, adapters=AdapterConfig(), allow_cache_control=False).cache_control == Adapters()


# --- the model directory ---


def test_vllm_backend_s_list_of_adapters_is_read(tmp_path: Path) -> None:
    version = tmp_path / "models" / "m" / "1"
    for folder in ("checkpoint", "loras/doll", "loras/own"):
        (version / folder).mkdir(parents=True)
    (version / "multi_lora.json").write_text('{"sheep": "/somewhere/sheep", "doll": "./loras/doll"}')

    def read(file: str, **values: Any) -> AdapterConfig:
        for name in ("quire.json", "model.json"):
            (version / name).unlink(missing_ok=True)
        (version / file).write_text(json.dumps({"model": "checkpoint", **values}))
        return read_engine_config({}, version).adapters

    listed = {"sheep": "/somewhere/sheep", "doll": str(version / "loras" / "doll")}
    for switch in (True, "true", "True"):
        assert read("model.json", enable_lora=switch, max_lora_rank=32) == AdapterConfig(
            enable_lora=True, max_lora_rank=32, lora_modules=listed
        )
    for switch in (False, "false"):
        assert read("model.json", enable_lora=switch) == AdapterConfig()
    own = read("quire.json", enable_lora=True, lora_modules={"own": "loras/own"}, lora_root="loras")
    assert own.lora_modules == {**listed, "own": str(version / "loras" / "own")}
    assert own.lora_root == str(version / "loras")
    with pytest.raises(ConfigError, match=r"multi_lora\.json: 'doll'"):
        read("quire.json", enable_lora=True, lora_modules={"doll": "loras/own"})
    for wrong in ("{", "[]", '{"a": 1}'):
        with pytest.raises(ConfigError, match="lora_modules"):
            read("quire.json", enable_lora=True, lora_modules=wrong)
    (version / "multi_lora.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"multi_lora\.json"):
        read("model.json", enable_lora=True)


# --- the result cache ---


@pytest.mark.row("G22", clauses=("key",))
def test_results_are_kept_by_weights_adapter_and_parameters() -> None:
    """Unseeded sampling is never looked up; a name whose content changed is another adapter."""
    cache = ResultCache(ResultCacheConfig(memory=10**6))
    greedy = SamplingParams(max_tokens=3, ignore_eos=True)

    def ask(engine: EngineInfo, name: str = "", params: SamplingParams = greedy) -> ParsedRequest:
        digest = next((one.digest for one in engine.adapters if one.name == name), "")
        none: frozenset[str] = frozenset()
        parsed = ParsedRequest([5, 6], params, "", none, none, adapter=name, adapter_digest=digest)
        cache.look_up(parsed, engine)
        return parsed

    def answer(parsed: ParsedRequest, token: int, engine: EngineInfo) -> None:
        assert parsed.results is None and parsed.recording is not None
        (choice,) = RequestProcessor("r", 2, parsed.params, None).choices
        output = EngineCoreOutput("r", [token] * 3, "length")
        parsed.recording.add_output(choice, output)
        choice.process(output)
        cache.keep(parsed.recording, [choice], engine)

    def token_of(parsed: ParsedRequest) -> int | None:
        return None if parsed.results is None else parsed.results.choices[0].token_ids[0]

    other = msgspec.structs.replace(LOADED, fingerprint="other weights")
    replaced = info(status("doll", "another content"), status("sheep", "d2"))
    seeded = SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0, seed=3)
    cases = [(LOADED, ""), (LOADED, "doll"), (LOADED, "sheep"), (other, ""), (replaced, "doll")]
    for token, (engine, name) in enumerate(cases):
        answer(ask(engine, name), token, engine)
        answer(ask(engine, name, seeded), token + 10, engine)
    for token, (engine, name) in enumerate(cases):
        assert token_of(ask(engine, name)) == token and token_of(ask(engine, name, seeded)) == token + 10
    for unknown in (
        ask(LOADED, "nobody"),
        ask(LOADED, "", SamplingParams(max_tokens=3, temperature=1.0)),
    ):
        assert unknown.results is None and unknown.recording is None
    longer = SamplingParams(max_tokens=4, ignore_eos=True)
    answer(asked := ask(LOADED, "doll", longer), 50, replaced)  # the engine had it when the other was there
    assert asked.results is None and token_of(ask(LOADED, "doll", longer)) is None


# --- where names are told ---


def test_another_engine_is_given_the_adapter_again() -> None:
    parsed = parse({"lora_name": "doll"})
    handle = RequestHandle(fake_pb_utils.ResponseSender(), "r", "")
    processor = RequestProcessor("r", 2, parsed.params, None)
    generation = Generation(handle, processor, add_request("r", parsed, 0.0))
    message = generation.next_message()
    assert (message.adapter, message.adapter_digest) == ("doll", "d1")


def record(adapter: str, **values: Any) -> RequestEnded:
    times = {"arrived_at": 1.0, "admitted_at": 2.0, "first_token_at": 3.0, "ended_at": 4.0}
    counts = {"n": 1, "num_prompt_tokens": 5, "num_output_tokens": 7}
    return RequestEnded(
        request_id="r", external_id="", model="m", adapter=adapter, finish_reason="stop",
        **{**times, **counts, **values},
    )  # fmt: skip


def test_tokens_are_counted_by_adapter_and_logs_and_traces_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeMetricFamily.reset(monkeypatch, fake_pb_utils)
    monkeypatch.setattr(metrics, "MAX_ADAPTERS", 2)
    board = MetricsBoard(fake_pb_utils)
    requests = RequestMetrics(board, "m", "1")
    for name in ("", "a", "b", "a", "c", "d"):
        requests.ended(record(name))
    requests.ended(record("refused", admitted_at=0.0))
    board.send()
    shown = FakeMetricFamily.shown("model", "version", "tenant")
    found = {name: value for name, value in shown.items() if name.startswith("quire_output_tokens")}
    names = {"": 7, "a": 14, "b": 7, "other": 14}
    assert found == {f'quire_output_tokens_total{{adapter="{name}"}}': n for name, n in names.items()}
    assert request_fields(record("a"))["adapter"] == "a"
    assert attributes_of(record("a"))["quire.adapter"] == "a"
    assert "quire.adapter" not in attributes_of(record(""))


@pytest.mark.row("E21", clauses=("metrics",))
def test_metrics_tell_what_is_loaded_and_of_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hits are counted over deaths and replacements; gauges tell a router what is in a slot."""
    FakeMetricFamily.reset(monkeypatch, fake_pb_utils)
    directory = tmp_path / "quire-0-1-5eed"
    directory.mkdir()
    board = MetricsBoard(fake_pb_utils, {"model_name": "m", "engine": "5eed"})
    engine = EngineMetrics(board, directory, "m", "1", max_loras=2)
    stats = SchedulerStats(
        step=0, num_running=0, num_waiting=0, num_waiting_tokens=0, num_blocks=9, num_free_blocks=9,
        num_preemptions=0, num_scheduled_tokens=0,
    )  # fmt: skip

    def shown(*adapters: AdapterStatus, evictions: int = 0, pid: int = 1) -> dict[str, float]:
        now = msgspec.structs.replace(stats, num_adapter_evictions=evictions)
        engine.update(now, info(*adapters, pid=pid))
        board.send()
        return FakeMetricFamily.shown("engine", "model_name")

    found = shown(status("a", slot=0, num_running=3, num_hits=2, num_loads=1), status("b", num_waiting=1))
    assert found["quire_adapters_loaded"] == 1
    assert found['quire_adapter_loaded{adapter="a"}'] == 1 and found['quire_adapter_loaded{adapter="b"}'] == 0
    assert found['quire_adapter_requests{adapter="a",state="running"}'] == 3
    assert found['quire_adapter_requests{adapter="b",state="waiting"}'] == 1
    assert found['quire_adapter_hits_total{adapter="a"}'] == 2
    assert found['quire_adapter_loads_total{adapter="a"}'] == 1
    labels = 'max_lora="2",running_lora_adapters="a",waiting_lora_adapters="b"'
    began = found[f"vllm:lora_requests_info{{{labels}}}"]
    assert began > 1e9
    assert FakeMetricFamily.kinds["quire_adapter_loaded"] == FakeMetricFamily.GAUGE
    assert FakeMetricFamily.kinds["quire_adapter_hits_total"] == FakeMetricFamily.COUNTER
    again = shown(status("a", slot=0, num_running=3, num_hits=2, num_loads=1), status("b", num_waiting=1))
    assert again[f"vllm:lora_requests_info{{{labels}}}"] == began, "nothing has changed"
    found = shown(status("a", slot=0, num_hits=5, num_loads=1), evictions=4)
    assert found['quire_adapter_loaded{adapter="b"}'] == 0
    assert found['quire_adapter_hits_total{adapter="a"}'] == 5
    assert found["quire_adapter_evictions_total"] == 4
    found = shown(status("a", slot=1, num_hits=1, num_loads=1), pid=2)
    assert found['quire_adapter_hits_total{adapter="a"}'] == 6, "another engine counts from zero"
    assert found['quire_adapter_loads_total{adapter="a"}'] == 2


def test_vllms_series_of_adapters_are_few_and_never_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest tells what is so. One that was made again, with the same labels, was freed with the one
    before and written to: the server died."""
    FakeMetricFamily.reset(monkeypatch, fake_pb_utils)
    monkeypatch.setattr(adapter_metrics, "MAX_TOLD", 8)
    clock = iter([1000.0, 1001.0, 1002.0, *[900.0] * 99])
    monkeypatch.setattr(adapter_metrics, "time", SimpleNamespace(time=lambda: next(clock)))
    board = MetricsBoard(fake_pb_utils, {"model_name": "m", "engine": "5eed"})
    adapters = adapter_metrics.AdapterMetrics(board, {"engine": "5eed"}, max_loras=2)

    def told(running: str, waiting: str = "") -> tuple[str, str]:
        """What is told when those have requests."""
        names = dict.fromkeys(running + waiting)
        adapters.update(
            [status(one, num_running=one in running, num_waiting=one in waiting) for one in reversed(names)]
        )
        board.send()
        latest = max(of_info(), key=lambda one: one.value).labels
        assert latest["max_lora"] == "2" and latest["model_name"] == "m"
        return latest["running_lora_adapters"], latest["waiting_lora_adapters"]

    def of_info() -> list[FakeMetric]:
        every = FakeMetricFamily.all_metrics.values()
        return [metric for metric in every if metric.name == "vllm:lora_requests_info"]

    assert told("") == ("", "")
    assert [told("a"), told(""), told("a")] == [("a", ""), ("", ""), ("a", "")]
    adapters.update([])
    assert told("a") == ("a", ""), "nothing was sent between"
    assert told("ab", "c") == ("a,b", "c") and told("", "c") == ("", "c") and told("ab") == ("a,b", "")
    assert told("b") == ("b", "") and len(of_info()) == 6
    assert told("ab", "c") == ("a,b", "c"), "it has a series"
    assert told("abc") == ("a,b", "") and told("bd", "c") in {("b", ""), ("", "c")} and len(of_info()) == 6
    assert told("d") == ("d", "") and told("ef") == ("e", ""), "one alone has room longer, for others too"
    assert told("g") == ("", "") and told("fe") == ("e", "")
    assert len(of_info()) == 8 and not FakeMetricFamily.deleted
    board.start()
    board.stop(timeout_s=120.0)
    assert not any(metric.value for metric in of_info()), "nothing of it is so when the model is gone"
