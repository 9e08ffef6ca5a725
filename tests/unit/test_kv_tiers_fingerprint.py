"""The fingerprint tells checkpoints and layouts apart that must not share KV blocks, and no others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.errors import CheckpointError
from quire.kv_tiers import fingerprint

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "rope_theta": 1e4}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two shards; the first is so large that it is only sampled."""
    path = tmp_path / "model"
    path.mkdir()
    rng = np.random.default_rng(0)
    large = {
        "embed": rng.standard_normal((600, 4096), dtype=np.float32),
        "layers.0.q": rng.standard_normal((256, 1024), dtype=np.float32),
        "layers.0.norm": rng.standard_normal(64, dtype=np.float32),
        "layers.1.q": rng.standard_normal((256, 1024), dtype=np.float32),
    }
    save_file(large, path / "model-00001-of-00002.safetensors")
    save_file({"lm_head": large["layers.0.norm"] + 1}, path / "model-00002-of-00002.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def change_config(path: Path, **values: object) -> None:
    (path / "config.json").write_text(json.dumps({**CONFIG, **values}))


def change_tensor(name: str, shard: int = 1) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / f"model-0000{shard}-of-00002.safetensors"
        tensors = load_file(file)
        tensors[name] = tensors[name] * np.float32(1.001)
        save_file(tensors, file)

    return change


def remove_shard(path: Path) -> None:
    (path / "model-00002-of-00002.safetensors").unlink()


def append(path: Path) -> None:
    with (path / "model-00002-of-00002.safetensors").open("ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize(
    "change",
    [
        change_tensor("embed"),
        change_tensor("layers.0.q"),
        change_tensor("layers.0.norm"),
        change_tensor("layers.1.q"),
        change_tensor("lm_head", 2),
        remove_shard,
        append,
        lambda path: change_config(path, rope_theta=5e5),
        lambda path: change_config(path, rope_scaling={"factor": 2.0}),
    ],
)
def test_what_changes_the_blocks_changes_it(checkpoint: Path, change: Callable[[Path], None]) -> None:
    before = fingerprint(checkpoint, dtype="float32")
    change(checkpoint)
    assert fingerprint(checkpoint, dtype="float32") != before


def test_what_does_not_keeps_it(checkpoint: Path, tmp_path: Path) -> None:
    before = fingerprint(checkpoint, dtype="float32", block_size=16)
    assert len(before) == 32 and int(before, 16)
    change_config(checkpoint, transformers_version="9.9", torch_dtype="bfloat16", _name_or_path="/elsewhere")
    for file in checkpoint.iterdir():
        os.utime(file, (1, 1))
    (checkpoint / "README.md").write_text("new")
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    assert fingerprint(copy, block_size=16, dtype="float32") == before


def test_layout_is_part_of_it(checkpoint: Path) -> None:
    layouts = [
        {"dtype": "float32", "block_size": 16},
        {"dtype": "float32", "block_size": 32},
        {"dtype": "bfloat16", "block_size": 16},
        {"dtype": "float32", "block_size": 16, "kv_cache_dtype": "int8"},
        {"dtype": "float32", "block_size": 16, "groups": [[0, 1], [2, 3]]},
        {"dtype": "float32", "block_size": 16, "groups": [[0, 1, 2], [3]]},
    ]
    assert len({fingerprint(checkpoint, **layout) for layout in layouts}) == len(layouts)


def test_a_single_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    content = bytearray(os.urandom(9 * 2**20))
    path.write_bytes(content)
    before = fingerprint(path)
    content[-1] ^= 1
    path.write_bytes(content)
    assert fingerprint(path) != before


def test_only_samples_of_large_files_are_read(tmp_path: Path) -> None:
    """20 GB that are all hole: reading them whole would take many seconds, the samples take milliseconds."""
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate(20 * 10**9)
    read_before = _bytes_read()
    fingerprint(path)
    assert _bytes_read() - read_before < 200 * 2**20


def _bytes_read() -> int:
    text = Path("/proc/self/io").read_text()
    return int(text.split("rchar: ")[1].split()[0])


def test_complaints(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no weights"):
        fingerprint(tmp_path / "nothing")
    (checkpoint / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no fingerprint can be taken"):
        fingerprint(checkpoint)
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "model-00001-of-00002.safetensors").write_bytes(b"\xff" * 9 * 2**20)
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        fingerprint(checkpoint)
