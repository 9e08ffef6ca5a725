"""The gateway's application and its HTTP routes, most of which answer with the help of `AsyncClient`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from quire_client import _connection as conn
from quire_client.aio import AsyncClient, AsyncStream
from quire_client.embedding import classify, classify_messages, embed, score
from quire_client.errors import NotFound, QuireClientError
from quire_client.openai.adapters import Adapter, Adapters
from quire_client.openai.balancer import Balancer
from quire_client.openai.batch import Batch
from quire_client.openai.errors import RequestError, error_object, named
from quire_client.openai.images import ImageFetcher, ImagePolicy
from quire_client.openai.intake import (
    Hold,
    Intake,
    count_values,
    parse_json,
    read_body,
    text_bytes,
    write_json,
)
from quire_client.openai.keys import check_admin
from quire_client.openai.logprobs import LogprobsFormat
from quire_client.openai.metrics import CONTENT_TYPE
from quire_client.openai.names import Names, part_that
from quire_client.openai.observer import (
    Exchange,
    Observer,
    ObserverMiddleware,
    error_response,
    exchange_of,
)
from quire_client.openai.page import chat_page
from quire_client.openai.replies import ReplyFormat, embeddings_reply
from quire_client.openai.requests import (
    HEADERS,
    EmbeddingRequest,
    TextRequest,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_embedding,
    parse_tokenize,
)
from quire_client.openai.scoring import (
    ScoringRequest,
    classify_reply,
    parse_classify,
    parse_rerank,
    parse_score,
    rerank_reply,
    score_reply,
)
from quire_client.openai.stream import EventStream, Exchanges
from quire_client.openai.tokens import max_model_len, text_of, token_ids
from quire_client.protocol import ModelSchema
from quire_client.types import Scores

Parsed = TypeVar("Parsed", TextRequest, EmbeddingRequest, ScoringRequest)
SCORING = (
    ("/v1/classify", parse_classify, classify_reply),
    ("/v1/score", parse_score, score_reply),
    ("/v1/rerank", parse_rerank, rerank_reply),
)
"""Routes that answer with scores: path, parser of bodies, and maker of answers."""
PROMPTS = ("messages", "text_input")
DESCRIBED_S = 5.0
"""Timeout, in seconds, for asking a model for its `max_model_len`."""


@dataclass(frozen=True)
class GatewaySettings:
    """Settings of the gateway.

    url: HOST:PORT of the server's gRPC endpoint, or of several with the same models, separated by commas.
    timeout: seconds for a generation, or for all embeddings or scores of a request; None: no limit.
    images: limits on the images that are fetched for requests.
    api_keys: file of API keys, see `keys.py`; None: clients need no key.
    metrics: whether /metrics is served.
    access_log: file to which a line of JSON is appended for each request that `ObserverMiddleware` observes;
        `-`: stderr; None: no log.
    cors_origins: other origins whose pages may call the gateway in a browser; "*": any.
    names: names by which clients call the models."""

    url: str = conn.DEFAULT_URL
    timeout: float | None = None
    images: ImagePolicy = field(default_factory=ImagePolicy)
    api_keys: Path | None = None
    metrics: bool = False
    access_log: Path | None = None
    cors_origins: tuple[str, ...] = ()
    names: Names = field(default_factory=Names)

    @property
    def urls(self) -> list[str]:
        return [url.strip() for url in self.url.split(",")]


def create_app(
    settings: GatewaySettings, *, make_fetcher: Callable[[ImagePolicy], ImageFetcher] = ImageFetcher
) -> Starlette:
    """Returns the ASGI application. Its lifespan opens and closes the connections to the servers.

    Args:
        make_fetcher: makes the fetcher of images.

    Raises:
        ValueError: the file of keys is wrong or cannot be read, or the log cannot be opened.
    """
    observer = Observer(settings.api_keys, metrics=settings.metrics, log=settings.access_log)
    gateway = _Gateway(observer, settings.names)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with (
            Balancer(settings.urls, settings.timeout) as balancer,
            make_fetcher(settings.images) as fetcher,
        ):
            gateway.balancer, gateway.fetcher = balancer, fetcher
            yield
            await gateway.exchanges.close()
            observer.close()

    routes = [
        Route("/", chat_page),
        Route("/health", gateway.health),
        Route("/v1/models", gateway.models),
        Route("/v1/models/{name:path}", gateway.model),
        Route("/v1/chat/completions", partial(gateway.answer, parse=parse_chat), methods=["POST"]),
        Route("/v1/completions", partial(gateway.answer, parse=parse_completion), methods=["POST"]),
        Route("/v1/embeddings", gateway.embeddings, methods=["POST"]),
        *(
            Route(path, partial(gateway.score, parse=parse, reply=reply), methods=["POST"])
            for path, parse, reply in SCORING
        ),
        Route("/tokenize", gateway.tokenize, methods=["POST"]),
        Route("/detokenize", gateway.detokenize, methods=["POST"]),
        Route("/v1/load_lora_adapter", partial(gateway.change_adapters, load=True), methods=["POST"]),
        Route("/v1/unload_lora_adapter", partial(gateway.change_adapters, load=False), methods=["POST"]),
    ]
    if settings.metrics:
        routes.append(Route("/metrics", gateway.metrics))
    middleware = [Middleware(ObserverMiddleware, observer=observer)]
    if settings.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
            expose_headers=["retry-after"],
        )
        middleware.insert(0, cors)
    handlers: Mapping[Any, Any] = {
        RequestError: _failed,
        QuireClientError: _failed,
        ClientDisconnect: _gone,
        HTTPException: _http_error,
        Exception: _crashed,
    }
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers, middleware=middleware)


class _Gateway:
    balancer: Balancer
    fetcher: ImageFetcher

    def __init__(self, observer: Observer, names: Names) -> None:
        self.exchanges = Exchanges()
        self._names = names
        self._observer = observer
        self.intake = Intake()
        self.adapters = Adapters()
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        """Answers 200 while at least one server is ready, else 503."""
        servers = await self.balancer.health()
        ready = any(servers.values())
        body = {"status": "ok" if ready else "unavailable", "servers": servers}
        return JSONResponse(body, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        metrics = self._observer.metrics
        assert metrics is not None
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        """Lists the models of one server that `Names.listed` names, if they accept text or messages and
        answer with text, and the server's LoRA adapters."""
        client = self.balancer.pick().client
        ready = [info.name for info in await client.models() if info.ready]
        schemas = {name: await client._schema(name) for name in ready}
        listed: dict[str, tuple[ModelSchema, Adapter | None]] = {
            name: (schemas[model], None)
            for name, model in self._names.listed(schemas).items()
            if _is_text_model(schemas[model])
        }
        for name, adapter in (await self.adapters.list_adapters(client)).items():
            listed[name] = await client._schema(adapter.parent), adapter
        # Concurrently, because each call waits for its engine.
        data = await asyncio.gather(*(self._model(client, name, *one) for name, one in listed.items()))
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name, client = request.path_params["name"], self.balancer.pick().client
        schema, adapter = await self._find(client, name)
        if not _is_text_model(schema):
            raise NotFound(f"the model {name!r} does not generate text")
        return JSONResponse(await self._model(client, name, schema, adapter))

    async def _find(self, client: AsyncClient, name: str) -> tuple[ModelSchema, Adapter | None]:
        """Returns what a client's model name means; returns and raises as `Adapters.find` does."""
        return await self.adapters.find(client, self._names.model_of(name))

    async def tokenize(self, request: Request) -> Any:
        return await self._run_text_request(request, parse_tokenize, self._tokenize)

    async def detokenize(self, request: Request) -> Any:
        return await self._run_text_request(request, parse_detokenize, self._detokenize)

    async def _run_text_request(
        self,
        request: Request,
        parse: Callable[[Mapping[str, Any]], TextRequest],
        tell: Callable[[AsyncClient, TextRequest, ModelSchema, Hold], Awaitable[dict[str, Any]]],
    ) -> Any:
        """Answers a request that generates nothing: its body is read, parsed, and handed to `tell`."""
        exchange = exchange_of(request.scope)

        async def work(hold: Hold, parsed: TextRequest) -> Response:
            server = self.balancer.pick(parsed.sampling)
            with server.watched(), server.counted():
                schema, _ = await self._find(server.client, parsed.model)
                exchange.model = parsed.model
                return JSONResponse(await tell(server.client, parsed, schema, hold))

        with self.intake.open() as hold:
            parsed = await _parsed(request, parse, hold)
            return await self.exchanges.run(request.receive, work(hold, parsed))

    async def _tokenize(
        self, client: AsyncClient, parsed: TextRequest, schema: ModelSchema, hold: Hold
    ) -> dict[str, Any]:
        (ids,) = await self._prompt_ids(client, parsed, schema, hold)
        generator = await part_that(client, schema, lambda part: "cache_control" in part.inputs)
        longest = await max_model_len(client, generator, DESCRIBED_S)
        return {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": None}

    async def _detokenize(
        self, client: AsyncClient, parsed: TextRequest, schema: ModelSchema, hold: Hold
    ) -> dict[str, Any]:
        assert parsed.input_ids is not None
        generator = await part_that(client, schema, lambda part: "input_ids" in part.inputs)
        with named({"input_ids": "tokens", "prompt": "tokens"}):
            text = await text_of(client, generator, parsed.input_ids[0], **parsed.sampling)
        return {"prompt": text}

    async def _prompt_ids(
        self, client: AsyncClient, parsed: TextRequest, schema: ModelSchema, hold: Hold
    ) -> list[list[int]]:
        """Returns the token ids of each prompt of a request; raises as `token_ids` and
        `ImageFetcher.with_images` do."""
        if parsed.input_ids is not None:
            return parsed.input_ids
        timeout = client._settings.timeout
        if parsed.messages is not None:
            messages = await self._messages(parsed.messages, hold)
            return [await token_ids(client, schema, None, messages, timeout)]
        texts = [parsed.prompt] if isinstance(parsed.prompt, str) else parsed.prompt or []
        return await asyncio.gather(*(token_ids(client, schema, text, None, timeout) for text in texts))

    async def change_adapters(self, request: Request, *, load: bool) -> Response:
        """Serves vLLM's routes to load and unload LoRA adapters; with API keys, only for keys with
        `admin`."""
        check_admin(exchange_of(request.scope).key)
        with self.intake.open() as hold:
            body = await _read(request, dict, hold)
            change = self.adapters.load if load else self.adapters.unload
            return PlainTextResponse(await change([s.client for s in self.balancer.servers], body))

    async def _model(
        self, client: AsyncClient, name: str, schema: ModelSchema, adapter: Adapter | None = None
    ) -> dict[str, Any]:
        parts = [schema, *[await client._schema(step) for step in schema.steps]]
        inputs = {name for part in parts if _is_text_model(part) for name in part.inputs}
        inputs |= schema.inputs.keys()
        generator = await part_that(client, schema, lambda part: "cache_control" in part.inputs)
        able = (
            ("chat", "messages"),
            ("completions", "text_input"),
            ("images", "image"),
            ("embeddings", "return_embedding"),
        )
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "quire",
            "max_model_len": await max_model_len(client, generator, DESCRIBED_S),
            "capabilities": [word for word, name in able if name in inputs],
            **({} if adapter is None else {"root": adapter.root, "parent": adapter.parent}),
        }

    async def answer(self, request: Request, parse: Callable[[Mapping[str, Any]], TextRequest]) -> Any:
        with self.intake.open() as hold:
            # No name here for what was parsed: it may be large, and goes when the server has it.
            work = self._generate(await _parsed(request, parse, hold), hold, exchange_of(request.scope))
            return await self.exchanges.run(request.receive, work)

    async def embeddings(self, request: Request) -> Any:
        with self.intake.open() as hold:
            parsed = await _parsed(request, parse_embedding, hold)
            work = self._embed(parsed, hold, exchange_of(request.scope))
            return await self.exchanges.run(request.receive, work)

    async def _embed(self, parsed: EmbeddingRequest, hold: Hold, exchange: Exchange) -> Response:
        server, model = self.balancer.pick(parsed.sampling), parsed.model
        with server.watched(), server.counted():
            client = server.client
            schema, adapter = await self._find(client, model)
            schema = await part_that(client, schema, lambda part: "return_embedding" in part.inputs)
            exchange.model = model
            timeout, chosen = client._settings.timeout, _with_adapter(parsed.sampling, adapter)
            stated: dict[str, Any] = {"model": schema.name, "timeout": timeout, **chosen}
            found = await embed(client, parsed.input, name="input", **stated)
        exchange.pooled(found)
        body = await hold.work(partial(embeddings_reply, as_base64=parsed.as_base64), model, found)
        return Response(body, media_type="application/json")

    async def score(
        self,
        request: Request,
        parse: Callable[[Mapping[str, Any]], ScoringRequest],
        reply: Callable[[ScoringRequest, Scores], dict[str, Any]],
    ) -> Any:
        """Answers a request for scores: `parse` parses its body, and `reply` makes its answer."""
        with self.intake.open() as hold:
            parsed = await _parsed(request, parse, hold)
            work = self._score(parsed, reply, hold, exchange_of(request.scope))
            return await self.exchanges.run(request.receive, work)

    async def _score(
        self,
        parsed: ScoringRequest,
        reply: Callable[[ScoringRequest, Scores], dict[str, Any]],
        hold: Hold,
        exchange: Exchange,
    ) -> Response:
        server = self.balancer.pick(parsed.sampling)
        with server.watched(), server.counted():
            client = server.client
            schema, adapter = await self._find(client, parsed.model)
            needed = {"return_scores", parsed.source}
            schema = await part_that(client, schema, lambda part: needed <= part.inputs.keys())
            exchange.model = parsed.model
            timeout, chosen = client._settings.timeout, _with_adapter(parsed.sampling, adapter)
            stated: dict[str, Any] = {"model": schema.name, "timeout": timeout, **chosen}
            if parsed.messages is not None:
                messages = await self._messages(parsed.messages, hold)
                found = await classify_messages(client, messages, **stated)
            elif parsed.seconds is not None:
                found = await score(client, parsed.firsts, parsed.seconds, name=parsed.pair_field, **stated)
            else:
                found = await classify(client, parsed.input, name="input", **stated)
        exchange.pooled(found)
        return await hold.work(lambda: JSONResponse(reply(parsed, found)))

    async def _generate(self, parsed: TextRequest, hold: Hold, exchange: Exchange) -> Any:
        """Returns the response. For a stream this waits for the first chunk, so that an error before the
        first chunk is answered with its own HTTP status."""
        exchange.streams, num_choices = parsed.stream, parsed.num_prompts * parsed.choices_per_prompt
        is_chat, top = parsed.messages is not None, parsed.top_logprobs
        server = self.balancer.pick(parsed.sampling)
        with server.watched(), named(parsed.names):
            prompt_ids: list[list[int]] = []
            if parsed.returns_token_ids:
                schema, _ = await self._find(server.client, parsed.model)
                prompt_ids = await self._prompt_ids(server.client, parsed, schema, hold)
            request = await server.start(self._start(server.client, parsed, hold, exchange))
            reply = ReplyFormat(
                request.request_id,
                parsed.model,
                is_chat,
                parsed.include_usage,
                parsed.choices_per_prompt,
                None if top is None else LogprobsFormat(is_chat, top),
                parsed.echoed,
                continuous_usage=parsed.continuous_usage,
                prompt_logprobs=parsed.prompt_logprobs,
                returns_token_ids=parsed.returns_token_ids,
                prompt_token_ids=tuple(prompt_ids),
            )
            del parsed
            hold.close()
            if not exchange.streams:
                result = await request.result()
                exchange.answered(result)
                return JSONResponse(reply.whole(result))
            first = await anext(request, None)
            return EventStream(self.exchanges, request, first, reply, num_choices, exchange)

    async def _start(
        self, client: AsyncClient, parsed: TextRequest, hold: Hold, exchange: Exchange
    ) -> AsyncStream | Batch:
        """Sends the request to the client's server and returns it.

        Raises:
            RequestError: the model lacks an input or output for the request, `lora_name` is another adapter
                than the request's model, or as `ImageFetcher.with_images`.
            QuireClientError: as `AsyncStream.start`.
        """
        schema, adapter = await self._find(client, parsed.model)
        schema = await part_that(client, schema, partial(_takes, parsed))
        exchange.model = parsed.model
        if parsed.source not in schema.inputs:
            field = "messages" if parsed.source == "messages" else "prompt"
            raise RequestError(f"{field}: the model {parsed.model!r} has no {parsed.source}", param=field)
        if isinstance(parsed.prompt, list) and not schema.inputs["text_input"].is_list:
            raise RequestError(f"prompt: the model {parsed.model!r} takes one prompt", param="prompt")
        for field, output in _needed(parsed):
            if schema.outputs is not None and output not in schema.outputs:
                raise RequestError(f"{field}: the model {parsed.model!r} has no {output}", param=field)
        messages: Any = None if parsed.messages is None else await self._messages(parsed.messages, hold)
        asked: dict[str, Any] = {
            "stream": parsed.stream,
            "model": schema.name,
            "outputs": _outputs(schema, parsed, counts_tokens=exchange.counts_tokens),
            **_with_adapter(parsed.sampling, adapter),
        }
        request: AsyncStream | Batch
        if parsed.input_ids is None:
            request = AsyncStream(client, parsed.prompt, messages=messages, **asked)
        else:
            streams = [AsyncStream(client, None, input_ids=ids, **asked) for ids in parsed.input_ids]
            request = streams[0] if len(streams) == 1 else Batch(streams)
        exchange.request_id = request.request_id
        await request.start()
        return request

    async def _messages(self, stated: Mapping[str, Any], hold: Hold) -> bytes:
        """Returns the JSON for the server's input `messages`: the messages with images fetched, and the other
        fields of `stated`."""
        fetched = await self.fetcher.with_images(stated["messages"], hold)
        beside = {name: value for name, value in stated.items() if name != "messages"}
        # Without such fields it is a bare list, which models of other backends understand, too.
        return await hold.work(write_json, {"messages": fetched, **beside} if beside else fetched)


def _takes(parsed: TextRequest, schema: ModelSchema) -> bool:
    """Whether the model has an input for this form of prompt: messages, one or several texts, or token
    ids."""
    tensor = schema.inputs.get(parsed.source)
    return tensor is not None and (tensor.is_list or not isinstance(parsed.prompt, list))


def _with_adapter(sampling: Mapping[str, Any], adapter: Adapter | None) -> dict[str, Any]:
    """Returns the parameters, with `lora_name` set if the request's model name was an adapter's. Raises
    RequestError if they name another adapter."""
    if adapter is None:
        return dict(sampling)
    if sampling.get("lora_name") not in (None, "", adapter.name):
        raise RequestError(f"lora_name: the model {adapter.name!r} is another adapter", param="lora_name")
    return {**sampling, "lora_name": adapter.name}


def _is_text_model(schema: ModelSchema) -> bool:
    """Whether a model accepts text or messages and answers with text; unknown outputs count as text. (A
    tokenizer model accepts text, too.)"""
    answers = schema.outputs is None or "text_output" in schema.outputs
    return answers and any(name in schema.inputs for name in PROMPTS)


def _needed(parsed: TextRequest) -> list[tuple[str, str]]:
    """Returns pairs: a field that the request uses, and a model output without which it cannot be served."""
    needed = (
        ("tools", "tool_calls", parsed.has_tools),
        ("logprobs", "logprobs", parsed.top_logprobs is not None),
        ("logprobs", "prompt_logprobs", parsed.echo and parsed.top_logprobs is not None),
        ("prompt_logprobs", "prompt_logprobs", parsed.prompt_logprobs is not None),
        ("return_token_ids", "output_ids", parsed.returns_token_ids),
        ("timing", "timing", parsed.timing),
        ("prompt", "batch_index", isinstance(parsed.prompt, list) and len(parsed.prompt) > 1),
    )
    return [(field, output) for field, output, is_wanted in needed if is_wanted]


def _outputs(schema: ModelSchema, parsed: TextRequest, *, counts_tokens: bool) -> list[str] | None:
    """Returns the outputs to ask for; None: all. In streams, token counts are left out unless they are
    used."""
    if schema.outputs is None:
        return None
    wanted = ["text_output", "finish_reason"]
    if counts_tokens or parsed.include_usage or not parsed.stream:
        counts = "num_output_tokens" if "num_output_tokens" in schema.outputs else "output_ids"
        wanted += [counts, "num_input_tokens", "num_cached_tokens", "num_reasoning_tokens"]
    if not parsed.stream:
        wanted.append("stop_reason")
    if parsed.messages is not None:
        wanted.append("reasoning_output")
    wanted += [output for _, output in _needed(parsed)]
    if any(name in parsed.sampling for name in ("n", "best_of", "beam_width")):
        wanted.append("index")
    return [name for name in dict.fromkeys(wanted) if name in schema.outputs]


async def _parsed(request: Request, parse: Callable[[Mapping[str, Any]], Parsed], hold: Hold) -> Parsed:
    """Returns the parsed body of a request, with parameters that headers and the key state."""
    parsed = await _read(request, parse, hold)
    stated = {field: request.headers[name] for name, field in HEADERS.items() if name in request.headers}
    key = exchange_of(request.scope).key
    if key is not None:
        stated["tenant"] = key.tenant
    return dataclasses.replace(parsed, sampling={**stated, **parsed.sampling})


async def _read(request: Request, parse: Callable[[Mapping[str, Any]], Any], hold: Hold) -> Any:
    """Reads the body of a request and returns what `parse` makes of it, on a thread."""
    body = await read_body(request, hold)
    hold.take_values(await hold.work(count_values, body))

    def read() -> tuple[Any, int]:
        value = parse_json(body)
        return parse(value), text_bytes(value)

    parsed, num_bytes = await hold.work(read)
    hold.take_text(num_bytes)
    return parsed


async def _failed(request: Request, error: Any) -> Response:
    return error_response(error)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _http_error(request: Request, error: Any) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(error_object(message, error.status_code), error.status_code, error.headers)


async def _crashed(request: Request, error: Exception) -> Response:
    return JSONResponse(error_object("the gateway failed; its log has the reason", 500), 500)
