"""Weight formats, and one clear line for each way a checkpoint can be broken."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config import ModelConfig
from quire.errors import CheckpointError
from quire.loader import files as loader_files
from quire.loader import load as load_module
from quire.loader.info import read_configs
from quire.loader.load import LoadedModel, empty_model, fill_weights, load_model
from quire_common.gguf_file import GGUFFile
from tests.fixtures.checkpoints import build_model, make_checkpoint
from tests.fixtures.drive import Driver, hf_logits, hf_model
from tests.fixtures.gguf_files import gguf_name, write_gguf

CPU = torch.device("cpu")
IDS = torch.randint(5, 512, (30,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama in one safetensors file, which no test changes."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> torch.Tensor:
    """What `transformers` says about IDS."""
    return hf_logits(hf_model(checkpoint), IDS)


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(ModelConfig(model=str(path), **options), CPU)


def complaint(path: Path, **options: Any) -> str:
    """The message of the CheckpointError that loading raises: one line."""
    with pytest.raises(CheckpointError) as raised:
        load(path, **options)
    message = str(raised.value)
    assert "\n" not in message and raised.value.code == "INVALID_ARG"
    return message


# Each format loads.


@pytest.mark.row("G16", clauses=("safetensors", "bin"))
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("weight_format", ["safetensors", "bin"])
def test_one_file_and_shards(shards: int, weight_format: str, tmp_path: Path, expected: torch.Tensor) -> None:
    path = make_checkpoint("llama", tmp_path, shards=shards, weight_format=weight_format, tokenizer=False)
    stem, suffix = {"safetensors": ("model", "safetensors"), "bin": ("pytorch_model", "bin")}[weight_format]
    assert len(list(path.glob(f"{stem}*.{suffix}"))) == shards
    assert (path / f"{stem}.{suffix}.index.json").exists() == (shards > 1)
    driver = Driver.load(path, load_format=weight_format)
    torch.testing.assert_close(driver.logits(IDS), expected, atol=1e-4, rtol=0.0)


@pytest.mark.row("G16", clauses=("pt",))
@pytest.mark.parametrize("name", ["pytorch_model.pt", "model.pt"])
@pytest.mark.parametrize("zipped", [True, False])
def test_pt_files_of_old_and_new_layout(name: str, zipped: bool, copy: Path, expected: torch.Tensor) -> None:
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    torch.save(weights, copy / name, _use_new_zipfile_serialization=zipped)
    driver = Driver.load(copy, load_format="bin")
    torch.testing.assert_close(driver.logits(IDS), expected, atol=1e-4, rtol=0.0)


def naive_q8_0(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 share a float16 scale, max / 127; what is left of the weight after that.

    Halves are rounded outwards."""
    blocks = weight.float().unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    steps = blocks * (1 / scale)
    return (steps.sign() * (steps.abs() + 0.5).floor() * scale.half().float()).flatten(-2)


def naive_q4_0(weight: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 share a float16 scale, the largest value / -8; values are 0..15 minus 8."""
    blocks = weight.float().unflatten(-1, (-1, 32))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    codes = torch.clamp(torch.floor(blocks / scale + 8.5), 0, 15)
    return ((codes - 8) * scale.half().float()).flatten(-2)


NAIVE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": lambda w: w,
    "F16": lambda w: w.half().float(),
    "BF16": lambda w: w.bfloat16().float(),
    "Q8_0": naive_q8_0,
    "Q4_0": naive_q4_0,
}


@pytest.mark.row("G16", clauses=("gguf",))
@pytest.mark.parametrize("kind", NAIVE)
@pytest.mark.parametrize("family", ["llama", "llama3", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_gguf_equals_transformers_with_the_decoded_weights(family: str, kind: str, tmp_path: Path) -> None:
    """Configuration, names, order of rotary dimensions and quantisation: all from the file."""
    options: dict[str, Any] = {"mlp_only_layers": []} if family in ("qwen2_moe", "qwen3_moe") else {}
    file = write_gguf(make_checkpoint(family, tmp_path / "hf", **options), tmp_path / "model.gguf", kind)
    model = build_model(family, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not name.endswith((".mlp.gate.weight", ".shared_expert_gate.weight")):
                parameter.copy_(NAIVE[kind](parameter))
    driver = Driver.load(file, dtype="float32", quantization="dequantized")
    torch.testing.assert_close(driver.logits(IDS), hf_logits(model, IDS), atol=2e-3, rtol=0.0)


def test_gguf_blocks_of_every_kind_are_where_the_public_reader_finds_them(tmp_path: Path) -> None:
    """K-quants too, which the public package reads and does not write: of random bytes."""
    rng, file = np.random.default_rng(15), tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    kinds = [
        kind for kind in gguf.GGMLQuantizationType if kind.name[:2] in ("Q2", "Q3", "Q4", "Q5", "Q6", "IQ")
    ]
    for kind in kinds:
        size = gguf.GGML_QUANT_SIZES[kind][1]
        data = rng.integers(0, 256, (3, 2 * size), dtype=np.uint8)
        writer.add_tensor(kind.name, data, raw_shape=(3, 2 * size), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened = GGUFFile.open(file)
    for tensor in gguf.GGUFReader(file).tensors:
        stored = opened.tensors[tensor.name]
        assert stored.kind == tensor.tensor_type and stored.shape == tuple(tensor.shape[::-1].tolist())
        np.testing.assert_array_equal(opened.data(stored), tensor.data)


@pytest.mark.row("G16")
def test_gguf_linear_rope_tokens_and_dtype(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0}
    path = make_checkpoint("llama", tmp_path / "hf", rope_scaling=rope, tied=True)
    file = write_gguf(path, tmp_path / "model.gguf", "BF16")
    loaded = load(file)
    assert loaded.config.dtype == torch.bfloat16, "auto is the type of the file's matrices"
    assert loaded.config.tie_word_embeddings
    assert loaded.eos_token_ids == {0, 2, 4}, "<|endoftext|>, </s> and <|im_end|>"
    assert loaded.config.rope.parameters["factor"] == 4.0
    hf, _ = read_configs(file)
    assert (hf.get("vocab_size"), hf.get("max_position_embeddings")) == (512, 2048)
    assert hf.architecture == "LlamaForCausalLM"


def test_gguf_yarn_between_other_turns(tmp_path: Path) -> None:
    """llama.cpp's converter writes YaRN's beta_fast and beta_slow; they were not read, and 32 and 1 taken.

    Biases of queries and keys are in the order of the rows of their weights.
    """
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    rope |= {"beta_fast": 4.0, "beta_slow": 0.25}
    path = make_checkpoint("llama", tmp_path / "hf", rope_scaling=rope, tokenizer=False, attention_bias=True)
    file = write_gguf(path, tmp_path / "model.gguf")
    expected = hf_logits(hf_model(path), IDS)
    torch.testing.assert_close(Driver.load(file).logits(IDS), expected, atol=1e-4, rtol=0.0)


def gguf_head(file: Path, **values: Any) -> Path:
    """A llama file of no layers, with more keys; dots in their names are "__"."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    for name, value in values.items():
        key = name.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            adders = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
            adders[type(value)](key, value)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("key", ["llama__rope__scale_linear", "llama__rope__scaling__factor"])
def test_gguf_scaling_without_a_type_is_linear(key: str, tmp_path: Path) -> None:
    """As llama.cpp has it. Files of 2023 state `rope.scale_linear` alone, which was not read: a model of a
    context four times as long as its base's was rotated as its base."""
    hf, _ = read_configs(gguf_head(tmp_path / "model.gguf", **{key: 4.0}))
    assert (hf.get("rope_parameters")["rope_type"], hf.get("rope_parameters")["factor"]) == ("linear", 4.0)


def test_gguf_keys_that_nobody_reads_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A scale of attention, for example, would change every token."""
    head = {"llama__attention__scale": 0.5, "llama__rope__scaling__original_context_length": 64}
    file = gguf_head(tmp_path / "model.gguf", **head, llama__vocab_size=8, tokenizer__ggml__x=1)
    hf, _ = read_configs(file)
    assert hf.unused == ("llama.attention.scale", "llama.rope.scaling.original_context_length")
    with pytest.raises(CheckpointError), caplog.at_level("WARNING", "quire"):
        load_model(ModelConfig(model=str(file)), torch.device("cpu"))  # it has no layers
    (record,) = caplog.records
    assert f"{file}: {', '.join(hf.unused)}: not known, and not used" in record.getMessage()
    read, _ = read_configs(gguf_head(tmp_path / "yarn.gguf", llama__rope__scaling__type="yarn", **head))
    assert read.unused == ("llama.attention.scale",)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_attn_factor": 1.5},
            "is 1.5: not",
        ),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__yarn_ext_factor": 0.5}, "is 0.5: not"),
        ({"llama__rope__dimension_count": 4.0}, "is 4.0, of heads of 8"),
    ],
)
def test_gguf_rotation_that_is_not_ours_is_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_configs(gguf_head(tmp_path / "model.gguf", **values))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["a", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "b"], {0, 1, 2, 3}),  # Llama 3
        (["a", "<|endoftext|>", "<|im_start|>", "<|im_end|>"], {0, 1, 3}),  # Qwen, SmolLM
        (["a", "<eos>", "<start_of_turn>", "<end_of_turn>"], {0, 3}),  # Gemma
        (["a", "<s>", "</s>"], {0, 2}),  # Llama 2, Mistral
        (["a", "<|user|>", "<|end|>", "<|endoftext|>"], {0, 2, 3}),  # Phi
        (["a", "<｜User｜>", "<｜end▁of▁sentence｜>"], {0, 2}),  # DeepSeek's distillates
        (["a", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"], {0, 2, 3, 4}),  # gpt-oss
    ],
)
def test_gguf_turns_end_where_the_file_does_not_say_so(
    tokens: list[str], expected: set[int], tmp_path: Path
) -> None:
    """Files of chat models name one end alone, often their base model's: answers went on behind the end of
    the turn, with the next question."""
    head = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__eos_token_id": 0}
    hf, _ = read_configs(gguf_head(tmp_path / "model.gguf", **head))
    assert set(hf.get("eos_token_id")) == expected


@pytest.mark.row("G16")
def test_a_directory_that_holds_one_gguf_file(
    tmp_path: Path, checkpoint: Path, expected: torch.Tensor
) -> None:
    write_gguf(checkpoint, tmp_path / "tiny-f32.gguf")
    torch.testing.assert_close(Driver.load(tmp_path).logits(IDS), expected, atol=1e-4, rtol=0.0)
    write_gguf(checkpoint, tmp_path / "tiny-q8.gguf", "Q8_0")
    assert complaint(tmp_path) == (
        f"{tmp_path}: holds several .gguf files (tiny-f32.gguf, tiny-q8.gguf); name one of them"
    )


# What is loaded.


def test_eos_comes_from_generation_config_first(copy: Path) -> None:
    assert load(copy).eos_token_ids == {2, 4}
    assert read_configs(copy)[1]["eos_token_id"] == [2, 4]
    (copy / "generation_config.json").write_text('{"temperature": 0.5}')
    assert load(copy).eos_token_ids == {2}
    (copy / "generation_config.json").unlink()
    assert load(copy).eos_token_ids == {2}
    assert read_configs(copy)[1] == {}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_ends_that_are_no_ids_are_refused_in_their_file(name: str, copy: Path) -> None:
    """config.json was named for both."""
    set_json(copy / name, eos_token_id=["2"])
    if name == "config.json":
        (copy / "generation_config.json").unlink()
    said = rf"/{name}: eos_token_id must be the id of a token or a list of them, got \['2'\]"
    with pytest.raises(CheckpointError, match=said):
        load(copy)


def test_an_end_of_the_tokenizer_that_is_no_id_is_refused_in_its_file(copy: Path) -> None:
    """config.json was named."""
    (copy / "generation_config.json").unlink()
    set_json(copy / "tokenizer_config.json", eos_token="</s>")
    set_json(copy / "tokenizer.json", added_tokens=[{"content": "</s>", "id": "2"}])
    with pytest.raises(CheckpointError, match=r"/tokenizer.json: eos_token '</s>' must be the id .* got '2'"):
        load(copy)


def set_json(file: Path, **values: Any) -> None:
    """Other values of keys of a JSON file; None takes a key away."""
    whole = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in whole.items() if value is not None}))


@pytest.mark.parametrize("form", ["tokenizer.json", "added_tokens_decoder", "special_tokens_map.json"])
def test_eos_that_the_tokenizer_alone_knows(form: str, copy: Path) -> None:
    """A chat model is published with its base's config.json, and a tokenizer that ends turns with <|im_end|>:
    answers went on behind it."""
    (copy / "generation_config.json").unlink()
    set_json(copy / "config.json", eos_token_id=0)
    tokenizer = copy / "tokenizer_config.json"
    set_json(tokenizer, eos_token="<|im_end|>")
    if form == "added_tokens_decoder":  # of transformers 4, where tokens may be objects
        decoder = {"0": {"content": "<|endoftext|>"}, "4": {"content": "<|im_end|>"}}
        set_json(
            tokenizer, added_tokens_decoder=decoder, eos_token={"content": "<|im_end|>", "lstrip": False}
        )
        (copy / "tokenizer.json").unlink()
    elif form == "special_tokens_map.json":
        set_json(tokenizer, eos_token=None)
        (copy / form).write_text('{"eos_token": "<|im_end|>"}')
    assert load(copy).eos_token_ids == {0, 4}
    set_json(copy / "config.json", eos_token_id=None)
    assert load(copy).eos_token_ids == {4}


@pytest.mark.parametrize(("kind", "expected"), [("llama", {2}), ("gemma2", {1}), ("qwen2", set())])
def test_eos_that_nothing_names_is_the_default_of_transformers(
    kind: str, expected: set[int], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    path = make_checkpoint(kind, tmp_path / "hf", tokenizer=False)
    (path / "generation_config.json").unlink()
    set_json(path / "config.json", eos_token_id=None)
    assert AutoConfig.from_pretrained(path).eos_token_id == next(iter(expected), None)
    assert load(path).eos_token_ids == expected
    whole = {**json.loads((path / "config.json").read_text()), "eos_token_id": None}
    (path / "config.json").write_text(json.dumps(whole))
    assert load(path).eos_token_ids == set(), "null means none"


def test_eos_beyond_the_vocabulary_ends_nothing(copy: Path) -> None:
    """Such ids were masked in logits that do not have them, where a request has min_tokens."""
    set_json(copy / "generation_config.json", eos_token_id=[2, 512, 10_000])
    assert load(copy).eos_token_ids == {2}


@pytest.mark.parametrize(
    "text", ['{"eos_token": 5}', '{"eos_token": {"a": 1}}', "[]", '{"eos_token": "</s>"}']
)
def test_a_tokenizer_that_cannot_be_read_is_named(text: str, copy: Path) -> None:
    (copy / "tokenizer_config.json").write_text(text)
    (copy / "tokenizer.json").write_text('{"added_tokens": {}}')
    assert str(copy) in complaint(copy)


@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_dtype_is_converted(asked: str, checkpoint: Path) -> None:
    loaded = load(checkpoint, dtype=asked)
    dtype = getattr(torch, asked)
    assert loaded.config.dtype == dtype
    assert all(parameter.dtype == dtype for parameter in loaded.model.parameters())
    stored = sum(tensor.numel() for tensor in load_file(checkpoint / "model.safetensors").values())
    assert loaded.weight_bytes == stored * dtype.itemsize


def test_tied_embeddings_are_held_once(tmp_path: Path) -> None:
    tied = load(make_checkpoint("llama", tmp_path / "tied", tied=True))
    untied = load(make_checkpoint("llama", tmp_path / "untied", tied=False))
    assert untied.weight_bytes - tied.weight_bytes == 512 * 64 * 4
    assert tied.model.lm_head is tied.model.embed_tokens


def test_known_leftovers_are_ignored(copy: Path, expected: torch.Tensor) -> None:
    """Old Llama files hold rotary frequencies; tied checkpoints may hold the head a second time."""
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, copy / "model.safetensors")
    torch.testing.assert_close(Driver.load(copy).logits(IDS), expected, atol=1e-4, rtol=0.0)


def test_loading_needs_the_model_once(tmp_path: Path) -> None:
    """Peak memory grows by the model and one tensor, not by the model twice; measured in its own process."""
    path = make_checkpoint(
        "llama", tmp_path, tokenizer=False, hidden_size=512, intermediate_size=2048, num_hidden_layers=6
    )
    size = (path / "model.safetensors").stat().st_size
    code = """if True:
        import re, sys, torch
        from quire.config import ModelConfig
        from quire.loader.load import load_model
        def anonymous():
            return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])
        before = anonymous()
        loaded = load_model(ModelConfig(model=sys.argv[1], dtype="bfloat16"), torch.device("cpu"))
        print(anonymous() - before, loaded.weight_bytes)
        """
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        check=True, capture_output=True, text=True, timeout=280, env=os.environ,
    )  # fmt: skip
    grown, weight_bytes = map(int, done.stdout.split())
    assert weight_bytes == pytest.approx(size / 2, rel=0.01)
    assert grown < 1.25 * weight_bytes


def test_info_needs_no_torch(checkpoint: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from quire.loader.info import read_configs\n"
        "print(read_configs(sys.argv[1])[0].get('vocab_size'))\n"
        "print(any(name in sys.modules for name in ('torch', 'transformers')))\n"
    )
    for path in (checkpoint, write_gguf(checkpoint, tmp_path / "model.gguf")):
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True, timeout=280
        )
        assert done.stdout.split() == ["512", "False"]


# Pickles.


class Hostile:
    """Unpickling it would create a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


@pytest.mark.row("G16", clauses=("pickle",))
def test_pickles_are_refused_unless_allowed(tmp_path: Path, expected: torch.Tensor) -> None:
    path = make_checkpoint("llama", tmp_path, weight_format="bin", tokenizer=False)
    message = complaint(path)
    assert message.startswith(f"{path / 'pytorch_model.bin'}: the weights are pickles")
    assert "load_format=bin reads them" in message
    assert complaint(path, load_format="safetensors") == (
        f"{path}: holds neither model.safetensors nor its index"
    )
    driver = Driver.load(path, load_format="bin")
    torch.testing.assert_close(driver.logits(IDS), expected, atol=1e-4, rtol=0.0)


@pytest.mark.row("G16", clauses=("safe",))
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_in_it_is_refused_and_not_run(zipped: bool, copy: Path) -> None:
    target, file = copy / "executed", copy / "pytorch_model.bin"
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    content = {**weights, "evil": Hostile(target)}
    if zipped:
        torch.save(content, file)
    else:
        file.write_bytes(pickle.dumps(content))
    message = complaint(copy, load_format="bin")
    assert message.startswith(f"{file}: ")
    assert not target.exists()


@pytest.mark.row("G16")
def test_safetensors_are_preferred_to_pickles(copy: Path, expected: torch.Tensor) -> None:
    (copy / "pytorch_model.bin").write_bytes(b"not a checkpoint")
    driver = Driver.load(copy)
    torch.testing.assert_close(driver.logits(IDS), expected, atol=1e-4, rtol=0.0)


# Missing, unexpected and misshapen tensors.


def change(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    file = path / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file)
    return file


@pytest.mark.row("G16", clauses=("missing",))
def test_missing_tensors_are_listed(copy: Path) -> None:
    file = change(copy, lambda w: [w.pop("model.layers.1.self_attn.k_proj.weight"), w.pop("lm_head.weight")])
    assert complaint(copy) == (
        f"{file}: 2 missing tensors: lm_head.weight, model.layers.1.self_attn.k_proj.weight"
    )


@pytest.mark.row("G16", clauses=("extra",))
def test_unexpected_tensors_are_listed(copy: Path) -> None:
    file = change(copy, lambda w: w.update({"model.extra": torch.ones(2), "a.b": torch.ones(2)}))
    assert complaint(copy) == f"{file}: 2 unexpected tensors: a.b, model.extra"


@pytest.mark.row("G16")
def test_a_renamed_tensor_is_both(copy: Path) -> None:
    file = change(copy, lambda w: w.update({"model.normal.weight": w.pop("model.norm.weight")}))
    assert complaint(copy) == (
        f"{file}: 1 missing tensors: model.norm.weight; {file}: 1 unexpected tensors: model.normal.weight"
    )


@pytest.mark.row("G16")
def test_unexpected_tensors_name_their_shard(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, shards=2, tokenizer=False)
    shard = path / "model-00002-of-00002.safetensors"
    save_file({**load_file(shard), "extra": torch.ones(1)}, shard)
    assert complaint(path) == f"{shard}: 1 unexpected tensors: extra"
    save_file({}, path / "model-00001-of-00002.safetensors")
    assert complaint(path).startswith(f"{path / 'model.safetensors.index.json'}: 11 missing tensors: lm_head")


@pytest.mark.row("G16")
def test_a_long_list_is_cut(copy: Path) -> None:
    change(copy, lambda w: w.update({f"extra.{i:02d}": torch.ones(1) for i in range(20)}))
    assert complaint(copy).endswith("extra.14, extra.15 and 4 more")


@pytest.mark.row("G16")
def test_a_wrong_shape_is_named(copy: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    file = change(copy, lambda w: w.update({name: torch.ones(128, 63)}))
    assert complaint(copy) == f"{file}: {name} has shape [128, 63], config.json means [128, 64]"


@pytest.mark.row("G16")
def test_integer_weights_are_refused(copy: Path) -> None:
    name = "model.norm.weight"
    file = change(copy, lambda w: w.update({name: torch.ones(64, dtype=torch.int8)}))
    assert complaint(copy) == f"{file}: {name} has type torch.int8, expected floating point"


@pytest.mark.row("G16")
def test_missing_and_unexpected_tensors_of_gguf(tmp_path: Path, copy: Path) -> None:
    change(copy, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    file = write_gguf(copy, tmp_path / "model.gguf")
    assert complaint(file) == f"{file}: 1 missing tensors: model.layers.1.mlp.up_proj.weight"
    assert gguf_name("model.layers.1.mlp.up_proj.weight") == "blk.1.ffn_up.weight"


# Broken files.


def truncate(file: Path, keep: float = 0.6) -> Path:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])
    return file


def test_no_such_directory(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    assert complaint(path) == f"{path}: no such checkpoint directory or file"
    with pytest.raises(CheckpointError, match="nowhere: no such checkpoint"):
        read_configs(path)


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    assert complaint(file) == f"{file}: neither a checkpoint directory nor a .gguf file"


def test_no_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    assert complaint(copy) == f"{copy / 'config.json'}: file not found"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON: "),
        ("[1]", "must hold a JSON object"),
        ("\udc80", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json(name: str, text: str, message: str, copy: Path) -> None:
    (copy / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert complaint(copy).startswith(f"{copy / name}: {message}")


def test_a_text_config_takes_the_defaults_of_its_type(tmp_path: Path) -> None:
    """As LLaVA 1.5's file, which names the type and the vocabulary and little else."""
    text = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}
    outer = {"architectures": ["LlavaForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": text}))
    config, _ = read_configs(tmp_path)
    assert (config.get("vocab_size"), config.get("max_position_embeddings")) == (32064, 4096)
    assert (config.require_int("hidden_size"), config.require_int("num_attention_heads")) == (4096, 32)
    assert config.architecture == "LlavaForConditionalGeneration"


def test_the_ends_of_the_whole_count_before_those_of_the_text_part(tmp_path: Path) -> None:
    """Gemma 3's file names <eos> and <end_of_turn>, and its text part has <eos> by default, at which alone
    answers ended where there was no generation_config.json."""
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": {"model_type": "gemma3_text"}}))
    assert read_configs(tmp_path)[0].get("eos_token_id") == [1, 106]


def test_a_text_part_that_says_its_head_is_tied_is_believed(tmp_path: Path) -> None:
    """transformers 4 stated it there alone; the whole's false beside it is a default that was written out."""
    outer = {"architectures": ["LlavaForConditionalGeneration"], "tie_word_embeddings": False}
    for stated in (True, False):
        text = {"model_type": "qwen2", "tie_word_embeddings": stated}
        (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": text}))
        assert read_configs(tmp_path)[0].flag("tie_word_embeddings", False) == stated


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"model_type": "no-such-type"}, "text_config has the unknown model_type 'no-such-type'"),
        ({"model_type": "gemma3_text", "num_attention_heads": "many"}, "text_config: "),
    ],
)
def test_a_text_config_without_defaults(text: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}))
    assert complaint(tmp_path).startswith(f"{file}: {message}")


def test_no_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert complaint(copy) == (
        f"{copy}: holds no weights: neither model.safetensors nor model.safetensors.index.json"
    )
    assert "neither pytorch_model.bin nor" in complaint(copy, load_format="bin")
    assert complaint(copy, load_format="gguf") == f"{copy}: load_format=gguf, but this is no .gguf file"


@pytest.mark.parametrize(
    ("keep", "words"), [(0.0, "0 bytes are too few"), (0.6, "broken safetensors file: "), (0.999, "broken")]
)
def test_truncated_safetensors(keep: float, words: str, copy: Path) -> None:
    file = truncate(copy / "model.safetensors", keep)
    assert complaint(copy).startswith(f"{file}: {words}")


def test_safetensors_of_noise(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(np.random.default_rng(0).bytes(50_000))
    assert complaint(copy).startswith(f"{file}: broken safetensors file: ")


def test_missing_shard(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, shards=3, tokenizer=False)
    shard = path / "model-00002-of-00003.safetensors"
    shard.unlink()
    assert complaint(path) == f"{shard}: shard not found; model.safetensors.index.json names it"


def test_truncated_shard(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, shards=3, tokenizer=False)
    shard = truncate(path / "model-00002-of-00003.safetensors")
    assert complaint(path).startswith(f"{shard}: broken safetensors file: ")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{}", "must hold a weight_map of tensor names to files"),
        ("nonsense", "cannot be read as JSON"),
        (
            '{"weight_map": {"a": "../secret.safetensors"}}',
            "'../secret.safetensors' is not the name of a .safetensors file beside",
        ),
        ('{"weight_map": {"a": 3}}', "3 is not the name of a .safetensors file beside"),
        ('{"weight_map": {"a": ["b"]}}', "list of 1 entries is not the name of a .safetensors file beside"),
        ('{"weight_map": {"a": "shard.dat"}}', "'shard.dat' is not the name of a .safetensors file beside"),
        ('{"a":' * 100_000, "cannot be read as JSON"),
    ],
)
def test_broken_index(index: str, message: str, copy: Path) -> None:
    file = copy / "model.safetensors.index.json"
    file.write_text(index)
    assert complaint(copy).startswith(f"{file}: {message}")


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_truncated_bin(keep: float, tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, weight_format="bin", tokenizer=False)
    file = truncate(path / "pytorch_model.bin", keep)
    assert complaint(path, load_format="bin").startswith(f"{file}: ")


def test_bin_that_is_no_dictionary(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    file = copy / "pytorch_model.bin"
    torch.save([torch.ones(2**15)], file)
    assert complaint(copy, load_format="bin") == f"{file}: holds a list, not a dictionary of tensors"
    torch.save({"epoch": 3, "weight": torch.ones(2**15)}, file)
    assert complaint(copy, load_format="bin") == f"{file}: epoch is a int, not a tensor"


@pytest.mark.parametrize("keep", [0.0, 0.0001, 0.01, 0.5, 0.99])
def test_truncated_gguf(keep: float, checkpoint: Path, tmp_path: Path) -> None:
    file = truncate(write_gguf(checkpoint, tmp_path / "model.gguf"), keep)
    assert complaint(file).startswith(f"{file}: broken GGUF file: ")


def test_gguf_of_noise_and_of_an_unknown_architecture(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"noise" * 100)
    assert complaint(file) == f"{file}: broken GGUF file: begins with b'nois', not with b'GGUF'"
    file.write_bytes(b"GGUF" + struct.pack("<I", 3) + np.random.default_rng(0).bytes(500))
    assert complaint(file).startswith(f"{file}: broken GGUF file: ")
    write_gguf(checkpoint, file)
    data = file.read_bytes().replace(
        b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00gpt2x"
    )
    file.write_bytes(data)
    assert complaint(file).startswith(
        f"{file}: GGUF architecture 'gpt2x' is not supported; supported: llama, qwen2, qwen2moe, qwen3, "
    )


def test_index_is_preferred_to_a_stray_single_file(tmp_path: Path, expected: torch.Tensor) -> None:
    """Repositories with both hold the same weights; the index states which files belong together."""
    path = make_checkpoint("llama", tmp_path, shards=2, tokenizer=False)
    save_file({"other": torch.ones(1)}, path / "model.safetensors")
    torch.testing.assert_close(Driver.load(path).logits(IDS), expected, atol=1e-4, rtol=0.0)
    assert json.loads((path / "model.safetensors.index.json").read_text())["metadata"]["total_size"] > 0


# Reading ahead.


@pytest.mark.row("G18")
def test_layers_are_packed_while_others_are_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    pack = load_module.Packer.pack

    def packed(packer: Any, module: Any) -> None:
        events.append("packed")
        pack(packer, module)

    def read(wanted: Iterable[loader_files.Wanted]) -> Iterator[Any]:
        for one in loader_files.read_ahead(wanted):
            events.append("read")
            yield one

    monkeypatch.setattr(load_module.Packer, "pack", packed)
    monkeypatch.setattr(load_module, "read_ahead", read)
    load(checkpoint)
    last = len(events) - events[::-1].index("read")
    assert events[:last].count("packed") > events.count("packed") / 2


@pytest.mark.row("G18")
@pytest.mark.parametrize("weight_format", ["safetensors", "gguf"])
def test_a_file_that_is_cut_short_while_it_is_read_is_refused(
    weight_format: str, checkpoint: Path, tmp_path: Path
) -> None:
    """Of a mapped file the process would have died by SIGBUS."""
    if weight_format == "gguf":
        file = path = write_gguf(checkpoint, tmp_path / "model.gguf", "Q8_0")
    else:
        path = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
        file = path / "model.safetensors"
    empty = empty_model(ModelConfig(model=str(path)), CPU)
    assert empty.files is not None
    tensors = empty.files.tensors()
    first = next(tensors)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=f"{file.name} has become shorter: truncated"):
        fill_weights(empty.model, itertools.chain([first], tensors), file)


@pytest.mark.row("G18")
def test_tensors_of_many_sizes_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of 100 bytes, at most 3 000 ahead: every byte at its place, whatever is converted."""
    path = make_checkpoint("qwen2", tmp_path, shards=2, dtype="bfloat16", tokenizer=False)
    for name, value in {"_PART": 100, "_AHEAD": 3_000}.items():
        monkeypatch.setattr(loader_files, name, value)
    for dtype in ("bfloat16", "float32"):
        model = load(path, dtype=dtype).model
        stored = {
            **load_file(path / "model-00001-of-00002.safetensors"),
            **load_file(path / "model-00002-of-00002.safetensors"),
        }
        assert torch.equal(model.norm.weight, stored["model.norm.weight"].to(model.norm.weight.dtype))
        rows = model.embed_tokens(torch.arange(512))
        assert torch.equal(rows, stored["model.embed_tokens.weight"].to(rows.dtype))
