"""Checkpoints named as a hub names them, fetched by the real `huggingface_hub` from a hub of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.loader.load import load_model
from quire.triton.config_completion import read_engine_config
from quire_common.gguf_file import GGUFFile
from quire_common.hub import find_checkpoint
from quire_ensemble.builder import build_repository
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.gguf_files import write_gguf
from tests.fixtures.hub import COMMIT, serve_hub

_PROGRAM = """
import sys, json
from quire_common.hub import find_checkpoint
found = []
for name in sys.argv[1:]:
    try:
        found.append(str(find_checkpoint(name)))
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""


class Hub:
    def __init__(self, url: str, asked: list[str], home: Path) -> None:
        self.asked = asked
        self.env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        self.env.pop("HF_HUB_OFFLINE", None)

    def find(self, *names: str, **env: str) -> list[str]:
        """What `find_checkpoint` says of names, in a process of its own: settings are read once."""
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, *names],
            env={**self.env, **env}, capture_output=True, text=True, check=True, timeout=280,
        )  # fmt: skip
        found: list[str] = json.loads(done.stdout)
        return found


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    checkpoint = make_checkpoint("llama", root / "files" / "owner" / "tiny")
    (checkpoint / "modeling_tiny.py").write_text("raise SystemExit")
    (checkpoint / "pytorch_model.bin").write_bytes(b"a pickle")
    (root / "files" / "owner" / "tiny-GGUF").mkdir()
    write_gguf(checkpoint, root / "files" / "owner" / "tiny-GGUF" / "tiny-Q8_0.gguf", "Q8_0")
    many = root / "files" / "owner" / "many-GGUF"
    (many / "F16").mkdir(parents=True)
    for kind in ("F16", "BF16", "Q8_0", "Q4_0"):
        write_gguf(checkpoint, many / f"tiny-{kind}.gguf", kind)
    (many / "tiny-Q8_0.gguf").rename(many / "tiny-UD-Q8_0.gguf")
    (many / "mmproj-Q4_0.gguf").write_bytes(b"a tower")
    (many / "tiny-F16.gguf").unlink()
    write_gguf(checkpoint, many / "F16" / "tiny-F16.gguf", "F16", tensors_per_part=9)
    write_gguf(checkpoint, many / "tiny-Q5_0.gguf", "Q5_0", tensors_per_part=13)
    (many / "tiny-Q5_0-00002-of-00002.gguf").unlink()
    with serve_hub(root / "files") as (url, asked):
        yield Hub(url, asked, root / "home")


def test_a_repository_is_fetched_once_without_code_and_pickles(hub: Hub) -> None:
    (found,) = hub.find("owner/tiny")
    names = {path.name for path in Path(found).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not names & {"modeling_tiny.py", "pytorch_model.bin"}
    assert not any(".py" in path or ".bin" in path for path in hub.asked if "resolve" in path)
    assert hub.find("owner/tiny@main", f"owner/tiny@{COMMIT}") == [found, found]
    assert hub.find("owner/tiny", HF_HUB_OFFLINE="1") == [found]
    downloads = [path for path in hub.asked if path.endswith("model.safetensors")]
    hub.find("owner/tiny")
    assert [path for path in hub.asked if path.endswith("model.safetensors")] == downloads


def test_one_file_of_a_repository(hub: Hub) -> None:
    names = ("owner/tiny-GGUF/tiny-Q8_0.gguf", "owner/tiny-GGUF", "owner/tiny-GGUF:q8_0@main")
    found = hub.find(*names)
    assert Path(found[0]).name == "tiny-Q8_0.gguf" and Path(found[0]).read_bytes()[:4] == b"GGUF"
    assert found == [found[0]] * 3 == hub.find(*names, HF_HUB_OFFLINE="1")


def test_what_is_planned_may_be_a_hubs(hub: Hub) -> None:
    command = [sys.executable, "-m", "quire.cli", "plan", "owner/tiny-GGUF", "--json", "--memory", "4GiB"]
    done = subprocess.run(command, env=hub.env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["name"].endswith("tiny-Q8_0.gguf")


def test_one_type_of_several_in_all_its_parts(hub: Hub) -> None:
    """The same file as llama.cpp and as vLLM name it, by any part; and nothing beside it is fetched."""
    part = "owner/many-GGUF/F16/tiny-F16-00002-of-00003.gguf"
    names = ("owner/many-GGUF:F16", "owner/many-GGUF:f16@main", part)
    found = hub.find(*names)
    first = Path(found[0])
    assert found == [str(first)] * 3 == hub.find(*names, HF_HUB_OFFLINE="1")
    assert sorted(file.name for file in first.parents[1].rglob("*.gguf")) == [
        f"tiny-F16-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]
    assert len(GGUFFile.open(first).files) == 3
    assert [Path(one).name for one in hub.find("owner/many-GGUF:Q4_0", "owner/many-GGUF:UD-Q8_0")] == [
        "tiny-Q4_0.gguf", "tiny-UD-Q8_0.gguf",
    ]  # fmt: skip


def test_what_is_named_by_none_or_several_is_told_with_what_there_is(hub: Hub) -> None:
    first, others = "F16/tiny-F16-00001-of-00003.gguf", "tiny-BF16.gguf, tiny-Q4_0.gguf, "
    last = "tiny-Q5_0-00001-of-00002.gguf, tiny-UD-Q8_0.gguf"
    none = f"it has no such .gguf file; it has: {first}, mmproj-Q4_0.gguf, {others}{last}"
    problems = {
        "owner/many-GGUF": f"several .gguf files may be meant: {first}, {others}{last}",
        "owner/many-GGUF:0": f"several .gguf files may be meant: tiny-Q4_0.gguf, {last}",
        "owner/many-GGUF:Q4_K_M": none,
        "owner/many-GGUF/tiny-Q8_0.gguf": none,
        "owner/many-GGUF:Q5_0": "it has no tiny-Q5_0-00002-of-00002.gguf, a part of "
        "tiny-Q5_0-00001-of-00002.gguf",
        "owner/tiny:Q4_K_M": "it has no such .gguf file; it has: none",
    }
    told = [
        f"HubError: {name}: neither a path nor to be had from the hub: {problems[name]}" for name in problems
    ]
    assert hub.find(*problems) == told


def test_a_model_of_a_repository_is_a_hubs_file(hub: Hub, tmp_path: Path) -> None:
    """The cache's files are links to others without a name that says what they are."""
    (first,) = hub.find("owner/many-GGUF:F16")
    build_repository(Path(first), tmp_path)
    version = tmp_path / "generator" / "1"
    assert len(list(version.glob("*.gguf"))) == 3
    for folder in (version, tmp_path / "generator_unary" / "1"):
        config = read_engine_config({}, folder)
        assert config.model.model == str(version / Path(first).name)
    load_model(config.model, torch.device("cpu"))


def test_what_is_not_there_is_told_in_one_line(hub: Hub) -> None:
    names = ("owner/none", "owner/tiny@v9", "owner/tiny-GGUF/other.gguf")
    for name, told in zip(names, hub.find(*names), strict=True):
        assert told.startswith(f"HubError: {name}: neither a path nor to be had from the hub: ")
        assert "\n" not in told
    (offline,) = hub.find("owner/never-fetched", HF_HUB_OFFLINE="1")
    assert offline.startswith("HubError: owner/never-fetched: ")


@pytest.mark.parametrize("name", ["/a/b", "../a", "./a/b", "a", "a/b/c", "~/a", "a/b/../c.gguf", "a b/c"])
def test_what_is_no_name_of_a_hub_is_a_path(name: str) -> None:
    assert find_checkpoint(name) == Path(name).expanduser()


def test_what_exists_is_never_looked_for_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert find_checkpoint("owner/tiny") == Path("owner/tiny")


@pytest.mark.parametrize(
    ("header", "value"),
    [("etag", '"../../../../../out"'), ("etag", '"{root}/out"'), ("x_repo_commit", "../../../../../out")],
)
def test_no_answer_of_a_hub_is_written_outside_the_cache(header: str, value: str, tmp_path: Path) -> None:
    """`huggingface_hub` 2.4 names files after these headers, wherever that leads."""
    repository = tmp_path / "files" / "owner" / "bad"
    repository.mkdir(parents=True)
    (repository / "config.json").write_text("{}")
    with serve_hub(tmp_path / "files", **{header: value.format(root=tmp_path)}) as (url, asked):
        (found,) = Hub(url, asked, tmp_path / "home").find("owner/bad")
    assert found.startswith("HubError: owner/bad: ") and f"the hub's {header.replace('_', '-')} is" in found
    assert not [file for file in tmp_path.rglob("out*") if file.is_file()]
