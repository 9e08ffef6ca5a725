"""`quire healthcheck`: whether an engine still computes, for liveness probes.

A damaged tritonserver can keep all its ports open and answer "ready"; in many releases so does one whose stub
has died. So the engine is asked, through the model, how many steps it has finished, until the number changes
or the probe's time is over. An idle engine computes a step for that. A request of the probe's own could wait
behind others, find the queue full, or its tenant's quota used up.
"""

from __future__ import annotations

import json
import queue
import re
import sys
import time
from typing import Any

import click

PAUSE_S = 0.2
GRPC_MARGIN_S = 1.0
NEAR = re.compile(r"(localhost|127\.[\d.]+|\[::1\]):")
"""Matches a loopback address, for which the environment's proxy is not used. `quire_client` repeats this
rule, because neither package depends on the other."""
FULL = "the queue is full"
"""Part of a frontend's error when too many requests, or too long ones, wait to be parsed."""


class ProbeError(Exception):
    """The model did not prove that it works; the message is one line."""


def probe(url: str, model: str, timeout_s: float) -> str:
    """Asks `model` at gRPC `url` ("host:port") for a sign of progress. From an engine that is asleep, any
    answer counts as one.

    Args:
        timeout_s: seconds for the whole probe, connecting included. If the engine had work at the first
            answer, a step that takes longer is no failure until the engine's watchdog considers it overdue.

    Returns:
        The proof of progress, in words.

    Raises:
        ProbeError: no connection, an error from the server, or no progress in time.
    """
    deadline = time.monotonic() + timeout_s
    first = now = _engine(url, model, deadline)
    if first["is_asleep"]:
        return "asleep, and it answers"
    # A count that begins anew is that of an engine that took over.
    while now["num_finished_steps"] == first["num_finished_steps"]:
        if time.monotonic() + 2 * PAUSE_S > deadline:
            if first["has_work"] and not now["is_overdue"]:
                return "busy with a long step"
            raise ProbeError(f"no step was finished within {timeout_s:g} s")
        time.sleep(PAUSE_S)
        now = _engine(url, model, deadline)
    return "busy, and steps get done" if first["has_work"] else "a token came"


def _engine(url: str, model: str, deadline: float) -> dict[str, Any]:
    """Returns the engine's answer to the cache command `health`; asks again while the queue is full.

    Raises:
        ProbeError: an error came, or no answer by the deadline.
    """
    while True:
        try:
            return dict(json.loads(_ask(url, model, deadline)))
        except ProbeError as error:
            if FULL not in str(error) or time.monotonic() + PAUSE_S > deadline:
                raise
            time.sleep(PAUSE_S)


def _ask(url: str, model: str, deadline: float) -> str:
    """Returns the model's answer to the cache command `health`, JSON text.

    Raises:
        ProbeError: an error came, or no answer by the deadline.
    """
    import numpy as np
    import tritonclient.grpc as grpcclient
    from tritonclient.utils import InferenceServerException

    timeout_s = max(0.001, deadline - time.monotonic())
    responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
    tensor = grpcclient.InferInput("cache_control", [1], "BYTES")
    tensor.set_data_from_numpy(np.array(['{"command": "health"}'], dtype=np.object_))
    text = ""
    channel_args = [("grpc.enable_http_proxy", 0)] if NEAR.match(url) else []
    client = grpcclient.InferenceServerClient(url, channel_args=channel_args)
    finished = False
    try:
        # gRPC's own end of time is only for what hangs in there: the queue's is told in our words.
        client.start_stream(
            lambda result, error: responses.put((result, error)), stream_timeout=timeout_s + GRPC_MARGIN_S
        )
        client.async_stream_infer(
            model,
            [tensor],
            outputs=[grpcclient.InferRequestedOutput("text_output")],
            enable_empty_final_response=True,
        )
        while not finished:
            result, error = responses.get(timeout=max(0.0, deadline - time.monotonic()))
            if error is not None:
                raise error
            part = result.as_numpy("text_output")
            text += "" if part is None or not part.size else part[0].decode()
            finished = result.get_response().parameters["triton_final_response"].bool_param
    except queue.Empty:
        raise ProbeError(f"no answer within {timeout_s:.0f} s") from None
    except InferenceServerException as error:
        raise ProbeError(" ".join(str(error).split())) from error
    finally:
        # A stream that ended well is closed, not cancelled: old servers leak the request of a cancelled one.
        client.stop_stream(cancel_requests=not finished)
        client.close()
    return text


@click.command()
@click.option("--url", default="127.0.0.1:8001", show_default=True, help="gRPC address.")
@click.option("--model", default="generator", show_default=True)
@click.option("--timeout", default=5.0, show_default=True, help="Seconds for the whole probe.")
def healthcheck(url: str, model: str, timeout: float) -> None:
    """Check that a served model computes tokens, or is asleep; status 0 if so."""
    began = time.monotonic()
    try:
        proof = probe(url, model, timeout)
    except ProbeError as error:
        click.echo(f"quire: {model} at {url} is NOT healthy: {error}", err=True)
        sys.exit(1)
    click.echo(f"quire: {model} at {url} is healthy ({proof}, {(time.monotonic() - began) * 1000:.0f} ms)")
