"""A cache that cannot keep anything costs the start some seconds, and nobody an answer."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.server import MODEL_REPOSITORY, ServeRepository


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "cache"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "none", str(folder)]
    if subprocess.run(command, check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_the_service_goes_on_when_the_disk_of_the_cache_is_full(
    serve_repository: ServeRepository, full_disk: Path, tmp_path: Path
) -> None:
    """The server did not start, nor did an engine have kernels: neither the backend directory nor what was
    compiled could be written. Each is made for the process that needs it now, and says so in one line."""
    compiler = tmp_path / "fast-g++"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
    compiler.chmod(0o755)
    environment = {"QUIRE_CACHE_DIR": str(full_disk), "CXX": str(compiler)}
    server = serve_repository(MODEL_REPOSITORY, "--load-model=generator", env=environment)
    body = json.dumps({"text_input": "hello", "max_tokens": 4, "temperature": 0.0}).encode()
    url = f"http://{server.http_url}/v2/models/generator/generate_stream"
    answer = urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=60).read().decode()
    assert '"text_output"' in answer and "error" not in answer
    log = server.log.read_text("utf-8")
    assert "PyTorch is used instead" not in log
    assert log.count("the backend directory cannot be kept in") == 1
    assert log.count("what is made cannot be kept in") == 1
    assert f"{full_disk}/kernels: No space left on device" in log
