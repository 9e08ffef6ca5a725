"""The checks. Each returns what it has seen, or raises Failed, Known or NotShown."""

from __future__ import annotations

import queue
import re
import threading
import time
from typing import Any

import tritonclient.grpc as grpcclient

from tests.compat.site import ENDLESS, PROMPT, WAIT_S, Failed, Known, NotShown, Site, end_of, wait_until
from tests.e2e.triton_calls import infer, tensor

PAUSE_S = 5.0
MAX_GAP_S = 4.0
"""A stub that waits for itself stands still for 5 s."""
HEADER = "Inference-Header-Content-Length"
CHOICES, TOKENS = 8, 64
"""Of the slow reader's request."""


def two_requests(site: Site) -> str:
    """From 26.03 on all requests from the second on were refused, where a frontend asked about itself."""
    site.answer_s()
    time.sleep(PAUSE_S)
    return f"the second, {PAUSE_S:g} s behind the first, took {site.answer_s():.2f} s"


def long_stream(site: Site) -> str:
    over, answers = threading.Event(), list[tuple[int, bytes]]()

    def poll() -> None:
        while not over.wait(0.5):
            for path in ("/v2/health/ready", f"/v2/models/{site.generator}/ready"):
                answers.append(site.http(path, wait_s=10))

    # Special tokens are text then: a model that has come to its end would send nothing.
    asked = {"max_tokens": ENDLESS, "ignore_eos": True, "skip_special_tokens": False}
    polling, gaps, num_tokens = threading.Thread(target=poll), list[float](), 0
    polling.start()
    ends_at = time.monotonic() + site.options.seconds
    try:
        while time.monotonic() < ends_at:
            with site.client() as client, client.stream(PROMPT, model=site.generator, **asked) as stream:
                last = stream.started_at
                for chunk in stream:
                    gaps.append(chunk.received_at - last)
                    last, num_tokens = chunk.received_at, num_tokens + chunk.num_tokens
                    if time.monotonic() >= ends_at:
                        break
    finally:
        over.set()
        polling.join()
    refusals = [answer for answer in answers if answer[0] != 200]
    seen = f"{num_tokens} tokens, largest gap {max(gaps):.2f} s, {len(answers)} times asked whether ready"
    if refusals or max(gaps) > MAX_GAP_S:
        raise Failed(f"{seen}, {len(refusals)} times not, such as {refusals[:1]}")
    return seen


def ensemble(site: Site) -> str:
    if not site.ensemble:
        raise NotShown("no ensemble of text; --ensemble names one")
    endless = {"max_tokens": ENDLESS, "ignore_eos": True, "request_id": "compat-ensemble"}
    with site.client() as client:
        whole = client.chat(PROMPT, model=site.ensemble, max_tokens=16)
        with client.stream(PROMPT, model=site.ensemble, **endless) as left:
            next(left)
    if not whole.num_output_tokens or not whole.finish_reason:
        raise Failed(f"{whole.num_output_tokens} tokens, finish reason {whole.finish_reason!r}")
    freed_s = wait_until(lambda: not site.is_open("compat-ensemble"), "a stream that was left goes on")
    return f"{whole.num_output_tokens} tokens; a stream that was left ended in {freed_s:.2f} s"


def cancellation(site: Site) -> str:
    """A plain client cancels its call; the BLS model of the tests cancels what it has asked for."""
    seen = ""
    if site.bls:
        report = infer(site.grpc_url, site.bls, {"prompt": PROMPT, "take": 3}).as_numpy("report")
        if report[2] != b"cancelled":
            raise Failed(f"what {site.bls} cancelled ended with {report[2]!r}")
        seen = f"{site.bls} cancelled its own; "
    (call,) = site.streams(1, "compat-cancel")
    if not site.is_open("compat-cancel"):
        raise NotShown(f"{seen}a stream as long as the model allows is over at once")
    call.cancel()
    freed_s = wait_until(lambda: not site.is_open("compat-cancel"), "its slot is not free")
    call.client.close()
    return f"{seen}free {freed_s:.2f} s after a call was cancelled"


def slow_reader(site: Site) -> str:
    """One that reads nothing while its responses pile up, an error behind them."""
    go_on, came = threading.Event(), queue.SimpleQueue[tuple[Any, Any]]()

    def read(result: Any, error: Any) -> None:
        go_on.wait(WAIT_S)
        came.put((result, error))

    many = {"max_tokens": TOKENS, "n": CHOICES, "logprobs": 20, "ignore_eos": True}
    counted = finals = errors = 0
    client = grpcclient.InferenceServerClient(site.grpc_url)
    client.start_stream(read)
    try:
        for fields in (many, {"max_tokens": -1}):
            inputs = {"text_input": PROMPT, "stream": True, **fields}
            given = [tensor(name, value) for name, value in inputs.items()]
            client.async_stream_infer(site.generator, given, request_id="compat-slow")
            time.sleep(1.0)
            wait_until(lambda: not site.is_open("compat-slow"), "a slow reader holds it up")
        go_on.set()
        while finals + errors < 2:
            result, error = came.get(timeout=WAIT_S)
            errors += error is not None
            if result is not None and (response := result.get_response()).outputs:
                counted += result.as_numpy("output_ids").size
                finals += response.parameters["triton_final_response"].bool_param
    finally:
        go_on.set()
        client.stop_stream(cancel_requests=True)  # 24.10 forgets to close some
        client.close()
    seen = f"{counted} of {CHOICES * TOKENS} tokens and {errors} error came late"
    if (counted, finals, errors) != (CHOICES * TOKENS, 1, 1):
        raise Failed(f"{seen}, {finals} final responses")
    return seen


def empty_list(site: Site) -> str:
    status, body = site.generate({"stop": []})
    if status == 400 and site.version >= (2, 68):
        raise Known(f"from 26.04 on the server answers 400: {body[:100].decode(errors='replace')}")
    if status != 200:
        raise Failed(f'"stop": [] is answered {status} {body[:200]!r}')
    return '"stop": [] is none'


def big_bodies(site: Site) -> str:
    seen = []
    for megabytes in (5, 20):
        began = time.monotonic()
        status, body = site.generate({}, padding=megabytes << 20)
        if status != 200:
            raise Failed(f"a body of {megabytes} MB is answered {status} {body[:200]!r}")
        status, body = site.generate({"text_input": "x" * (megabytes << 20)})
        if status != 400 or not re.search(rb"max_model_len|at most \d+", body):
            raise Failed(f"a prompt of {megabytes} MB is answered {status} {body[:200]!r}")
        seen.append(f"{megabytes} MB in {time.monotonic() - began:.1f} s")
    return f"read, and refused as a prompt: {', '.join(seen)}"


def bad_header(site: Site) -> str:
    if (2, 70) <= site.version <= (2, 72) and not site.options.dangerous:
        raise Known("26.06 to 26.08 end by it; --dangerous sends it all the same")
    if not site.unary:
        raise NotShown("no model that answers once is ready")
    path, lengths = f"/v2/models/{site.unary}/infer", ("99999999999999999999", "-1", "1000000", "x")
    answers = [str(site.http(path, b"{}", **{HEADER: length})[0]) for length in lengths]
    return f"{HEADER} out of range is answered {', '.join(answers)}"


def unload(site: Site) -> str:
    _, body = site.http("/v2/repository/models/no-such-model/unload", b"{}")
    if b"not allowed" in body or b"restricted" in body:
        raise NotShown("the server has no explicit model control, or wants a --key")
    before, calls = site.ready_models(), site.streams(4)
    began = time.monotonic()
    status, body = site.http(f"/v2/repository/models/{site.generator}/unload", b"{}")
    if status != 200:
        raise Failed(f"unload is answered {status} {body[:200]!r}")
    ends = sorted({end_of(call)[:60] for call in calls})
    drained_s = time.monotonic() - began
    wait_until(lambda: site.generator not in site.ready_models(), "it is still ready")
    for model in (site.generator, *sorted(before - {site.generator})):  # what depends on it goes with it
        if model not in site.ready_models():
            status, body = site.http(f"/v2/repository/models/{model}/load", b"{}")
            if status != 200:
                raise Failed(f"{model} is not loaded again: {status} {body[:200]!r}")
    wait_until(lambda: site.ready_models() == before, f"not all of {before} are ready again")
    seen = f"{len(calls)} streams ended once each within {drained_s:.1f} s ({', '.join(ends)})"
    return f"{seen}; loaded again, it answers in {site.answer_s():.2f} s"


CHECKS = (two_requests, long_stream, ensemble, cancellation, slow_reader)
CHECKS += (empty_list, big_bodies, bad_header, unload)
