"""A logits processor out of the model's version directory, through the real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import write_generator
from tests.e2e.triton_calls import stream
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.server import ServeRepository

PLUGIN = """
class Ban:
    def __init__(self, token):
        self.token = token

    def __call__(self, token_ids, logits):
        logits[self.token] = float("-inf")
"""


@pytest.mark.row("A34", clauses=("plugin", "refusal"))
def test_a_plug_in_bans_token_5_and_unlisted_code_is_refused(
    tmp_path: Path, serve_repository: ServeRepository
) -> None:
    checkpoint = make_checkpoint("llama", tmp_path / "llama")
    repository = tmp_path / "repository"
    listed = {"ban": "plugin.py:Ban"}
    write_generator(repository, "generator", checkpoint, logits_processors=listed, max_model_len=256)
    version = repository / "generator" / "1"
    (version / "plugin.py").write_text(PLUGIN)
    (version / "unlisted.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n{PLUGIN}")
    url = serve_repository(repository).grpc_url
    # All of the weight lies on token 5, unless it is banned.
    asked = {"input_ids": [7, 8, 9], "max_tokens": 12, "ignore_eos": True, "logit_bias": '{"5": 100}'}
    assert stream(url, "generator", asked).token_ids == [5] * 12
    ban = json.dumps([{"name": "ban", "args": {"token": 5}}])
    assert 5 not in (tokens := stream(url, "generator", {**asked, "logits_processors": ban}).token_ids)
    assert len(tokens) == 12
    for name in ("unlisted", "unlisted.py:Ban", "plugin.py:Ban", "os:system"):
        reply = stream(url, "generator", {**asked, "logits_processors": json.dumps([name])})
        assert reply.error is not None and "logits_processors" in str(reply.error), reply
        assert "is not listed" in str(reply.error)
    assert not (tmp_path / "imported").exists()
    assert stream(url, "generator", asked).token_ids == [5] * 12
