"""A missing or broken checkpoint fails the load with one clear line that names the file.

Of every place where a load may fail one kind; all that may be wrong is in test_loader.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.server import ServerProcess

pytestmark = pytest.mark.server


def model(repository: Path, name: str, checkpoint: Path | str | None, **options: object) -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text('backend: "quire"\n')
    if checkpoint is not None:
        (version / "quire.json").write_text(json.dumps({"model": str(checkpoint), **options}))
    else:
        (version / "README").write_text("no checkpoint here\n")
    return version


@pytest.mark.row("A42", clauses=("refusal",))
@pytest.mark.row("G16")
def test_a_broken_checkpoint_is_one_clear_line(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    good = make_checkpoint("llama", tmp_path / "good")
    truncated = shutil.copytree(good, tmp_path / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])

    model(repository, "nothing", None)
    model(repository, "nowhere", "/does/not/exist")
    model(repository, "truncated", truncated)
    model(repository, "typo", good, max_num_seq=3)
    model(repository, "tiny_pool", good, num_blocks=1)

    server = ServerProcess(repository, tmp_path)
    with pytest.raises(AssertionError, match="ended with status"):
        server.start()
    # Triton repeats a load error in its table; one occurrence is enough, and none may be a traceback.
    text = " ".join(server.log_text().split())
    for words in (
        "nothing: no checkpoint:",
        "nowhere: model '/does/not/exist': no such directory or file",
        "truncated/model.safetensors",
        "configuration key 'max_num_seq' is unknown; did you mean 'max_num_seqs'?",
        "num_blocks=1 gives a KV cache of 1 blocks",
    ):
        assert words in text, f"{words!r} is not in:\n{server.log_text()}"
    assert "Traceback" not in text
    assert server.leftovers() == []
