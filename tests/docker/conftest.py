"""Images that the tests of this folder share; each is built once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docker.images import Builder, Image
from tests.rows import ROOT


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """QUIRE_TEST_IMAGES names a folder whose images are kept for the next run."""
    kept = os.environ.get("QUIRE_TEST_IMAGES")
    made = Builder(Path(kept) if kept else tmp_path_factory.mktemp("images"))
    made.folder.mkdir(parents=True, exist_ok=True)
    yield made
    made.close()
    if kept is None:
        shutil.rmtree(made.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cpu(builder: Builder) -> Image:
    builder.debian()
    wheels = os.environ.get("PIP_FIND_LINKS")
    # With wheels at hand no index has to carry torch's builds for the CPU.
    index = {"TORCH_INDEX": "file:///nowhere"} if wheels else {}
    return builder.quire("cpu", "Dockerfile.cpu", BASE="localhost/quire-test/debian:12", **index)


@pytest.fixture(scope="session")
def gpu(builder: Builder) -> Image:
    builder.stand_in()
    base = "localhost/quire-test/tritonserver"
    # The stand-in's server is older than its base would be, and takes numpy 1 only.
    return builder.quire("gpu", "Dockerfile", TRITON_IMAGE=base, PIP_ARGS="numpy==1.26.4")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's models of text."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("chat", "generator", "tokenizer"):
        shutil.copytree(ROOT / "model_repository" / name, folder / name)
    folder.chmod(0o755)
    return folder
