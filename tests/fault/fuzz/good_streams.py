"""Eight good streams beside the fuzzer, again and again: whatever it sends, their tokens are the same."""

from __future__ import annotations

import base64
import http.client
import json
import threading
from collections.abc import Callable
from typing import Any

from tests.e2e.triton_calls import infer, stream
from tests.e2e.vision import picture
from tests.fault.fuzz.outcome import LIMIT_S
from tests.fault.fuzz.target import Target

TOKENS = 60
PAUSE_S = 0.3
"""Between two rounds of one stream: the machine is the fuzzer's too."""


class GoodStreams:
    """Knows what each answers undisturbed, and asks again until `stop`.

    Attributes:
        rounds: answers that were as they should be.
        wrong: one line for each that was not.
        failed: one line for each that did not come.
    """

    def __init__(self, target: Target) -> None:
        self._kinds = _kinds(target)
        self._expected = {name: ask() for name, ask in self._kinds.items()}
        assert len(set(map(str, self._expected.values()))) > 6, "the streams differ"
        self.rounds = 0
        self.wrong: list[str] = []
        self.failed: list[str] = []
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(name,), daemon=True) for name in self._kinds
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * LIMIT_S)
        assert not any(thread.is_alive() for thread in self._threads), "a good stream does not end"

    def _run(self, name: str) -> None:
        while not self._over.is_set():
            try:
                found = self._kinds[name]()
            except Exception as error:
                with self._lock:
                    self.failed.append(f"good stream {name}: {type(error).__name__}: {error}")
            else:
                with self._lock:
                    if found == self._expected[name]:
                        self.rounds += 1
                    else:
                        wanted = self._expected[name]
                        self.wrong.append(f"good stream {name}: {found!r:.300} is not {wanted!r:.300}")
            self._over.wait(PAUSE_S)


def _kinds(target: Target) -> dict[str, Callable[[], Any]]:
    url, http_url = target.server.grpc_url, target.server.http_url
    greedy: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
    streamed = {**greedy, "stream": True}
    chat = json.dumps([{"role": "user", "content": "good morning"}])
    image = picture(3)
    parts = [{"type": "image"}, {"type": "text", "text": "what is it"}]
    with_image = json.dumps([{"role": "user", "content": parts}])
    data_url = "data:image/png;base64," + base64.b64encode(image).decode()
    shown = [{"type": "image_url", "image_url": {"url": data_url}}, parts[1]]

    def tokens(model: str, **inputs: Any) -> Any:
        reply = stream(url, model, {**streamed, **inputs})
        if reply.error is not None:
            raise reply.error
        return reply.token_ids

    def unary() -> Any:
        found = infer(url, "generator_unary", {"text_input": "good afternoon", **greedy})
        return [int(one) for one in found.as_numpy("output_ids")]

    def generate() -> Any:
        return _post(http_url, "/v2/models/generator/generate", {"text_input": "good evening", **greedy})[
            "output_ids"
        ]

    def gateway(prompt: Any, model: str) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], **greedy}
        return _post(target.gateway_url, "/v1/chat/completions", body)["choices"][0]["message"]["content"]

    return {
        "text": lambda: tokens("generator", text_input="good text"),
        "ids": lambda: tokens("generator", input_ids=[5, 6, 7, 8, 9]),
        "chat": lambda: tokens("chat", messages=chat),
        "vision": lambda: tokens("vision_chat", messages=with_image, image=[image]),
        "unary": unary,
        "http": generate,
        "gateway": lambda: gateway("good night", "chat"),
        "gateway with an image": lambda: gateway(shown, "vision_chat"),
    }


def _post(url: str, path: str, body: dict[str, Any]) -> Any:
    connection = http.client.HTTPConnection(url, timeout=LIMIT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        assert response.status == 200, text
        return json.loads(text)
    finally:
        connection.close()
