"""Every family against `transformers`: logits, greedy output, precision, and the cost of a step."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from quire.config import ModelConfig
from quire.errors import CheckpointError, ConfigError
from quire.layers.embedding import Embedding
from quire.layers.hf_config import HFConfig
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import rope_frequencies
from quire.layers.scheme import SCHEMES
from quire.loader.info import read_configs
from quire.loader.load import load_model
from quire.models.kv_groups import blocks_per_sequence
from quire.models.registry import model_class
from quire_kernels import registry
from quire_kernels.quantized_kv import data_of
from tests.fixtures.checkpoints import (
    FALLBACK_FAMILIES,
    MLA_FAMILIES,
    MLA_SIBLINGS,
    NATIVE_FAMILIES,
    Checkpoints,
    build_model,
    make_checkpoint,
    randomize,
)
from tests.fixtures.drive import Driver, hf_greedy, hf_logits, hf_model
from tests.fixtures.foreign_checkpoints import MAKERS, make_foreign

LOGITS_TOLERANCE = 1e-4
"""Of logits up to 14; transformers itself is up to 7e-5 away from its result in float64."""
"""float32: largest difference of any logit; logits have a standard deviation of 3."""
HALF_TOLERANCE = {"bfloat16": 4e-2, "float16": 6e-3}
"""Half precision against float32 of the same weights, two layers: root mean square of the difference over
the logits' deviation."""


QUANTISE_NO_CACHE = (*MLA_FAMILIES, *MLA_SIBLINGS, "mimo_v2_flash")
"""Families whose layers keep latent vectors, or on transformers' code heads of different sizes."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each family."""
    return Checkpoints(tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def greedy(checkpoints: dict[str, Path]) -> Callable[[str], list[list[int]]]:
    """24 tokens of `transformers` behind each of GREEDY_PROMPTS, for a family: however ours gets to them."""

    @functools.cache
    def expected(family: str) -> list[list[int]]:
        model = hf_model(checkpoints[family])
        return [hf_greedy(model, prompt, 24) for prompt in GREEDY_PROMPTS]

    return expected


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(5, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


GREEDY_PROMPTS = [tokens(length, seed=length) for length in (1, 7, 8, 9, 16, 30, 64)]


@pytest.mark.row("E1", clauses=("logits", "llama4"))
@pytest.mark.row("E2", clauses=("logits",))
@pytest.mark.row("E3", clauses=("logits", "ministral"))
@pytest.mark.row("E4", clauses=("logits", "gemma4"))
@pytest.mark.row("E5", clauses=("equal",))
@pytest.mark.row("E6", clauses=("equal",))
@pytest.mark.row("E7", clauses=("equal",))
@pytest.mark.row("E8", clauses=("equal",))
@pytest.mark.row("E9", clauses=("equal",))
@pytest.mark.row("C23", clauses=("equal",))
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
@pytest.mark.parametrize("chunk", [None, 7], ids=["whole", "chunks"])
def test_logits_equal_transformers(family: str, chunk: int | None, checkpoints: dict[str, Path]) -> None:
    ids = tokens(75)
    logits = Driver.load(checkpoints[family]).logits(ids, chunk)
    expected = hf_logits(hf_model(checkpoints[family]), ids)
    torch.testing.assert_close(logits, expected, atol=LOGITS_TOLERANCE, rtol=0.0)


@pytest.mark.row("E1", clauses=("greedy", "llama4"))
@pytest.mark.row("E2", clauses=("greedy",))
@pytest.mark.row("E3", clauses=("greedy", "ministral"))
@pytest.mark.row("E4", clauses=("greedy", "gemma4"))
@pytest.mark.row("E5", clauses=("equal",))
@pytest.mark.row("E6", clauses=("equal",))
@pytest.mark.row("E7", clauses=("equal",))
@pytest.mark.row("E8", clauses=("equal",))
@pytest.mark.row("E9", clauses=("equal",))
@pytest.mark.row("C23", clauses=("equal",))
@pytest.mark.row("C16", clauses=("equal",))
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
@pytest.mark.parametrize(("chunk", "block_size"), [(None, 16), (1, 8), (7, 8)])
def test_greedy_output_equals_transformers(
    family: str,
    chunk: int | None,
    block_size: int,
    checkpoints: dict[str, Path],
    greedy: Callable[[str], list[list[int]]],
) -> None:
    """A batch of lengths around the block size and the window, prefilling and decoding mixed."""
    driver = Driver.load(checkpoints[family], block_size=block_size)
    expected = greedy(family)
    assert driver.greedy(GREEDY_PROMPTS, 24, chunk) == expected
    assert all(len(set(output)) > 6 for output in expected), "an oracle that repeats itself proves little"


@pytest.mark.row("E1", clauses=("bf16",))
@pytest.mark.row("E2", "E3", "E4")
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
def test_half_precision_is_as_close_to_float32_as_stated(family: str, dtype: str, tmp_path: Path) -> None:
    """Within the stated tolerance of float32, and no worse than `transformers` in the same type."""
    # Where a token chooses another expert or other positions, all those behind it go on from another state.
    options: dict[str, Any] = {
        "deepseek_v32": {"index_topk": 64},
        "glm_moe_dsa": {"index_topk": 64},
        "qwen3_next": {"mlp_only_layers": list(range(6))},
        "lfm2_moe": {"num_dense_layers": 4},
        "nemotron_h": {"hybrid_override_pattern": "MM-*-M-M*-"},
        "granitemoehybrid": {"num_local_experts": 0},
    }.get(family, {})
    path = make_checkpoint(family, tmp_path, dtype=dtype, tokenizer=False, **options)
    ids = tokens(60)
    exact = hf_logits(hf_model(path, "float32"), ids)
    driver = Driver.load(path)
    has_experts = driver.model.config.experts is not None

    def error(logits: torch.Tensor) -> float:
        of_tokens = (logits - exact).square().mean(1)
        # Some tokens choose other experts than in float32, by a hair.
        mean = of_tokens.median() if has_experts else of_tokens.mean()
        return float(mean.sqrt() / exact.std())

    assert driver.model.config.dtype == getattr(torch, dtype) == data_of(driver.kv_cache.layer(0)).dtype
    ours = error(driver.logits(ids))
    # Rounding errors of layers add up like the steps of a random walk.
    assert 0 < ours < HALF_TOLERANCE[dtype] * (driver.model.config.num_layers / 2) ** 0.5
    assert ours < 1.1 * error(hf_logits(hf_model(path, dtype), ids))


@pytest.mark.parametrize("family", [*NATIVE_FAMILIES, *FALLBACK_FAMILIES])
def test_a_quantised_cache_is_close_to_a_plain_one_or_refused_by_its_key(
    family: str, checkpoints: dict[str, Path]
) -> None:
    """In chunks, so that most keys and values are read from the cache."""
    driver, ids = Driver.load(checkpoints[family]), tokens(40)
    exact = driver.logits(ids, 7)
    for kind, most in (("int8", 0.15), ("fp8", 0.3)):
        if family in QUANTISE_NO_CACHE:
            with pytest.raises(ConfigError, match=f"^kv_cache_dtype={kind}"):
                driver.model.kv_spec(kind)
            continue
        found = Driver(driver.model, kv_cache_dtype=kind).logits(ids, 7)
        distance = (found - exact).square().mean(1).median().sqrt() / exact.std()
        assert 0 < distance < most, kind


@pytest.mark.row("E3")
def test_sliding_window_matters_and_equals_transformers_beyond_it(checkpoints: dict[str, Path]) -> None:
    """A window of 12 in 2 layers: position 60 depends on 60 - 2 * 11 and on nothing before it."""
    path, ids = checkpoints["mistral"], tokens(75, seed=3)
    driver = Driver.load(path)
    logits = driver.logits(ids)
    torch.testing.assert_close(logits, hf_logits(hf_model(path), ids), atol=LOGITS_TOLERANCE, rtol=0.0)

    def influence(position: int) -> float:
        other = [*ids[:position], (ids[position] + 1) % 512, *ids[position + 1 :]]
        return float((driver.logits(other)[60] - logits[60]).abs().max())

    assert influence(60 - 22) > 100 * influence(60 - 23)
    assert influence(60 - 23) < 1e-5


WINDOWED = ("mistral", "gemma2", "gemma3")
LONG_PROMPTS = (9, 40, 100, 150)
"""Up to twelve windows of 12."""


@pytest.fixture(scope="module")
def beyond_window(checkpoints: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What `transformers` says to prompts that are longer than the window."""
    models = {family: hf_model(checkpoints[family]) for family in WINDOWED}
    return {
        family: [hf_greedy(hf, tokens(length, seed=length), 30) for length in LONG_PROMPTS]
        for family, hf in models.items()
    }


@pytest.mark.row("C14", clauses=("equal",))
@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("block_size", [8, 16])
def test_blocks_before_the_window_are_never_read(
    family: str,
    chunk: int,
    block_size: int,
    checkpoints: dict[str, Path],
    beyond_window: dict[str, list[list[int]]],
) -> None:
    """Equal to `transformers`, though they hold NaN or another sequence, in no more blocks than stated."""
    driver = Driver.load(checkpoints[family], block_size=block_size, num_blocks=256)
    prompts = [tokens(length, seed=length) for length in LONG_PROMPTS]
    assert driver.greedy(prompts, 30, chunk) == beyond_window[family]
    # The last token is not computed.
    bound = [
        blocks_per_sequence(driver.model.kv_groups, length + 29, block_size, chunk) for length in LONG_PROMPTS
    ]
    assert driver.num_blocks - driver.fewest_free <= sum(bound)
    # Of all their blocks, the longest two do not keep more than half in the groups that have a window.
    for sequence in driver.sequences[2:]:
        for group, blocks, left in zip(
            driver.model.kv_groups, sequence.block_ids, sequence.num_left, strict=True
        ):
            assert len(blocks) == -(-(len(sequence.token_ids) - 1) // block_size)
            assert left == 0 if group.window is None else left > len(blocks) / 2


@pytest.mark.parametrize("family", WINDOWED)
def test_the_driver_notices_a_read_of_a_block_it_took_back(family: str, checkpoints: dict[str, Path]) -> None:
    """Else the test above would prove nothing: one position too early is too early at some length."""
    driver = Driver.load(checkpoints[family], block_size=1, num_blocks=1024)
    groups = driver.model.kv_groups
    driver.model.kv_groups = tuple(
        group if group.window is None else group._replace(window=group.window - 1) for group in groups
    )
    assert driver.logits(tokens(30), chunk=1).isnan().any(dim=1).tolist() == [False] * 11 + [True] * 19


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"sliding_window": 4096}),
        ("gemma3", {"sliding_window": 4096}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 32}),
        ("gemma3", {"query_pre_attn_scalar": 32}),
        ("gemma3", {"rope_parameters": None}),
    ],
)
def test_the_oracle_depends_on_what_sets_the_family_apart(
    family: str, keys: dict[str, Any], beyond_window: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    """Same weights without the window, the cap, the scale or the two kinds of positions: other tokens."""
    hf = hf_model(make_checkpoint(family, tmp_path, tokenizer=False, **keys))
    for length, expected in zip(LONG_PROMPTS[1:], beyond_window[family][1:], strict=True):
        assert hf_greedy(hf, tokens(length, seed=length), 30) != expected


@pytest.mark.row("E4")
def test_logits_are_capped(tmp_path: Path) -> None:
    """The cap keeps the order of the tokens and not their probabilities: sampling would differ."""
    ids = tokens(40)
    capped = make_checkpoint("gemma2", tmp_path / "capped", tokenizer=False)
    free = make_checkpoint("gemma2", tmp_path / "free", tokenizer=False, final_logit_softcapping=None)
    logits = {path: Driver.load(path).logits(ids) for path in (capped, free)}
    assert logits[capped].abs().max() < 6.0 < 8.0 < logits[free].abs().max()
    for path, ours in logits.items():
        torch.testing.assert_close(ours, hf_logits(hf_model(path), ids), atol=LOGITS_TOLERANCE, rtol=0.0)
    assert torch.equal(logits[capped].argmax(-1), logits[free].argmax(-1))


FULL = ["full_attention"]


@pytest.mark.row("E4")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gemma", {"hidden_act": "gelu"}),
        ("gemma", {"tied": False, "attention_bias": True}),
        ("gemma2", {"attention_bias": True, "num_hidden_layers": 3}),
        # The exact one: "gelu" means the tanh form in files of the first Gemma alone.
        ("gemma2", {"hidden_activation": "gelu"}),
        ("gemma2", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}),
        ("gemma3", {"attention_bias": True, "num_hidden_layers": 4, "layer_types": None}),
        ("gemma3", {"layer_types": ["sliding_attention"] * 6}),
        # Seven groups of two layers, one of them half empty.
        ("gemma3", {"num_hidden_layers": 13, "layer_types": [*["sliding_attention"] * 11, *FULL * 2]}),
        ("gemma3", {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0}),
    ],
)
def test_switches_of_gemma(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path, tokenizer=False, **options)
    ids = tokens(60)
    expected = hf_logits(hf_model(path), ids)
    torch.testing.assert_close(Driver.load(path).logits(ids), expected, atol=2e-4, rtol=0.0)


def test_embeddings_are_scaled_by_a_number_of_their_own_type() -> None:
    """Gemma rounds the square root of the hidden size to the checkpoint's type, and then multiplies."""
    scale, dtype = 3072**0.5, torch.bfloat16
    hf = HFConfig(Path("config.json"), {**_SIZES, "architectures": ["GemmaForCausalLM"], "hidden_size": 3072})
    config = model_class(hf).parse_config(hf, dtype)
    embedding = Embedding(64, 32, dtype=dtype, scale=config.embedding_scale)
    embedding.allocate(SCHEMES[None], "model.embed_tokens")
    (stored,) = embedding.weights()
    weight = stored.memory.normal_(generator=torch.Generator().manual_seed(0)).clone()
    embedding.pack()
    expected = weight * torch.tensor(scale, dtype=dtype)
    assert torch.equal(embedding(torch.arange(64)), expected)
    assert not torch.equal(weight * scale, expected)


@pytest.mark.row("E4")
@pytest.mark.parametrize("scaling", [None, {"factor": 8.0, "rope_type": "linear"}], ids=["plain", "scaled"])
def test_gemma3_files_of_transformers_4(
    scaling: dict[str, Any] | None, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """rope_theta, rope_local_base_freq and rope_scaling; sliding_window_pattern instead of layer_types."""
    shutil.copytree(checkpoints["gemma3"], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_parameters", "layer_types", "_sliding_window_pattern", "tie_word_embeddings"):
        config.pop(key, None)
    config |= {"rope_theta": 50000.0, "rope_local_base_freq": 500.0, "sliding_window_pattern": 3}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": scaling}))
    ids = tokens(60)
    driver = Driver.load(tmp_path)
    assert [group.layers for group in driver.model.kv_groups] == [(2, 5), (0, 1), (3, 4)]
    expected = hf_logits(hf_model(tmp_path), ids)
    torch.testing.assert_close(driver.logits(ids), expected, atol=LOGITS_TOLERANCE, rtol=0.0)


@pytest.mark.row("E4")
def test_the_text_part_of_a_gemma3_with_vision(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = json.loads((checkpoints["gemma3"] / "config.json").read_text())
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config=text, vision_config={**tower, "image_size": 56, "patch_size": 14})
    )
    randomize(model, 0, unit_offset_norms=True)
    model.eval().save_pretrained(tmp_path)
    ids = tokens(60)
    logits = Driver.load(tmp_path, dtype="float32").logits(ids)
    torch.testing.assert_close(logits, hf_logits(model, ids), atol=LOGITS_TOLERANCE, rtol=0.0)


@pytest.mark.row("E4")
def test_the_config_of_gemma3_4b_states_only_what_differs_from_the_defaults(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (tmp_path / "config.json").write_text(
        json.dumps({**outer, "text_config": text, "torch_dtype": "bfloat16"})
    )
    hf, _ = read_configs(tmp_path)
    config = model_class(hf).parse_config(hf, torch.bfloat16)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.sliding_windows[4:7] == (1024, None, 1024) and config.sliding_windows.count(None) == 5
    assert (config.rope.theta, config.rope.rope_type) == (1e6, "linear")
    assert config.rope.parameters["factor"] == 8.0 and config.other_rope is not None
    assert (config.other_rope.theta, config.other_rope.rope_type) == (1e4, "default")
    assert config.tie_word_embeddings and config.attention_softcap is config.logits_softcap is None
    assert config.max_position_embeddings == 131072


@pytest.mark.row("E4")
def test_the_config_of_gemma3_12b_states_heads_and_no_vocabulary(tmp_path: Path) -> None:
    """It was taken for a whole file, and refused: "vocab_size must be a positive whole number, got None"."""
    text = {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "model_type": "gemma3_text",
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": text}))
    hf, _ = read_configs(tmp_path)
    config = model_class(hf).parse_config(hf, torch.bfloat16)
    assert (config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 256, 262208)


def interleaved(tensors: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """A Llama's tensors as InternLM 2 names and joins them."""
    names = {
        "embed_tokens": "tok_embeddings", "input_layernorm": "attention_norm", "self_attn": "attention",
        "post_attention_layernorm": "ffn_norm", "o_proj": "wo", "mlp": "feed_forward", "gate_proj": "w1",
        "up_proj": "w3", "down_proj": "w2", "lm_head": "output",
    }  # fmt: skip
    joined = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_proj.", f".{one}_proj.")] for one in "qkv"]
            heads = [part.unflatten(0, (config.num_key_value_heads, -1)) for part in parts]
            name, tensor = name.replace("q_proj", "wqkv"), torch.cat(heads, 1).flatten(0, 1)
        elif ".k_proj." in name or ".v_proj." in name:
            continue
        joined[".".join(names.get(part, part) for part in name.split("."))] = tensor.contiguous()
    return joined


@pytest.mark.row("E1", "E4")
@pytest.mark.parametrize("kind", ["Gemma4", "Llama4"])
def test_the_text_part_of_a_checkpoint_with_towers(kind: str, tmp_path: Path) -> None:
    """As the hub has it: names with a prefix, what the towers have, keys that nothing reads, and sizes of the
    layers without a window under keys of their own."""
    family = kind.lower()
    path = make_checkpoint(family, tmp_path, tokenizer=False)
    ids = tokens(50)
    expected = hf_logits(hf_model(path), ids)
    config = json.loads((path / "config.json").read_text())
    architectures = [f"{kind}ForConditionalGeneration"]
    tensors = load_file(path / "model.safetensors")
    if kind == "Gemma4":
        del config["per_layer_config"]
        config["global_head_dim"] = 32
        stored = {name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()}
        shared = "model.language_model.layers.4.self_attn"
        stored |= {f"{shared}.k_proj.weight": torch.zeros(16, 64), f"{shared}.k_norm.weight": torch.zeros(16)}
        stored |= {"model.vision_tower.x": torch.zeros(1), "model.embed_audio.x": torch.zeros(1)}
    else:
        stored = {f"language_model.{name}": one for name, one in tensors.items()}
        stored |= {"vision_model.x": torch.zeros(1), "multi_modal_projector.linear_1.weight": torch.zeros(1)}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    outer = {"architectures": architectures, "model_type": family, "text_config": config}
    (path / "config.json").write_text(json.dumps({**outer, "dtype": "float32"}))
    logits = Driver.load(path).logits(ids)
    torch.testing.assert_close(logits, expected, atol=LOGITS_TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("kind", ["AWQ gemm", "GPTQ", "FP8 blocks"])
def test_quantised_rows_that_cannot_be_put_in_order_are_refused(kind: str, tmp_path: Path) -> None:
    """Where neighbouring dimensions rotate: never computed as they lie."""
    sizes = {"num_attention_heads": 8, "hidden_size": 128}  # more than one block of 128 rows
    path = make_checkpoint("ernie4_5", tmp_path / "plain", tokenizer=False, **sizes)
    path, _ = make_foreign(path, tmp_path / "foreign", MAKERS[kind])
    with pytest.raises(CheckpointError, match=r"[qk]_proj.*neighbouring dimensions rotate together"):
        Driver.load(path)


@pytest.mark.row("E1")
@pytest.mark.parametrize(
    "keys",
    [
        {"num_experts_per_tok": 2},
        {"moe_layers": [0, 2], "attn_temperature_tuning": False, "use_qk_norm": False},
        {"layer_types": ["full_attention"] * 4, "no_rope_layers": [1, 1, 0, 1]},
    ],
    ids=str,
)
def test_switches_of_llama4(keys: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint("llama4", tmp_path, tokenizer=False, **keys)
    ids = tokens(50)
    expected = hf_logits(hf_model(path), ids)
    torch.testing.assert_close(Driver.load(path).logits(ids, 7), expected, atol=LOGITS_TOLERANCE, rtol=0.0)


@pytest.mark.row("E5", clauses=("equal",))
@pytest.mark.parametrize("bias", [False, True])
def test_internlm2_is_a_llama_of_other_names(bias: bool, tmp_path: Path) -> None:
    """Its class is in its checkpoints, not in `transformers`; the oracle is a Llama of the same weights."""
    model = build_model("llama", attention_bias=bias, num_hidden_layers=3)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": bias}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = hf_logits(model, ids := tokens(60))
    for kind in ("safetensors", "bin"):
        tensors = interleaved(model.state_dict(), model.config)
        if kind == "safetensors":
            save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        else:
            (tmp_path / "model.safetensors").unlink()
            torch.save(tensors, tmp_path / "pytorch_model.bin")
        logits = Driver.load(tmp_path, load_format=kind).logits(ids)
        torch.testing.assert_close(logits, expected, atol=LOGITS_TOLERANCE, rtol=0.0)
    config["num_key_value_heads"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"wqkv.weight has 128 rows, config.json means 96"):
        Driver.load(tmp_path, load_format="bin")


@pytest.mark.row("E5", clauses=("equal",))
@pytest.mark.parametrize(("qkv_bias", "bias"), [(False, False), (True, False), (True, True)])
def test_internlm3_is_a_llama_with_other_switches(qkv_bias: bool, bias: bool, tmp_path: Path) -> None:
    """As above."""
    rope = {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 50000.0}
    options: dict[str, Any] = {"rope_parameters": rope, "head_dim": 32}
    model = build_model("llama", attention_bias=qkv_bias, mlp_bias=bias, **options)
    tensors = dict(model.state_dict())
    for name in list(tensors):
        if name.endswith("o_proj.bias"):
            tensors[name].zero_()
            if not bias:
                del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}
    config |= {"qkv_bias": qkv_bias, "bias": bias, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    ids = tokens(60)
    logits = Driver.load(tmp_path).logits(ids)
    torch.testing.assert_close(logits, hf_logits(model, ids), atol=LOGITS_TOLERANCE, rtol=0.0)


@pytest.mark.row("E2", "E3")
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 10, "max_window_layers": 0}),
        ("mistral", {"sliding_window": None}),
        ("phi3", {"sliding_window": 10}),
    ],
)
def test_windows_of_some_layers(family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """By layer_types, and by max_window_layers in files that are older than layer_types."""
    path = make_checkpoint(family, tmp_path, tokenizer=False, num_hidden_layers=3, **keys)
    ids = tokens(50)
    expected = hf_logits(hf_model(path), ids)
    torch.testing.assert_close(Driver.load(path).logits(ids), expected, atol=2e-4, rtol=0.0)
    config = json.loads((path / "config.json").read_text())
    if config.pop("layer_types", None) is not None:
        # transformers 5 writes null where the switch is off; files of its time had the number.
        (path / "config.json").write_text(json.dumps({**config, **keys}))
        torch.testing.assert_close(Driver.load(path).logits(ids), expected, atol=2e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("kind", "architecture", "options"),
    [
        ("Gemma2Config", "Gemma2ForCausalLM", {}),
        (
            "Qwen2VLTextConfig",
            "Qwen2VLForConditionalGeneration",
            {
                "use_sliding_window": True,
                "max_window_layers": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]},
            },
        ),
    ],
)
@pytest.mark.parametrize("states_types", [True, False], ids=["layer_types", "older file"])
def test_windows_are_in_the_layers_that_transformers_says(
    kind: str, architecture: str, options: dict[str, Any], states_types: bool
) -> None:
    import transformers

    config = getattr(transformers, kind)(num_hidden_layers=5, sliding_window=12, **options)
    expected = tuple(12 if name == "sliding_attention" else None for name in config.layer_types)
    values = {**config.to_dict(), "architectures": [architecture]}
    if not states_types:
        del values["layer_types"]
    hf = HFConfig(Path("config.json"), values)
    assert model_class(hf).parse_config(hf, torch.float32).sliding_windows == expected
    assert {12, None} == set(expected)


_SIZES = {"vocab_size": 64, "hidden_size": 1024, "intermediate_size": 32, "num_hidden_layers": 3}
_SIZES |= {"num_attention_heads": 32, "num_key_value_heads": 2, "max_position_embeddings": 256}
_REFUSED_WITHOUT = _SIZES.keys() - {"num_key_value_heads"} | {
    "layer_types", "num_experts", "rope_parameters", "use_sliding_window",
}  # fmt: skip
"""Keys without which a file may be refused."""
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_OF_QWEN2 = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_OF_DOTS = {"n_routed_experts": 4, "num_experts_per_tok": 2}
_MROPE = {"type": "mrope", "mrope_section": [8, 4, 4]}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("Llama", {}),
        ("Mistral", {}),
        ("Ministral", {}),
        ("Ministral3", {}),
        ("Mixtral", _EXPERTS),
        ("Phi3", {"partial_rotary_factor": 0.5}),
        ("Glm", {}),
        ("Glm4", {}),
        ("Granite", {}),
        ("Olmo2", {}),
        ("Olmo3", {}),
        ("SmolLM3", {}),
        ("SmolLM3", {"use_sliding_window": True, "sliding_window": 12, "no_rope_layers": [1, 0, 1]}),
        ("SeedOss", {}),
        ("Ernie4_5", {}),
        ("Exaone4", {}),
        ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
        ("HunYuanDenseV1", {}),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
        ("Qwen3", {"use_sliding_window": True, "max_window_layers": 1, "head_dim": 32}),
        ("Qwen2Moe", _OF_QWEN2),
        ("Qwen2Moe", {**_OF_QWEN2, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
        ("Dots1", {**_OF_DOTS, "n_shared_experts": 1, "moe_intermediate_size": 8}),
        ("Glm4Moe", {"head_dim": 32}),
        ("Ernie4_5_Moe", {}),
        ("MiniMaxM2", {"rotary_dim": 16}),
        ("MiniMaxM2", {"head_dim": 32}),
        ("Olmoe", {}),
        ("GraniteMoe", {}),
        ("Qwen3Moe", {**_EXPERTS, "use_sliding_window": True, "moe_intermediate_size": 8}),
        ("Llama4", {"head_dim": 32, "intermediate_size_mlp": 64}),
        ("Llama4", {"head_dim": 32, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2}),
        ("Gemma", {}),
        ("Gemma2", {}),
        ("Gemma3", {}),
        ("Gemma4", {}),
        ("Gemma4", {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_hidden_layers": 8}),
        ("GptOss", {**_EXPERTS, "head_dim": 32}),
        ("GptOss", {**_EXPERTS, "head_dim": 32, "rope_theta": 500.0}),
        ("GptOss", {**_EXPERTS, "head_dim": 32, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("Qwen2VL", {"rope_scaling": _MROPE}),
        ("Qwen2VL", {"rope_scaling": _MROPE, "use_sliding_window": True}),
    ],
)
def test_what_a_file_leaves_out_is_what_transformers_takes(kind: str, values: dict[str, Any]) -> None:
    """Defaults are a family's own: a Mistral without the key sliding_window had none (it is 4096), Mixtral
    and gpt-oss an rms_norm_eps of 1e-6 (1e-5), Mixtral and Qwen2-VL a rope_theta of 1e4 (1e6)."""
    import transformers

    name = f"{kind}TextConfig" if kind in ("Gemma3", "Gemma4", "Llama4", "Qwen2VL") else f"{kind}Config"
    architecture = f"{kind}For{'ConditionalGeneration' if kind == 'Qwen2VL' else 'CausalLM'}"
    bare = {**_SIZES, **values}

    def completed(values: dict[str, Any]) -> dict[str, Any]:
        return dict(getattr(transformers, name)(**copy.deepcopy(values)).to_dict())

    def parsed(values: dict[str, Any]) -> tuple[Any, ...]:
        hf = HFConfig(Path("config.json"), {**values, "architectures": [architecture]})
        config = model_class(hf).parse_config(hf, torch.float32)
        ropes = [rope for rope in (config.rope, config.other_rope) if rope is not None]
        frequencies = [rope_frequencies(rope, 256) for rope in ropes]
        shown = [(table.tolist(), factor) for table, factor in frequencies]
        return dataclasses.replace(config, rope=None, other_rope=None), shown

    whole = completed(bare)
    assert "rms_norm_eps" in whole
    assert parsed(bare) == parsed(whole)
    for key in whole:
        rest = {other: value for other, value in whole.items() if other != key}
        try:
            found = parsed(rest)
            expected = completed(rest)
        except CheckpointError:
            assert key in _REFUSED_WITHOUT | values.keys(), key
        except ZeroDivisionError:
            assert (kind, key) == ("Exaone4", "layer_types")  # transformers' own, where windows are null
        else:
            assert found == parsed(expected), key


@pytest.mark.row("E1")
@pytest.mark.row("E2")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tied": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-3}),
        ("llama", {"hidden_act": "gelu", "head_dim": 32}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama3", {"tied": False, "legacy_config": True}),
        ("qwen2", {"tied": False, "legacy_config": True}),
        ("qwen3", {"tied": False, "attention_bias": True}),
    ],
)
def test_switches_of_the_configuration(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path, tokenizer=False, **options)
    ids = tokens(40)
    torch.testing.assert_close(
        Driver.load(path).logits(ids), hf_logits(hf_model(path), ids), atol=2e-4, rtol=0.0
    )


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_the_oracle_depends_on_its_whole_history(family: str, checkpoints: dict[str, Path]) -> None:
    """Else equality with it would prove nothing: see tests/fixtures/checkpoints.py."""
    hf, prompt = hf_model(checkpoints[family]), tokens(20)
    if family == "mistral":
        prompt = prompt[:12]
    output = hf_greedy(hf, prompt, 16)
    for changed in (0, len(prompt) // 2):
        other = [*prompt[:changed], (prompt[changed] + 1) % 512, *prompt[changed + 1 :]]
        assert hf_greedy(hf, other, 16) != output


@pytest.fixture
def counted_operators() -> Iterator[None]:
    """PyTorch's operators, whose work its counter knows."""
    with registry.forced(dict.fromkeys(registry.operators(), "reference")):
        yield


@pytest.mark.row("C1", clauses=("cost",))
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.usefixtures("counted_operators")
def test_a_decode_step_costs_one_token_whatever_the_history(num_kv_heads: int, tmp_path: Path) -> None:
    """One row through every layer, equal work at any history but for attention, and the right logits."""
    path = make_checkpoint("llama", tmp_path, tokenizer=False, num_key_value_heads=num_kv_heads)
    driver = Driver.load(path)
    rows_seen: list[int] = []

    def count_rows(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        rows_seen.append(inputs[0].shape[0])

    cost: dict[int, dict[str, int]] = {}
    ids = tokens(401)
    expected = hf_logits(hf_model(path), ids)
    hooks = [
        module.register_forward_hook(count_rows)
        for module in driver.model.modules()
        if isinstance(module, Linear | Embedding | RMSNorm)
    ]
    for history in (16, 400):
        sequence = driver.add(ids[: history + 1])
        driver.step([(sequence, history)])
        rows_seen.clear()
        with FlopCounterMode(display=False) as counter:
            (logits,) = driver.step([(sequence, 1)])
        assert rows_seen and set(rows_seen) == {1}
        cost[history] = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
        torch.testing.assert_close(logits[0], expected[history], atol=LOGITS_TOLERANCE, rtol=0.0)
    for hook in hooks:
        hook.remove()
    attention, rest = "aten.bmm", "aten.mm"
    assert cost[16][rest] == cost[400][rest] > 0
    # Blocks of 8: 17 tokens are 3 blocks, 401 are 51.
    assert cost[400][attention] * 3 == cost[16][attention] * 51
    assert set(cost[16]) == {attention, rest}


@pytest.mark.row("C1", clauses=("tokens",))
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
def test_the_cache_holds_kv_heads_only_and_output_equals_transformers(
    num_kv_heads: int, tmp_path: Path
) -> None:
    path = make_checkpoint("llama", tmp_path, tokenizer=False, num_key_value_heads=num_kv_heads)
    driver = Driver.load(path)
    assert driver.kv_cache.layer(0).shape[2] == num_kv_heads
    prompts = [tokens(length, seed=length) for length in (3, 21)]
    hf = hf_model(path)
    assert driver.greedy(prompts, 20) == [hf_greedy(hf, prompt, 20) for prompt in prompts]


def test_a_row_does_not_depend_on_the_rows_beside_it(checkpoints: dict[str, Path]) -> None:
    driver = Driver.load(checkpoints["llama"], num_blocks=256)
    prompts = [tokens(length, seed=length) for length in (5, 40, 100, 12)]
    alone = [driver.greedy([prompt], 16)[0] for prompt in prompts]
    assert driver.greedy(prompts, 16) == alone


_GEMMA4 = {"architectures": ["Gemma4ForCausalLM"], "rope_parameters": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported, and the causal model of",
        ),
        ({"architectures": None}, "architectures must name the model's class"),
        ({"hidden_size": None}, "hidden_size must be a positive whole number up to 16777216, got None"),
        (
            {"num_key_value_heads": 0},
            "num_key_value_heads must be a positive whole number up to 65536, got 0",
        ),
        ({"head_dim": "16"}, "head_dim must be a positive whole number up to 65536, got '16'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a positive whole number up to 4096"),
        ({"partial_rotary_factor": 1e9}, "partial_rotary_factor=1000000000.0 of heads of"),
        ({"partial_rotary_factor": "x"}, "partial_rotary_factor must be a number, got 'x'"),
        ({"partial_rotary_factor": True}, "partial_rotary_factor must be a number, got True"),
        # It was obeyed, where transformers' classes of these families rotate whole heads or fail.
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 8 of a head's 16 dimensions would rotate"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": "x"}},
            "factor must be a positive number, got 'x'",
        ),
        ({"dtype": 16}, "holds a value that cannot be right: 'int' object has no attribute"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": -1},
            "holds a value that cannot be right: a sliding window of -1",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        # As gte-Qwen2's, which transformers reads: each token then sees those behind it, too.
        ({"is_causal": False}, "is_causal false is not supported"),
        # Who adds rope_scaling to a file of transformers 5, as READMEs of models say, saw no effect.
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters and rope_scaling say different things",
        ),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"dtype": "float8"}, "dtype 'float8' is not supported"),
        (
            {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
            "use_bidirectional_attention is not supported",
        ),
        (
            {"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_type": "default"}},
            "rope_parameters must hold an object for each type of layer",
        ),
        ({**_GEMMA4, "enable_moe_block": True}, "num_experts must be"),
        ({**_GEMMA4, "vocab_size_per_layer_input": 511}, "vocab_size_per_layer_input=511 is less than vocab"),
        ({**_GEMMA4, "pad_token_id": 512}, "pad_token_id must be"),
        (
            {**_GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 5},
            "top_k_experts must be",
        ),
        ({**_GEMMA4, "num_kv_shared_layers": 9}, "num_kv_shared_layers must be"),
        ({**_GEMMA4, "per_layer_config": [1]}, "per_layer_config must be"),
        (
            {**_GEMMA4, "per_layer_config": {"0": {"head_dim": 8}}},
            "per_layer_config: layers with a window differ: not supported",
        ),
        (
            {"architectures": ["Llama4ForCausalLM"], "moe_layers": [7]},
            "moe_layers must be a list of layers' numbers, got [7]",
        ),
        (
            {"architectures": ["Llama4ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            "layer_types must be 2 times full_attention or chunked_attention",
        ),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [0, 1, 1]},
            "no_rope_layers must be 2 numbers 0 or 1, got [0, 1, 1]",
        ),
        (
            {"architectures": ["GraniteForCausalLM"], "logits_scaling": 0},
            "logits_divisor of 0.0 is no positive number",
        ),
        (
            {"architectures": ["GraniteForCausalLM"], "embedding_multiplier": "12"},
            "embedding_multiplier must be a number that is not negative, got '12'",
        ),
        (
            {"architectures": ["Ministral3ForCausalLM"]},
            "llama_4_scaling_beta must be a number that is not negative, got None",
        ),
        (
            {"architectures": ["Exaone4ForCausalLM"], "sliding_window_pattern": "LLLG"},
            "sliding_window_pattern must be a positive whole number",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, "weights quantised by 'hqq' are not supported"),
    ],
)
def test_an_unsupported_configuration_is_refused(
    change: dict[str, Any], message: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((checkpoints["llama"] / "config.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, **change}))
    with pytest.raises(CheckpointError) as raised:
        load_model(ModelConfig(model=str(tmp_path)), torch.device("cpu"))
    assert str(raised.value).startswith(f"{file}: ") and message in str(raised.value)
    assert "\n" not in str(raised.value)
