"""Adapters' directories: what PEFT writes is read, and all else is refused in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.adapters import AdapterTarget
from quire.config import ModelConfig
from quire.errors import CheckpointError
from quire.loader.adapter import read_adapter
from quire.loader.load import empty_model
from quire.worker.adapter_memory import targets_of
from quire_common.weight_files import NamedTensor, read_safetensors
from tests.fixtures.adapters import make_adapter
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import hf_model

TARGETS = [
    AdapterTarget("layers.0.self_attn.q_proj", 8, 8),
    AdapterTarget("layers.1.self_attn.q_proj", 8, 8),
    AdapterTarget("layers.1.mlp.down_proj", 16, 8),
]
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def write(path: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    if tensors is None:
        tensors = {f"{Q0}.lora_A.weight": torch.ones(2, 8), f"{Q0}.lora_B.weight": torch.ones(8, 2)}
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def complaint(path: Path, root: Path | None = None) -> str:
    with pytest.raises(CheckpointError) as error:
        read_adapter(path, TARGETS, "float32", 16, root)
    text = str(error.value)
    assert "\n" not in text and str(path) in text
    return text


@pytest.mark.row("E19")
@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 6}}, 3.0),
        ({"alpha_pattern": {r"layers\.[0-3]\..*proj": 6}}, 3.0),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 6}}, 2.0),
        ({"r": 5, "rank_pattern": {"self_attn.q_proj": 2}}, 2.0),
        ({"target_modules": "all-linear"}, 2.0),
        ({"target_modules": r".*\.(q|k)_proj"}, 2.0),
        ({"target_modules": ["self_attn.q_proj"], "layers_to_transform": [0]}, 2.0),
        ({"target_modules": None, "layers_to_transform": 0}, 2.0),
    ],
)
def test_scalings(tmp_path: Path, config: dict[str, Any], scaling: float) -> None:
    read = read_adapter(write(tmp_path / "a", **config), TARGETS, "float32", 16)
    values = torch.from_numpy(read.weights.data).view(torch.float32)
    assert read.rank == 2 and read.weights.parts == [(0, 2)]
    torch.testing.assert_close(values, torch.tensor([1.0] * 16 + [scaling] * 16))


def test_equal_weights_have_equal_digests(tmp_path: Path) -> None:
    first = read_adapter(write(tmp_path / "a"), TARGETS, "float32", 16)
    same = read_adapter(write(tmp_path / "b", lora_dropout=0.1), TARGETS, "float32", 16)
    other = read_adapter(write(tmp_path / "c", lora_alpha=5), TARGETS, "float32", 16)
    assert first.digest == same.digest != other.digest


def test_pickles_and_links_of_a_hub(tmp_path: Path) -> None:
    write(tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    (tmp_path / "b").mkdir()
    torch.save(tensors, tmp_path / "b" / "adapter_model.bin")
    (tmp_path / "b" / "adapter_config.json").symlink_to(tmp_path / "a" / "adapter_config.json")
    first = read_adapter(tmp_path / "a", TARGETS, "float32", 16)
    assert first.digest == read_adapter(tmp_path / "b", TARGETS, "float32", 16, tmp_path).digest
    assert "leads out of" in complaint(tmp_path / "b", tmp_path / "b")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"target_parameters": ["experts"]}, "target_parameters is not supported"),
        ({"bias": "all"}, 'bias must be "none"'),
        ({"peft_type": "IA3"}, "only LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"init_lora_weights": "loftq"}, "changes the base model"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is not supported"),
        ({"r": 0}, "r must be an integer in"),
        ({"r": "2"}, "r must be an integer in"),
        ({"r": 17}, "rank 17 of layers.0.self_attn.q_proj exceeds max_lora_rank 16"),
        ({"r": 3}, "has shape [2, 8], the model and adapter_config.json mean [3, 8]"),
        ({"lora_alpha": 1e999}, "lora_alpha must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number"),
        ({"rank_pattern": [2]}, "rank_pattern must be a JSON object"),
        ({"target_modules": ["v_proj"]}, "is not among the target_modules"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, "is not among the target_modules"),
        ({"exclude_modules": ["q_proj"]}, "is not among the target_modules"),
        ({"target_modules": "("}, "pattern '(' is none"),
        ({"target_modules": 5}, "must be a text or a list of texts"),
        ({"alpha_pattern": {"x" * 5000: 1}}, "longer than"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_supported_or_wrong(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    assert said in complaint(write(tmp_path / "a", **config))


def test_keys_that_are_not_known_are_named_where_they_are_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = {
        "use_newest_idea": True,
        "beta": 0.5,
        "another": None,
        "lora_dropout": 0.1,
        "inference_mode": True,
    }
    with caplog.at_level("WARNING", "quire"):
        read_adapter(write(tmp_path / "a", **said), TARGETS, "float32", 16)
    (record,) = caplog.records
    assert record.getMessage().endswith("adapter_config.json: beta, use_newest_idea: not known, and not used")


def test_a_pattern_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.loader.adapter.PATTERNS_S", 0.1)
    tensors = {f"{'a' * 60}.q_proj.lora_A.weight": torch.ones(2, 8)}
    assert "takes too long" in complaint(write(tmp_path / "a", tensors, target_modules="(a|aa)+b.*"))


def test_patterns_and_lists_that_take_long_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though each ends at once: there may be thousands for each of hundreds of layers."""
    now = [0.0]

    def later() -> float:  # each look at the clock is 100 s after the one before it
        now[0] += 100.0
        return now[0]

    monkeypatch.setattr("quire.loader.adapter.time", SimpleNamespace(monotonic=later))
    monkeypatch.setattr("quire.loader.adapter.PATTERNS_S", 10_000.0)
    patterns = {f"(?:x{n}|y{n}){{1,9}}": 2 for n in range(200)}
    assert "take too long" in complaint(write(tmp_path / "a", rank_pattern=patterns))
    monkeypatch.setattr("quire.loader.adapter.PATTERNS_S", 100.0)
    assert "take too long" in complaint(write(tmp_path / "b", exclude_modules=["x"]))

    def slowly(*given: Any) -> Iterator[NamedTensor]:
        for tensor in read_safetensors(*given):
            now[0] += 100.0
            yield tensor

    monkeypatch.setattr("quire.loader.adapter.PATTERNS_S", 10.0)
    monkeypatch.setattr("quire.loader.adapter.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("quire.loader.adapter.read_safetensors", slowly)
    path = write(tmp_path / "c", rank_pattern={"x": 3, "y.*": 3})
    assert read_adapter(path, TARGETS, "float32", 16).rank == 2, "what the disk takes is not theirs"


ONE, OTHER = torch.ones(2, 8), torch.ones(8, 2)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "holds no tensors of an adapter"),
        ({f"{Q0}.lora_A.weight": ONE}, "layers.0.self_attn.q_proj lacks its lora_B"),
        ({f"{Q0}.lora_A.weight": torch.ones(2, 9), f"{Q0}.lora_B.weight": OTHER}, "has shape [2, 9]"),
        ({f"{Q0}.lora_A.weight": ONE.int(), f"{Q0}.lora_B.weight": OTHER}, "has type torch.int32"),
        ({f"{Q0}.lora_magnitude_vector": ONE}, "a magnitude of DoRA: not supported"),
        ({f"{Q0}.lora_embedding_A": ONE}, "no matrix A or B of a layer"),
        ({f"{Q0}.weight": ONE}, "no matrix A or B of a layer"),
        ({Q0.replace("s.0.", "s.7.") + ".lora_A.weight": ONE}, "adapts what no adapter may change here"),
        ({"base_model.model.lm_head.q_proj.lora_A.weight": ONE}, "embeddings and the output head are not"),
        (
            {f"base_model.model.{Q0}.lora_A.weight": ONE.clone(), f"{Q0}.lora_A.weight": ONE},
            "is there twice",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_tensors_that_do_not_fit(tmp_path: Path, tensors: dict[str, torch.Tensor], said: str) -> None:
    assert said in complaint(write(tmp_path / "a", tensors))


def test_files_that_are_none(tmp_path: Path) -> None:
    assert "no such file: not the directory of a LoRA adapter" in complaint(tmp_path / "nowhere")
    path = write(tmp_path / "a")
    whole = (path / "adapter_model.safetensors").read_bytes()
    (path / "adapter_model.safetensors").write_bytes(whole[:-40])
    assert "broken safetensors file" in complaint(path)
    (path / "adapter_model.safetensors").write_bytes((2**62).to_bytes(8, "little") + whole[8:])
    assert "broken safetensors file" in complaint(path)
    assert "its header is longer than" in complaint(path)
    (path / "adapter_model.safetensors").unlink()
    torch.save({Q0: ONE}, path / "adapter_model.bin", _use_new_zipfile_serialization=False)
    assert "is no archive" in complaint(path)
    (path / "adapter_model.bin").unlink()
    assert "holds neither" in complaint(path)
    os.mkfifo(path / "adapter_model.safetensors")
    assert "is not a file" in complaint(path)
    for text in ("[" * 100_000, "[]", "{", '{"r": 2, "x": "' + "x" * 2**20 + '"}'):
        (path / "adapter_config.json").write_text(text)
        complaint(path)


@pytest.mark.row("E19")
def test_experts_and_what_is_no_layer_of_theirs_are_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_moe", tmp_path / "moe", tokenizer=False)
    model = empty_model(ModelConfig(model=str(path)), torch.device("meta")).model
    targets = targets_of(model)
    assert not any("experts" in one.name or one.name.endswith(".gate") for one in targets)
    make_adapter(tmp_path / "a", hf_model(path), targets=("q_proj", "o_proj"), rank=2)
    assert len(read_adapter(tmp_path / "a", targets, "float32", 16).weights.parts) == 6
    name = "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight"
    write(tmp_path / "b", {name: torch.ones(2, 64)}, target_modules="all-linear")
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj.* adapts what no adapter may change"):
        read_adapter(tmp_path / "b", targets, "float32", 16)
