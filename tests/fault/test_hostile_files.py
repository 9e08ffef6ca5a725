"""Files with lies in them: refused in one line, without memory for what they claim, and no process dies."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from quire.config import ModelConfig
from quire.errors import CheckpointError
from quire.loader import load as load_module
from quire.loader.gguf.weights import block_scheme, read_gguf
from quire.loader.load import load_model
from quire_common.gguf_file import GGUFError, GGUFFile, StoredTensor
from quire_ensemble.errors import TokenizerError
from quire_ensemble.tokenizer import Tokenizer
from tests.fault.hostile_files import KINDS, gguf_fields
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.foreign_checkpoints import MAKERS, make_foreign
from tests.fixtures.gguf_files import write_gguf

SEED = 20


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("genuine")
    whole = make_checkpoint("llama", folder / "safetensors")
    (folder / "gguf").mkdir()
    write_gguf(whole, folder / "gguf" / "model.gguf", "Q8_0")
    (folder / "split").mkdir()
    write_gguf(whole, folder / "split" / "model.gguf", "Q8_0", tensors_per_part=13)
    shutil.copytree(whole, folder / "config")
    make_checkpoint("llama", folder / "index", shards=3)
    make_checkpoint("llama", folder / "bin", weight_format="bin")
    shutil.copytree(folder / "bin", folder / "old_bin")
    weights = load_file(whole / "model.safetensors")
    torch.save(weights, folder / "old_bin" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    return folder


def load_lies(kinds: str, genuine: Path, count: int, tmp_path: Path, processes: int = 1) -> Counter[str]:
    """What became of `count` files, in so many processes at a time; raises what went wrong."""
    share = count // processes
    found: Counter[str] = Counter()
    running = []
    for index in range(processes):
        folder = shutil.copytree(genuine, tmp_path / str(index))
        command = [sys.executable, "-m", "tests.fault.hostile_files", kinds, str(folder)]
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "HF_HUB_OFFLINE": "1"}
        running.append(
            subprocess.Popen(
                [*command, str(SEED), str(index * share), str(share)],
                stdout=subprocess.PIPE, stderr=(tmp_path / f"{index}.log").open("wb"), env=environment,
            )
        )  # fmt: skip
    for index, process in enumerate(running):
        lines = process.communicate()[0].decode().splitlines()
        log = (tmp_path / f"{index}.log").read_text("utf-8", "replace")
        assert process.returncode == 0, (process.returncode, lines[-1:], log[-3000:])
        report = json.loads(lines[-1])
        assert not report["wrong"], "\n".join(report["wrong"][:20])
        found.update(report["outcomes"])
    assert found.total() == share * processes
    return found


@pytest.mark.row("G16")
def test_files_with_lies_are_refused_in_one_line(genuine: Path, tmp_path: Path) -> None:
    """Loaded, planned, built and generated from in a process that has little more memory than the genuine
    files need; one that is not refused has to work."""
    found = load_lies(",".join(KINDS), genuine, 280, tmp_path)
    for kind in KINDS:
        assert 7 < found[f"{kind} refused"] < 40, found


@pytest.mark.row("G16")
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_ten_thousand_heads(kind: str, genuine: Path, tmp_path: Path) -> None:
    found = load_lies(kind, genuine, 10_000, tmp_path, processes=2)
    assert found[f"{kind} refused"] > 5_000 and found[f"{kind} loaded"] > 20, found


def refusal(path: Path, **options: str) -> str:
    with pytest.raises(CheckpointError) as refused:
        load_model(ModelConfig(model=str(path), **options), torch.device("cpu"))  # type: ignore[arg-type]
    return str(refused.value)


@pytest.mark.parametrize(
    ("what", "lie", "words"),
    [
        ("version", 1, "version 1 is not supported"),
        ("count", 2**16 + 1, "states 65537 tensors, at most 65536 are allowed"),
        ("key", 2**63, "within its head: truncated"),
        ("type", 77, "a value of the unknown type 77"),
        ("length", 2**22 - 1, "within its head: truncated"),
        ("length", 2**61, "states arrays of 2305843009213693952 values, at most 4194304 are allowed"),
        ("rank", 0, "has 0 dimensions"),
        ("rank", 2**32 - 1, "has 4294967295 dimensions"),
        ("dimension", 0, "has the shape"),
        ("dimension", 2**63, "does not lie in it: truncated"),
        ("kind", 31, "has the unknown type 31"),
        ("offset", 1, "does not lie in it"),
        ("offset", 2**63, "does not lie in it: truncated"),
    ],
)
def test_each_number_of_a_gguf_head(what: str, lie: int, words: str, genuine: Path, tmp_path: Path) -> None:
    data = bytearray((genuine / "gguf" / "model.gguf").read_bytes())
    at, size, _ = next(field for field in gguf_fields(data)[0] if field.what == what)
    data[at : at + size] = lie.to_bytes(size, "little")
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    message = refusal(file)
    assert message.startswith(f"{file}: broken GGUF file: ") and words in message, message


def test_a_gguf_file_that_claims_its_bytes_twice_or_ends_early(genuine: Path, tmp_path: Path) -> None:
    """Tensors over the same bytes make a large model of a small file. A mapped file that shrinks kills."""
    whole = (genuine / "gguf" / "model.gguf").read_bytes()
    offsets = [field.at for field in gguf_fields(whole)[0] if field.what == "offset"]
    file = tmp_path / "model.gguf"
    file.write_bytes(whole[: offsets[1]] + whole[offsets[0] : offsets[0] + 8] + whole[offsets[1] + 8 :])
    assert "begins within another tensor" in refusal(file)
    file.write_bytes(whole)
    opened = GGUFFile.open(file)
    os.truncate(file, len(whole) // 2)
    with pytest.raises(GGUFError, match="does not lie in it any more"):
        for tensor in opened.tensors.values():
            opened.data(tensor)
    with file.open("wb") as stream:  # a text of 128 Mi bytes, of a file that has them all: a hole
        stream.write(b"GGUF" + struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"a", 8, 2**27))
        stream.truncate(2**28)
    assert "its head is longer than 67108864 bytes" in refusal(file)
    with file.open("wb") as stream:  # two texts, the second of which was read ahead
        stream.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 2))
        for key in (b"a", b"b"):
            stream.write(struct.pack("<Q1sIQ", 1, key, 8, 2**25))
            stream.seek(2**25, os.SEEK_CUR)
        stream.truncate(2**28)
    assert "its head is longer than 67108864 bytes" in refusal(file)


class Grown:
    """As a pickle some bytes; loaded, a terabyte."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (bytearray, (2**40,))


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_that_make_memory_are_refused(zipped: bool, genuine: Path, tmp_path: Path) -> None:
    """`weights_only` allows bytearray."""
    path = Path(shutil.copytree(genuine / "bin", tmp_path / "copy"))
    file = path / "pytorch_model.bin"
    torch.save({"a": Grown(), "b": torch.zeros(2**19)}, file, _use_new_zipfile_serialization=zipped)
    message = refusal(path, load_format="bin")
    assert message == f"{file}: not a pickle of tensors only: it names '__builtin__ bytearray'"


def test_archives_that_are_compressed_or_claim_too_much_are_refused(genuine: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(genuine / "bin", tmp_path / "copy"))
    file = path / "pytorch_model.bin"
    entries = {}
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            entries[name] = archive.read(name)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
        archive.writestr("pytorch_model/data/bomb", bytes(2**26))
    assert file.stat().st_size < 2**21
    message = refusal(path, load_format="bin")
    assert message == f"{file}: broken checkpoint file: its entries are compressed, or longer than itself"


@pytest.mark.parametrize(
    ("key", "lie", "words"),
    [
        ("hidden_size", 2**20, "weights that config.json means"),
        ("vocab_size", 2**24, "weights that config.json means"),
        ("num_hidden_layers", 4096, "weights that config.json means"),
        ("num_hidden_layers", 2**63, "must be a positive whole number up to"),
        ("num_attention_heads", 0, "must be a positive whole number"),
        ("num_key_value_heads", 3, "is no multiple of num_key_value_heads=3"),
        ("head_dim", 7, "an even number of dimensions rotates"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps must be a number that is not negative"),
        ("rms_norm_eps", 10**400, "holds a value that cannot be right"),
        ("rope_parameters", {"rope_theta": -1.0}, "rope_theta must be a positive number"),
        ("rope_parameters", {"mrope_section": [1, 2, 3]}, "must be three numbers that make 8"),
        ("rope_parameters", {"frequency_factors": [1.0] * 3}, "has 3 entries, the head needs 8"),
        ("eos_token_id", -5, "eos_token_id must be the id of a token or a list of them, got -5"),
        ("hidden_act", "x\n" * 10_000, "hidden_act"),
        ("tie_word_embeddings", "false", "must be true or false, got 'false'"),
        ("attention_bias", 1, "must be true or false, got 1"),
        ("rope_parameters", {"rope_type": "yarn", "attention_factor": float("nan")}, "not numbers"),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 1e308}, "factor must be a positive number"),
        ("rope_parameters", {"original_max_position_embeddings": -5}, "must be a positive number, got -5"),
        ("rope_parameters", {"frequency_factors": [0.0] * 8}, "not numbers"),
        ("text_config", {"model_type": ["x"]}, "unknown model_type list of 1 entries"),
        ("text_config", {"model_type": "x\x1b" * 10_000}, "unknown model_type"),
        ("quantization_config", {"quant_method": "compressed-tensors", "format": "\x1b[2J\n", "config_groups":
            {"": {"targets": [], "weights": {}}}}, "of the format ?[2J of int8 per tensor are not supported"),
    ],
)  # fmt: skip
def test_hyperparameters_that_cannot_be(
    key: str, lie: Any, words: str, genuine: Path, tmp_path: Path
) -> None:
    """Sizes that make a model larger than its files are refused before there is one."""
    path = Path(shutil.copytree(genuine / "safetensors", tmp_path / "copy"))
    (path / "generation_config.json").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, key: lie}))
    message = refusal(path)
    assert message.startswith(str(path)) and words in message, message
    assert message.isprintable() and len(message) < 2000


@pytest.mark.parametrize("kind", ["pipe", "device", "hole"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
def test_files_that_are_none(kind: str, name: str, genuine: Path, tmp_path: Path) -> None:
    """A pipe's reader waits for ever, that of /dev/zero takes all memory, and so does one of a large hole."""
    path = Path(shutil.copytree(genuine / "safetensors", tmp_path / "copy"))
    (path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path / name)
    elif kind == "device":
        (path / name).symlink_to("/dev/zero")
    else:
        with (path / name).open("wb") as file:
            file.truncate(2**40)
    words = "longer than 134217728 bytes" if kind == "hole" else "neither a file nor a directory"
    assert refusal(path) == f"{path}: '{name}' is {words}"
    with pytest.raises(TokenizerError, match=words):
        Tokenizer(path)


def test_gguf_files_that_are_none(tmp_path: Path) -> None:
    """Nor does a directory's listing go into a message as it is, or take a name for each part that may be."""
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(GGUFError, match="is a directory, a pipe or a device"):
        GGUFFile.open(tmp_path / "pipe.gguf")
    assert refusal(tmp_path) == f"{tmp_path}: 'pipe.gguf' is neither a file nor a directory"
    (tmp_path / "pipe.gguf").unlink()
    for number in range(300):
        (tmp_path / f"{number}\n\x1b[2J-00001-of-99999.gguf").touch()
    begin = time.process_time()
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path}: holds several .gguf files (0 ?[2J-00001-of-99999.gguf, ")
    assert message.isprintable() and len(message) < 2000 and time.process_time() - begin < 5


@pytest.mark.parametrize(
    ("family", "lies", "words"),
    [
        ("Mistral", {"sliding_window": True}, "a sliding window of True"),
        ("Mistral", {"sliding_window": 3.5}, "a sliding window of 3.5"),
        (
            "Mistral",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
            "no sliding_window is switched on",
        ),
        ("Qwen2", {"use_sliding_window": "false"}, "use_sliding_window must be true or false"),
        ("Gemma2", {"query_pre_attn_scalar": -4}, "attention_scale of"),
        ("Gemma2", {"query_pre_attn_scalar": float("nan")}, "attention_scale of nan"),
        ("Gemma2", {"attn_logit_softcapping": 0}, "attention_softcap of 0"),
        ("Gemma2", {"final_logit_softcapping": "30"}, "logits_softcap of '30'"),
    ],
)
def test_hyperparameters_of_one_family_that_cannot_be(
    family: str, lies: dict[str, Any], words: str, genuine: Path, tmp_path: Path
) -> None:
    """What would be computed, wrongly, or fail with the first request."""
    path = Path(shutil.copytree(genuine / "safetensors", tmp_path / "copy"))
    config = {**json.loads((path / "config.json").read_text()), "architectures": [f"{family}ForCausalLM"]}
    (path / "config.json").write_text(json.dumps({**config, **lies}))
    message = refusal(path)
    assert message.startswith(str(path)) and words in message and message.isprintable(), message


def test_experts_are_no_more_than_the_file_has_bytes_for(genuine: Path, tmp_path: Path) -> None:
    """4096 layers of 4096 experts with four weights each: a file of 60 MB has bytes for the weights, while
    Python's objects take a hundred GB."""
    path = Path(shutil.copytree(genuine / "safetensors", tmp_path / "copy"))
    sizes = {"hidden_size": 4, "head_dim": 2, "num_hidden_layers": 4096, "vocab_size": 2}
    sizes |= {"num_experts": 4096, "num_experts_per_tok": 1, "moe_intermediate_size": 1}
    config = json.loads((path / "config.json").read_text())
    config |= {**sizes, "num_attention_heads": 1, "num_key_value_heads": 1}
    config["architectures"] = ["Qwen3MoeForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    os.truncate(path / "model.safetensors", 60_000_000)
    assert "weights in 16777216 experts that config.json means" in refusal(path)


def test_tensors_that_contradict_each_other(genuine: Path, tmp_path: Path) -> None:
    """Which of two is meant, nobody knows: the loader would take the last, or a mixture."""
    path = Path(shutil.copytree(genuine / "safetensors", tmp_path / "copy"))
    file = path / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "norm.weight": torch.zeros(64)}, file)
    assert " stands for model.norm.weight, as a tensor before it does" in refusal(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    save_file(weights, file)
    assert "lm_head.weight is not model.embed_tokens.weight, but tie_word_embeddings says" in refusal(path)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file)
    load_model(ModelConfig(model=str(path)), torch.device("cpu"))


def test_a_checkpoint_that_changes_while_it_is_read_is_refused(
    genuine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers of the old weights and some of the new ones answered, and nobody knew."""
    path = Path(shutil.copytree(genuine / "safetensors", tmp_path / "copy"))
    file, fill = path / "model.safetensors", load_module.fill_weights
    new = make_checkpoint("llama", tmp_path / "new", seed=1) / file.name

    def copied_over(model: Any, tensors: Any, *others: Any) -> None:
        given = list(tensors)
        file.write_bytes(new.read_bytes())
        fill(model, given, *others)

    monkeypatch.setattr(load_module, "fill_weights", copied_over)
    assert refusal(path) == f"{file}: the checkpoint changed while it was read: load it again"


def bnb_state_with(**lies: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def lie(octets: torch.Tensor) -> torch.Tensor:
        state = {**json.loads(bytes(octets.tolist())), **lies}
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return lie


@pytest.mark.parametrize(
    ("name", "lies", "suffix", "lie", "words"),
    [
        ("GPTQ v2, 8 bits", {"group_size": 2**40}, "", None, "group_size 1099511627776 is no number of fea"),
        ("GPTQ", {}, "g_idx", lambda g_idx: g_idx - 5, "g_idx does not divide the inputs"),
        ("FP8 blocks", {"weight_block_size": [-128, -128]}, "", None, "weight_block_size -128 is no number"),
        ("FP8 blocks", {"weight_block_size": "99"}, "", None, "weight_block_size '99' is not two numbers"),
        ("W4A16", {"ignore": ["re:(\\w|.|\\S)+[A-Z]"]}, "", None, "as a target: it takes too long to match"),
        ("W4A16", {}, "weight_shape", lambda shape: shape - torch.tensor([0, 3]), "stored as ["),
        ("NF4", {}, "nf4", bnb_state_with(shape=[32, 128]), "stored as [32, 128], its layer has [64, 64]"),
        ("NF4", {}, "nf4", bnb_state_with(shape=[-64, -64]), "invalid shape dimension"),
        ("NF4", {}, "nf4", lambda _: torch.zeros(2**17, dtype=torch.uint8), "it is longer than 65536 bytes"),
    ],
)  # fmt: skip
def test_quantised_layers_that_contradict_themselves(
    name: str, lies: dict[str, Any], suffix: str, lie: Any, words: str, genuine: Path, tmp_path: Path
) -> None:
    """Layers of another shape than their neighbours have would be read beyond their ends."""
    config = {**MAKERS[name].config, **lies}
    path, _ = make_foreign(genuine / "safetensors", tmp_path / "foreign", MAKERS[name], config=config)
    if suffix:
        weights = load_file(path / "model.safetensors")
        key = next(key for key in weights if "q_proj" in key and key.endswith(suffix))
        save_file({**weights, key: lie(weights[key])}, path / "model.safetensors")
    message = refusal(path)
    assert message.startswith(str(path)) and words in message and message.isprintable(), message


def test_scales_that_are_symmetric_are_said_to_be_by_true(genuine: Path, tmp_path: Path) -> None:
    """ "false" is a true value, and zeros would not be read."""
    config = json.loads(json.dumps(MAKERS["W4A16 with zeros"].config))
    for group in config["config_groups"].values():
        group["weights"]["symmetric"] = "false"
    path, _ = make_foreign(
        genuine / "safetensors", tmp_path / "foreign", MAKERS["W4A16 with zeros"], config=config
    )
    assert "symmetric 'false' is not supported" in refusal(path)


@pytest.mark.parametrize(
    ("shape", "stated", "words"),
    [
        ((8, 64, 64), 4, "holds 8 matrices of 16384 bytes, the file states 4 experts"),
        ((8, 64, 64), None, "the file states None experts"),
        ((4096, 1, 1), 4096, "holds 4096 matrices of 4 bytes"),
    ],
)
def test_a_gguf_tensor_of_experts_is_of_as_many_as_there_are(
    shape: tuple[int, ...], stated: int | None, words: str
) -> None:
    """An object for each matrix of four bytes takes a hundred times the file."""
    file, size = Path("/nowhere.gguf"), 4 * shape[0] * shape[1] * shape[2]
    name = "blk.0.ffn_up_exps.weight"
    tensors = {name: StoredTensor(name, GGMLQuantizationType.F32, shape, 0, size, file)}
    metadata = {"general.architecture": "llama", "llama.expert_count": stated}
    with pytest.raises(CheckpointError, match=words):
        block_scheme(GGUFFile(file, metadata, tensors, (file,)))


def test_a_gguf_tensor_that_is_not_wanted_is_not_decoded() -> None:
    """Its numbers may take twenty times its bytes; there is not even a file here."""
    file, name = Path("/nowhere.gguf"), "junk.weight"
    tensors = {name: StoredTensor(name, GGMLQuantizationType.IQ1_S, (2**20, 256), 0, 50 * 2**20, file)}
    opened = GGUFFile(file, {"general.architecture": "llama"}, tensors, (file,))
    [stored] = read_gguf(file, opened, keeps_blocks=True)
    assert stored.tensor.is_meta and stored.tensor.shape == (2**20, 256)
