"""The benchmark of the preprocessor runs, compares pixels, and tells both times."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import images
from tests.fixtures.vision_checkpoints import make_vision_checkpoint


@pytest.mark.row("H10", clauses=("speed",))
@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_both_are_measured_and_make_the_same_pixels(kind: str, tmp_path: Path) -> None:
    path = make_vision_checkpoint(kind, tmp_path / kind)
    results = images.measure(path, [(90, 60), (64, 64)], [1, 2], rounds=2)
    assert [(one.size, one.images) for one in results] == [
        ((90, 60), 1), ((90, 60), 2), ((64, 64), 1), ((64, 64), 2),
    ]  # fmt: skip
    assert all(min(one.quire_s, one.transformers_s) > 0 for one in results)
    lines = images.table(results).splitlines()
    assert len(lines) == 2 + len(results) and "of transformers'" in lines[0]


def test_other_pixels_are_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_vision_checkpoint("llava", tmp_path / "llava")
    monkeypatch.setattr(images, "TOLERANCE", -1.0)
    with pytest.raises(AssertionError, match="Not equal"):
        images.measure(path, [(90, 60)], [1], rounds=1)
