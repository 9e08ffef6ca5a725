"""Paths of checkpoints with letters outside ASCII, in which a stub of Triton opens no file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire_common.checkpoint_files import with_ascii_name, without_links

_AS_A_STUB = """
import sys
from pathlib import Path
from quire.errors import CheckpointError
from quire.triton.config_completion import _checkpoint, _find_adapters
from quire_common.errors import ParameterError
from quire_ensemble.triton_model import checkpoint_path

assert sys.getfilesystemencoding() == "ascii"
named, root = sys.stdin.buffer.read().decode("utf-8"), Path("/")

def root_of_adapters():
    values = {"lora_root": named}
    _find_adapters(values, root)
    return values["lora_root"]

def adapter():
    values = {"lora_modules": {"a": named}}
    _find_adapters(values, root)
    return values["lora_modules"]["a"]

for find in (
    lambda: _checkpoint(named, root),
    lambda: checkpoint_path({"checkpoint": named}, root),
    root_of_adapters,
    adapter,
):
    try:
        print(ascii(str(find())))
    except (CheckpointError, ParameterError) as error:
        print(ascii(str(error)))
"""


def as_a_stub(named: Path) -> list[str]:
    """What becomes of a path in a process whose file names are ASCII, as that of a model, a tokenizer model's
    checkpoint, `lora_root` and an adapter: the path, or the complaint."""
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", _AS_A_STUB]
    done = subprocess.run(
        command, env=environment, input=str(named).encode(), capture_output=True, check=True
    )
    return [line.strip("'\"") for line in done.stdout.decode("ascii").splitlines()]


def test_a_stub_takes_a_link_to_such_a_path_and_says_why_not_the_path_itself(tmp_path: Path) -> None:
    """It said that there was no such directory; of a link to it the stub died, as the path that the link
    leads to has no UTF-8 form there."""
    place, link = tmp_path / "é", tmp_path / "link"
    place.mkdir()
    link.symlink_to(place)
    assert as_a_stub(link) == [str(link)] * 4
    complaints = as_a_stub(place)
    says = "Triton's Python opens paths of ASCII letters alone: name a link to it"
    assert all(says in one for one in complaints)
    assert [one.split()[0] for one in complaints] == ["model", "checkpoint", "lora_root", "lora_modules"]
    assert without_links(link) == place, "where names are UTF-8"


@pytest.mark.parametrize(
    ("name", "is_file", "linked"),
    [
        ("plain", False, None),
        ("with space.gguf", True, None),
        ("é", False, "checkpoint"),
        ("modèle.gguf", True, "checkpoint.gguf"),
        ("é/tiny-00001-of-00002.gguf", True, "checkpoint/tiny-00001-of-00002.gguf"),
    ],
)
def test_such_a_checkpoint_has_a_link(name: str, is_file: bool, linked: str | None, tmp_path: Path) -> None:
    path, folder = tmp_path / name, tmp_path / "run"
    folder.mkdir()
    if is_file:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    else:
        path.mkdir()
    for _ in range(2):  # a start that begins again finds the first one's link
        found = with_ascii_name(path, folder / "checkpoint")
        assert found == (path if linked is None else folder / linked)
        assert found.resolve() == path and found.suffix == path.suffix


def test_nothing_is_made_for_what_is_not_there(tmp_path: Path) -> None:
    assert with_ascii_name(tmp_path / "é", tmp_path / "link") == tmp_path / "é"
    assert not any(tmp_path.iterdir())
