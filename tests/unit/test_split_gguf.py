"""GGUF files in several parts, as gguf-split makes them: the public package writes them here."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch

from quire.config import ModelConfig
from quire.errors import CheckpointError
from quire.llm import LLM
from quire.loader.info import checkpoint_state
from quire.loader.load import load_model
from quire_ensemble.builder import build_repository
from quire_ensemble.errors import BuildError
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.gguf_files import write_gguf

FIRST, SECOND, THIRD = (f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return write_gguf(make_checkpoint("llama", folder / "hf"), folder / "model.gguf", "Q8_0")


@pytest.fixture
def split(whole: Path, tmp_path: Path) -> Path:
    """The first of three parts of `whole`."""
    first = write_gguf(whole.parent / "hf", tmp_path / "model.gguf", "Q8_0", tensors_per_part=9)
    assert sorted(file.name for file in tmp_path.iterdir()) == [FIRST, SECOND, THIRD]
    return first


@pytest.mark.row("G16")
def test_a_file_in_parts_is_what_it_is_in_one(whole: Path, split: Path) -> None:
    """Named by its first part, by another, and by its directory: weights, tokenizer and all."""
    expected = LLM(whole, kv_cache_memory="1MiB").generate("hello", max_tokens=8)[0]
    for named in (split, split.with_name(THIRD), split.parent):
        found = LLM(named, kv_cache_memory="1MiB").generate("hello", max_tokens=8)[0]
        assert (found.text, found.token_ids) == (expected.text, expected.token_ids)


def test_a_repository_has_every_part(split: Path, tmp_path: Path) -> None:
    for placement in ("link", "copy"):
        build_repository(split.with_name(SECOND), tmp_path / placement, placement=placement)  # type: ignore[arg-type]
        place = tmp_path / placement / "generator" / "1"
        assert sorted(file.name for file in place.glob("*.gguf")) == [FIRST, SECOND, THIRD]
        load_model(ModelConfig(model=str(place / SECOND)), torch.device("cpu"))


def test_a_change_of_any_part_is_a_change_of_the_checkpoint(split: Path) -> None:
    before = checkpoint_state(str(split))
    assert [name for name, *_ in before] == [str(split.with_name(name)) for name in (FIRST, SECOND, THIRD)]
    os.utime(split.with_name(THIRD), (0, 0))
    assert checkpoint_state(str(split)) != before


def restate(file: Path, key: str, value: int) -> None:
    """Changes a number that the head of a file states."""
    reader = gguf.GGUFReader(file, "r+")
    reader.fields[key].parts[-1][0] = value
    reader.data.flush()


def copy_of_first(split: Path) -> None:
    """The third part becomes the second's tensors, with the third's number."""
    shutil.copyfile(split.with_name(SECOND), split.with_name(THIRD))
    restate(split.with_name(THIRD), "split.no", 2)


def another_model(split: Path) -> None:
    """Its second part says that it is of another architecture, as none that gguf-split wrote does."""
    writer = gguf.GGUFWriter(split.with_name(SECOND), "qwen3")
    for key, value in (("split.no", 1), ("split.count", 3)):
        writer.add_uint16(key, value)
    writer.add_int32("split.tensors.count", 21)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda s: s.with_name(SECOND).unlink(), f"its part {SECOND}: No such file or directory"),
    "short": (lambda s: os.truncate(s.with_name(THIRD), 50), f"its part {THIRD}: ends at byte 50"),
    "no split": (
        lambda s: shutil.copyfile(s.parent.parent / "whole.gguf", s.with_name(SECOND)),
        f"its part {SECOND}: states split.no None, not 1",
    ),
    "count": (lambda s: restate(s, "split.count", 4), "states split.count 4, its name says 3"),
    "count of a part": (
        lambda s: restate(s.with_name(THIRD), "split.count", 2),
        f"its part {THIRD}: states split.count 2, not 3",
    ),
    "number": (
        lambda s: restate(s.with_name(SECOND), "split.no", 2),
        f"its part {SECOND}: states split.no 2, not 1",
    ),
    "first is another": (lambda s: restate(s, "split.no", 1), "states split.no 1, not 0"),
    "tensors": (
        lambda s: restate(s.with_name(SECOND), "split.tensors.count", 9),
        f"its part {SECOND}: states split.tensors.count 9, not 21",
    ),
    "all tensors": (
        lambda s: [restate(s.with_name(n), "split.tensors.count", 20) for n in (FIRST, SECOND, THIRD)],
        "states split.tensors.count 20, its parts hold 21",
    ),
    "twice": (copy_of_first, f"its part {THIRD}: holds blk."),
    "model": (another_model, f"its part {SECOND}: states another general.architecture than the first part"),
}


@pytest.mark.parametrize("lie", REFUSALS)
def test_parts_that_do_not_belong_together_are_refused(lie: str, split: Path, whole: Path) -> None:
    change, words = REFUSALS[lie]
    shutil.copyfile(whole, split.parent.parent / "whole.gguf")
    change(split)
    with pytest.raises(CheckpointError) as refused:
        load_model(ModelConfig(model=str(split)), torch.device("cpu"))
    message = str(refused.value)
    assert message.startswith(f"{split}: broken GGUF file: {words}") and message.isprintable(), message
    with pytest.raises(BuildError, match="broken GGUF file: "):
        build_repository(split, split.parent / "repository")


def test_a_part_under_a_name_that_is_none(split: Path) -> None:
    alone = split.rename(split.with_name("model.gguf"))
    with pytest.raises(CheckpointError, match=r"model\.gguf: .*states split\.count 3, its name says 1"):
        load_model(ModelConfig(model=str(alone)), torch.device("cpu"))
