"""`quire healthcheck`: whether tokens still come, for liveness probes.

A damaged tritonserver can keep all its ports open and answer "ready", and one whose stub has died goes on
reporting ready for years of releases. So an idle model is asked for a real token; one that has work is
healthy when its engine finishes steps, as a request of the probe's own would only wait behind others or find
the queue full.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from typing import Any

import click

PROBE_TOKEN_ID = 1  # inside every vocabulary
PAUSE_S = 0.2
FULL = "the queue is full"
"""In what a frontend says that has too many requests to read to take another."""


class ProbeError(Exception):
    """The model did not prove that it works; the message is one line."""


def probe(url: str, model: str, timeout_s: float) -> str:
    """Ask `model` at gRPC `url` ("host:port") for a sign of progress.

    Args:
        timeout_s: for the whole probe, connecting included; it should exceed the longest step.

    Returns:
        What proved it.

    Raises:
        ProbeError: no connection, an error from the server, or no progress in time.
    """
    deadline = time.monotonic() + timeout_s
    first: dict[str, Any] = {}
    failure: ProbeError | None = None
    while not first or time.monotonic() < deadline:
        now = _engine(url, model, deadline)
        first = first or now
        # A count that begins anew is that of an engine that took over.
        if now["num_finished_steps"] != first["num_finished_steps"]:
            return "busy, and steps get done"
        if now["has_work"]:
            time.sleep(PAUSE_S)
            continue
        if failure is not None:
            raise failure
        try:
            # Others may come meanwhile and go first: half of the time is left to see that they do.
            half = (time.monotonic() + deadline) / 2
            asked = {"input_ids": [PROBE_TOKEN_ID], "max_tokens": [1]}
            if _ask(url, model, asked, "output_ids", half):
                return "a token came"
            raise ProbeError("the response holds no token")
        except ProbeError as error:
            failure = error
    raise failure or ProbeError(f"no step was finished within {timeout_s:g} s")


def _engine(url: str, model: str, deadline: float) -> dict[str, Any]:
    """What the engine says of its steps."""
    while True:
        try:
            answer = _ask(url, model, {"cache_control": ['{"command": "health"}']}, "text_output", deadline)
            return dict(json.loads(answer[0]))
        except ProbeError as error:
            if FULL not in str(error) or time.monotonic() + PAUSE_S > deadline:
                raise
            time.sleep(PAUSE_S)


def _ask(url: str, model: str, inputs: dict[str, list[Any]], output: str, deadline: float) -> list[Any]:
    """The elements of an output in all responses to one request.

    Raises:
        ProbeError: an error came, or no answer by the deadline.
    """
    import numpy as np
    import tritonclient.grpc as grpcclient
    from tritonclient.utils import InferenceServerException

    timeout_s = max(0.001, deadline - time.monotonic())
    responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
    tensors = []
    for name, values in inputs.items():
        is_text = isinstance(values[0], str)
        tensors.append(grpcclient.InferInput(name, [len(values)], "BYTES" if is_text else "INT32"))
        tensors[-1].set_data_from_numpy(np.array(values, dtype=np.object_ if is_text else np.int32))
    found: list[Any] = []
    client = grpcclient.InferenceServerClient(url)
    finished = False
    try:
        client.start_stream(lambda result, error: responses.put((result, error)), stream_timeout=timeout_s)
        client.async_stream_infer(
            model,
            tensors,
            outputs=[grpcclient.InferRequestedOutput(output)],
            enable_empty_final_response=True,
        )
        while not finished:
            result, error = responses.get(timeout=max(0.0, deadline - time.monotonic()))
            if error is not None:
                raise error
            part = result.as_numpy(output)
            found += [] if part is None else part.tolist()
            finished = result.get_response().parameters["triton_final_response"].bool_param
    except queue.Empty:
        raise ProbeError(f"no answer within {timeout_s:.0f} s") from None
    except InferenceServerException as error:
        raise ProbeError(" ".join(str(error).split())) from error
    finally:
        # A stream that ended well is closed, not cancelled: old servers leak the request of a cancelled one.
        client.stop_stream(cancel_requests=not finished)
        client.close()
    return found


@click.command()
@click.option("--url", default="127.0.0.1:8001", show_default=True, help="gRPC address.")
@click.option("--model", default="generator", show_default=True)
@click.option("--timeout", default=10.0, show_default=True, help="Seconds for the whole probe.")
def healthcheck(url: str, model: str, timeout: float) -> None:
    """Ask a served model for a token, or see that it computes others; status 0 if so."""
    began = time.monotonic()
    try:
        proof = probe(url, model, timeout)
    except ProbeError as error:
        click.echo(f"quire: {model} at {url} is NOT healthy: {error}", err=True)
        sys.exit(1)
    click.echo(f"quire: {model} at {url} is healthy ({proof}, {(time.monotonic() - began) * 1000:.0f} ms)")
