"""`quire-client profile` through the real server: a file that holds what the engine did meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire_client import Client, InvalidArgument
from tests.e2e.conftest import ENDLESS, TinyServer
from tests.fixtures.pace import paced

pytestmark = pytest.mark.server


@pytest.mark.row("G26", clauses=("profile", "roofline"))
def test_a_profile_of_a_running_stream_is_written(tiny: TinyServer, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    command = [sys.executable, "-m", "quire_client.cli", "profile", str(file), "--steps=40"]
    command += ["--url", tiny.server.grpc_url]
    with Client(tiny.server.grpc_url) as client:
        endless = {"max_tokens": ENDLESS, "ignore_eos": True, "logits_processors": paced()}
        with client.stream("Once", model="generator", **endless) as stream:
            next(iter(stream))
            shown = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True).stdout
        with pytest.raises(InvalidArgument, match="cache_control"):
            client.cache_control({"command": "profile", "steps": 0})
    trace = json.loads(file.read_bytes())
    steps = [event["args"] for event in trace["traceEvents"] if "kind" in event.get("args", {})]
    assert len(steps) == 40 and all(step["decode_rows"] == step["rows"] == 1 for step in steps)
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"schedule", "wait", "update", "send", "prepare", "model", "sample", "collect"} <= names
    decode = trace["otherData"]["roofline"]["phases"]["decode"]
    assert decode["steps"] == 40 and decode["bound"] in ("memory", "compute")
    heading, line, limits, share = shown.splitlines()
    assert heading.split()[-2:] == ["BOUND", "BY"] and line.split()[0] == "decode"
    assert line.split()[-1] == decode["bound"]
    assert limits.startswith("limits: ") and share.startswith("computing ")
