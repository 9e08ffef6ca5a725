"""`quire plan`: what it predicts is what engines then have, and all that is wrong is said at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from quire.cli import main
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.errors import ConfigError
from quire.plan.capacity import GPU_CONTEXT_BYTES, Target, advise, predict
from quire.plan.cost import PRESETS
from tests.fixtures.checkpoints import make_checkpoint, make_throughput_checkpoint
from tests.fixtures.gguf_files import write_gguf
from tests.fixtures.server import MODEL_REPOSITORY

FREE = 16 << 30
"""Bytes that are available to plan and engine alike: what other processes leave changes between the two."""
SHARE = 2e-3
"""Share of the memory: some 30 MB, so that it and not the number of sequences decides."""
MEMORY = {"cpu_memory_utilization": SHARE, "max_num_seqs": 60_000, "num_threads": 1}
FAMILIES = ("llama", "mistral", "qwen3", "gemma", "gemma2", "gemma3", "qwen3_moe")
"""With windows in no layer, in all, in none, in none, in half of the layers and in two thirds."""
QUANTIZATIONS = (None, "int8", "int4", "w8a8", "w4a8", "fp8")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plan")
    return {family: make_checkpoint(family, folder / family, tokenizer=False) for family in FAMILIES}


def compare(path: Path, **values: Any) -> None:
    """Predicts, starts an engine and looks."""
    config = EngineConfig.from_mapping({"model": str(path), **values})
    found = predict(config, "cpu", FREE)
    with patch("quire.worker.kv_cache.available_memory", return_value=FREE):
        engine = EngineCore(config)
    info = engine.info
    engine.close()
    assert found.num_blocks == pytest.approx(info.num_blocks, rel=0.05)
    assert found.kv_cache_bytes == pytest.approx(info.kv_cache_bytes, rel=0.05)
    assert (found.dtype, found.max_model_len) == (info.dtype, info.max_model_len)


@pytest.mark.row("G27")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_capacity_of_every_family_and_cache_type(
    checkpoints: dict[str, Path], family: str, kv_cache_dtype: str
) -> None:
    """By a share of the memory, by bytes, and by what the sequences need."""
    options = {"kv_cache_dtype": kv_cache_dtype}
    compare(checkpoints[family], **MEMORY, **options)
    compare(checkpoints[family], kv_cache_memory="3MiB", max_model_len=128, **options)
    compare(checkpoints[family], max_num_seqs=3, max_model_len=200, block_size=8, **options)


@pytest.mark.row("G27")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_capacity_of_every_type_of_weights(
    checkpoints: dict[str, Path], dtype: str, quantization: str | None
) -> None:
    compare(checkpoints["llama"], dtype=dtype, quantization=quantization, **MEMORY)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("larger")
    return make_throughput_checkpoint(path, dtype="bfloat16", num_key_value_heads=4)


@pytest.mark.row("G27", clauses=("plan",))
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_larger_model_in_a_process_of_its_own(larger: Path, quantization: str | None) -> None:
    """An engine as it is served, of 85 M weights, beside the command and its figures; the others above are
    part of this clause, and compare as this does."""
    values = {**MEMORY, "cpu_memory_utilization": 0.02, "quantization": quantization}
    settings = [f"--option={key}={value}" for key, value in values.items() if value is not None]
    with patch("quire.worker.kv_cache.available_memory", return_value=FREE):
        answer = CliRunner().invoke(main, ["plan", str(larger), "--json", *settings])
    assert answer.exit_code == 0, answer.output
    planned = json.loads(answer.output)[0]["capacity"]
    script = (
        "import json, sys; from quire.config import EngineConfig; from quire.engine.core import EngineCore; "
        f"import quire.worker.kv_cache as kv_cache; kv_cache.available_memory = lambda: {FREE}; "
        "from quire.engine.loop import _engine_info; import logging; logging.basicConfig(level='INFO'); "
        "print(_engine_info(EngineCore(EngineConfig.from_mapping(json.loads(sys.argv[1])))).num_blocks)"
    )
    command = [sys.executable, "-c", script, json.dumps({"model": str(larger), **values})]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    assert planned["num_blocks"] == pytest.approx(int(done.stdout), rel=0.05)
    logged = float(done.stderr.rpartition(" MiB of ")[0].rpartition(" ")[2])
    assert planned["weight_bytes"] / 2**20 == pytest.approx(logged, rel=0.01)


def test_gate_and_up_of_different_types(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """What joins them looked into numbers that a plan does not have."""
    file = write_gguf(checkpoints["llama"], tmp_path / "model.gguf", "Q8_0", kinds={"ffn_up": "Q4_0"})
    compare(file, **MEMORY)


def write_config(path: Path, **values: Any) -> Path:
    """A checkpoint of Llama 3.1 8B's shape without weights."""
    path.mkdir()
    shape = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 8192, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps({**shape, **values}))
    return path


def test_experts_on_disk_for_a_gpu_are_refused_as_at_start(tmp_path: Path) -> None:
    path = write_config(tmp_path / "8b")
    config = EngineConfig.from_mapping({"model": str(path), "max_resident_experts": 2})
    with pytest.raises(ConfigError, match="max_resident_experts: on the CPU only"):
        predict(config, "cuda", 80 * 2**30, 80 * 2**30, [1000])


def test_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """8.03 billion weights, 128 KiB of keys and values a token; 80 GiB, of which 72 are used."""
    path = write_config(tmp_path / "8b")
    config = EngineConfig.from_mapping({"model": str(path), "load_format": "dummy"})
    found = predict(config, "cuda", 80 * 2**30, 80 * 2**30, [1000])
    assert found.weight_bytes == 2 * 8_030_261_248
    assert found.block_bytes == 16 * 131072 and found.bytes_per_token == 131072
    left = 72 * 2**30 - found.weight_bytes - GPU_CONTEXT_BYTES
    assert found.num_blocks == left // found.block_bytes
    assert found.kv_tokens == 16 * found.num_blocks
    assert found.concurrency == {1000: 64, 8192: min(64, found.num_blocks // 512)}
    half = predict(config.replace(quantization="int8"), "cuda", 80 * 2**30, 80 * 2**30)
    assert half.weight_bytes == pytest.approx(found.weight_bytes / 2, rel=0.1)


def test_advice_is_the_most_that_keeps_the_target(tmp_path: Path) -> None:
    config = EngineConfig.from_mapping(
        {"model": str(write_config(tmp_path / "8b")), "load_format": "dummy", "max_num_seqs": 48}
    )
    capacity = predict(config, "cuda", 80 * 2**30, 80 * 2**30)
    target = Target(prompt_tokens=256, output_tokens=32, itl_ms=12.0)
    found = advise(config, capacity, PRESETS["h100-8b"], target)
    assert 1 < found.concurrency < 48 and found.itl_ms <= 12.0
    wider = advise(config, capacity, PRESETS["h100-8b"], Target(256, 32, itl_ms=10_000))
    assert wider.concurrency == 48 and wider.tokens_per_s > found.tokens_per_s
    none = advise(config, capacity, PRESETS["h100-8b"], Target(256, 32, ttft_ms=0.1))
    assert none.concurrency == 0 and none.ttft_ms > 0.1


def plan(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    answer = CliRunner().invoke(main, ["plan", "--json", *arguments])
    return answer.exit_code, json.loads(answer.output)


@pytest.mark.row("G27", clauses=("validation",))
def test_everything_wrong_is_said_at_once(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    model = tmp_path / "repository" / "mine"
    (model / "1").mkdir(parents=True)
    text = 'backend: "quire"\nparameters { key: "max_num_seqs" value { string_value: "none" } }\n'
    (model / "config.pbtxt").write_text(text)
    values = {
        "model": str(checkpoints["llama"]), "//model": "a comment", "max_num_sqs": 3, "block_size": 5,
        "preemption_mode": "swap", "max_model_len": 4096, "trace_file": "/nowhere/trace",
        "num_blocks": 7, "kv_cache_memory": "1MiB", "tenants": {"a": {"wait": 3}},
    }  # fmt: skip
    (model / "1" / "quire.json").write_text(json.dumps(values))
    for path in (model, model.parent):
        status, (document,) = plan(str(path))
        assert status == 1 and document["name"] == "mine"
        for expected in (
            "'max_num_sqs' is unknown; did you mean 'max_num_seqs'?",
            "block_size must be one of 1, 2, 4",
            "max_num_seqs must be an integer in [1, 65536], got 'none'",
            "preemption_mode=swap needs host_cache_memory",
            "max_model_len=4096 exceeds the checkpoint's limit of 2048 tokens",
            "trace_file: /nowhere is not a directory",
            "tenants: 'a': configuration key 'wait' is unknown; did you mean 'weight'?",
        ):
            assert sum(expected in problem for problem in document["problems"]) == 1, expected
        assert "kv_cache_memory does not count, as num_blocks is stated too" in document["advice"]
    status, (document,) = plan(str(model / "1" / "quire.json"), "--option", "max_model_len=2000")
    assert status == 1 and "one sequence of max_model_len=2000 needs 125 blocks" in str(document["problems"])
    assert "exceeds" not in str(document["problems"])

    # What contradicts the memory, and the machine.
    llama = str(checkpoints["llama"])
    status, (document,) = plan(llama, "--option", "num_blocks=7")
    assert status == 1 and "max_model_len=2048 needs 128 blocks" in document["problems"][0]
    status, (document,) = plan(llama, "--option", "num_blocks=200", "--option", "max_num_batched_tokens=8")
    assert status == 0 and not document["problems"]
    assert "holds 1 sequences of max_model_len=2048" in str(document["advice"])
    assert "max_num_batched_tokens=8 is below max_num_seqs=64" in str(document["advice"])
    status, (document,) = plan(llama, "--memory", "1MiB")
    assert status == 1 and "cpu_memory_utilization=0.25 gives a KV cache of 0 blocks" in str(document)
    status, (document,) = plan(llama, "--option", "host_cache_memory=2GiB", "--memory", "1GiB")
    assert status == 1 and "host_cache_memory" in str(document["problems"])

    # With a target: how many at a time.
    target = ["--cost", "h100-8b", "--itl-ms", "9", "--prompt-tokens", "64", "--output-tokens", "16"]
    status, (document,) = plan(llama, *target)
    assert status == 0 and 0 < document["clients"]["concurrency"] < 64
    assert f"max_num_seqs={document['clients']['concurrency']} keeps the target" in str(document["advice"])
    status, (document,) = plan(llama, "--option", "max_model_len=64", *target)
    assert status == 1 and "prompt" in document["problems"][0] and "clients" not in document

    # What is wrong only together.
    ranks = ["--option", "enable_lora=true", "--option", "tensor_parallel_size=2"]
    status, (document,) = plan(llama, *ranks)
    assert status == 1 and "tensor_parallel_size" in document["problems"][0]


def test_the_demo_is_sound() -> None:
    """Text and figures of the repository that comes with the source."""
    answer = CliRunner().invoke(main, ["plan", str(MODEL_REPOSITORY), "--tokens", "100"])
    assert answer.exit_code == 0, answer.output
    assert answer.output.count("64 of 100 tokens, 64 of 2048 tokens") == 4
    assert "problem" not in answer.output and "advice" not in answer.output


def test_what_is_no_configuration(tmp_path: Path) -> None:
    for path, words in ((tmp_path, "neither a checkpoint"), (tmp_path / "none", "does not exist")):
        answer = CliRunner().invoke(main, ["plan", str(path)])
        assert answer.exit_code and words in answer.output
    for arguments in (["--itl-ms", "3"], ["--device", "cuda"], ["--memory", "lots"]):
        answer = CliRunner().invoke(main, ["plan", str(tmp_path), *arguments])
        assert answer.exit_code == 2, answer.output
