"""Clients that take more than their share of connections: slow ones, silent ones, thousands at once.

The server goes on as ever for the others, what has a limit is answered UNAVAILABLE, and afterwards nothing of
the crowd is left: no descriptor, no block, no request, no memory to speak of.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from typing import Any

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.e2e.conftest import ENDLESS, TINY_OPTIONS, write_model
from tests.e2e.triton_calls import TritonStream, infer, stream, tensor
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.pace import PACED, PACED_ENV, paced_input
from tests.fixtures.server import ServerProcess
from tests.fixtures.waiting import wait_until

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

CROWD = {"max_running": 1, "max_waiting": 8}
SHORT = {"text_input": "hello", "stream": True, "max_tokens": 8, "ignore_eos": True, "tenant": "other"}
WAIT_S = 120.0
MAX_GROWTH = 64 * 2**20
"""Bytes that tritonserver and the stub may grow for good, each; a connection of gRPC takes some 10 KiB."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""What an HTTP/2 client says first: the preface, and empty settings."""
BEGINNINGS = {
    "http": (
        b"", b"POST /v2/models/generator/infer HTTP/1.1\r\nHost: a\r\n",
        b"POST /v2/models/generator/generate HTTP/1.1\r\nHost: a\r\nContent-Length: 60000000\r\n\r\n{",
        b"POST /v2/models/generator/generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffff\r\n{",
    ),
    "grpc": (b"", PREFACE[:11], PREFACE, PREFACE + b"\x00\x40\x00\x01\x04\x00\x00\x00\x01\x82"),
}  # fmt: skip
"""Of requests that do not go on: nothing, half of a head, a head without its body, half of a frame."""
short_and_full = pytest.mark.parametrize("size", [1, pytest.param(10, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    root = tmp_path_factory.mktemp("crowds")
    checkpoint = make_checkpoint("llama", root / "llama", max_position_embeddings=16_384)
    options = {**TINY_OPTIONS, **PACED, "max_num_seqs": 4, "max_waiting_requests": 64}
    options["tenants"] = {"crowd": CROWD}
    for name, policy in (("generator", ""), ("generator_unary", "model_transaction_policy {}\n")):
        version = write_model(root / "repository", name, f'backend: "quire"\n{policy}')
        (version / "quire.json").write_text(json.dumps({"model": str(checkpoint), **options}))
    with ServerProcess(root / "repository", root, env=PACED_ENV) as running:
        stream(running.grpc_url, "generator", SHORT)
        yield running
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Bystander(threading.Thread):
    """Asks for health and for a few tokens, by HTTP and gRPC in turns, until it is told to stop.

    A refusal is an answer, too, where a crowd fills the queue before its tenant is known; then it asks again.
    """

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(daemon=True)
        self.server, self.stopped = server, threading.Event()
        self.took_s: list[float] = []
        self.refused, self.failures = 0, list[str]()

    def __enter__(self) -> Bystander:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self.join(WAIT_S)
        assert not self.is_alive(), "it waits for an answer"

    def run(self) -> None:
        while not self.stopped.is_set():
            start = time.monotonic()
            try:
                assert call(self.server, "v2/health/ready")[0] == 200
                status, body = call(self.server, "v2/models/generator/generate", {**SHORT, "stream": False})
                reply = stream(self.server.grpc_url, "generator", SHORT)
                error = "" if status == 200 else body
                error = error or ("" if reply.error is None else str(reply.error))
            except Exception as failure:
                self.failures.append(repr(failure))
                continue
            if error:
                self.refused += "queue is full" in error
                self.failures += [] if "queue is full" in error else [error]
            else:
                assert len(reply.token_ids) == 8
                self.took_s.append(time.monotonic() - start)

    def check(self) -> None:
        assert not self.failures, self.failures[:5]
        assert self.took_s, f"nobody else was served ({self.refused} refusals)"


def call(server: ServerProcess, path: str, body: Any = None) -> tuple[int, str]:
    """Status and text of an HTTP request."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(f"http://{server.http_url}/{path}", data, timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextlib.contextmanager
def nothing_stays(server: ServerProcess) -> Iterator[None]:
    """Descriptors, memory, requests and blocks are what they were before."""
    processes = server.running("tritonserver") + server.running("triton_python_backend_stub")
    assert len(processes) >= 2
    before = {process: (process.num_fds(), process.memory_info().rss) for process in processes}
    yield

    def more() -> dict[psutil.Process, int]:
        return {process: process.num_fds() - fds for process, (fds, _) in before.items()}

    wait_until(lambda: max(more().values()) <= 8, more, poll_s=0.1)
    grown = {p.name(): (p.memory_info().rss - rss) / 2**20 for p, (_, rss) in before.items()}
    print(f"grown by MiB: {grown}")
    assert max(grown.values()) * 2**20 < MAX_GROWTH, grown

    def at_work() -> list[str]:
        with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=WAIT_S) as answer:
            lines = answer.read().decode().splitlines()
        names = ("quire_requests_running{", "quire_requests_waiting{")
        return [line for line in lines if line.startswith(names) and not line.endswith(" 0")]

    wait_until(lambda: not at_work(), at_work, poll_s=0.1)  # they are told twice a second


def connect(server: ServerProcess, kind: str) -> socket.socket:
    host, _, port = (server.http_url if kind == "http" else server.grpc_url).rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def broken_off(connection: socket.socket) -> None:
    """Ends a connection with RST, as a machine that is gone does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@short_and_full
def test_slow_and_silent_connections_hold_up_nobody(server: ServerProcess, size: int) -> None:
    """100 (1 000) connections stay open in the middle of a request, a byte every now and then."""
    with nothing_stays(server):
        connections = []
        with Bystander(server) as bystander:
            for number in range(100 * size):
                kind = ("http", "grpc")[number % 2]
                connection = connect(server, kind)
                connection.sendall(BEGINNINGS[kind][number // 2 % len(BEGINNINGS[kind])])
                connections.append(connection)
            served = len(bystander.took_s)
            for _ in range(3):
                for connection in connections:
                    with contextlib.suppress(OSError):  # the server may have had enough of it
                        connection.send(b"a")
            wait_until(lambda: len(bystander.took_s) > served + 2, lambda: bystander.failures)
        bystander.check()
        for number, connection in enumerate(connections):
            (broken_off if number % 3 else socket.socket.close)(connection)
    print(f"longest answer beside {len(connections)} connections: {max(bystander.took_s):.2f} s")


@short_and_full
def test_a_thousand_connections_come_and_go(server: ServerProcess, size: int) -> None:
    """1 000 (10 000), most of them broken off in the middle of a request."""
    with nothing_stays(server), Bystander(server) as bystander:
        for number in range(1000 * size):
            kind = ("http", "grpc")[number % 2]
            connection = connect(server, kind)
            with contextlib.suppress(OSError):
                connection.sendall(BEGINNINGS[kind][number // 2 % len(BEGINNINGS[kind])])
            (broken_off if number % 3 else socket.socket.close)(connection)
    bystander.check()


@contextlib.contextmanager
def a_seat_taken(server: ServerProcess) -> Iterator[Callable[[], None]]:
    """Context in which the crowd's one place to run is taken, until what it gives is called."""
    asked = {**SHORT, "tenant": "crowd", "max_tokens": ENDLESS, **paced_input()}
    holder = TritonStream(server.grpc_url, "generator", asked)

    def release() -> None:
        while holder.extra_responses():
            assert not holder.next(), "it was to be there"
        holder.cancel()

    try:
        assert not holder.next(), holder.reply.error
        yield release
    finally:
        holder.cancel()


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_client_with_thousands_of_streams_has_its_share(server: ServerProcess, count: int) -> None:
    """Each stream of one connection asks for tokens at once. As many as may wait do, all others end with
    UNAVAILABLE, each by one answer, and others are served meanwhile."""

    async def one(stub: Any) -> str:
        call = stub.ModelStreamInfer()
        request = service_pb2.ModelInferRequest(model_name="generator")
        for name, value in {**SHORT, "tenant": "crowd", "max_tokens": 64}.items():
            item = tensor(name, value)
            request.inputs.append(item._get_tensor())
            request.raw_input_contents.append(item._get_content())
        await call.write(request)
        await call.done_writing()
        errors = [message.error_message async for message in call]
        assert sum(map(bool, errors)) <= 1, "one answer to each"
        return next(filter(None, errors), "")

    async def crowd() -> tuple[list[str], list[str]]:
        """What those are told that end while the place is taken, and the others, who waited for it."""
        options = [("grpc.max_receive_message_length", -1)]
        with a_seat_taken(server) as release:
            async with grpc.aio.insecure_channel(server.grpc_url, options=options) as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                tasks = [asyncio.create_task(one(stub)) for _ in range(count)]
                num_refused = count - CROWD["max_waiting"]
                ended = islice(asyncio.as_completed(tasks, timeout=500), num_refused)
                first = [await task for task in ended]
                waiting = [task for task in tasks if not task.done()]
                release()
                return first, await asyncio.gather(*waiting)

    before = {p: p.memory_info().rss for p in server.running("tritonserver")}
    asyncio.run(crowd())
    growth = {p.pid: (p.memory_info().rss - rss) / 2**20 for p, rss in before.items()}
    print(f"MiB that the first {count} streams have left: {growth}")  # the front keeps what it once had
    with nothing_stays(server):
        with Bystander(server) as bystander:
            refused, waited = asyncio.run(crowd())
            served = len(bystander.took_s)
            wait_until(lambda: len(bystander.took_s) > served, lambda: bystander.failures)
        bystander.check()
    assert all("queue is full" in one or "max_waiting" in one for one in refused), {*refused}
    assert waited == [""] * CROWD["max_waiting"], "who waits is served"
    print(f"{len(refused)} of {count} refused, others: {len(bystander.took_s)} served, "
          f"{bystander.refused} refused, longest {max(bystander.took_s):.2f} s")  # fmt: skip
    # The code that a stream's error has not, a single answer has.
    body = {**SHORT, "tenant": "crowd", "stream": False}
    with a_seat_taken(server) as release, ThreadPoolExecutor(17) as pool:
        calls = [pool.submit(infer, server.grpc_url, "generator_unary", body) for _ in range(17)]
        first = [one.exception() for one in islice(as_completed(calls), 17 - CROWD["max_waiting"])]
        release()
    assert {one.status() for one in first} == {"StatusCode.UNAVAILABLE"}  # type: ignore[union-attr]
    assert sum(one.exception() is None for one in calls) == CROWD["max_waiting"]
