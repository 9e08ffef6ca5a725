"""Rotary tables of every scaling type against those of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from quire.errors import CheckpointError
from quire.layers.hf_config import HFConfig
from quire.layers.rotary import RopeConfig, RotaryEmbedding, rope_frequencies
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import Driver, hf_greedy, hf_logits, hf_model

HEAD_DIM = 32
MAX_POSITION = 256
ORIGINAL = 64
CPU = torch.device("cpu")

_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.02 * i for i in range(HEAD_DIM // 2)],
    "long_factor": [1.5 + 0.3 * i for i in range(HEAD_DIM // 2)],
    "original_max_position_embeddings": ORIGINAL,
}
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-options": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 1.3,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
    },
    "longrope": _LONGROPE,
    "longrope-options": {**_LONGROPE, "factor": 6.0, "attention_factor": 1.2},
}


def config_of(rope: dict[str, Any]) -> Any:
    """The configuration `transformers` makes of these keys."""
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_theta": 10000.0, **rope},
    )


def ours(values: dict[str, Any], max_model_len: int = MAX_POSITION) -> RotaryEmbedding:
    rope = RopeConfig.from_hf(HFConfig(Path("config.json"), values), HEAD_DIM)
    return RotaryEmbedding(rope, max_model_len, CPU)


def assert_tables_equal(rotary: RotaryEmbedding, hf: LlamaRotaryEmbedding, length: int) -> None:
    """cos and sin of all positions of one sequence of this length."""
    positions = torch.arange(length)
    cos, sin = rotary(positions)
    hf_cos, hf_sin = hf(torch.zeros(1, dtype=torch.float32), positions[None])
    half = HEAD_DIM // 2
    # An angle of 10^4 radians has an error of 5e-4 in float32 if its frequency is one ulp off.
    options: dict[str, Any] = {"atol": 1e-4, "rtol": 0.0}
    torch.testing.assert_close(cos, hf_cos[0, :, :half], **options)
    torch.testing.assert_close(sin, hf_sin[0, :, :half], **options)


@pytest.mark.row("D23", clauses=("tables",))
@pytest.mark.parametrize("kind", TYPES)
def test_tables_equal_transformers(kind: str) -> None:
    """A sequence as long as max_position_embeddings, which is also the default max_model_len."""
    config = config_of(TYPES[kind])
    assert_tables_equal(ours(json.loads(config.to_json_string())), LlamaRotaryEmbedding(config), MAX_POSITION)


@pytest.mark.row("D23")
@pytest.mark.parametrize("kind", TYPES)
def test_frequencies_and_attention_factor_equal_transformers(kind: str) -> None:
    config = config_of(TYPES[kind])
    rotary = ours(json.loads(config.to_json_string()))
    hf = LlamaRotaryEmbedding(config)
    hf(torch.zeros(1), torch.arange(MAX_POSITION)[None])
    torch.testing.assert_close(rotary.frequencies, hf.inv_freq, atol=0.0, rtol=1e-6)
    assert rotary.attention_factor == pytest.approx(hf.attention_scaling, rel=1e-12)


@pytest.mark.row("D23")
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("length", [MAX_POSITION + 1, 3 * MAX_POSITION])
def test_tables_beyond_the_stated_length(kind: str, length: int) -> None:
    """max_model_len beyond max_position_embeddings: as `transformers` rotates a sequence of that length."""
    config = config_of(TYPES[kind])
    rotary = ours(json.loads(config.to_json_string()), max_model_len=length)
    assert_tables_equal(rotary, LlamaRotaryEmbedding(config), length)


@pytest.mark.row("D23")
def test_longrope_within_the_original_length_uses_the_short_factors() -> None:
    config = config_of(_LONGROPE)
    rotary = ours(json.loads(config.to_json_string()), max_model_len=ORIGINAL)
    assert_tables_equal(rotary, LlamaRotaryEmbedding(config), ORIGINAL)
    long = ours(json.loads(config.to_json_string()), max_model_len=ORIGINAL + 1)
    assert not torch.allclose(rotary.frequencies, long.frequencies)


@pytest.mark.row("D23")
def test_a_position_is_rotated_the_same_whatever_else_is_in_the_batch() -> None:
    """Unlike `transformers`, whose dynamic and longrope tables follow the longest sequence they see."""
    for kind in ("dynamic", "longrope"):
        rotary = ours(json.loads(config_of(TYPES[kind]).to_json_string()), max_model_len=4 * MAX_POSITION)
        short = rotary(torch.arange(8))
        mixed = rotary(torch.cat((torch.arange(8), torch.tensor([4 * MAX_POSITION - 1]))))
        assert torch.equal(short[0], mixed[0][:8]) and torch.equal(short[1], mixed[1][:8])


@pytest.mark.row("D23")
@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_partial_rotary_dimension(kind: str) -> None:
    config = config_of({**TYPES[kind], "partial_rotary_factor": 0.5})
    rotary = ours(json.loads(config.to_json_string()))
    frequencies, factor = ROPE_INIT_FUNCTIONS[TYPES[kind]["rope_type"]](config)
    assert rotary.frequencies.shape == (HEAD_DIM // 4,)
    torch.testing.assert_close(rotary.frequencies, frequencies, atol=0.0, rtol=1e-6)
    assert rotary.attention_factor == pytest.approx(factor)


@pytest.mark.row("D23", clauses=("mrope",))
@pytest.mark.parametrize("interleaved", [False, True], ids=["sections", "interleaved"])
def test_mrope_equals_transformers(interleaved: bool) -> None:
    """Text, an image and text again: three axes that differ, as Qwen2-VL and Qwen3-VL number positions."""
    section = [6, 5, 5] if interleaved else [4, 6, 6]
    rope = {"rope_type": "default", "mrope_section": section, "mrope_interleaved": interleaved}
    config = config_of(rope)
    positions = torch.randint(0, 200, (3, 40), generator=torch.Generator().manual_seed(0))
    positions[:, :10] = torch.arange(10)
    rotary = ours(json.loads(config.to_json_string()))
    # The modules read the rope keys and the head's size, which this configuration has too.
    module: Any = (
        modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding(config)
        if interleaved
        else modeling_qwen2_vl.Qwen2VLRotaryEmbedding(config)
    )
    hf_cos, hf_sin = module(torch.zeros(1), positions[:, None])
    cos, sin = rotary(positions)
    torch.testing.assert_close(cos, hf_cos[0, :, : HEAD_DIM // 2], atol=1e-4, rtol=0.0)
    torch.testing.assert_close(sin, hf_sin[0, :, : HEAD_DIM // 2], atol=1e-4, rtol=0.0)
    # Text alone, whose axes are equal, may be given as plain positions.
    plain = rotary(torch.arange(9))
    assert torch.equal(plain[0], rotary(torch.arange(9).expand(3, 9))[0])


@pytest.mark.row("D23")
@pytest.mark.parametrize("kind", TYPES)
def test_configuration_files_of_transformers_4(kind: str) -> None:
    """rope_theta + rope_scaling, with the type under its old key, mean the same."""
    new = json.loads(config_of(TYPES[kind]).to_json_string())
    old = dict(new)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    old["rope_scaling"] = None if rope["type"] == "default" else rope
    assert torch.equal(ours(new).frequencies, ours(old).frequencies)
    assert ours(new).attention_factor == ours(old).attention_factor


@pytest.mark.row("D23")
@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
def test_generation_equals_transformers(kind: str, tmp_path: Path) -> None:
    """Prompts on both sides of the original length, in chunks, through a whole model."""
    path = make_checkpoint(
        "llama", tmp_path, rope_scaling=TYPES[kind], max_position_embeddings=MAX_POSITION, tokenizer=False
    )
    hf, generator = hf_model(path), torch.Generator().manual_seed(7)
    prompts = [torch.randint(5, 512, (n,), generator=generator).tolist() for n in (9, 60, 150)]
    assert Driver.load(path).greedy(prompts, 12, chunk=50) == [hf_greedy(hf, p, 12) for p in prompts]


@pytest.mark.row("D23")
@pytest.mark.parametrize(("kind", "length"), [("dynamic", 96), ("longrope", 96), ("longrope", 48)])
def test_logits_where_the_length_decides(kind: str, length: int, tmp_path: Path) -> None:
    """max_model_len = the length of the sequence: `transformers` then uses the same table in one pass."""
    rope = {
        "dynamic": {"rope_type": "dynamic", "factor": 2.0},
        "longrope": {
            **_LONGROPE,
            "short_factor": _LONGROPE["short_factor"][:8],
            "long_factor": _LONGROPE["long_factor"][:8],
        },
    }[kind]
    # dynamic is defined over max_position_embeddings, longrope over the original length.
    stated = 64 if kind == "dynamic" else 128
    path = make_checkpoint(
        "llama", tmp_path, rope_scaling=rope, max_position_embeddings=stated, tokenizer=False
    )
    ids = torch.randint(5, 512, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    driver = Driver.load(path, max_model_len=length)
    torch.testing.assert_close(driver.logits(ids), hf_logits(hf_model(path), ids), atol=2e-4, rtol=0.0)


def test_longest_model_len() -> None:
    def longest(rope: dict[str, Any]) -> int:
        values = {"max_position_embeddings": MAX_POSITION, "rope_parameters": rope}
        return RopeConfig.from_hf(HFConfig(Path("config.json"), values), HEAD_DIM).longest_model_len

    assert longest(TYPES["default"]) == MAX_POSITION
    assert longest(TYPES["dynamic"]) == 3 * MAX_POSITION
    assert longest({"rope_type": "yarn", "factor": 4.0}) == 4 * MAX_POSITION
    assert (
        longest({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}) == MAX_POSITION
    )
    assert longest(TYPES["llama3"]) == MAX_POSITION


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral"}, "rope type 'spiral' is not supported; supported: default, linear"),
        ({"rope_type": "linear"}, "rope type linear needs the key 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope type llama3 needs the key 'low_freq_factor'"),
        ({**_LONGROPE, "long_factor": [1.0]}, "long_factor has 1 entries, the head needs 16"),
        ({"full_attention": {"rope_theta": 1e4}}, "a different rope per layer is not supported"),
        # What is false in Python is stated, too: it was taken for a key that is not there.
        ({"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
        ({"rope_theta": False}, "rope_theta must be a positive number, got False"),
        ({"rope_type": 0}, "rope type 0 is not supported"),
        ({**TYPES["yarn"], "original_max_position_embeddings": 0}, "must be a positive number, got 0"),
        ([], "rope_parameters must be one object"),
    ],
)
def test_wrong_parameters_are_refused_by_name(rope: Any, message: str) -> None:
    values = {"max_position_embeddings": MAX_POSITION, "rope_parameters": rope}
    with pytest.raises(CheckpointError, match=f"^some/config.json: .*{message}"):
        RopeConfig.from_hf(HFConfig(Path("some/config.json"), values), HEAD_DIM)


def test_frequency_factors_divide() -> None:
    """GGUF files hold llama3 scaling worked out as divisors."""
    values = {"max_position_embeddings": MAX_POSITION, "rope_parameters": {"rope_type": "default"}}
    plain = RopeConfig.from_hf(HFConfig(Path("x"), values), HEAD_DIM)
    values["rope_parameters"] = {"rope_type": "default", "frequency_factors": [2.0] * (HEAD_DIM // 2)}
    halved = RopeConfig.from_hf(HFConfig(Path("x"), values), HEAD_DIM)
    assert torch.equal(rope_frequencies(halved, 1)[0] * 2, rope_frequencies(plain, 1)[0])
