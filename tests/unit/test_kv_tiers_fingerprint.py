"""Blocks on disk are used again by an engine that would compute the same, and by no other.

Each test fills a directory with one engine and gives it to another, which differs in one respect: a key of
the configuration, a key of config.json, a file. Either that engine finds nothing, or it generates what it
generates without the directory.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    KVConnectorConfig,
    ModelConfig,
    SchedulerConfig,
)
from quire.kv_tiers import fingerprint, needs_fingerprint
from quire.kv_tiers.fingerprint import HARMLESS_KEYS
from quire.layers.linear import Weight
from quire.loader import identity as identity_module
from quire.loader.load import digest_weights
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.foreign_checkpoints import MAKERS, make_foreign
from tests.fixtures.gguf_files import write_gguf
from tests.fixtures.runner_of import runner_of
from tests.unit.test_engine import random_prompts

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "max_model_len": 128,
    "num_blocks": 96,
    "block_size": 8,
    "num_threads": 1,
    "max_num_seqs": 4,
}
PROMPTS = [prompt * 2 for prompt in random_prompts(3, longest=45, seed=11)]
KEYS = {
    field.name: field
    for part in (ModelConfig, CacheConfig, SchedulerConfig, AdapterConfig)
    for field in dataclasses.fields(part)
}


def serve(path: Path, directory: Path | None, **options: Any) -> tuple[list[list[int]], int]:
    """Generated tokens, and how many prompt tokens came from a tier."""
    values = {"disk_cache_directory": str(directory)} if directory is not None else {}
    llm = LLM(path, **{**OPTIONS, **values, **options})
    try:
        tokens = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        return tokens, llm.core.stats().num_loaded_tokens
    finally:
        llm.core.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its rotary frequencies are those of the longest sequence that is served."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    path = tmp_path_factory.mktemp("dynamic")
    return make_checkpoint("llama", path, max_position_embeddings=64, rope_scaling=rope)


@pytest.fixture(scope="module")
def filled(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the blocks of PROMPTS, which are found again."""
    directory = tmp_path_factory.mktemp("filled")
    cold, _ = serve(checkpoint, directory)
    assert serve(checkpoint, directory) == (cold, sum((len(prompt) - 1) // 8 * 8 for prompt in PROMPTS))
    return directory


def hits(path: Path, filled: Path, scratch: Path, **options: Any) -> bool:
    """Whether blocks were found; then the tokens are those of an engine without the directory."""
    directory = shutil.copytree(filled, scratch / "blocks")
    tokens, num_loaded = serve(path, directory, **options)
    if num_loaded:
        assert tokens == serve(path, None, **options)[0], "blocks that another engine computed otherwise"
    return num_loaded > 0


# Keys of the configuration.

VALUES: dict[str, list[Any]] = {
    "attention_backend": ["reference"],
    "batch_policy": ["prefill_first", "decode_first", "static"],
    "block_size": [4, 16],
    "classifier_from_token": ["a,e"],
    "default_deadline_ms": [10**8],
    "default_ttft_deadline_ms": [10**8],
    "device": ["cpu"],
    "disk_cache_size": ["256MiB"],
    "dtype": ["bfloat16", "float32"],
    "host_cache_memory": ["1MiB"],
    "kv_cache_dtype": ["int8", "fp8"],
    "kv_cache_memory": ["4MiB"],
    "kv_connector": ['{"connector": "tests.fixtures.loopback:LoopbackConnector"}'],
    "kv_reservation": ["no_evict", "predicted"],
    "load_format": ["safetensors", "dummy"],
    "max_model_len": [100, 200],
    "max_predicted_ttft_ms": [10**8],
    "max_waiting_requests": [5],
    "max_waiting_tokens": [10**6],
    "model_class": ["quire.models.llama:LlamaForCausalLM"],
    "model_impl": ["quire"],
    "preemption_mode": ["auto"],
    "quantization": ["int8", "int4", "w8a8", "w4a8", "fp8"],
    "queue_policy": ["priority", "longest_prefix", "shortest_first", "fair"],
    "result_cache": ['{"memory": 1}', '{"url": "redis://127.0.0.1:1"}'],
    "seed": [7],
    "tensor_parallel_size": [2],
    "tenants": ['{"*": {"weight": 2}}'],
    "logits_processors": ['{"a": "json:JSONDecoder"}'],
}
ELSEWHERE = {
    "model", "disk_cache_directory", "draft_model", "kv_events", "lora_modules", "lora_root",
    "max_resident_experts", "tokenizer", "trace_file",
}  # fmt: skip
"""Names of files and addresses: other tests move the checkpoint; the rest never reaches the model. A fake
device refuses tiers, a model without experts a budget of them."""
FINDS_NOTHING = {
    ("dtype", "bfloat16"), ("load_format", "dummy"), ("max_model_len", 100), ("max_model_len", 200),
    ("enable_prefix_caching", False),
}  # fmt: skip
"""Values of harmless keys that lead to other blocks all the same, or to none."""


def other_values(key: str) -> list[Any]:
    if key in VALUES:
        return VALUES[key]
    default = KEYS[key].default
    present = OPTIONS.get(key, default)
    if isinstance(default, bool):
        return [not present]
    if isinstance(default, float):
        return [0.75 if present != 0.75 else 0.5]
    assert default is None or isinstance(default, int), f"{key}: give this test another value of it"
    # A limit of one is felt, and every default is above 100 or may be.
    return [1 if present != 1 and key not in OPTIONS else (present or 100) + 1]


@pytest.mark.row("C10", clauses=("fingerprint",))
@pytest.mark.parametrize("key", sorted(KEYS.keys() - ELSEWHERE))
def test_a_key_finds_blocks_only_where_they_are_what_it_would_compute(
    checkpoint: Path, filled: Path, tmp_path: Path, key: str
) -> None:
    """`max_model_len` moved the frequencies of `dynamic` and `longrope`, and old blocks were found."""
    for number, value in enumerate(other_values(key)):
        options = {key: value}
        if key == "kv_cache_memory":
            options["num_blocks"] = None
        scratch = tmp_path / str(number)
        scratch.mkdir()
        found = hits(checkpoint, filled, scratch, **options)
        assert found == (key in HARMLESS_KEYS and (key, value) not in FINDS_NOTHING), (key, value)


def test_every_harmless_key_exists() -> None:
    assert KEYS.keys() >= HARMLESS_KEYS


def test_a_key_that_nobody_thought_of_keeps_blocks_apart() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Newer(ModelConfig):
        attention_sinks: int = 0

    configs = [EngineConfig(model=Newer(attention_sinks=count)) for count in (0, 1)]
    assert len({fingerprint(config, {}) for config in configs}) == 2
    assert len({fingerprint(EngineConfig(), {"groups": groups}) for groups in ([[1]], [[2]])}) == 2


# Keys of config.json.


def change_config(path: Path, **values: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, **values}}


@pytest.mark.parametrize(
    "values",
    [
        rope(factor=2.0),
        rope(rope_theta=5e5),
        rope(rope_type="linear") | {"max_position_embeddings": 128},
        rope(rope_type="yarn", original_max_position_embeddings=32),
        rope(
            rope_type="longrope",
            original_max_position_embeddings=64,
            short_factor=[1.0] * 8,
            long_factor=[2.0 + i for i in range(8)],
        )
        | {"max_position_embeddings": 128},
        {"max_position_embeddings": 100},
        {"rms_norm_eps": 1e-3},
        {"hidden_act": "gelu"},
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20},
    ],
    ids=lambda values: "-".join(str(value) for value in values)[:40],
)
def test_what_config_json_says_of_the_computation(
    checkpoint: Path, filled: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "model")
    change_config(path, **values)
    assert not hits(path, filled, tmp_path)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_longest_sequence(tmp_path: Path, kind: str) -> None:
    """96 tokens of another rotation were found, and the output was another one."""
    scaling: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 8.0}
    if kind == "longrope":
        scaling |= {"short_factor": [1.0] * 8, "long_factor": [1.0 + 4 * i for i in range(8)]}
        scaling["original_max_position_embeddings"] = 120
    longest = 64 if kind == "dynamic" else 960
    path = make_checkpoint("llama", tmp_path / kind, max_position_embeddings=longest, rope_scaling=scaling)
    directory = tmp_path / "blocks"
    outputs = []
    for max_model_len in (120, 400, 120, 400):
        tokens, num_loaded = serve(path, directory, max_model_len=max_model_len)
        assert tokens == serve(path, None, max_model_len=max_model_len)[0]
        assert (num_loaded > 0) == (len(outputs) > 1), "each finds its own"
        outputs.append(tokens)
    assert outputs[0] != outputs[1], "the two lengths do not differ, the test sees nothing"


# Files.


def change_tensor(name: str) -> Callable[[Path], None]:
    """One bit of one number in the middle."""

    def change(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        flat = tensors[name].flatten().view(torch.int32)
        flat[len(flat) // 2] ^= 1 << 21
        tensors[name] = flat.view(torch.float32).reshape(tensors[name].shape)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return change


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "lm_head.weight",
    ],
)
def test_one_bit_of_one_weight(checkpoint: Path, filled: Path, tmp_path: Path, name: str) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "model")
    change_tensor(name)(path)
    assert not hits(path, filled, tmp_path)


def test_the_files_that_count_are_those_that_are_loaded(
    checkpoint: Path, filled: Path, tmp_path: Path
) -> None:
    """Pickles of other weights beside the safetensors; load_format says which are read."""
    other = make_checkpoint("llama", tmp_path / "other", seed=1, weight_format="bin")
    path = shutil.copytree(checkpoint, tmp_path / "model")
    shutil.copy(other / "pytorch_model.bin", path)
    for folder in ("auto", "bin", "dummy"):
        (tmp_path / folder).mkdir()
        assert hits(path, filled, tmp_path / folder, load_format=folder) == (folder == "auto")


@pytest.mark.parametrize("weight_format", ["safetensors", "bin"])
@pytest.mark.parametrize("shards", [1, 3])
def test_the_same_weights_from_other_files(
    checkpoint: Path, filled: Path, tmp_path: Path, weight_format: str, shards: int
) -> None:
    path = tmp_path / "model"
    shutil.copytree(checkpoint, path)
    for file in path.glob("*.safetensors"):
        file.unlink()
    rope_scaling = rope()["rope_parameters"]
    options: dict[str, Any] = {"max_position_embeddings": 64, "rope_scaling": rope_scaling}
    make_checkpoint("llama", path, weight_format=weight_format, shards=shards, **options)
    assert hits(path, filled, tmp_path, load_format=weight_format)


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_files_that_do_not_reach_the_model(checkpoint: Path, filled: Path, tmp_path: Path, name: str) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "model")
    assert (path / name).exists()
    (path / name).write_text(json.dumps(json.loads((path / name).read_text()), indent=3) + "\n")
    change_config(path, transformers_version="9.9", _name_or_path="/elsewhere")
    assert hits(path, filled, tmp_path)


def test_a_bit_of_a_large_tensor() -> None:
    """Where files were sampled every 4 MiB, edits of a few rows in between were missed."""

    class OneTensor:
        def __init__(self) -> None:
            self.tensor = torch.zeros(3000, 1000, dtype=torch.bfloat16)

        def weights(self) -> list[Weight]:
            return [Weight("a", self.tensor.t())]  # a view that is not contiguous

    model: Any = OneTensor()
    found = {digest_weights(model)}
    for row, column in ((0, 0), (1500, 3), (2999, 999)):
        model.tensor[row, column] = 2.0**-100
        found.add(digest_weights(model))
    model.tensor = model.tensor.flatten()[:2].reshape(1, 2)
    found.add(digest_weights(model))
    model.tensor = model.tensor.reshape(2, 1)
    found.add(digest_weights(model))
    assert len(found) == 6


# The machine and the code.


def test_another_processor_or_code_finds_nothing(
    checkpoint: Path, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines may share a directory: sums in another order are other bits, and each keeps its own."""
    for name, value in (("_processor", lambda device: ["another one"]), ("_code_digest", lambda: "changed")):
        with monkeypatch.context() as patch:
            patch.setattr(identity_module, name, value)
            (tmp_path / name).mkdir()
            assert not hits(checkpoint, filled, tmp_path / name)
    monkeypatch.setattr(identity_module, "supported_isas", lambda: ())
    assert identity_module._processor(torch.device("cpu")) == [torch.backends.cpu.get_cpu_capability()]
    (tmp_path / "isa").mkdir()
    assert not hits(checkpoint, filled, tmp_path / "isa")


def test_every_file_of_the_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kernels_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "gemm.h").write_text("a + b")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(identity_module, "_CODE", (package.name,))
    digest = identity_module._code_digest.__wrapped__
    found = {digest()}
    (package / "gemm.h").write_text("b + a")
    found.add(digest())
    (package / "gemm.h").rename(package / "other.h")
    found.add(digest())
    assert len(found) == 3
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_text("")
    assert digest() in found


def test_only_what_others_may_find_needs_one(checkpoint: Path) -> None:
    assert not needs_fingerprint(CacheConfig(host_cache_memory=2**20))
    assert needs_fingerprint(CacheConfig(kv_connector=KVConnectorConfig(connector="a:B")))
    llm = LLM(checkpoint, **OPTIONS, host_cache_memory="1MiB")
    runner = runner_of(llm.core)
    assert runner.info.kv_identity == {}, "the weights are read for nothing"
    llm.core.close()


def test_only_the_kernels_that_compute_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of each instruction set were compiled and loaded, as an engine with a disk tier began."""
    asked: list[str] = []

    def library(isa: str) -> object:
        asked.append(isa)
        return object() if isa == "avx512" else None

    monkeypatch.setattr(identity_module, "supported_isas", lambda: ("amx", "avx512", "avx2"))
    monkeypatch.setattr(identity_module, "library", library)
    monkeypatch.setattr(identity_module, "library_name", lambda isa: f"{isa}.so")
    found = identity_module._processor(torch.device("cpu"))
    assert found[0] == "avx512.so" and asked == ["amx", "avx512"]


@pytest.mark.parametrize("form", ["gguf", "awq"])
def test_checkpoints_quantised_by_others_have_a_fingerprint(form: str, tmp_path: Path) -> None:
    """Blocks are found again by the same file; the scheme counts, though the same bits may lie in two."""
    path = make_checkpoint("llama", tmp_path / "plain", hidden_size=128, intermediate_size=256)
    if form == "gguf":
        path = write_gguf(path, tmp_path / "tiny.gguf", "Q8_0")
    else:
        path, _ = make_foreign(path, tmp_path / "awq", MAKERS["AWQ gemm"])
    directory = tmp_path / "blocks"
    cold, _ = serve(path, directory)
    again, num_loaded = serve(path, directory)
    assert again == cold and num_loaded
    assert serve(path, directory, quantization="dequantized")[1] == 0
