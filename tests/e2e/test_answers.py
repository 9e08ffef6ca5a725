"""Answers as clients of the real server see them: their timing, perf_analyzer's requests, an idle server."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from benchmarks import perf_analyzer
from tests.e2e.conftest import TinyServer
from tests.e2e.triton_calls import infer, stream, tensor
from tests.fixtures.pace import paced_input
from tests.fixtures.threads import OWN, Woken, engines_and_stubs, of_triton, wakes_in
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.server

PROMPTS = ("The first", "A second prompt", "And one more")
WINDOW_S = 2.0
STRAY = 1
"""Times that the threads of a process may wake in a window in which nothing is asked of them."""


@pytest.mark.row("A38")
def test_the_times_are_parts_of_what_the_client_measures(tiny: TinyServer) -> None:
    """Queue, prefill and decode are the whole of the server's part, which lies within what the client
    measures; a paced stream takes as long as it is paced, in decode."""
    tokens, token_s = 24, 0.02
    asked = {"text_input": "The times add up", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    sent = time.monotonic()
    reply = stream(
        tiny.server.grpc_url, "generator", {**asked, "return_timing": True, **paced_input(token_s=token_s)}
    )
    took_ms = (time.monotonic() - sent) * 1000
    timing = json.loads(reply.results[-1].as_numpy("timing")[0])
    parts = timing["queue"], timing["prefill"], timing["decode"]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(timing["total"], abs=0.003)
    assert timing["queue"] + timing["prefill"] <= timing["first_token"] <= timing["total"] <= took_ms
    assert timing["decode"] >= (tokens - 1) * token_s * 1000 and timing["prefill"] >= token_s * 1000


@pytest.mark.slow
@pytest.mark.row("A38", clauses=("timing",))
def test_the_times_add_up_to_what_the_client_measures(tiny: TinyServer) -> None:
    """Queue, prefill and decode are the whole of the server's part, and the first token lies where the client
    sees it: what its own clock shows is more by the way there and back alone.

    The request that was least disturbed counts, of as many as it takes: other work on the machine only adds.
    """
    asked = {"text_input": "The times add up", "max_tokens": 24, "ignore_eos": True, "stream": True}
    outputs = [grpcclient.InferRequestedOutput(name) for name in ("text_output", "timing")]
    arrived: queue.Queue[tuple[float, Any, Any]] = queue.Queue()
    missing_whole, missing_first = [], []
    with grpcclient.InferenceServerClient(tiny.server.grpc_url) as client:
        client.start_stream(lambda result, error: arrived.put((time.monotonic(), result, error)))
        for _ in range(300):
            inputs = [tensor(name, value) for name, value in asked.items()]
            sent = time.monotonic()
            client.async_stream_infer("generator", inputs, outputs=outputs)
            times, timing = [], {}
            while True:
                when, result, error = arrived.get(timeout=60)
                assert error is None, error
                response = result.get_response()
                if response.outputs:
                    times.append(when)
                    timing = json.loads(result.as_numpy("timing")[0])
                if response.parameters["triton_final_response"].bool_param:
                    break
            parts = timing["queue"], timing["prefill"], timing["decode"]
            assert min(parts) >= 0 and sum(parts) == pytest.approx(timing["total"], abs=0.003)
            assert timing["queue"] + timing["prefill"] <= timing["first_token"] <= timing["total"]
            missing_whole.append((times[-1] - sent) * 1000 - timing["total"])
            missing_first.append((times[0] - sent) * 1000 - timing["first_token"])
            if max(min(missing_whole), min(missing_first)) < 5:
                break
        client.stop_stream()
    assert 0 < min(missing_whole) < 5, missing_whole
    assert 0 < min(missing_first) < 5, missing_first


def drive(folder: Path, model: str, inputs: dict[str, Any], *arguments: str) -> list[list[dict[str, Any]]]:
    """The responses of each request that perf_analyzer sends, as it exports them."""
    data, export = folder / "input.json", folder / "export.json"
    fixed = {name: [value] for name, value in inputs.items()}
    entries = [{"text_input": {"content": [prompt], "shape": [1]}, **fixed} for prompt in PROMPTS]
    data.write_text(json.dumps({"data": entries}), "utf-8")
    command = [
        *(str(perf_analyzer.find_binary()), "-m", model, "--input-data", str(data)),
        *("--request-count", "6", "--concurrency-range", "2:2", "--profile-export-file", str(export)),
        *arguments,
    ]
    pytriton = importlib.util.find_spec("pytriton")
    assert pytriton is not None and pytriton.origin is not None
    libraries = perf_analyzer.library_path(site_packages=Path(pytriton.origin).parents[1])
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    for _ in range(perf_analyzer.ATTEMPTS):
        export.unlink(missing_ok=True)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        try:
            document = json.loads(export.read_bytes())
        except ValueError:
            continue  # cut: see `benchmarks.perf_analyzer`
        requests = [r for experiment in document["experiments"] for r in experiment["requests"]]
        assert len(requests) >= 6
        return [request["response_outputs"] for request in requests]
    raise AssertionError(f"no whole export in {perf_analyzer.ATTEMPTS} attempts")


def texts_of(tiny: TinyServer, inputs: dict[str, Any]) -> set[str]:
    answers = (
        infer(tiny.server.grpc_url, "generator_unary", {"text_input": prompt, **inputs}) for prompt in PROMPTS
    )
    return {answer.as_numpy("text_output")[0].decode() for answer in answers}


@pytest.mark.row("A3", clauses=("perf",))
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_perf_analyzer_drives_the_unary_model_synchronously(
    tiny: TinyServer, tmp_path: Path, protocol: str
) -> None:
    inputs = {"max_tokens": 12, "ignore_eos": True}
    url = tiny.server.grpc_url if protocol == "grpc" else tiny.server.http_url.removeprefix("http://")
    answers = drive(tmp_path, "generator_unary", inputs, "-i", protocol, "-u", url, "--sync")
    assert all(len(responses) == 1 for responses in answers)
    assert {responses[0]["text_output"] for responses in answers} == texts_of(tiny, inputs)


@pytest.mark.parametrize("interval", [{}, {"stream_interval": 4}, {"stream_interval_ms": 10}], ids=str)
def test_perf_analyzer_sees_whole_streams_in_every_mode(
    tiny: TinyServer, tmp_path: Path, interval: dict[str, int]
) -> None:
    """What it exports of a request's responses, put together, is the text of the unary model."""
    inputs = {"max_tokens": 12, "ignore_eos": True}
    arguments = ("-i", "grpc", "-u", tiny.server.grpc_url, "--async", "--streaming")
    answers = drive(tmp_path, "generator", {**inputs, "stream": True, **interval}, *arguments)
    expected = texts_of(tiny, inputs)
    for responses in answers:
        assert "".join(response.get("text_output", "") for response in responses) in expected
        if interval == {"stream_interval": 4}:
            assert len([r for r in responses if "text_output" in r]) <= 5


@pytest.mark.row("G33", clauses=("no-polling",))
def test_nothing_of_ours_wakes_where_nothing_is_asked(tiny: TinyServer) -> None:
    """Over 2 s without an open request no thread of an engine wakes, and none of a generator's stub but the
    two that Triton itself has in every Python model: they look whether there is a request, and whether the
    server is alive. (While streams wait: test_metrics.py.)
    """
    asked = {"text_input": "then silence", "max_tokens": 5, "stream": True}
    assert stream(tiny.server.grpc_url, "generator", asked).error is None
    engines, stubs = engines_and_stubs(tiny.server, "generator")
    assert engines and len(stubs) >= 3
    found: dict[int, Woken] = {}

    def is_quiet() -> bool:
        found.update(wakes_in(engines + stubs, WINDOW_S))
        ours = {pid: found[pid] for pid in engines}
        ours |= {pid: [one for one in found[pid] if one[0].startswith(OWN)] for pid in stubs}
        return all(sum(count for _, count in threads) <= STRAY for threads in ours.values())

    wait_until(is_quiet, lambda: found)  # figures of what was before are sent once more, seconds later
    for pid in stubs:
        assert {name for name, _ in found[pid]} >= {"quire-responder", "quire-metrics", "quire-intake-0"}
        assert len(of_triton(found[pid])) <= 2, found[pid]
