"""GGUF's quantised weights as they are: what their blocks mean, and models that are computed in them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from quire.config import ModelConfig
from quire.errors import CheckpointError
from quire.loader.gguf import weights as gguf_weights
from quire.loader.gguf.weights import hf_name, read_gguf
from quire.loader.load import load_model
from quire_common.gguf_file import GGUFFile
from quire_kernels import ops, registry
from quire_kernels.block_weights import BLOCK_KINDS, BlockWeight
from quire_kernels.cpu.compiler import supported_isas
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import Driver, hf_logits, hf_model
from tests.fixtures.gguf_files import write_gguf

IDS = torch.randint(5, 512, (30,), generator=torch.Generator().manual_seed(0)).tolist()
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
"""Multiples of the K-quants' blocks."""
MOST_OFF = 0.05
"""Distance of logits that inputs in eight bits may make."""
KINDS = [kind.name for kind in BLOCK_KINDS]
MIXED = {
    "attn_v": "Q6_K",
    "blk.1.ffn_up": "Q5_K",
    "ffn_down": "Q3_K",
    "blk.0.attn_q": "F16",
    "output": "Q6_K",
}
"""Parts of a layer of different types: like Q4_K_M's files, and worse."""


def write(family: str, path: Path, kind: str, kinds: Mapping[str, str] | None = None, **options: Any) -> Path:
    checkpoint = make_checkpoint(family, path / "hf", tokenizer=False, **{**SIZES, **options})
    return write_gguf(checkpoint, path / "model.gguf", kind, kinds=kinds)


def decoded(file: Path) -> Any:
    """The checkpoint in `transformers` with the weights that the public package finds in the file."""
    model = hf_model(file.parent / "hf")
    parameters = dict(model.named_parameters())
    for tensor in gguf.GGUFReader(file).tensors:
        weight = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
        with torch.no_grad():
            parameters[hf_name(tensor.name)].copy_(weight)
    return model


def check_logits(file: Path, expected: torch.Tensor) -> None:
    """Asserts that a file's logits are those expected where blocks are taken for what they mean, and near
    them where they are computed in their bits, with inputs of eight."""
    with registry.forced({"grouped_linear": "reference"}):
        exact = Driver.load(file, dtype="float32")
    torch.testing.assert_close(exact.logits(IDS), expected, atol=1e-3, rtol=0.0)
    assert distance(Driver.load(file, dtype="float32").logits(IDS), expected) < MOST_OFF


def packed_rows(kind: GGMLQuantizationType, blocks: torch.Tensor) -> torch.Tensor:
    """float32: what a matrix means once it is packed."""
    packed = ops.pack_linear(BlockWeight(kind, blocks), dtype=torch.float32)
    return packed.rows(torch.arange(blocks.shape[0]))


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Of logits at most positions, as a share of their size. (At some, little tips attention over.)"""
    return float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).median())


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_random_bytes_mean_what_the_public_package_says(kind: str) -> None:
    """Bit for bit, whatever the bytes are: factors that are no numbers too."""
    of_file = GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[of_file]
    data = np.random.default_rng(of_file).integers(0, 256, (64, 3 * size), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        theirs = quants.dequantize(data, of_file)
    weight = BlockWeight(of_file, torch.from_numpy(data))
    assert weight.shape == (64, 3 * block)
    for isa in supported_isas():
        with registry.forced({"grouped_linear": isa}):
            rows = ops.pack_linear(weight, dtype=torch.float32).rows(torch.arange(64))
        np.testing.assert_array_equal(rows.numpy(), theirs)


@pytest.mark.row("D15", clauses=("equal",))
@pytest.mark.row("G16", clauses=("gguf",))
@pytest.mark.parametrize("kind", [*KINDS, "F16", "BF16"])
def test_weights_equal_those_of_the_public_reader_and_run(kind: str, tmp_path: Path) -> None:
    """Each tensor bit for bit, as the file has it; and the logits."""
    file = write("qwen3", tmp_path, kind)
    ours = {one.name: one.read() for one in read_gguf(file, GGUFFile.open(file), keeps_blocks=True)}
    tensors = gguf.GGUFReader(file).tensors
    assert ours.keys() == {hf_name(tensor.name) for tensor in tensors}
    for tensor in tensors:
        weight, of_file = ours[hf_name(tensor.name)], tensor.tensor_type
        means = packed_rows(of_file, weight) if of_file in BLOCK_KINDS else weight.float()
        assert torch.equal(means, torch.from_numpy(quants.dequantize(tensor.data, of_file))), tensor.name
    check_logits(file, hf_logits(decoded(file), IDS))


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("mixtral", ("block_sparse_moe", "w1", "w3", "w2")),
        ("qwen3_moe", ("mlp", "gate_proj", "up_proj", "down_proj")),
    ],
)
def test_an_expert_is_a_slice_of_its_tensor(
    family: str, names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, in the kind that the file has it in, also of kinds that are decoded; and the logits."""
    options = {"moe_intermediate_size": 256, "mlp_only_layers": []} if family == "qwen3_moe" else {}
    kinds = {"ffn_down_exps": "Q6_K", "blk.1.ffn_up_exps": "Q8_0", "blk.0.ffn_gate_exps": "IQ2_S"}
    file = write(family, tmp_path, "Q4_K", kinds, **options)
    ours = {one.name: one.read() for one in read_gguf(file, GGUFFile.open(file), keeps_blocks=True)}
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for layer in range(2):
        for part, name in zip(("gate", "up", "down"), names[1:], strict=True):
            tensor = tensors[f"blk.{layer}.ffn_{part}_exps.weight"]
            expected = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type))
            for expert in range(8):
                weight = ours.pop(f"model.layers.{layer}.{names[0]}.experts.{expert}.{name}.weight")
                if tensor.tensor_type in BLOCK_KINDS:
                    assert weight.dtype == torch.uint8
                    weight = packed_rows(tensor.tensor_type, weight)
                assert torch.equal(weight, expected[expert])
    assert not any(".experts." in name for name in ours if not name.startswith("model.layers.2."))
    exact = Driver.load(file, dtype="float32", quantization="dequantized").logits(IDS)
    check_logits(file, exact)
    # More slices than a layer may have experts are none.
    monkeypatch.setattr(gguf_weights, "MAX_EXPERTS", 7)
    with pytest.raises(CheckpointError, match=r"unexpected tensors: blk\.0\.ffn_down_exps\.weight"):
        Driver.load(file)


@pytest.mark.row("D20")
@pytest.mark.parametrize("kinds", [{}, MIXED], ids=["one kind", "mixed"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_parts_of_a_layer_have_kinds_of_their_own(family: str, kinds: dict[str, str], tmp_path: Path) -> None:
    """Queries, keys and values, and a gate and what it gates; reordered rows (llama), biases (qwen2), heads
    that are tables too (qwen3) and heads that are not."""
    file = write(family, tmp_path, "Q4_K", kinds)
    check_logits(file, Driver.load(file, dtype="float32", quantization="dequantized").logits(IDS))


def test_types_without_operators_are_decoded_and_said_to_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write("qwen3", tmp_path, "Q4_K", {"ffn_down": "IQ2_S"})
    with caplog.at_level(logging.WARNING, "quire"):
        logits = Driver.load(file, dtype="float32").logits(IDS)
    (message,) = caplog.messages
    num_layers = 2
    count = num_layers * SIZES["hidden_size"] * SIZES["intermediate_size"]
    assert message == (
        f"{file}: {num_layers} tensors of the types IQ2_S are decoded: "
        f"{count * 82 / 256 / 1e6:.0f} MB of the file become {count} numbers of `dtype`"
    )
    assert distance(logits, hf_logits(decoded(file), IDS)) < MOST_OFF


def test_inputs_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    """A row of another size may have as many bytes."""
    file = write("qwen3", tmp_path, "Q4_0")
    data = bytearray(file.read_bytes())
    key = b"qwen3.feed_forward_length"
    at = data.index(key) + len(key) + 4
    assert int.from_bytes(data[at : at + 4], "little") == 512
    data[at : at + 4] = (513).to_bytes(4, "little")
    file.write_bytes(data)
    with pytest.raises(CheckpointError) as raised:
        load_model(ModelConfig(model=str(file)), torch.device("cpu"))
    assert str(raised.value) == (
        f"{file}: model.layers.0.mlp.down_proj has blocks of 32 inputs (Q4_0), its layer 513"
    )
