"""Site: a running server, and the models of it that the checks ask."""

from __future__ import annotations

import argparse
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from quire_client import Client, QuireClientError
from tests.e2e.triton_calls import TritonStream

WAIT_S = 120.0
"""Limit of a wait for what takes a second: it only ends a hang."""
PROMPT = "Count from 1 to 500."
ENDLESS = 1_000_000
"""Tokens of a stream that goes on for as long as the model allows."""
Answer = tuple[int, bytes]


class Failed(Exception):
    """A fault of Quire's, or of a server that is not known to have it."""


class Known(Exception):
    """What servers of this version are known to do."""


class NotShown(Exception):
    """What a check needs is not there."""


class Site:
    """Asks the server for its `version` (numbers) and its models.

    Args:
        options: of the command line.

    Raises:
        Failed: there is no server, or none with a generator.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.grpc_url = options.grpc.removeprefix("grpc://").rstrip("/")
        self.http_url = options.http.rstrip("/")
        key, _, value = options.key.partition("=")
        self._headers = {key: value} if key else {}
        self._metadata = {f"triton-grpc-protocol-{key}": value} if key else {}
        status, body = self.http("/v2")
        try:
            self.version = tuple(int(part) for part in json.loads(body)["version"].split(".")[:2])
        except (ValueError, KeyError, TypeError):
            raise Failed(f"{self.http_url}/v2 is answered {status} {body[:200]!r}") from None
        try:
            with self.client() as client:
                models = {model.name: model for model in client.models() if model.ready}
        except QuireClientError as error:
            raise Failed(f"grpc://{self.grpc_url}: {error}") from error
        streaming = [name for name, model in models.items() if model.kind == "quire" and model.decoupled]
        joined = [name for name, model in models.items() if model.kind == "ensemble" and "vision" not in name]
        single = [name for name, model in models.items() if model.decoupled is False]
        self.generator = options.model or _one_of(streaming, "generator")
        self.ensemble = options.ensemble or _one_of(joined, "chat")
        self.unary = _one_of(single, "generator_unary")
        self.bls = "bls" if "bls" in models else ""
        if self.generator not in models:
            wanted = options.model or "a model of the backend quire that streams"
            raise Failed(f"{wanted} is not ready; ready are {sorted(models)}")

    def client(self) -> Client:
        return Client(self.grpc_url, timeout=WAIT_S, headers=self._metadata)

    def http(self, path: str, body: bytes | None = None, wait_s: float = WAIT_S, **headers: str) -> Answer:
        """Status and body of an answer; status 0: none came, and the body says why."""
        stated = {"Content-Type": "application/json", **self._headers, **headers}
        request = urllib.request.Request(f"{self.http_url}{path}", body, stated)
        try:
            with urllib.request.urlopen(request, timeout=wait_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error).encode()

    def generate(self, fields: dict[str, Any], padding: int = 0) -> Answer:
        """HTTP generate, with so many blanks in the body besides."""
        text = json.dumps({"text_input": PROMPT, "max_tokens": 4, "stream": False, **fields})
        return self.http(f"/v2/models/{self.generator}/generate", f"{text[:-1]}{' ' * padding}}}".encode())

    def streams(self, count: int, request_id: str = "", **inputs: Any) -> list[TritonStream]:
        """Streams of the generator, ENDLESS where the inputs do not say otherwise, that have begun."""
        stated = {"text_input": PROMPT, "stream": True, "ignore_eos": True, "max_tokens": ENDLESS, **inputs}
        asked = self.grpc_url, self.generator, stated
        calls = [TritonStream(*asked, request_id=request_id) for _ in range(count)]
        for call in calls:
            call.next()
        return calls

    def answer_s(self) -> float:
        """Seconds that a short request takes."""
        began = time.monotonic()
        with self.client() as client:
            result = client.generate(PROMPT, model=self.generator, max_tokens=8, ignore_eos=True)
        if result.num_output_tokens != 8:
            raise Failed(f"a request for 8 tokens got {result.num_output_tokens}")
        return time.monotonic() - began

    def check_alive(self) -> None:
        status, body = self.http("/v2/health/live", wait_s=10)
        if status != 200:
            raise Failed(f"the server is gone: {body.decode(errors='replace')}")

    def is_open(self, request_id: str) -> bool:
        """Whether a request runs or waits."""
        with self.client() as client:
            listed = client.requests(model=self.generator)["requests"]
        return request_id in {one["id"] for one in listed}

    def ready_models(self) -> set[str]:
        status, body = self.http("/v2/repository/index", b"{}")
        if status != 200:
            raise Failed(f"the repository's index is answered {status} {body[:200]!r}")
        return {one["name"] for one in json.loads(body) if one.get("state") == "READY"}


def _one_of(names: list[str], usual: str) -> str:
    return usual if usual in names else (names or [""])[0]


def wait_until(condition: Callable[[], Any], what: str) -> float:
    """Seconds until a condition holds; Failed, which says what, where it does not."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > WAIT_S:
            raise Failed(f"after {WAIT_S:g} s {what}")
        time.sleep(0.05)
    return time.monotonic() - began


def end_of(call: TritonStream) -> str:
    """Reads a stream to its end and says how it ended: a finish reason or an error's text.

    Raises:
        Failed: not by exactly one final response.
    """
    reply = call.read_all()
    finals = reply.finals + (reply.error is not None)
    # A connection that breaks behind the end is no response.
    behind = [error for _, error in list(call._queue.queue) if error is None or error.status() is None]
    if finals != 1 or behind:
        raise Failed(f"a stream had {finals} ends and {len(behind)} responses behind them")
    return str(reply.error) if reply.error is not None else reply.finish_reasons[-1]
