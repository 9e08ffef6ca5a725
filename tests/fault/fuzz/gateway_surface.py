"""The OpenAI gateway: bodies of chat and text completions, and what else a client may ask of it."""

from __future__ import annotations

import base64
import json
from random import Random
from typing import Any
from urllib.parse import quote

from quire_client.openai.requests import HEADERS, OPENAI_SAMPLING, QUIRE_SAMPLING
from tests.fault.fuzz import hostile
from tests.fault.fuzz.calls import VALID, messages, picture, token_ids, words
from tests.fault.fuzz.http_surface import LEFT, HttpMessage, exchange
from tests.fault.fuzz.outcome import Outcome
from tests.fault.fuzz.target import Target

_OTHERS = (
    "stream",
    "stream_options",
    "user",
    "max_completion_tokens",
    "best_of",
    "tools",
    "response_format",
    "echo",
)


def _grammar(rng: Random) -> Any:
    """For the other names of `structured_output`."""
    return rng.choice(
        ({"regex": "[ab]+"}, {"json_object": True}, {"type": "json_object"}, "[ab]+", ["a", "b"])
    )


def make(rng: Random) -> HttpMessage:
    if rng.random() < 0.05:
        name = quote(
            rng.choice(("", "chat", "nope", hostile.text(rng)[:300])).encode("utf-8", "replace"), safe=""
        )
        return HttpMessage(rng.choice(("/health", "/v1/models", f"/v1/models/{name}")), b"", method="GET")
    chats = rng.random() < 0.5
    body: dict[str, Any] = {"max_tokens": rng.randrange(1, 12), "stream": rng.random() < 0.5}
    if chats:
        body |= {"model": rng.choice(("chat", "vision_chat")), "messages": _messages(rng)}
    else:
        draws = (words, token_ids, lambda rng: [words(rng)], hostile.text, hostile.value)
        body |= {"model": "generator", "prompt": rng.choice(draws)(rng)}
    for name in rng.sample((*OPENAI_SAMPLING, *QUIRE_SAMPLING), rng.choice((0, 1, 3))):
        draw = VALID.get("request_priority" if name == "priority" else name, _grammar)
        body[name] = draw(rng)
    for _ in range(rng.choice((0, 1, 1, 2))):
        _mistreat(rng, body)
    data = hostile.to_json(body).encode("utf-8", "surrogatepass")
    match rng.randrange(20):
        case 0:
            data = hostile.damaged(rng, data)
        case 1:
            data = hostile.json_text(rng, body)
        case _:
            pass
    headers = {"Content-Type": "application/json" if rng.random() < 0.97 else "text/plain"}
    if rng.random() < 0.1:
        value = "".join(char for char in hostile.text(rng)[:4_000] if " " <= char <= "~").strip()
        headers[rng.choice(list(HEADERS))] = value
    path = "/v1/chat/completions" if chats else "/v1/completions"
    return HttpMessage(path, data, headers, leaves=rng.random() < LEFT)


def _messages(rng: Random) -> Any:
    turns = messages(rng)
    match rng.randrange(5):
        case 0:
            image = rng.choice((picture, hostile.blob))(rng)
            url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
            part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
            if rng.random() < 0.3:
                part["image_url"] = hostile.value(rng)
            turns[0]["content"] = [part, {"type": "text", "text": words(rng)}]
        case 1:
            turns[0][rng.choice(("role", "content", "name", "refusal"))] = hostile.value(rng)
        case _:
            pass
    return turns


def _mistreat(rng: Random, body: dict[str, Any]) -> None:
    match rng.randrange(5):
        case 0 | 1:
            body[rng.choice((*OPENAI_SAMPLING, *QUIRE_SAMPLING, *_OTHERS, *body))] = hostile.value(rng)
        case 2:
            body[hostile.text(rng)[:500]] = hostile.value(rng)
        case 3:
            body.pop(rng.choice(list(body)))
        case _:
            body["stop"] = hostile.many(rng)


class GatewaySurface:
    """Sends messages, each on a connection of its own."""

    def __init__(self, target: Target) -> None:
        self._url = target.gateway_url

    def close(self) -> None:
        pass

    def send(self, message: HttpMessage) -> Outcome:
        outcome = Outcome()
        answer = exchange(self._url, message, outcome)
        if answer is not None:
            self._check(message, *answer, outcome)
        return outcome

    @staticmethod
    def _check(message: HttpMessage, status: int, body: bytes, outcome: Outcome) -> None:
        """Errors are OpenAI's error objects; a stream ends with [DONE] or with an error."""
        if body.startswith(b"data: "):
            *_, last = [block for block in body.split(b"\n\n") if block]
            if last != b"data: [DONE]" and b'"error"' not in last:
                outcome.problems.append(f"a stream without an end: {last[:200]!r}")
            return
        try:
            found = json.loads(body)
        except ValueError:
            outcome.problems.append(f"no JSON: {body[:200]!r}")
            return
        if status >= 400 and set(found) != {"error"} and message.path != "/health":
            outcome.problems.append(f"no error object: {body[:200]!r}")
