"""`ObserverMiddleware`: checks requests' API keys, and records the outcome in metrics and the access log."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from quire_client._connection import CALLER_TRACE
from quire_client.openai.errors import RequestError, describe, retry_after
from quire_client.openai.keys import ApiKey, KeyRing
from quire_client.openai.metrics import Metrics
from quire_client.openai.replies import usage
from quire_client.types import Chunk, Embeddings, Result, Scores

GONE = 499
"""Status, in log and metrics, of a request whose client was seen to disconnect before its answer was
complete, and of one that ended in another way without an answer."""
_BESIDE = ("/tokenize", "/detokenize")
"""Paths outside /v1/, named as in vLLM, that are also observed and, if the gateway has keys, need a key."""
_SCORING = ("/v1/classify", "/v1/score", "/v1/rerank")
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", *_SCORING, "/v1/models", *_BESIDE)
TRACE_HEADERS = ("traceparent", "tracestate")
"""Headers with a trace context. Values of 1 to 512 printable ASCII characters become the `CALLER_TRACE` of
the request."""
_PASSED_ON = re.compile(r"[ -~]{1,512}")
_SCOPE_KEY = "quire.exchange"


@dataclass
class Exchange:
    """Record of one HTTP request and its answer, for log and metrics, without their texts."""

    method: str
    path: str
    client: str
    observer: Observer
    key: ApiKey | None = None
    model: str = ""
    """Name of the model as the client wrote it; empty before the model was found."""
    request_id: str = ""
    streams: bool = False
    status: int = 0
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    ttft: float | None = None
    """Time from the request to the first chunk of a stream that has tokens, in seconds; None before it, for
    answers that are not streamed, and if tokens are not counted."""
    began: float = field(default_factory=time.monotonic)
    _last: dict[tuple[int, int], float] = field(default_factory=dict)
    """Time (CLOCK_MONOTONIC seconds) of the latest chunk with tokens, by (number of the prompt, index of the
    choice)."""
    _prompts: set[int] = field(default_factory=set)
    """Numbers of the prompts already counted. Chunks may repeat their prompt's token count, which counts
    once."""
    _num_reasoning_tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    """Reasoning tokens so far, by (number of the prompt, index of the choice)."""

    @property
    def counts_tokens(self) -> bool:
        """Whether token counts are needed: for metrics, the log, or a key with a limit."""
        limited = self.key is not None and self.key.tokens_per_minute is not None
        return limited or self.observer.is_recording

    def streamed(self, chunk: Chunk) -> None:
        """Records a chunk of a stream."""
        choice = chunk.batch_index, chunk.index
        if chunk.num_input_tokens is not None and chunk.batch_index not in self._prompts:
            self._prompts.add(chunk.batch_index)
            self._prompt(chunk.num_input_tokens, chunk.num_cached_tokens)
        if chunk.num_reasoning_tokens is not None:
            self._num_reasoning_tokens[choice] = chunk.num_reasoning_tokens
        self.finish_reason = chunk.finish_reason or self.finish_reason
        count = chunk.num_tokens
        if not count:
            return
        self._answered(count)
        now, metrics = time.monotonic(), self.observer.metrics
        last = self._last.get(choice)
        self._last[choice] = now
        if self.ttft is None:
            self.ttft = now - self.began
            if metrics:
                metrics.first.labels(self.model).observe(self.ttft)
        elif metrics and last is not None:
            between = metrics.between.labels(self.model)
            for _ in range(count):
                between.observe((now - last) / count)

    @property
    def usage(self) -> dict[str, Any] | None:
        """Token counts of a stream so far, in OpenAI's form; None while no chunk has had the prompt's token
        count."""
        counts = self._num_reasoning_tokens.values()
        num_reasoning_tokens = sum(counts) if counts else None
        return usage(
            self.num_input_tokens, self.num_output_tokens, self.num_cached_tokens, num_reasoning_tokens
        )

    def answered(self, result: Result) -> None:
        """Records an answer that is not streamed."""
        self._prompt(result.num_input_tokens, result.num_cached_tokens)
        self.finish_reason = result.finish_reason
        self._answered(result.num_output_tokens)

    def pooled(self, result: Embeddings | Scores) -> None:
        """Records an answer with embeddings or scores."""
        self._prompt(result.num_input_tokens, result.num_cached_tokens)

    def _prompt(self, tokens: int | None, cached: int | None) -> None:
        if tokens is None:
            return
        self.num_input_tokens = (self.num_input_tokens or 0) + tokens
        if cached is not None:
            self.num_cached_tokens = (self.num_cached_tokens or 0) + cached
        self._charge(tokens)
        if self.observer.metrics:
            self.observer.metrics.input.labels(self.model).inc(tokens)
            self.observer.metrics.cached.labels(self.model).inc(cached or 0)

    def _answered(self, tokens: int) -> None:
        self.num_output_tokens += tokens
        self._charge(tokens)
        if self.observer.metrics:
            self.observer.metrics.output.labels(self.model).inc(tokens)

    def _charge(self, tokens: int) -> None:
        if self.key is not None and self.observer.keys is not None:
            self.observer.keys.charge(self.key, tokens)


class Observer:
    """The keys, the metrics and the log of a gateway; each may be absent.

    Raises:
        ValueError: the file of keys is wrong or cannot be read, or the log cannot be opened.
    """

    def __init__(self, keys: Path | None, *, metrics: bool, log: Path | None) -> None:
        self.keys = None if keys is None else KeyRing(keys)
        self.metrics = Metrics() if metrics else None
        self._log = _opened(log)

    @property
    def is_recording(self) -> bool:
        return self.metrics is not None or self._log is not None

    def begin(self, scope: Any) -> Exchange:
        client = (scope.get("client") or ("",))[0]
        exchange = Exchange(scope["method"][:16], scope["path"][:256], client, self)
        scope[_SCOPE_KEY] = exchange
        if self.metrics:
            self.metrics.running.inc()
        return exchange

    def end(self, exchange: Exchange) -> None:
        took = time.monotonic() - exchange.began
        if self.metrics:
            path = next((p for p in _PATHS if exchange.path.startswith(p)), "other")
            self.metrics.running.dec()
            self.metrics.requests.labels(path, exchange.status).inc()
            self.metrics.seconds.labels(path).observe(took)
        if self._log is None:
            return
        line = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "client": exchange.client,
            "key": None if exchange.key is None else exchange.key.name,
            "method": exchange.method,
            "path": exchange.path,
            "status": exchange.status,
            "seconds": round(took, 4),
            "ttft": None if exchange.ttft is None else round(exchange.ttft, 4),
            "model": exchange.model or None,
            "request_id": exchange.request_id or None,
            "stream": exchange.streams,
            "finish_reason": exchange.finish_reason,
            "input_tokens": exchange.num_input_tokens,
            "cached_tokens": exchange.num_cached_tokens,
            "output_tokens": exchange.num_output_tokens,
        }
        self._log.write(f"{json.dumps(line)}\n")

    def close(self) -> None:
        if self._log is not None and self._log is not sys.stderr:
            self._log.close()


class ObserverMiddleware:
    """ASGI middleware for HTTP requests whose path begins with /v1/, /tokenize or /detokenize. It records
    them in metrics and log, and checks their keys if the gateway has keys."""

    def __init__(self, app: Any, observer: Observer) -> None:
        self._app = app
        self._observer = observer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(("/v1/", *_BESIDE)):
            await self._app(scope, receive, send)
            return
        exchange = self._observer.begin(scope)
        stated = Headers(scope=scope)
        trace = ((name, stated[name]) for name in TRACE_HEADERS if name in stated)
        CALLER_TRACE.set(tuple((name, value) for name, value in trace if _PASSED_ON.fullmatch(value)))

        async def send_noting_status(message: Any) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            await send(message)

        try:
            app = self._app
            if self._observer.keys is not None:
                try:
                    exchange.key = self._observer.keys.find(Headers(scope=scope).get("authorization"))
                    self._observer.keys.admit(exchange.key)
                except RequestError as error:
                    app = error_response(error)
            await app(scope, receive, send_noting_status)
        except BaseException as error:
            # Starlette answers an Exception with 500, outside of this.
            exchange.status = exchange.status or (500 if isinstance(error, Exception) else GONE)
            raise
        finally:
            self._observer.end(exchange)


def exchange_of(scope: Any) -> Exchange:
    """Returns the Exchange that ObserverMiddleware made for the request with this ASGI scope."""
    exchange: Exchange = scope[_SCOPE_KEY]
    return exchange


def error_response(error: Any) -> JSONResponse:
    """Returns the HTTP answer for an error of the gateway or of the server."""
    status, body = describe(error)
    seconds = retry_after(error)
    headers = {} if seconds is None else {"Retry-After": str(seconds)}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body, status, headers)


def _opened(path: Path | None) -> TextIO | None:
    """Opens the log for appending; each line is written at once. `-` is stderr. Raises ValueError if the log
    cannot be opened."""
    if path is None:
        return None
    if str(path) == "-":
        return sys.stderr
    try:
        return path.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
