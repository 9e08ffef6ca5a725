"""A logits processor out of the model's version directory, through the real server."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import AssortedServer
from tests.e2e.triton_calls import stream

pytestmark = pytest.mark.server


@pytest.mark.row("A34", clauses=("plugin", "refusal"))
def test_a_plug_in_bans_token_5_and_unlisted_code_is_refused(assorted: AssortedServer) -> None:
    url = assorted.server.grpc_url
    # All of the weight lies on token 5, unless it is banned.
    asked = {"input_ids": [7, 8, 9], "max_tokens": 12, "ignore_eos": True, "logit_bias": '{"5": 100}'}
    assert stream(url, "plugged", asked).token_ids == [5] * 12
    ban = json.dumps([{"name": "ban", "args": {"token": 5}}])
    assert 5 not in (tokens := stream(url, "plugged", {**asked, "logits_processors": ban}).token_ids)
    assert len(tokens) == 12
    for name in ("unlisted", "unlisted.py:Ban", "plugin.py:Ban", "os:system"):
        reply = stream(url, "plugged", {**asked, "logits_processors": json.dumps([name])})
        assert reply.error is not None and "logits_processors" in str(reply.error), reply
        assert "is not listed" in str(reply.error)
    assert not (assorted.root / "imported").exists()
    assert stream(url, "plugged", asked).token_ids == [5] * 12
