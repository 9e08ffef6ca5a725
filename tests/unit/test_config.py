from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import Meta

from quire import config
from quire.config import EngineConfig, KVEventsConfig, ResultCacheConfig, TenantLimits, load_config_file
from quire.converters import unless_none
from quire.errors import ConfigError
from quire.triton import dialects
from quire.triton.config_completion import read_engine_config, shows_vllm_metrics
from tests import keys_page, parameters_page
from tests.rows import ROOT


def test_values_may_be_text_as_in_triton_parameters() -> None:
    config = EngineConfig.from_mapping(
        {"model": "m", "max_num_seqs": "7", "kv_cache_memory": "2MiB", "enforce_eager": "true"}
    )
    assert config.scheduler.max_num_seqs == 7
    assert config.cache.kv_cache_memory == 2 * 2**20
    assert config.model.enforce_eager is True


def test_spaces_around_a_text_mean_nothing() -> None:
    """They were taken in sizes only, and " 8" ended the load of a model that it had been good for."""
    text = {
        "max_num_seqs": " 8",
        "gpu_memory_utilization": "0.5 ",
        "enforce_eager": " true ",
        "dtype": "auto ",
    }
    values = {"max_num_seqs": 8, "gpu_memory_utilization": 0.5, "enforce_eager": True}
    assert EngineConfig.from_mapping(text) == EngineConfig.from_mapping(values)
    events = {"topic": " a "}
    assert EngineConfig.from_mapping({"kv_events": events}).cache.kv_events.topic == " a "


def test_round_trip_keeps_what_differs_from_the_defaults() -> None:
    values = {"model": "m", "block_size": 8, "max_model_len": 128}
    config = EngineConfig.from_mapping(values)
    assert config.to_mapping() == values
    assert EngineConfig.from_mapping(config.to_mapping()) == config
    assert config.replace(block_size=32).cache.block_size == 32


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_num_seq": 1}, ["max_num_seq", "did you mean 'max_num_seqs'"]),
        ({"nonsense_key": 1}, ["nonsense_key", "known keys"]),
        ({"block_size": 12}, ["block_size", "one of 1, 2, 4, 8, 16, 32, 64, 128, got 12"]),
        ({"dtype": "int3"}, ["dtype must be one of auto, float32, bfloat16, float16, got 'int3'"]),
        ({"max_num_seqs": 0}, ["max_num_seqs must be an integer in [1, 65536], got 0"]),
        ({"max_num_seqs": "many"}, ["max_num_seqs", "an integer", "got 'many'"]),
        ({"max_num_seqs": 1.5}, ["max_num_seqs", "an integer", "got 1.5"]),
        ({"max_num_seqs": True}, ["max_num_seqs", "an integer"]),
        ({"enforce_eager": "perhaps"}, ["enforce_eager", "true or false"]),
        ({"gpu_memory_utilization": 0}, ["gpu_memory_utilization", "(0, 1]"]),
        ({"kv_cache_memory": "lots"}, ["kv_cache_memory", "MiB"]),
        ({"kv_cache_memory": True}, ["kv_cache_memory", "MiB"]),
        ({"kv_cache_memory": "9" * 400}, ["kv_cache_memory", "1125899906842624"]),
        ({"model": 3}, ["model", "text"]),
        ({"preemption_mode": "swap"}, ["preemption_mode=swap needs host_cache_memory"]),
        ({"kv_connector": "{"}, ["kv_connector must be a JSON object, got '{'"]),
        ({"kv_connector": {"options": [1]}}, ["kv_connector: options must be a JSON object"]),
        ({"kv_events": {"endpont": "a"}}, ["kv_events: ", "'endpont' is unknown; did you mean 'endpoint'?"]),
        ({"result_cache": {"memory": "lots"}}, ["result_cache: memory must be an integer in [0, ", "MiB"]),
        ({"result_cache": "1MB"}, ["result_cache must be a JSON object, got '1MB'"]),
        ({"kv_events_endpoint": "a"}, ["kv_events_endpoint", "did you mean 'kv_events'?"]),
        ({"result_cache_memory": "1MB"}, ["result_cache_memory", "did you mean 'result_cache'?"]),
        ({"tenants": "[1]"}, ["tenants must be a JSON object"]),
        ({"tenants": "[" * 10**5}, ["tenants must be a JSON object"]),
        ({"tenants": {"a": 3}}, ["tenants: 'a' must be a JSON object, got 3"]),
        (
            {"tenants": '{"a": {"wieght": 1}}'},
            ["tenants: 'a'", "'wieght' is unknown; did you mean 'weight'?"],
        ),
        (
            {"tenants": {"a": {"weight": 0}}},
            ["tenants: 'a': weight must be a number in (0, 1000000000], got 0"],
        ),
        ({"tenants": '{"a": {"weight": Infinity}}'}, ["tenants: 'a': weight", "got inf"]),
        ({"tenants": '{"a": {"weight": NaN}}'}, ["tenants: 'a': weight", "got nan"]),
        ({"tenants": {"a": {"weight": True}}}, ["tenants: 'a': weight must be a number"]),
        (
            {"tenants": {"*": {"tokens_per_minute": 1.5}}},
            ["tenants: '*': tokens_per_minute must be an integer"],
        ),
        ({"tenants": {"a": {"max_running": 0}}}, ["tenants: 'a': max_running must be an integer in [1, "]),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_mapping(values)
    for word in words:
        assert word in str(error.value)


def test_objects_may_be_text_as_in_triton_parameters() -> None:
    limits = {"*": {"weight": "0.5", "max_running": None}, "a": {}}
    for given in (limits, json.dumps(limits)):
        config = EngineConfig.from_mapping({"tenants": given})
        assert config.scheduler.tenants == {"*": TenantLimits(weight=0.5), "a": TenantLimits()}
        assert EngineConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config
    assert EngineConfig.from_mapping({"tenants": ""}) == EngineConfig()
    text = '{"connector": "a:B", "options": {"port": 1, "nested": {"a": [2]}}}'
    config = EngineConfig.from_mapping({"kv_connector": text, "result_cache": '{"memory": "1MB"}'})
    assert config.cache.kv_connector.options == {"port": 1, "nested": {"a": [2]}}
    assert config.cache.result_cache == ResultCacheConfig(memory=10**6)
    assert EngineConfig.from_mapping(json.loads(json.dumps(config.to_mapping()))) == config


def annotations() -> Iterator[tuple[str, Any]]:
    """Every key with its annotation, those inside objects too: "kv_events.topic", "tenants.*.weight"."""
    for key, kind in config._KINDS.items():
        yield key, unless_none(kind)
        if (inner := keys_page.keys_inside(kind)) is not None:
            where = key if inner is kind else f"{key}.*"
            yield from ((f"{where}.{name}", unless_none(each)) for name, each in config._kinds(inner).items())


NUMERIC = {
    key: [note for note in get_args(kind) if isinstance(note, Meta)]
    for key, kind in annotations()
    if kind in (int, float) or get_args(kind)[:1] in ((int,), (float,))
}


def stating(key: str, value: object) -> dict[str, Any]:
    """Keys of a configuration in which one of `annotations` has a value."""
    first, *rest = key.split(".")
    for name in reversed(rest):
        value = {name: value}
    return {first: value}


def test_every_numeric_key_has_a_range_that_holds_its_default() -> None:
    assert len(NUMERIC) > 30 and {"tenants.*.weight", "result_cache.ttl_s"} <= NUMERIC.keys()
    for key, (allowed,) in NUMERIC.items():
        EngineConfig.from_mapping(stating(key, allowed.le))
        EngineConfig.from_mapping(stating(key, allowed.ge) if allowed.gt is None else {})
    EngineConfig.from_mapping(config._flat(EngineConfig()))


@pytest.mark.parametrize("key", sorted(NUMERIC))
def test_no_number_outside_its_range_passes(key: str) -> None:
    """NaN passed wherever a value was compared with its limit: it is not less than anything. A
    `startup_timeout_s` of NaN was never over."""
    (allowed,) = NUMERIC[key]
    low = allowed.ge if allowed.gt is None else allowed.gt
    wrong: list[object] = [float("nan"), float("inf"), -float("inf"), "nan", "inf", "-inf", -1e300, 10**400]
    wrong += [10**30, str(10**30), low - 1, -(10**30), "1e400"]
    wrong += [low] if allowed.gt is not None else []
    name = key.rpartition(".")[2]
    for value in wrong:
        with pytest.raises(ConfigError, match=name) as refused:
            EngineConfig.from_mapping(stating(key, value))
        assert len(str(refused.value)) < 200
        with pytest.raises(ConfigError, match=name):
            EngineConfig().replace(**stating(key, value))


def test_nothing_may_be_pinned() -> None:
    assert EngineConfig.from_mapping({"max_pinned_fraction": 0}).cache.max_pinned_fraction == 0


@pytest.mark.parametrize(
    ("text", "expected"), [("512", 512), ("1k", 1000), ("1KiB", 1024), ("1.5GiB", 3 * 2**29), (77, 77)]
)
def test_sizes(text: object, expected: int) -> None:
    assert EngineConfig.from_mapping({"kv_cache_memory": text}).cache.kv_cache_memory == expected


def test_config_file(tmp_path: Path) -> None:
    path = tmp_path / "quire.json"
    path.write_text(json.dumps({"// note": "comments are keys with two slashes", "block_size": 8}))
    assert load_config_file(path) == {"block_size": 8}
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"quire\.json"):
        load_config_file(path)
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="JSON object"):
        load_config_file(path)


def test_the_page_of_keys_is_of_this_code() -> None:
    assert (ROOT / "docs" / "keys.md").read_text("utf-8") == keys_page.page(), "make status"


def test_the_page_of_parameters_is_of_this_code() -> None:
    assert (ROOT / "docs" / "parameters.md").read_text("utf-8") == parameters_page.page(), "make status"
    assert set(parameters_page.TENSORRT_LLM_TENSORS) == set(dialects._TENSORS)


def test_every_key_of_a_text_model_is_read_or_changes_nothing() -> None:
    """A key that transformers' next version brings is met here before it is passed over."""
    read, unread = keys_page.config_keys()
    assert unread == keys_page.WITHOUT_EFFECT and len(read) > 80


def test_the_model_directory_of_vllm_backend_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = tmp_path / "1"
    (version / "checkpoint").mkdir(parents=True)
    file = version / "model.json"

    def read(**arguments: object) -> EngineConfig:
        file.write_text(json.dumps({"model": "checkpoint", **arguments}))
        return read_engine_config({"parameters": {"num_blocks": {"string_value": "7"}}}, version)

    arguments = {"trust_remote_code": True, "swap_space": 4, "seed": None, "tensor_parallel_size": 2}
    config = read(dtype="half", enforce_eager=True, max_model_len=64, model_impl="vllm", **arguments)
    assert [record.getMessage() for record in caplog.records] == [
        "model.json: without effect here: trust_remote_code, swap_space"
    ]
    assert (config.model.tensor_parallel_size, config.model.model_impl) == (2, "quire")
    assert read(model_impl="transformers").model.model_impl == "transformers"
    assert config.frontend.dialect == "vllm" and config.cache.num_blocks == 7
    assert (config.model.dtype, config.model.max_model_len) == ("float16", 64)
    assert config.model.model == str(version / "checkpoint")
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "t", "replay_endpoint": None}
    published = read(kv_events_config={**events, "buffer_steps": 5}).cache.kv_events
    assert published == KVEventsConfig(endpoint="tcp://*:5557", topic="t")
    assert caplog.records[-1].getMessage().endswith("without effect here: kv_events_config.buffer_steps")
    for off in ({"topic": "t"}, {**events, "publisher": "null"}):
        assert read(kv_events_config=off).cache.kv_events == KVEventsConfig()
    with pytest.raises(ConfigError, match="kv_events: configuration key 'topics' is unknown; did you mean"):
        read(kv_events_config={**events, "topics": "t"})
    with pytest.raises(ConfigError, match="kv_events must be a JSON object"):
        read(kv_events_config=3)
    with pytest.raises(ConfigError) as refused:
        read(pipeline_parallel_size=2, invalid_attribute=True)
    first, second = refused.value.problems
    assert "pipeline_parallel_size must be 1" in first and "'invalid_attribute' is unknown" in second

    hf = version / "checkpoint" / "config.json"
    hf.write_text("{}")
    with pytest.raises(ConfigError, match=r"quantization 'fp8': the checkpoint's weights are not"):
        read(quantization="fp8")
    hf.write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    assert read(quantization="fp8").model.quantization is None
    hf.unlink()

    file.write_text(json.dumps({"model": "checkpoint"}))
    theirs = {
        "ENABLE_VLLM_HEALTH_CHECK": {"string_value": "true"},
        "EXECUTION_ENV_PATH": {"string_value": "x"},
    }
    assert read_engine_config({"parameters": theirs}, version).model.model == config.model.model
    with pytest.raises(ConfigError, match="'GPU_DEVICE_IDS' is unknown"):  # it was passed over
        read_engine_config({"parameters": {**theirs, "GPU_DEVICE_IDS": {"string_value": "1"}}}, version)

    def shows(value: str, **arguments: object) -> bool:
        file.write_text(json.dumps(arguments))
        parameters = {"REPORT_CUSTOM_METRICS": {"string_value": value}}
        return shows_vllm_metrics({"parameters": parameters}, version)

    assert shows("True") and not shows("false") and not shows("true", disable_log_stats=True)
    assert not shows_vllm_metrics({}, version)
    beside = {"draft_model": "../small", "tokenizer": "/t", "num_draft_tokens": 4}
    (version / "quire.json").write_text(json.dumps({"model": "checkpoint", **beside}))
    model = read_engine_config({}, version).model
    assert (model.draft_model, model.tokenizer) == (str((version / "../small").resolve()), "/t")
    file.write_text("no JSON")
    assert read_engine_config({}, version).frontend.dialect == "quire", "ours counts where both are there"
