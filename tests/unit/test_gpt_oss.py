"""gpt-oss: its own MXFP4 beside what `transformers` makes of it, and what config.json may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import quants
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quire.config import ModelConfig
from quire.errors import CheckpointError
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP
from quire.layers.moe import Router
from quire.loader.gguf.metadata import read_gguf_config
from quire.loader.gguf.weights import hf_name
from quire.loader.load import load_model
from quire_kernels import registry
from quire_kernels.cpu.linear import NativeLinear
from quire_kernels.cpu.native import Format as NativeFormat
from tests.fixtures.checkpoints import build_model, make_checkpoint
from tests.fixtures.drive import Driver, hf_greedy, hf_logits, hf_model
from tests.fixtures.foreign_checkpoints import make_mxfp4_gpt_oss
from tests.fixtures.gguf_files import write_gguf

CPU = torch.device("cpu")
IDS = torch.randint(5, 512, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("gpt_oss", tmp_path_factory.mktemp("gpt_oss") / "plain", tokenizer=False)


@pytest.fixture(scope="module")
def mxfp4(plain: Path) -> Path:
    return make_mxfp4_gpt_oss(plain, plain.parent / "mxfp4")


def meant(path: Path) -> Any:
    """The `transformers` model with the numbers that it takes the blocks for."""
    stored = load_file(path / "model.safetensors")
    weights = {name: tensor for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales"))}
    for name, blocks in stored.items():
        if name.endswith("_blocks"):
            matrix = name.removesuffix("_blocks")
            scales = stored[f"{matrix}_scales"]
            weights[matrix] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model = build_model("gpt_oss")
    model.load_state_dict(weights)
    return model


@pytest.mark.row("C15", clauses=("equal",))
def test_sinks_equal_those_of_transformers(plain: Path) -> None:
    """Whose logits are others without them."""
    hf = hf_model(plain)
    theirs = hf_logits(hf, IDS)
    torch.testing.assert_close(Driver.load(plain).logits(IDS), theirs, atol=1e-3, rtol=0.0)
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.self_attn.sinks.fill_(-torch.inf)
    assert (hf_logits(hf, IDS) - theirs).norm() > 0.1 * theirs.norm()


@pytest.mark.row("D16", clauses=("moe",))
@pytest.mark.parametrize("chunk", [None, 7])
def test_mxfp4_equals_transformers(chunk: int | None, mxfp4: Path) -> None:
    """Prompts longer than the window, whole and in chunks, and tokens after them in one batch."""
    hf = meant(mxfp4)
    with registry.forced({"grouped_linear": "reference"}):
        driver = Driver.load(mxfp4, dtype="float32")
        torch.testing.assert_close(driver.logits(IDS), hf_logits(hf, IDS), atol=1e-3, rtol=0.0)
        prompts = [IDS, IDS[:5], IDS[7:31]]
        assert driver.greedy(prompts, 16, chunk=chunk) == [hf_greedy(hf, prompt, 16) for prompt in prompts]


@pytest.mark.row("D16", clauses=("moe",))
def test_weights_are_those_of_transformers_own_reader(mxfp4: Path) -> None:
    """Bit for bit in bfloat16, in which it gives them."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        mxfp4, dtype=torch.bfloat16, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    with registry.forced({"grouped_linear": "reference", "linear": "reference"}):
        layers = load_model(ModelConfig(model=str(mxfp4), dtype="bfloat16"), CPU).model.layers
    for ours, theirs in zip(layers, hf.model.layers, strict=True):
        for number, expert in enumerate(ours.mlp.experts):  # type: ignore[union-attr, arg-type]
            gate_up = theirs.mlp.experts.gate_up_proj[number].T
            assert torch.equal(expert.gate_up.packed.weight, torch.cat((gate_up[0::2], gate_up[1::2])))
            assert torch.equal(expert.down.packed.weight, theirs.mlp.experts.down_proj[number].T)


@pytest.mark.row("D16")
def test_experts_stay_in_their_blocks(mxfp4: Path) -> None:
    driver = Driver.load(mxfp4, dtype="float32")
    for layer in driver.model.layers:
        for expert in layer.mlp.experts:  # type: ignore[union-attr]
            assert isinstance(expert, GatedMLP)
            for linear in (expert.gate_up, expert.down):
                packed = linear.packed
                assert isinstance(packed, NativeLinear) and packed.struct.format == NativeFormat.GROUPED
                assert packed.nbytes <= packed.struct.num_columns * 64 * (0.5 + 2 / 32)
    theirs = hf_logits(meant(mxfp4), IDS)
    assert (driver.logits(IDS) - theirs).norm() < 0.2 * theirs.norm()


def test_layers_that_are_exempt_are_plain(plain: Path, tmp_path: Path) -> None:
    path = make_mxfp4_gpt_oss(plain, tmp_path / "mixed", exempt="model.layers.1.mlp")
    with registry.forced({"grouped_linear": "reference"}):
        ours = Driver.load(path, dtype="float32").logits(IDS)
    torch.testing.assert_close(ours, hf_logits(meant(path), IDS), atol=1e-3, rtol=0.0)


@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", None), ("bfloat16", "w8a8"), ("float16", None)]
)
def test_other_types_and_quantisations_load(dtype: str, quantization: str | None, mxfp4: Path) -> None:
    theirs = hf_logits(meant(mxfp4), IDS)
    ours = Driver.load(mxfp4, dtype=dtype, quantization=quantization).logits(IDS).float()
    of_tokens = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
    assert ours.isfinite().all() and of_tokens.median() < 0.2


def read_by_gguf(plain: Path, file: Path) -> Any:
    """The `transformers` model with the weights that the public package finds in a GGUF file."""
    weights = load_file(plain / "model.safetensors")
    for tensor in gguf.GGUFReader(file).tensors:
        means = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
        _, layer, part, end = [*tensor.name.split("."), "", ""][:4]
        matrix, is_bias = {"ffn_down_exps": "down_proj"}.get(part, "gate_up_proj"), end == "bias"
        if not part.endswith("_exps"):
            weights[hf_name(tensor.name, {"ffn_gate_inp": "mlp.router"})] = means
            continue
        whole = weights[f"model.layers.{layer}.mlp.experts.{matrix}" + "_bias" * is_bias]
        first, step = {"ffn_gate_exps": (0, 2), "ffn_up_exps": (1, 2)}.get(part, (0, 1))
        whole[..., first::step] = means if is_bias else means.transpose(1, 2)
    model = build_model("gpt_oss")
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0"])
def test_gguf_equals_transformers(kind: str, plain: Path, tmp_path: Path) -> None:
    """With the weights that gguf-py reads; experts stay in their blocks, in one file or several."""
    others = {"token_embd": "Q8_0", "output": "Q8_0", "attn_q": "BF16", "attn_k": "F16"}
    parts = 20 if kind == "MXFP4" else 0
    whole = write_gguf(plain, tmp_path / "whole.gguf", kind, kinds=others)
    file = write_gguf(plain, tmp_path / "model.gguf", kind, kinds=others, tensors_per_part=parts)
    hf = read_by_gguf(plain, whole)
    with registry.forced({"grouped_linear": "reference"}):
        driver = Driver.load(file, dtype="float32")
        torch.testing.assert_close(driver.logits(IDS), hf_logits(hf, IDS), atol=1e-3, rtol=0.0)
        assert driver.greedy([IDS, IDS[:5]], 16, chunk=7) == [
            hf_greedy(hf, one, 16) for one in (IDS, IDS[:5])
        ]
    decoder = Driver.load(file).model
    for layer in decoder.layers:
        for linear in layer.mlp.modules():  # type: ignore[union-attr]
            if isinstance(linear, Linear) and not isinstance(linear, Router):
                assert isinstance(linear.packed, NativeLinear)
                assert linear.packed.struct.format == NativeFormat.GROUPED
    decoded = Driver.load(file, dtype="float32", quantization="dequantized").logits(IDS)
    torch.testing.assert_close(decoded, hf_logits(hf, IDS), atol=1e-3, rtol=0.0)


def test_a_call_ends_a_generation_of_a_gguf_file(tmp_path: Path) -> None:
    """Files state one end alone, that of an answer."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gpt-oss")
    writer.add_token_list(["a", "<|return|>", "b", "<|call|>"])
    writer.add_eos_token_id(1)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_gguf_config(tmp_path / "model.gguf").get("eos_token_id") == [1, 3]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"swiglu_limit": 5.0}, r"swiglu_limit 5.0 is not supported; supported: 7.0$"),
        ({"swiglu_alpha": 2}, r"swiglu_alpha 2 is not supported; supported: 1.702$"),
        ({"num_local_experts": 9}, r"experts.down_proj has shape \[8, 64, 64\], config.json means 9 experts"),
        ({"attention_bias": 3}, "attention_bias must be true or false, got 3"),
        ({"sliding_window": 0}, "sliding_window must be a positive whole number"),
    ],
)
def test_what_config_json_may_not_say(
    values: dict[str, Any], message: str, plain: Path, tmp_path: Path
) -> None:
    path = tmp_path / "changed"
    path.mkdir()
    (path / "model.safetensors").symlink_to(plain / "model.safetensors")
    stated = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stated, **values}))
    with pytest.raises(CheckpointError, match=message):
        load_model(ModelConfig(model=str(path)), CPU)


def test_quantised_weights_are_computed_in_bfloat16_where_no_type_is_stated(
    mxfp4: Path, tmp_path: Path
) -> None:
    """As openai/gpt-oss-20b states none."""
    stated = json.loads((mxfp4 / "config.json").read_text())
    del stated["dtype"]
    (tmp_path / "model.safetensors").symlink_to(mxfp4 / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert load_model(ModelConfig(model=str(tmp_path)), CPU).config.dtype == torch.bfloat16


def test_what_config_json_need_not_say(plain: Path, tmp_path: Path) -> None:
    """Windows and YaRN as the first checkpoints have them."""
    stated = json.loads((plain / "config.json").read_text())
    for key in ("layer_types", "rope_parameters", "sliding_window"):
        stated.pop(key)
    path = tmp_path / "bare"
    path.mkdir()
    (path / "model.safetensors").symlink_to(plain / "model.safetensors")
    (path / "config.json").write_text(json.dumps(stated))
    model = load_model(ModelConfig(model=str(path)), CPU).model
    assert model.config.sliding_windows == (128, None, 128, None)
    hf = transformers.GptOssConfig()
    assert model.config.rope.parameters == {**hf.rope_parameters, "rope_theta": hf.default_theta}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_sinks_that_are_no_numbers_spoil_their_layer_alone(value: float, plain: Path, tmp_path: Path) -> None:
    """Such a file gives no tokens, and no crash."""
    path = tmp_path / "spoilt"
    path.mkdir()
    tensors = load_file(plain / "model.safetensors")
    tensors["model.layers.0.self_attn.sinks"][1] = value
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text((plain / "config.json").read_text())
    assert Driver.load(path).logits(IDS).isnan().all()
