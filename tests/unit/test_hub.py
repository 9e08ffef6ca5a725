"""Checkpoints named as a hub names them, fetched by the real `huggingface_hub` from a hub of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_ensemble.hub import find_checkpoint
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.gguf_files import write_gguf
from tests.fixtures.hub import COMMIT, serve_hub

_PROGRAM = """
import sys, json
from quire_ensemble.hub import find_checkpoint
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
            env={**self.env, **env}, capture_output=True, text=True, check=True, timeout=120,
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
    whole, (found,) = hub.find("owner/tiny-GGUF"), hub.find("owner/tiny-GGUF/tiny-Q8_0.gguf")
    assert "no config.json; name one of its .gguf files" in whole[0]
    assert Path(found).name == "tiny-Q8_0.gguf" and Path(found).read_bytes()[:4] == b"GGUF"


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
