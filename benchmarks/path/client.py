"""The client of one measurement, in a process of its own: reads a `Job` from stdin, writes a `Measured`.

It reads the processes' CPU clocks itself, right before the first request and after the last response.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
import grpc
import numpy as np
import psutil
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks import load, report
from benchmarks.machine import ROOT, CpuShare
from benchmarks.path.http2 import Connection
from benchmarks.report import RequestRecord
from quire_client import AsyncClient
from quire_client.protocol import FINAL_PARAMETER, Prompt, build_request, schema_from_config

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
TIMEOUT_S = 120.0
WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Job:
    """Streams that run to their ends: so many at once, and the next as many when these have ended."""

    url: str
    model: str
    processes: dict[str, list[int]]
    """Process ids by role."""
    streams: int
    """At once."""
    num_tokens: int
    """Tokens of each stream."""
    prompts: list[Any] = dataclasses.field(default_factory=list)
    """One text, or list of token ids, for each request to a generator."""
    floor: dict[str, float] | None = None
    """Inputs of the floor model."""
    library: bool = False
    """Whether quire_client's AsyncClient receives, not the cheaper connection of `http2`."""


@dataclass(frozen=True)
class Measured:
    """What came out of a Job."""

    summary: dict[str, Any]
    """As `report.summarize` has it; `token_gap_s` are the gaps between responses as their tokens see them: a
    response of k tokens that comes after g seconds counts k times, with g / k."""
    cpu_s: dict[str, float]
    """CPU time by role, `client` among them."""
    others_cpu: float
    """Share of all cores' time that went to anything else."""


def measure(job: Job) -> Measured:
    """Runs a job in a new process.

    Raises:
        click.ClickException: it failed, a stream had other tokens than asked for; details went to stderr.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.path.client"],
        input=json.dumps(dataclasses.asdict(job)),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode:
        raise click.ClickException(f"the client of {job.streams} streams of {job.model} failed, see above")
    return Measured(**json.loads(done.stdout))


def _run(job: Job) -> Measured:
    receive = _receive_by_library if job.library else _receive
    # Other prompts: none must be found in the prefix cache.
    others = [prompt[::-1] for prompt in job.prompts[: job.streams]]
    short = dataclasses.replace(job, num_tokens=WARM_UP_TOKENS, prompts=others)
    if job.floor is not None:
        short = dataclasses.replace(short, floor={**job.floor, "responses": WARM_UP_TOKENS})
    receive(short)
    own = {role: list(pids) for role, pids in job.processes.items()} | {"client": [os.getpid()]}
    share = CpuShare([psutil.Process(pid) for pids in own.values() for pid in pids])
    before = {role: sum(map(_cpu_s, pids)) for role, pids in own.items()}
    records = receive(job)
    after = {role: sum(map(_cpu_s, pids)) for role, pids in own.items()}
    others_cpu = share.finish()["others_cpu"]
    for record in records:
        if record.error or (job.floor is None and record.num_tokens != job.num_tokens):
            raise RuntimeError(f"a stream has {record.num_tokens} tokens of {job.num_tokens}: {record.error}")
    summary = report.summarize(records)
    gaps = [
        gap
        for record in records
        for whole, count in zip(record.itls, record.response_tokens[1:], strict=True)
        for gap in [whole / count] * count
    ]
    summary["token_gap_s"] = report.distribution(gaps)
    return Measured(summary, {role: after[role] - before[role] for role in own}, others_cpu)


def _cpu_s(pid: int) -> float:
    # The clock of another process, see clock_getcpuclockid(3): nanoseconds, where /proc counts hundredths.
    return time.clock_gettime(~pid << 3 | 2)


def _receive(job: Job) -> list[RequestRecord]:
    messages = _messages(job)
    connection = Connection(job.url, METHOD, TIMEOUT_S)
    records: list[RequestRecord] = []
    for begin in range(0, len(messages), job.streams):
        records += _receive_all(connection, messages[begin : begin + job.streams])
    connection.close()
    return records


def _receive_all(connection: Connection, messages: Sequence[bytes]) -> list[RequestRecord]:
    times: list[list[float]] = [[] for _ in messages]
    counts: list[list[int]] = [[] for _ in messages]
    finals = [0] * len(messages)
    errors: dict[int, str] = {}
    parse = service_pb2.ModelStreamInferResponse.FromString
    start = time.perf_counter()
    for arrived in connection.calls(messages):
        now = time.perf_counter()
        for number, message in arrived:
            if message is None:
                continue
            answer = parse(message)
            response = answer.infer_response
            if answer.error_message:
                errors[number] = answer.error_message
            for output, content in zip(response.outputs, response.raw_output_contents, strict=False):
                if output.name == "output_ids" and content:
                    times[number].append(now)
                    counts[number].append(len(content) // 4)
            finals[number] += response.parameters[FINAL_PARAMETER].bool_param
    failures = [errors.get(i) or (None if count == 1 else f"{count} FINAL") for i, count in enumerate(finals)]
    return [
        RequestRecord(start, tuple(at), tuple(sizes), failure)
        for at, sizes, failure in zip(times, counts, failures, strict=True)
    ]


def _messages(job: Job) -> list[bytes]:
    """The request of each stream, as bytes."""
    if job.floor is not None:
        request = service_pb2.ModelInferRequest(model_name=job.model)
        for name, kind, datatype in (
            ("responses", np.int32, "INT32"),
            ("tokens", np.int32, "INT32"),
            ("step_ms", np.float32, "FP32"),
            ("anew", np.bool_, "BOOL"),
        ):
            request.inputs.add(name=name, datatype=datatype, shape=[1])
            request.raw_input_contents.append(kind(job.floor[name]).tobytes())
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        return [request.SerializeToString()] * job.streams
    with grpc.insecure_channel(job.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        schema = schema_from_config(stub.ModelConfig(service_pb2.ModelConfigRequest(name=job.model)))
    sampling = {"max_tokens": job.num_tokens, "ignore_eos": True}
    return [
        build_request(
            schema, _prompt(prompt), request_id=f"{time.time_ns()}-{i}", stream=True, sampling=sampling
        ).SerializeToString()
        for i, prompt in enumerate(job.prompts)
    ]


def _prompt(prompt: Any) -> Prompt:
    return Prompt(text=prompt) if isinstance(prompt, str) else Prompt(input_ids=prompt)


def _receive_by_library(job: Job) -> list[RequestRecord]:
    async def run() -> list[RequestRecord]:
        async with AsyncClient(job.url) as client:
            arrivals = [load.Arrival(0.0, prompt, job.num_tokens) for prompt in job.prompts]
            return await load.closed_loop(client, job.model, arrivals, job.streams, TIMEOUT_S)

    return asyncio.run(run())


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(_run(Job(**json.loads(sys.stdin.read()))))))
