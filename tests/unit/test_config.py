from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import config
from quire.config import RANGES, EngineConfig, load_config_file, parse_bytes
from quire.errors import ConfigError


def test_values_may_be_text_as_in_triton_parameters() -> None:
    config = EngineConfig.from_mapping(
        {"model": "m", "max_num_seqs": "7", "kv_cache_memory": "2MiB", "enforce_eager": "true"}
    )
    assert config.scheduler.max_num_seqs == 7
    assert config.cache.kv_cache_memory == 2 * 2**20
    assert config.model.enforce_eager is True


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
        ({"block_size": 12}, ["block_size", "power of two"]),
        ({"dtype": "int3"}, ["dtype", "bfloat16"]),
        ({"max_num_seqs": 0}, ["max_num_seqs", "at least 1"]),
        ({"max_num_seqs": "many"}, ["max_num_seqs", "int"]),
        ({"max_num_seqs": 1.5}, ["max_num_seqs", "int"]),
        ({"enforce_eager": "perhaps"}, ["enforce_eager", "true or false"]),
        ({"gpu_memory_utilization": 0}, ["gpu_memory_utilization", "(0, 1]"]),
        ({"kv_cache_memory": "lots"}, ["kv_cache_memory", "MiB"]),
        ({"model": 3}, ["model", "text"]),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_mapping(values)
    for word in words:
        assert word in str(error.value)


NUMERIC = {
    key: str(field.type)
    for key, (_, field) in config._FIELDS.items()
    if set(str(field.type).split(" | ")) & {"int", "float"}
}


def test_every_numeric_key_has_a_range_that_holds_its_default() -> None:
    assert set(RANGES) == set(NUMERIC)
    EngineConfig.from_mapping({key: RANGES[key].high for key in NUMERIC})
    EngineConfig.from_mapping({key: RANGES[key].low for key in NUMERIC if not RANGES[key].excludes_low})


@pytest.mark.parametrize("key", sorted(NUMERIC))
def test_no_number_outside_its_range_passes(key: str) -> None:
    """NaN passed wherever a value was compared with its limit: it is not less than anything. A
    `startup_timeout_s` of NaN was never over."""
    allowed = RANGES[key]
    wrong: list[object] = [float("nan"), float("inf"), -float("inf"), "nan", "inf", "-inf", -1e300, 10**400]
    wrong += [10**30, str(10**30), int(allowed.low) - 1, -(10**30), "1e400"]
    wrong += [allowed.low] if allowed.excludes_low else []
    for value in wrong:
        with pytest.raises(ConfigError, match=key) as refused:
            EngineConfig.from_mapping({key: value})
        assert len(str(refused.value)) < 200
        with pytest.raises(ConfigError, match=key):
            EngineConfig().replace(**{key: value})


def test_nothing_may_be_pinned() -> None:
    assert EngineConfig.from_mapping({"max_pinned_fraction": 0}).cache.max_pinned_fraction == 0


@pytest.mark.parametrize(
    ("text", "expected"), [("512", 512), ("1k", 1000), ("1KiB", 1024), ("1.5GiB", 3 * 2**29), (77, 77)]
)
def test_sizes(text: object, expected: int) -> None:
    assert parse_bytes("kv_cache_memory", text) == expected


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
