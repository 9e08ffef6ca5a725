"""HTTP: generate, generate_stream and infer of tritonserver."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import quote

from tests.fault.fuzz import hostile
from tests.fault.fuzz.calls import PROMPTS, SPECS, Call, fuzzed_call
from tests.fault.fuzz.grpc_surface import _flat
from tests.fault.fuzz.outcome import LIMIT_S, Outcome
from tests.fault.fuzz.target import Target

MODELS = {"generator": 5, "generator_unary": 3, "chat": 3, "vision_chat": 2, "tokenizer": 1}
_PROMPTS = {"chat": ("text_input", "messages"), "tokenizer": ("text_input", "messages")}
LARGEST_BODY = 2_000_000
LEFT = 0.02
FRONT_S_OWN = (
    "failed to parse the request JSON",
    "failed to get request params",
    "Unable to parse",
    "Expected JSON",
    "Converting keyword",
    "parameter key",
    "attempt to",
    "Unexpected",
)
"""How errors of the server's HTTP front begin which it calls INTERNAL (500) though the JSON is wrong."""
STATUS = {
    200: "OK",
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    405: "REFUSED",
    411: "REFUSED",
    415: "REFUSED",
}
STATUS |= {
    413: "REFUSED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
}


@dataclass(frozen=True)
class HttpMessage:
    """One request by HTTP; `leaves`: the fuzzer closes the connection when it has sent it."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    method: str = "POST"
    leaves: bool = False

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.headers} leaves {self.leaves}\n{self.body[:1_500]!r}"


def make(rng: Random) -> HttpMessage:
    model = rng.choices(list(MODELS), list(MODELS.values()))[0]
    prompts = (*PROMPTS, "image") if model == "vision_chat" else _PROMPTS.get(model, PROMPTS)
    call = fuzzed_call(rng, model, prompts)
    ways = ["generate", "generate_stream", "generate_stream"]
    way = rng.choice([*ways, "infer", "infer"] if model in ("generator_unary", "tokenizer") else ways)
    if rng.random() < 0.02:
        call.model = rng.choice(("..", "nope", hostile.text(rng)[:200], "generator/versions/9"))
    body = _infer_body(rng, call) if way == "infer" else _generate_body(rng, call)
    if rng.random() < 0.06:
        body = hostile.damaged(rng, body)
    headers = {"Content-Type": "application/json", **call.headers}
    if rng.random() < 0.03:
        headers["Inference-Header-Content-Length"] = rng.choice(
            ("0", "5", "-1", "x", str(len(body) + 9), "9" * 30)
        )
    path = f"/v2/models/{quote(call.model.encode('utf-8', 'replace'), safe='/')}/{way}"
    return HttpMessage(path, body[:LARGEST_BODY], headers, leaves=rng.random() < LEFT)


def _generate_body(rng: Random, call: Call) -> bytes:
    fields: dict[str, Any] = {**call.inputs, **call.parameters}
    if call.stated:
        fields["sampling_parameters" if rng.random() < 0.7 else "parameters"] = (
            hostile.to_json(call.stated) if rng.random() < 0.7 else call.stated
        )
    if call.request_id:
        fields["id"] = call.request_id
    pairs = list(fields.items())
    match rng.randrange(30):
        case 0:
            pairs.append((rng.choice(list(SPECS)), hostile.value(rng)))
        case 1 if pairs:
            pairs.append(rng.choice(pairs))
        case 2:
            pairs.append(("parameters", hostile.value(rng)))
        case 3:
            return hostile.to_json(hostile.value(rng)).encode("utf-8", "surrogatepass")
        case _:
            pass
    return hostile.to_json(hostile.Pairs(pairs)).encode("utf-8", "surrogatepass")


def _infer_body(rng: Random, call: Call) -> bytes:
    inputs = []
    for name, value in call.tensors().items():
        spec = SPECS.get(name)
        datatype = "INT32" if spec is None else spec.datatype.removeprefix("TYPE_").replace("STRING", "BYTES")
        elements, shape = _flat(value)
        one = {"name": name, "datatype": datatype, "shape": shape, "data": elements}
        if rng.random() < 0.05:
            one[rng.choice(list(one))] = hostile.value(rng)
        inputs.append(one)
    body: dict[str, Any] = {"id": call.request_id, "inputs": inputs, "parameters": call.parameters}
    if call.outputs:
        body["outputs"] = [{"name": name} for name in call.outputs]
    if rng.random() < 0.1:
        body[rng.choice(list(body))] = hostile.value(rng)
    return hostile.to_json(body).encode("utf-8", "surrogatepass")


class HttpSurface:
    """Sends messages, each on a connection of its own."""

    def __init__(self, target: Target) -> None:
        self._url = target.server.http_url

    def close(self) -> None:
        pass

    def send(self, message: HttpMessage) -> Outcome:
        outcome = Outcome()
        answer = exchange(self._url, message, outcome, own_words=FRONT_S_OWN)
        if answer is not None and answer[0] == 200 and message.path.endswith("_stream"):
            self._check_events(answer[1], outcome)
        return outcome

    @staticmethod
    def _check_events(body: bytes, outcome: Outcome) -> None:
        """A stream of at least one event, each a JSON object."""
        events = [block for block in body.split(b"\n\n") if block]
        if not events:
            outcome.problems.append("a stream without an event")
        for event in events:
            try:
                assert event.startswith(b"data: ")
                json.loads(event[6:])
            except (AssertionError, ValueError):
                outcome.problems.append(f"no JSON event: {event[:200]!r}")
                return


def exchange(
    url: str, message: HttpMessage, outcome: Outcome, own_words: tuple[str, ...] = ()
) -> tuple[int, bytes] | None:
    """Status and whole body of the answer; None where the fuzzer left, or had no answer.

    Args:
        own_words: an error that begins so is a refusal, whatever its status.
    """
    connection = http.client.HTTPConnection(url, timeout=LIMIT_S)
    try:
        headers = {name: value.encode("latin-1", "replace") for name, value in message.headers.items()}
        connection.request(message.method, message.path, message.body, headers)
        if message.leaves:
            outcome.end("LEFT")
            return None
        response = connection.getresponse()
        body = response.read()
    except TimeoutError:
        outcome.end("DEADLINE_EXCEEDED", f"no answer in {LIMIT_S} s")
        return None
    except (http.client.HTTPException, OSError) as error:
        outcome.end("UNKNOWN", f"{type(error).__name__}: {error}")
        return None
    finally:
        connection.close()
    if response.status >= 400 and body.startswith(tuple(b'{"error":"' + word.encode() for word in own_words)):
        outcome.end("REFUSED")
    else:
        outcome.end(STATUS.get(response.status, "INTERNAL"), f"HTTP {response.status} {body[:300]!r}")
    return response.status, body
