"""Packed weights on disk: what is found there is what packing would make, whatever happened to the files."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.config import ModelConfig
from quire.loader import identity, packed_cache
from quire.loader import load as load_module
from quire.loader.load import LoadedModel, is_worth_keeping, load_model
from quire.loader.packed_cache import PackedCache
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.foreign_checkpoints import MAKERS, make_foreign
from tests.fixtures.gguf_files import write_gguf

W8A8 = {"quantization": "w8a8"}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where weights are kept: those of tiny models too, that were made just now."""
    monkeypatch.setattr(packed_cache, "lasting_directory", lambda name: tmp_path / name)
    monkeypatch.setattr(packed_cache, "_SETTLED_NS", -(10**9))
    monkeypatch.setattr(load_module, "is_worth_keeping", lambda read_s, pack_s: True)
    return tmp_path / "packed"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def load(path: Path, **options: Any) -> LoadedModel:
    loaded = load_model(ModelConfig(model=str(path), **options), torch.device("cpu"), with_digest=True)
    if loaded.cache_writer is not None:
        loaded.cache_writer.wait()
    return loaded


def found(path: Path, **options: Any) -> LoadedModel:
    """Loads what must be kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "fill_weights", None)
        return load(path, **options)


def weights(loaded: LoadedModel) -> dict[str, Any]:
    """All that computes, every bit of it."""
    flat: dict[str, Any] = {}

    def add(name: str, node: Any) -> None:
        if isinstance(node, dict | list):
            for key, each in node.items() if isinstance(node, dict) else enumerate(node):
                add(f"{name}.{key}", each)
        else:
            flat[name] = node.view(torch.uint8).numpy().tobytes() if isinstance(node, torch.Tensor) else node

    for name, module in loaded.model.packed_modules():
        state = packed_cache._state(module.packed)
        assert state is not None, name
        add(name, state)
        add(f"{name}.table", getattr(module, "table", None))
    for name, parameter in loaded.model.named_parameters():
        add(name, parameter.data)
    return flat


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*") if path.name != ".lock")


MIXED = {"attn_v": "Q6_K", "blk.1.ffn_up": "Q5_K", "blk.0.attn_q": "F16", "output": "Q6_K"}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
MODELS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "plain": (lambda path: make_checkpoint("qwen2", path), {}),
    "w8a8": (lambda path: make_checkpoint("llama", path), W8A8),
    "table of its own": (lambda path: make_checkpoint("qwen3", path, tied=True), {"quantization": "int4"}),
    "gemma": (lambda path: make_checkpoint("gemma3", path), {"quantization": "int8", "dtype": "bfloat16"}),
    "blocks of several kinds": (
        lambda path: write_gguf(
            make_checkpoint("qwen2", path / "hf", tokenizer=False, **SIZES),
            path / "model.gguf", "Q4_K", kinds=MIXED,
        ),
        {},
    ),
    "split": (
        lambda path: write_gguf(
            make_checkpoint("llama", path / "hf"), path / "model.gguf", "IQ4_NL", tensors_per_part=9
        ),
        {},
    ),
    "experts": (lambda path: make_checkpoint("mixtral", path), W8A8),
    "latents": (lambda path: make_checkpoint("deepseek_v3", path), {}),
}  # fmt: skip


@pytest.mark.row("G18")
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_kept_is_what_was_packed(kind: str, directory: Path, tmp_path: Path) -> None:
    make, options = MODELS[kind]
    path = make(tmp_path / "checkpoint")
    first = load(path, **options)
    assert len(entries(directory)) == 1
    second = found(path, **options)
    assert weights(second) == weights(first)
    assert (second.weight_bytes, second.weights_digest) == (first.weight_bytes, first.weights_digest)
    assert second.model.is_fused == first.model.is_fused
    data = [memory for name, module in second.model.packed_modules() for memory in _memories(module.packed)]
    assert data and all(memory.data_ptr() % 64 == 0 for memory in data)


def _memories(packed: Any) -> list[torch.Tensor]:
    parts = getattr(packed, "parts", None) or [getattr(packed, "layer", packed)]
    return [part.state()["data"] for part in parts]


@pytest.mark.row("G18")
def test_a_model_on_transformers_code_is_not_kept_and_takes_no_other_for_its_own(
    llama: Path, directory: Path
) -> None:
    load(llama)
    (kept,) = entries(directory)
    for _ in range(2):
        assert type(load(llama, model_impl="transformers").model).__name__ == "TransformersModel"
        assert entries(directory) == [kept]


def test_inputs_in_another_order(llama: Path, directory: Path, tmp_path: Path) -> None:
    path, _ = make_foreign(llama, tmp_path / "checkpoint", MAKERS["GPTQ act-order"])
    first = load(path)
    assert entries(directory) and weights(found(path)) == weights(first)


def test_a_waking_engine_reads_them_and_generates_the_same(llama: Path, directory: Path) -> None:
    options: dict[str, Any] = {"num_blocks": 64, "max_model_len": 128, "num_threads": 1, **W8A8}
    prompts = [[1, *range(5, 45)], [3, 2, 1]]

    def tokens(llm: LLM) -> list[list[int]]:
        return [output.token_ids for output in llm.generate(prompts, max_tokens=12, ignore_eos=True)]

    plain = LLM(llama, packed_weights_size=0, **options)
    expected = tokens(plain)
    plain.core.close()
    assert not directory.exists()
    llm = LLM(llama, **options)
    assert tokens(llm) == expected
    (writer,) = llm.core.executor.runner._cache_writers  # type: ignore[attr-defined]
    writer.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_module, "fill_weights", None)
        llm.core.sleep()
        llm.core.wake()
        assert tokens(llm) == expected
        assert tokens(LLM(llama, **options)) == expected
    llm.core.close()


def test_a_digest_is_made_only_where_it_is_asked_for(llama: Path, directory: Path) -> None:
    """What was kept without it is packed once more when it is wanted, and then serves both."""

    def start(with_digest: bool) -> LoadedModel:
        config = ModelConfig(model=str(llama), **W8A8)
        loaded = load_model(config, torch.device("cpu"), with_digest=with_digest)
        if loaded.cache_writer is not None:
            loaded.cache_writer.wait()
        return loaded

    assert start(False).weights_digest == ""
    assert start(False).cache_writer is None
    first = start(True)
    assert first.weights_digest and first.cache_writer is not None and len(entries(directory)) == 1
    second = start(True)
    assert second.cache_writer is None and second.weights_digest == first.weights_digest
    assert weights(second) == weights(first)


# What is found is of this checkpoint.


def test_another_checkpoint_in_its_place_is_packed(copy: Path, directory: Path, tmp_path: Path) -> None:
    """Written over, with the same size and time, and put there by a rename."""
    file, before = copy / "model.safetensors", load(copy, **W8A8)
    other = make_checkpoint("llama", tmp_path / "other", seed=1) / file.name
    expected = weights(load(other.parent, packed_weights_size=0, **W8A8))
    assert expected != weights(before)
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(other.read_bytes())
    os.utime(file, ns=times)
    assert weights(load(copy, **W8A8)) == expected
    shutil.copyfile(other, tmp_path / "away")
    os.utime(tmp_path / "away", ns=times)
    (tmp_path / "away").rename(file)
    assert weights(load(copy, **W8A8)) == expected
    assert len(entries(directory)) == 3


@pytest.mark.parametrize("way", ["link", "rename"])
def test_nothing_is_kept_of_a_checkpoint_that_was_another_meanwhile(
    way: str, copy: Path, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of B, read while A had gone away and come back, were kept under A's name."""
    other, named, fill = (
        make_checkpoint("llama", tmp_path / "b", seed=1),
        tmp_path / "named",
        load_module.fill_weights,
    )

    def put(path: Path, back: Path | None = None) -> None:
        if way == "link":
            named.unlink(missing_ok=True)
            named.symlink_to(path)
            return
        if back is not None:
            named.rename(back)
        path.rename(named)

    def swapped(*args: Any) -> None:
        put(other, copy)
        fill(*args)
        put(copy, other)

    put(copy)
    monkeypatch.setattr(load_module, "fill_weights", swapped)
    loaded = load(named, **W8A8)
    assert loaded.cache_writer is None and not entries(directory)
    monkeypatch.setattr(load_module, "fill_weights", fill)
    assert weights(load(named, **W8A8)) != weights(loaded) and len(entries(directory)) == 1


def test_nothing_is_kept_of_files_that_changed_just_now(copy: Path, directory: Path) -> None:
    """A second change within one tick of the file system's clock leaves the time as it is."""
    packed_cache._SETTLED_NS = 10**15
    assert load(copy, **W8A8).cache_writer is None and not entries(directory)


def test_links_to_the_same_files_under_other_names_are_another_checkpoint(
    llama: Path, directory: Path, tmp_path: Path
) -> None:
    """As of two revisions in a hub's cache: which of two files is model.safetensors only the names say."""
    other = make_checkpoint("llama", tmp_path / "other", seed=1)
    expected = weights(load(other, packed_weights_size=0, **W8A8))
    for place, ours, theirs in (("a", "model", "n"), ("b", "l", "model")):
        (tmp_path / place).mkdir()
        for file in llama.iterdir():
            if file.name != "model.safetensors":
                (tmp_path / place / file.name).symlink_to(file)
        (tmp_path / place / f"{ours}.safetensors").symlink_to(llama / "model.safetensors")
        (tmp_path / place / f"{theirs}.safetensors").symlink_to(other / "model.safetensors")
    load(tmp_path / "a", **W8A8)
    assert weights(load(tmp_path / "b", **W8A8)) == expected and len(entries(directory)) == 2


def test_a_link_that_another_link_names_is_part_of_what_a_file_is(copy: Path, tmp_path: Path) -> None:
    """Put back as it was after another time, it may have led elsewhere meanwhile."""
    for place in ("outer", "inner"):
        (tmp_path / place).mkdir()
    inner = tmp_path / "inner" / "checkpoint"
    inner.symlink_to(copy)
    (tmp_path / "outer" / "checkpoint").symlink_to(inner)
    before = identity.FileIdentity.from_path(str(tmp_path / "outer" / "checkpoint"))
    assert before.files and before == identity.FileIdentity.from_path(str(tmp_path / "outer" / "checkpoint"))
    (tmp_path / "inner" / "new").symlink_to(copy)
    (tmp_path / "inner" / "new").rename(inner)
    assert identity.FileIdentity.from_path(str(tmp_path / "outer" / "checkpoint")) != before


@pytest.mark.parametrize("of", ["_code_digest", "_version"])
def test_code_that_reads_files_tells_entries_apart(
    of: str, llama: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a mended reader of files, ours or a library's, makes of them is not what was packed before."""
    assert {"quire_common", "quire_ensemble"} <= set(identity._CODE) and "gguf" in identity._LIBRARIES
    load(llama, **W8A8)
    monkeypatch.setattr(identity, of, lambda *_: "changed")
    load(llama, **W8A8)
    assert len(entries(directory)) == 2


def test_what_is_asked_for_tells_entries_apart(llama: Path, directory: Path) -> None:
    for options in ({}, W8A8, {"quantization": "int8"}, {"dtype": "bfloat16"}):
        load(llama, **options)
    assert len(entries(directory)) == 4
    load(llama, max_model_len=64, seed=5, **W8A8)
    assert len(entries(directory)) == 4, "these change nothing of the weights"


def test_weights_that_kernels_do_not_pack_are_not_kept(llama: Path, directory: Path) -> None:
    assert load(llama, quantization="fp8").cache_writer is None
    assert load(llama, load_format="dummy").cache_writer is None
    assert not entries(directory)
    assert is_worth_keeping(0.5, 3.0) and not is_worth_keeping(5.0, 3.0) and not is_worth_keeping(0.0, 0.1)


# Whatever happens to the files.

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "magic": lambda data: b"X" + data[1:],
    "size of the index": lambda data: data[:8] + (2**63).to_bytes(8, "little") + data[16:],
    "index": lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    "cut in the index": lambda data: data[:100],
    "cut in the last tensor": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "a bit of the last tensor": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "a bit of the first tensor": lambda data: _with_bit(data, packed_cache._first(_index_size(data))),
}  # fmt: skip


def _index_size(data: bytes) -> int:
    return int.from_bytes(data[8:16], "little")


def _with_bit(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_packed_again(
    damage: str, llama: Path, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = weights(load(llama, **W8A8))
    (path,) = directory.glob("*.weights")
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    with caplog.at_level(logging.WARNING):
        assert weights(load(llama, **W8A8)) == expected
    assert [record.message for record in caplog.records if "cannot be used" in record.message]
    assert path.read_bytes() == whole, "the same weights are the same bytes"


def test_an_entry_under_anothers_name_is_not_taken(llama: Path, directory: Path) -> None:
    load(llama, **W8A8)
    expected = weights(load(llama, quantization="int8"))
    one, other = directory.glob("*.weights")
    for source, place in ((one, other), (other, one)):
        data = place.read_bytes()
        shutil.copyfile(source, place)
        assert weights(load(llama, quantization="int8")) == expected
        place.write_bytes(data)


def test_a_pipe_in_place_of_an_entry_is_not_waited_for(llama: Path, directory: Path) -> None:
    load(llama, **W8A8)
    (path,) = directory.glob("*.weights")
    whole = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    os.mkfifo(directory / ".left.tmp")
    load(llama, **W8A8)
    assert path.read_bytes() == whole


def trouble(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("when", ["disk_usage", "mkstemp", "fsync", "replace"])
def test_a_full_disk_costs_what_is_kept_and_a_line(
    when: str, llama: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    places = {"disk_usage": shutil, "mkstemp": packed_cache.tempfile, "fsync": os, "replace": Path}
    monkeypatch.setattr(places[when], when, full)
    load(llama, **W8A8)
    assert len(trouble(caplog)) == 1 and "No space left on device" in trouble(caplog)[0]
    assert not entries(directory)


def test_a_directory_that_cannot_be_written(
    llama: Path, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.write_text("a file")
    load(llama, **W8A8)
    assert len(trouble(caplog)) == 1 and trouble(caplog)[0].startswith(
        f"packed weights are not kept in {directory}"
    )


def test_a_disk_that_would_be_full(
    llama: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40, 1000))  # type: ignore[attr-defined]
    load(llama, **W8A8)
    assert "more than half of what the disk has left" in trouble(caplog)[0] and not entries(directory)


# A directory of several.


def tree(number: int, count: int = 4) -> dict[str, Any]:
    return {"parts": [torch.full((2**16,), number, dtype=torch.uint8) for _ in range(count)]}


def write(cache: PackedCache, key: str, number: int = 1) -> None:
    cache.write(key, tree(number), threading.Event())


def test_the_entries_that_were_used_last_stay(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = PackedCache(directory, 900_000)
    for number, key in enumerate("abc"):
        write(cache, key, number)
        os.utime(cache.path(key), ns=(number, number))
    assert entries(directory) == ["a.weights", "b.weights", "c.weights"]
    assert cache.read("a") is not None
    with cache.path("b").open("rb") as held:
        write(cache, "d")
        assert entries(directory) == ["a.weights", "c.weights", "d.weights"]
        assert len(held.read()) > 4 * 2**16, "who reads it still has it"
    write(cache, "c", 7)
    assert entries(directory) == ["a.weights", "c.weights", "d.weights"], (
        "one that is replaced is not counted"
    )
    assert int(cache.read("c")["parts"][0][0]) == 7
    PackedCache(directory, 200_000).write("e", tree(1), threading.Event())
    assert entries(directory) == ["a.weights", "c.weights", "d.weights"]
    assert "more than packed_weights_size" in trouble(caplog)[0]


def test_what_a_dead_writer_left_is_removed_and_no_live_ones(directory: Path) -> None:
    directory.mkdir()
    for name in (".left.tmp", ".live.tmp"):
        (directory / name).write_bytes(b"half")
    with (directory / ".live.tmp").open("rb") as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        write(PackedCache(directory, 2**30), "a")
        assert entries(directory) == [".live.tmp", "a.weights"]


def test_a_writer_that_is_stopped_leaves_nothing(directory: Path) -> None:
    stopped = threading.Event()
    stopped.set()
    PackedCache(directory, 2**30).write("a", tree(1), stopped)
    assert not entries(directory)


_EXIT = """
import sys, threading
from pathlib import Path
import torch
from quire.loader import packed_cache
from quire.loader.packed_cache import BackgroundWriter, PackedCache

begun, write = threading.Event(), packed_cache._write

def held(file, head, tensors, stopped):
    file.write(head)
    begun.set()
    assert stopped.wait(60), "the end of the process waits for nobody"
    return write(file, head, tensors, stopped)

packed_cache._write = held
BackgroundWriter(PackedCache(Path(sys.argv[1]), 2**40), "a", {"parts": [torch.zeros(2**10)] * 8})
assert begun.wait(60)
"""


def test_a_process_that_ends_while_it_writes_ends_well(directory: Path) -> None:
    """It gave SIGABRT, one time in some sixty, and left the half of an entry."""
    done = subprocess.run(
        [sys.executable, "-c", _EXIT, str(directory)], capture_output=True, text=True, timeout=280
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not entries(directory)


_KILLS = """
import os, resource, signal, sys, threading
from pathlib import Path
import torch
from quire.loader import packed_cache
from quire.loader.packed_cache import PackedCache

cache = PackedCache(Path(sys.argv[1]), 2**30)
tree = {"parts": [torch.full((2**18,), number, dtype=torch.uint8) for number in range(8)]}
write, replace = packed_cache._write, Path.replace

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class Dying:
    def __init__(self, file, num_bytes):
        self.file, self.left = file, num_bytes
    def seek(self, offset):
        self.file.seek(offset)
    def write(self, data):
        count = self.file.write(data[:self.left])
        self.left -= count
        if not self.left:
            die()
        return count

def end_within(num_bytes):
    packed_cache._write = lambda file, *rest: write(Dying(file, num_bytes), *rest)

def end_before_the_rename():
    Path.replace = die

def end_behind_the_rename():
    Path.replace = lambda *names: die(replace(*names))

def process(prepare):
    pid = os.fork()
    if not pid:
        try:
            prepare()
            cache.write("a", tree, threading.Event())
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]

def names():
    return sorted(path.name for path in cache.directory.glob("*") if path.name != ".lock")

assert process(lambda: None) == 0
whole = cache.path("a").stat().st_size
moments = [lambda part=part: end_within(int(whole * part)) for part in (0.0, 0.001, 0.3, 0.6, 0.95)]
for prepare in (*moments, end_before_the_rename, end_behind_the_rename):
    cache.path("a").unlink(missing_ok=True)
    assert process(prepare) == signal.SIGKILL
    is_whole = prepare is end_behind_the_rename
    assert [name.endswith(".tmp") for name in names()] == [not is_whole], names()
    found = cache.read("a")
    assert (found is not None) == is_whole
    assert found is None or all(map(torch.equal, found["parts"], tree["parts"]))
cache.path("a").unlink()
full_disk = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
assert process(full_disk) == 0 and not names(), names()
assert process(lambda: None) == 0
assert names() == ["a.weights"] and cache.read("a") is not None, names()
"""


@pytest.mark.row("G18")
def test_writers_that_are_killed_leave_it_sound(directory: Path) -> None:
    """At any moment: an entry is whole or not there, and the next writer removes what was left."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLS, str(directory)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
