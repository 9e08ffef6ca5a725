"""GGUF files of each family: names, keys and layout are those of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from quire.config import ModelConfig
from quire.errors import CheckpointError
from quire.layers.config import DecoderConfig
from quire.loader.gguf.families import FAMILIES
from quire.loader.gguf.weights import read_gguf
from quire.loader.info import read_configs
from quire.loader.load import empty_model
from quire_common.gguf_file import GGUFFile
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import Driver, hf_greedy, hf_logits, hf_model
from tests.fixtures.gguf_files import OF_FILES, write_gguf

IDS = torch.randint(5, 512, (24,), generator=torch.Generator().manual_seed(1)).tolist()
DENSE = (
    "gemma",
    "phi3",
    "granite",
    "smollm3",
    "olmo2",
    "olmo3",
    "glm4",
    "exaone4",
    "seed_oss",
    "ernie4_5",
    "hunyuan",
)
EXPERTS = ("dots1", "glm4_moe", "ernie4_5_moe", "olmoe", "granitemoe", "minimax_m2")
FAMILIES_OF_FILES = (
    *DENSE,
    *EXPERTS,
    "gemma2",
    "gemma3",
    "lfm2",
    "lfm2_moe",
    "youtu",
    "deepseek_v2",
    "deepseek_v3",
)


def write(family: str, path: Path, kind: str = "F32", **options: Any) -> Path:
    options = {**OF_FILES.get(family, {}), **options}
    return write_gguf(
        make_checkpoint(family, path / "hf", tokenizer=False, **options), path / "model.gguf", kind
    )


def config(file: Path) -> DecoderConfig:
    return empty_model(ModelConfig(model=str(file)), torch.device("meta")).model.config


def changed(file: Path, tensors: dict[str, np.ndarray] | None = None, **values: Any) -> Path:
    """The file with other values of its architecture's keys (None: without the key; dots are "__"), and with
    more tensors."""
    reader, out = gguf.GGUFReader(file), file.with_name("changed.gguf")
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, arch)
    others = {f"{arch}.{name.replace('__', '.')}": value for name, value in values.items()}
    stated = {name: (one.contents(), one.types[0]) for name, one in reader.fields.items()}
    for name, (value, kind) in stated.items():
        if name not in others and not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_array(name, value) if isinstance(value, list) else writer.add_key_value(
                name, value, kind
            )
    adders = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for name, value in others.items():
        if value is not None:
            adders[type(value)](name, value)
    for tensor in reader.tensors:
        if (
            tensors
            and any(name.endswith("attn_kv_b.weight") for name in tensors)
            and tensor.name.endswith(("_k_b.weight", "_v_b.weight"))
        ):
            continue
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.row("G16", clauses=("gguf",))
@pytest.mark.parametrize("family", FAMILIES_OF_FILES)
def test_logits_and_tokens_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    """All that the checkpoint says is in the file, and no key of the file is left unread."""
    file = write(family, tmp_path)
    theirs = hf_model(tmp_path / "hf")
    driver = Driver.load(file, dtype="float32")
    torch.testing.assert_close(driver.logits(IDS), hf_logits(theirs, IDS), atol=1e-4, rtol=0.0)
    assert driver.greedy([IDS], 8, chunk=7) == [hf_greedy(theirs, IDS, 8)]
    assert read_configs(file)[0].unused == ()


def test_a_rotation_with_long_and_short_divisors(tmp_path: Path) -> None:
    """Of Phi-3's files no key names the type: there are two tensors."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 16, "partial_rotary_factor": 0.75}
    factors = {
        name: [1.0 + scale * i for i in range(12)]
        for name, scale in (("short_factor", 0.1), ("long_factor", 0.7))
    }
    file = write(
        "phi3",
        tmp_path,
        rope_parameters={**rope, **factors, "rope_theta": 1e4},
        original_max_position_embeddings=16,
    )
    expected = hf_logits(hf_model(tmp_path / "hf"), IDS)
    torch.testing.assert_close(Driver.load(file, dtype="float32").logits(IDS), expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({}, "sssss."),
        ({"attention__sliding_window_pattern": 3}, "ss.ss."),
        ({"attention__sliding_window_pattern": [False, True] * 3}, ".s.s.s"),
        ({"attention__sliding_window": None}, "......"),
    ],
)
def test_which_layers_have_a_window(values: dict[str, Any], windows: str, tmp_path: Path) -> None:
    file = changed(write("gemma3", tmp_path), **values)
    found = config(file).sliding_windows
    assert found == tuple(12 if one == "s" else None for one in windows)


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemma_divides_scores_by_another_number(family: str, layers: int, tmp_path: Path) -> None:
    """That of hidden_size / num_attention_heads, and not of the size of a head. No key says so."""
    file = write(family, tmp_path)
    assert config(file).attention_scale == 32**-0.5
    assert config(changed(file, block_count=layers)).attention_scale == (64 // 4) ** -0.5


def test_layers_for_multi_token_prediction_are_passed_over(tmp_path: Path) -> None:
    file = write("glm4_moe", tmp_path)
    expected = Driver.load(file, dtype="float32").logits(IDS)
    more = {f"blk.3.{name}.weight": np.ones((64, 64), np.float32) for name in ("nextn.eh_proj", "attn_q")}
    of_four = changed(file, more, block_count=4, nextn_predict_layers=1)
    assert torch.equal(Driver.load(of_four, dtype="float32").logits(IDS), expected)


def test_parts_of_the_latents_projection_are_joined(tmp_path: Path) -> None:
    """Keys' part lies transposed, so that its blocks run along another dimension than the projection's."""
    file = write("deepseek_v3", tmp_path, "Q8_0")
    ours = {one.name: one for one in read_gguf(file, GGUFFile.open(file), keeps_blocks=True)}
    tensors = {
        one.name: quants.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(file).tensors
    }
    for layer in range(3):
        keys, values = (tensors[f"blk.{layer}.attn_{part}_b.weight"] for part in "kv")
        joined = np.concatenate([keys.swapaxes(1, 2), values], 1).reshape(-1, keys.shape[1])
        np.testing.assert_array_equal(ours[f"model.layers.{layer}.self_attn.kv_b_proj.weight"].read(), joined)
    assert not any(name.endswith(("k_b.weight", "v_b.weight")) for name in ours)


def test_files_from_before_latents_were_cached(tmp_path: Path) -> None:
    """They hold the whole projection, and state the lengths of the heads that it makes."""
    file = write("deepseek_v2", tmp_path)
    expected = Driver.load(file, dtype="float32").logits(IDS)
    opened = GGUFFile.open(file)
    joined = {one.name: one.read().numpy() for one in read_gguf(file, opened, keeps_blocks=False)}
    whole = {
        f"blk.{layer}.attn_kv_b.weight": joined[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        for layer in range(2)
    }
    lengths = {"attention__key_length": 48, "attention__value_length": 48, "attention__head_count_kv": 4}
    old = changed(file, whole, attention__key_length_mla=None, attention__value_length_mla=None, **lengths)
    assert torch.equal(Driver.load(old, dtype="float32").logits(IDS), expected)


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        (
            "glm4",
            {"rope__dimension_sections": [8, 12, 12, 0]},
            r"glm4\.rope\.dimension_sections is not supported$",
        ),
        ("granite", {"rope__dimension_count": 8}, "granite.rope.dimension_count is 8, of heads of 16"),
        ("deepseek_v3", {"expert_gating_func": 3}, "scoring_func 3 is not supported; supported: sigmoid"),
        (
            "lfm2_moe",
            {"expert_gating_func": 1},
            "scoring_func 'softmax' is not supported; supported: sigmoid",
        ),
        ("lfm2", {"attention__head_count_kv": [0, 2]}, "layer_types"),
        ("qwen3_5", {"ssm__group_count": 3}, "linear_num_value_heads=4 is no multiple of"),
        ("qwen3_5", {"ssm__time_step_rank": 0}, "linear_num_value_heads must be a positive whole number"),
        ("deepseek_v2", {"rope__dimension_count": 64}, "qk_nope_head_dim must be a positive whole number"),
        ("gemma3", {"attention__head_count": 0}, "num_attention_heads must be a positive whole number"),
        ("qwen3_5", {"rope__dimension_count": 8.0}, "rope.dimension_count must be a whole number, got 8.0"),
        ("minimax_m2", {"rope__dimension_count": [1, 2]}, "rope.dimension_count must be a whole number"),
        (
            "deepseek_v3",
            {"rope__scaling__yarn_log_multiplier": [1, 2]},
            "yarn_log_multiplier must be a number",
        ),
        ("gemma3", {"rope__freq_base": 0.0}, "rope parameter rope_theta must be a positive number"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    family: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = changed(write(family, tmp_path), **values)
    with pytest.raises(CheckpointError, match=message) as refused:
        config(file)
    assert str(refused.value).startswith(f"{file}: ") and "\n" not in str(refused.value)


@pytest.mark.parametrize("arch", ["qwen3next", "nemotron_h", "granitehybrid", "llama4", "minicpm3"])
def test_architectures_without_a_family_are_refused(arch: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", arch)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError) as refused:
        read_configs(tmp_path / "model.gguf")
    known = ", ".join(FAMILIES)
    assert str(refused.value) == (
        f"{tmp_path / 'model.gguf'}: GGUF architecture {arch!r} is not supported; supported: {known}"
    )


def test_every_family_is_one_of_llama_cpp() -> None:
    assert FAMILIES.keys() <= set(gguf.MODEL_ARCH_NAMES.values())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_columns_of_heads_stay_in_blocks_that_are_whole(kind: str, tmp_path: Path) -> None:
    """Two blocks of Q8_0 are a head's; of Q4_K a block holds four heads, and the matrix is decoded."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "linear_value_head_dim": 64}
    file = write("qwen3_5", tmp_path, kind, **sizes)
    ours = {one.name: one for one in read_gguf(file, GGUFFile.open(file), keeps_blocks=True)}
    out = ours["model.layers.0.linear_attn.out_proj.weight"]
    assert (out.tensor.dtype == torch.uint8) == (kind == "Q8_0")
    (stored,) = [one for one in gguf.GGUFReader(file).tensors if one.name == "blk.0.ssm_out.weight"]
    heads = quants.dequantize(stored.data, stored.tensor_type).reshape(256, 2, 2, 64)  # places, key heads
    means = out.read().numpy()
    if kind == "Q8_0":
        means = quants.dequantize(means, stored.tensor_type)
    np.testing.assert_array_equal(means, heads.swapaxes(1, 2).reshape(256, -1))
