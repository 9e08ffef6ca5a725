"""`quire healthcheck`: a real inference of one token, for liveness probes.

A damaged tritonserver can keep all its ports open and answer "ready", and one whose stub has died goes on
reporting ready for years of releases; only a token that comes back proves that tokens come back.
"""

from __future__ import annotations

import queue
import sys
import time
from typing import Any

import click

PROBE_TOKEN_ID = 1  # inside every vocabulary


class ProbeError(Exception):
    """The model did not give its token; the message is one line."""


def probe(url: str, model: str, timeout_s: float) -> None:
    """Ask `model` at gRPC `url` ("host:port") for one token.

    Args:
        timeout_s: for the whole probe, connecting included.

    Raises:
        ProbeError: no connection, an error from the server, or no final response in time.
    """
    import numpy as np
    import tritonclient.grpc as grpcclient
    from tritonclient.utils import InferenceServerException

    deadline = time.monotonic() + timeout_s
    responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
    input_ids = grpcclient.InferInput("input_ids", [1], "INT32")
    input_ids.set_data_from_numpy(np.array([PROBE_TOKEN_ID], dtype=np.int32))
    max_tokens = grpcclient.InferInput("max_tokens", [1], "INT32")
    max_tokens.set_data_from_numpy(np.array([1], dtype=np.int32))
    client = grpcclient.InferenceServerClient(url)
    finished = False
    try:
        client.start_stream(lambda result, error: responses.put((result, error)), stream_timeout=timeout_s)
        client.async_stream_infer(
            model,
            [input_ids, max_tokens],
            outputs=[grpcclient.InferRequestedOutput("output_ids")],
            enable_empty_final_response=True,
        )
        tokens = 0
        while not finished:
            result, error = responses.get(timeout=max(0.0, deadline - time.monotonic()))
            if error is not None:
                raise ProbeError(_one_line(error))
            output = result.as_numpy("output_ids")
            tokens += 0 if output is None else output.size
            finished = result.get_response().parameters["triton_final_response"].bool_param
        if tokens == 0:
            raise ProbeError("the response holds no token")
    except queue.Empty:
        raise ProbeError(f"no answer within {timeout_s:g} s") from None
    except InferenceServerException as error:
        raise ProbeError(_one_line(error)) from error
    finally:
        # A stream that ended well is closed, not cancelled: old servers leak the request of a cancelled one.
        client.stop_stream(cancel_requests=not finished)
        client.close()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


@click.command()
@click.option("--url", default="127.0.0.1:8001", show_default=True, help="gRPC address.")
@click.option("--model", default="generator", show_default=True)
@click.option("--timeout", default=10.0, show_default=True, help="Seconds for the whole probe.")
def healthcheck(url: str, model: str, timeout: float) -> None:
    """Ask a served model for one token; status 0 if it came."""
    began = time.monotonic()
    try:
        probe(url, model, timeout)
    except ProbeError as error:
        click.echo(f"quire: {model} at {url} is NOT healthy: {error}", err=True)
        sys.exit(1)
    click.echo(f"quire: {model} at {url} is healthy ({(time.monotonic() - began) * 1000:.0f} ms)")
