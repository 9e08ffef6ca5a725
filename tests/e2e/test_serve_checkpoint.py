"""`quire serve CHECKPOINT`: no repository is written by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from quire import LLM
from quire_client import Client
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.gguf_files import write_gguf

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"


def test_a_gguf_file_is_served_with_its_tokenizer_and_template(tmp_path: Path, serve_repository: Any) -> None:
    """Its path has letters outside ASCII, in which Triton's Python opens no file: it was not found."""
    (tmp_path / "é 1").mkdir()
    file = tmp_path / "é 1" / "modèle.gguf"
    write_gguf(make_checkpoint("llama", tmp_path / "hf"), file, "Q8_0", TEMPLATE)
    asked: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    options = {
        "max_model_len": 512,
        "num_blocks": 64,
        "dtype": "float32",
        "result_cache": json.dumps({"memory": 2**20}),
    }
    expected = LLM(file, **options).generate(["<s>hello"], **asked)[0]
    (tmp_path / "empty").mkdir()
    arguments = [f"--option={key}={value}" for key, value in options.items()]
    server = serve_repository(tmp_path / "empty", str(file), *arguments)
    with Client(server.grpc_url) as client:
        found = client.chat("hello", **asked)
        assert found.token_ids == tuple(expected.token_ids)
        assert found.text == expected.text
        guided = client.chat("hello", max_tokens=30, structured_output={"regex": "[a-c]{6}"})
        assert re.fullmatch("[a-c]{6}", guided.text)
        assert client.chat("hello", **asked).token_ids == found.token_ids  # from the result cache
    run_files = list(Path("/tmp").glob(f"quire-run-{server.shm_prefix.split('-')[1]}*"))
    assert run_files
    server.stop()
    assert server.leftovers() == [] and not any(path.exists() for path in run_files)
