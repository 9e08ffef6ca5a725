"""`AsyncClient`: calls and streams for asyncio; one channel may carry thousands of concurrent streams.

`Client` runs the same coroutines over blocking I/O. So this module and `embedding.py`, which together hold
the logic of both clients, await only their own coroutines and those of `_io.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2

from quire_client import _connection as conn
from quire_client._io import AsyncioCall, AsyncioIO, BlockingCall, BlockingIO
from quire_client.embedding import Prompts, classify, embed, score
from quire_client.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ProtocolError,
    QuireClientError,
    error_from_rpc,
    error_from_text,
)
from quire_client.protocol import (
    CHAT_MODEL,
    GENERATOR_MODEL,
    ModelSchema,
    Prompt,
    assumed_schema,
    build_cancel,
    build_request,
    cache_answer,
    conversation,
    parse_response,
    schema_from_config,
    schema_from_metadata,
    tenant_of,
)
from quire_client.types import Chunk, Embeddings, Message, ModelInfo, Result, Scores, collect

MAX_SCHEMAS = 1024
"""Most model schemas that a client caches. If a server restricts access to model configurations, any name
that a gateway's client invents gets an assumed schema, so the cache must be bounded."""


class AsyncStream(AsyncIterator[Chunk]):
    """A request and the chunks of its answer: `async for chunk in stream`.

    The request is sent by the first `async for` step, `async with` or `start()`. Leaving the stream early
    (`aclose()`, the end of an `async with` block, cancellation of the waiting task) cancels the request on
    the server. A plain `break` without `async with` cancels it when the stream is garbage-collected.
    """

    def __init__(
        self,
        client: AsyncClient,
        prompt: str | bytes | Sequence[str] | None,
        /,
        *,
        stream: bool,
        messages: Sequence[Message] | Mapping[str, Any] | str | None = None,
        input_ids: Sequence[int] | None = None,
        images: Sequence[bytes | str | os.PathLike[str]] = (),
        model: str | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        parameters: Mapping[str, Any] | None = None,
        outputs: Iterable[str] | None = None,
        **sampling: Any,
    ) -> None:
        self._client = client
        self._io = client._io
        self._prompt = Prompt(prompt, messages, input_ids, images)
        # Unguessable: whoever knows the id of a request can cancel it.
        self.request_id = request_id or uuid.uuid4().hex
        self.model = model or self._prompt.default_model
        self._timeout = client._settings.timeout if timeout is None else timeout
        self._tenant = tenant_of(sampling, parameters)
        self._arguments: dict[str, Any] = {
            "request_id": self.request_id,
            "stream": stream,
            "sampling": sampling,
            "parameters": parameters,
            "outputs": outputs,
        }
        self._schema: ModelSchema | None = None
        self._call: AsyncioCall | BlockingCall | None = None
        self._deadline = conn.Deadline(None)
        self._pending: list[Chunk] = []
        self._final = False
        self._over = False
        self._reading = self._io.lock()
        # Taken for good by the first `cancel`, of whichever thread.
        self._cancelling = threading.Lock()
        self.started_at = 0.0
        self._trace = conn.trace_metadata()

    async def start(self) -> None:
        """Sends the request; does nothing if it was already sent or cancelled.

        Raises:
            QuireClientError: the request was not sent, for example because of an unknown model, no
                connection, the timeout, or a value that the model has no input for.
        """
        if self._call is not None or self._over:
            return
        prompt, arguments = self._prompt, self._arguments
        self._deadline = deadline = conn.Deadline(self._timeout)
        schema = await self._client._schema(self.model, deadline)
        build = functools.partial(build_request, schema, prompt, timeout=deadline.remaining(), **arguments)
        request = await self._io.compute(build) if prompt.is_large else build()
        if self._call is not None or self._over:
            return  # started or cancelled meanwhile
        # The answer may take long, and needs none of it.
        self._prompt, self._arguments = Prompt(), {}
        self._schema = schema
        self.started_at = time.perf_counter()
        self._call = self._client._send(request, deadline.remaining(), self._trace)

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        try:
            await self._io.acquire(self._reading)
            try:
                if self._call is None:
                    await self.start()
                while not self._pending and not self._over:
                    if self._final:
                        await self._read_to_end(conn.DRAIN_TIMEOUT)
                    else:
                        await self._read()
                if self._cancelling.locked():
                    raise Cancelled("the request was cancelled by this client", request_id=self.request_id)
                if self._pending:
                    return self._pending.pop(0)
                raise StopAsyncIteration
            finally:
                self._reading.release()
        except StopAsyncIteration:
            raise
        except BaseException as error:
            # A request that was never sent may be tried again, and one that has ended needs no cancelling.
            if not isinstance(error, QuireClientError) or (self._call is not None and not self._over):
                # The cancellation of this task must not stop that of the request.
                await self._io.finish(self.cancel())
            raise

    async def _read(self) -> None:
        """Reads one response from the call; the caller holds `_reading`."""
        assert self._call is not None and self._schema is not None
        try:
            response = await self._call.receive()
        except grpc.RpcError as error:
            self._over = True
            failure = error_from_rpc(error, self._client._settings.url)
        else:
            if response is None:
                self._over = True
                failure = ProtocolError("the stream ended without a final response")
            elif response.error_message:
                await self._read_to_end(conn.DRAIN_TIMEOUT)
                failure = error_from_text(response.error_message)
            else:
                try:
                    chunks, final = parse_response(response.infer_response, time.perf_counter())
                except ProtocolError as error:
                    failure = error
                else:
                    self._pending.extend(chunks)
                    self._final = bool(final) or (final is None and self._schema.decoupled is False)
                    return
        if not self._cancelling.locked():
            raise self._failed(failure)

    async def _read_to_end(self, seconds: float) -> bool:
        """Reads the call to its end, so that it ends cleanly on the server too; returns whether the end came
        within `seconds`."""
        assert self._call is not None
        ended = await self._call.exhaust(seconds)
        self._over = True
        return ended

    def _failed(self, error: QuireClientError) -> QuireClientError:
        assert self._schema is not None
        error.request_id = self.request_id
        error = self._deadline.explained(error)
        if isinstance(error, DeadlineExceeded):
            # The call is gone. Triton tells a model about that, but not the members of an ensemble.
            self._io.spawn(self._cancel_by_id(late=True))
        elif isinstance(error, InvalidArgument | NotFound):
            # The model may have been replaced by one with other tensors.
            self._client._schemas.pop(self.model, None)
        return error

    async def _cancel_by_id(self, *, late: bool = False) -> bool:
        assert self._schema is not None
        return await self._client._cancel_by_id(self._schema, self.request_id, self._tenant, late=late)

    @property
    def done(self) -> bool:
        """True when nothing more will come from the server."""
        return self._final or self._over

    async def cancel(self) -> None:
        """Ends the request on the server; returns when the server has been told, or has not answered for some
        seconds.

        It first cancels by request id, if the model accepts that. This also reaches a generator inside an
        ensemble and lets the stream end with its own final response. Then it cancels the call. It cancels
        nothing if the request is over or is already being cancelled. A request that was not sent yet will not
        be sent.
        """
        if self._over:
            return
        if self._final:
            await self._drain(conn.DRAIN_TIMEOUT)
            return
        if not self._cancelling.acquire(blocking=False):
            return
        if self._call is None:
            self._over = True
            return
        told = await self._cancel_by_id()
        ended = await self._drain(conn.DRAIN_TIMEOUT if told else conn.LATE_CANCEL_DELAYS[0])
        self._over = True
        self._call.cancel()
        if not told and not ended:
            await self._cancel_by_id(late=True)

    async def _drain(self, seconds: float) -> bool:
        """Reads the call to its end, once nobody else reads it; returns whether the end came in time."""
        if not await self._io.acquire(self._reading, seconds):
            return False
        try:
            return self._over or await self._read_to_end(seconds)
        finally:
            self._reading.release()

    aclose = cancel

    async def result(self) -> Result:
        """Reads the stream to its end and returns the whole result; the stream must not have been iterated
        yet."""
        chunks = [chunk async for chunk in self]
        return collect(self.request_id, self.model, self.started_at, chunks)

    async def __aenter__(self) -> AsyncStream:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is None or self._over or not self._io.is_alive:
            return
        # No waiting in a destructor.
        if self._final:
            self._io.spawn(call.exhaust(conn.DRAIN_TIMEOUT))
        else:
            call.cancel()
            self._io.spawn(self._cancel_by_id(late=True))


class AsyncClient:
    """Asyncio client of a Quire server, or of another one with Triton's gRPC API. Lives in one event loop.

    Args:
        url: HOST:PORT of the gRPC endpoint.
        timeout: default for requests, seconds from call to last token; None: no limit.
        headers: gRPC metadata of every call (authorization, restricted protocols).
        credentials: TLS; None: plain text.
        channel_options: further gRPC channel arguments.
        error_codes: True: ask for the exact status code of errors in streams (`triton_grpc_error`). False:
            codes are inferred from the error's text. No known version of tritonserver survives True: an
            error then loses unwritten responses, and sooner or later crashes the whole server.
    """

    _io_type: type[AsyncioIO] | type[BlockingIO] = AsyncioIO

    def __init__(
        self,
        url: str = conn.DEFAULT_URL,
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        channel_options: Iterable[tuple[str, Any]] = (),
        error_codes: bool = False,
    ) -> None:
        self._settings = conn.Settings(url, timeout, dict(headers or {}), credentials, tuple(channel_options))
        self._error_codes = error_codes
        self._io = self._io_type(self._settings)
        self._schemas: dict[str, ModelSchema] = {}

    async def generate(self, prompt: str | bytes | Sequence[str] | None = None, **arguments: Any) -> Result:
        """Returns the whole answer, without streaming if the model allows that; arguments as for `stream`."""
        return await self._answer(prompt, **arguments).result()

    async def chat(
        self,
        messages: str | list[Message],
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> Result:
        """Returns the answer to a conversation (or to one message of the user).

        Args:
            tools, tool_choice, parallel_tool_calls, response_format: as in OpenAI's chat completions; the
                calls of the first choice are in `Result.tool_calls`.
            arguments: as for `stream`.
        """
        asked = conversation(
            messages,
            system=system,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
        )
        return await self.generate(messages=asked, **arguments)

    def stream(self, prompt: str | bytes | Sequence[str] | None = None, **arguments: Any) -> AsyncStream:
        """Returns a request whose chunks come as they are generated; arguments as for `Client.stream`.

        The request is sent when the stream is started or first iterated. Starting and iterating raise all
        errors of the request; this method raises none of them.
        """
        return AsyncStream(self, prompt, stream=True, **arguments)

    async def embed(
        self,
        prompts: Prompts,
        *,
        dimensions: int | None = None,
        model: str = GENERATOR_MODEL,
        timeout: float | None = None,
        **arguments: Any,
    ) -> Embeddings:
        """Returns the embeddings of prompts, one for each.

        Args:
            prompts: a text, its token ids, or several of either.
            dimensions: number of leading dimensions to keep; None: all.
            timeout: seconds for all prompts together.
            arguments: scheduling parameters, as for `stream`.

        Raises:
            QuireClientError: the model gives no embeddings, or a prompt's request failed, which cancels the
                requests of the other prompts. The message names a wrong prompt as `prompts[i]`, or as
                `prompts` if the argument is one prompt.
        """
        timeout = self._settings.timeout if timeout is None else timeout
        stated = arguments if dimensions is None else {"dimensions": dimensions, **arguments}
        return await embed(self, prompts, model=model, timeout=timeout, **stated)

    async def classify(
        self,
        prompts: Prompts,
        *,
        use_activation: bool | None = None,
        model: str = GENERATOR_MODEL,
        timeout: float | None = None,
        **arguments: Any,
    ) -> Scores:
        """Returns the scores of prompts by a classifier or a reward model, one for each label.

        Args:
            prompts: a text, its token ids, or several of either.
            use_activation: False: return logits, which are what reward models are used for. True or None:
                apply the activation of the checkpoint (sigmoid, softmax or none).
            timeout: seconds for all prompts together.
            arguments: scheduling parameters, as for `stream`.

        Raises:
            QuireClientError: the model gives no scores, or a prompt's request failed, as for `embed`.
        """
        timeout = self._settings.timeout if timeout is None else timeout
        return await classify(
            self, prompts, model=model, timeout=timeout, use_activation=use_activation, **arguments
        )

    async def score(
        self,
        firsts: str | Sequence[str],
        seconds: Sequence[str],
        *,
        use_activation: bool | None = None,
        model: str = GENERATOR_MODEL,
        timeout: float | None = None,
        **arguments: Any,
    ) -> Scores:
        """Returns the scores of pairs of texts by a reranker.

        Args:
            firsts: list of the first text of each pair (the query), or one text for all pairs.
            seconds: second text of each pair (the document).
            use_activation: as for `classify`.
            timeout: seconds for all pairs together.
            arguments: scheduling parameters, as for `stream`.

        Raises:
            QuireClientError: there are not as many first as second texts, the model gives no scores, or a
                pair's request failed, which cancels the requests of the other pairs. The message names a
                wrong pair as `seconds[i]`.
        """
        timeout = self._settings.timeout if timeout is None else timeout
        stated = {"use_activation": use_activation, **arguments}
        return await score(self, firsts, seconds, model=model, timeout=timeout, **stated)

    async def cache_control(
        self, command: Mapping[str, Any], *, model: str = GENERATOR_MODEL, timeout: float | None = None
    ) -> dict[str, Any]:
        """Sends a `cache_control` command to a generator and returns its answer.

        Raises:
            InvalidArgument: the command is unknown or not allowed, or the model takes no commands. Other
                errors depend on the command.
        """
        result = await self.generate(
            model=model, timeout=timeout, outputs=["text_output"], cache_control=command
        )
        return cache_answer(result.text)

    async def requests(
        self, *, tenant: str = "", model: str = GENERATOR_MODEL, timeout: float | None = None
    ) -> dict[str, Any]:
        """Returns an object with the tenant's requests that run or wait and what each waits for. If there are
        many, it lists only some and counts the others.

        Args:
            tenant: empty: the tenant that the server takes from a header, or if there is none, requests
                without a tenant.

        Raises:
            InvalidArgument: the model does not list requests.
        """
        result = await self.generate(
            model=model,
            timeout=timeout,
            outputs=["text_output"],
            tenant=tenant or None,
            cache_control={"command": "requests"},
        )
        return cache_answer(result.text)

    async def cache_reset(self, **arguments: Any) -> dict[str, Any]:
        """Empties the prefix cache, with its pins, and the KV tiers; running requests go on. Arguments as for
        `cache_control`."""
        return await self.cache_control({"command": "reset"}, **arguments)

    async def cache_inspect(self, **arguments: Any) -> dict[str, Any]:
        """Returns the cache's sizes, hit counters, pins and tiers. Arguments as for `cache_control`."""
        return await self.cache_control({"command": "inspect"}, **arguments)

    async def cache_unpin(
        self, session: str | None = None, *, tenant: str = "", **arguments: Any
    ) -> dict[str, Any]:
        """Unpins the blocks that the tenant's session has pinned. Without a session it removes all pins, of
        every tenant. Arguments as for `cache_control`."""
        whose = {"all": True} if session is None else {"session": session}
        stated = {"tenant": tenant} if tenant and session is not None else {}
        return await self.cache_control({"command": "unpin", **whose, **stated}, **arguments)

    async def sleep(self, *, drain: bool = False, **arguments: Any) -> dict[str, Any]:
        """Frees the memory of the engine's weights and KV cache; the engine refuses requests until `wake`.
        Prefixes cached in memory are lost.

        Args:
            drain: True: wait until all requests have ended. False: the command is refused while there are
                any.
            arguments: as for `cache_control`.
        """
        return await self.cache_control({"command": "sleep", "drain": drain}, **arguments)

    async def wake(self, **arguments: Any) -> dict[str, Any]:
        """Wakes a sleeping engine, with the same weights. Arguments as for `cache_control`."""
        return await self.cache_control({"command": "wake"}, **arguments)

    async def adapters(self, **arguments: Any) -> dict[str, Any]:
        """Returns an object with `adapters` (name, path, rank, slot and use of each LoRA adapter),
        `max_loras` and the model's `max_model_len`.

        Arguments as for `cache_control`.
        """
        return await self.cache_control({"command": "adapters"}, **arguments)

    async def load_adapter(self, name: str, path: str, **arguments: Any) -> dict[str, Any]:
        """Loads a LoRA adapter. It replaces one of this name; that fails while requests use one with other
        content. When this returns, requests may name the adapter (`lora_name`).

        Args:
            path: the adapter's directory on the server, below `lora_root` of the model's configuration; a
                relative path starts there.
            arguments: as for `cache_control`.
        """
        return await self.cache_control({"command": "load_adapter", "name": name, "path": path}, **arguments)

    async def unload_adapter(self, name: str, *, drain: bool = False, **arguments: Any) -> dict[str, Any]:
        """Unloads a LoRA adapter.

        Args:
            drain: True: wait until the adapter's requests have ended. False: the command is refused while
                there are any.
            arguments: as for `cache_control`.
        """
        return await self.cache_control(
            {"command": "unload_adapter", "name": name, "drain": drain}, **arguments
        )

    async def cancel(self, request_id: str, *, model: str = CHAT_MODEL, tenant: str = "") -> bool:
        """Ends a tenant's running or waiting request by its id, whichever client started it.

        Returns:
            True when the server had such a request; False when not, when the model cannot cancel by id, or
            when the cancel request failed.

        Raises:
            QuireClientError: the model's schema was not known yet and could not be fetched.
        """
        return await self._cancel_by_id(await self._schema(model), request_id, tenant)

    async def models(self) -> list[ModelInfo]:
        """Returns every model of the server's repository, ready or not."""
        entries = (await self._control("RepositoryIndex", service_pb2.RepositoryIndexRequest())).models
        infos = []
        for entry in entries:
            ready = await self._model_ready(entry.name, entry.version)
            # Fresh, not from the cache: this is how a caller learns that a model has changed.
            self._schemas.pop(entry.name, None)
            schema = await self._schema(entry.name) if ready else None
            state = entry.state or ("READY" if ready else "UNAVAILABLE")
            info = ModelInfo(entry.name, entry.version, state, entry.reason, ready)
            if schema is not None:
                info = dataclasses.replace(info, kind=schema.kind, decoupled=schema.decoupled)
            infos.append(info)
        return infos

    async def _model_ready(self, name: str, version: str) -> bool:
        try:
            request = service_pb2.ModelReadyRequest(name=name, version=version)
            return bool((await self._control("ModelReady", request)).ready)
        except NotFound:
            return False

    async def server_ready(self, *, timeout: float = 5.0) -> bool:
        """True when a server answers and says it is ready; False also when there is none."""
        try:
            request = service_pb2.ServerReadyRequest()
            return bool((await self._control("ServerReady", request, conn.Deadline(timeout))).ready)
        except QuireClientError:
            return False

    async def close(self) -> None:
        """Waits for pending cancellations, then closes the channel; running streams end with `Cancelled`."""
        await self._io.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _send(
        self, request: Any, timeout: float | None, trace: conn.Metadata = ()
    ) -> AsyncioCall | BlockingCall:
        metadata = self._settings.metadata(error_codes=self._error_codes) + trace
        return self._io.stream(request, timeout=timeout, metadata=metadata)

    async def _control(self, method: str, request: Any, deadline: conn.Deadline | None = None) -> Any:
        deadline = deadline or conn.Deadline(conn.CONTROL_TIMEOUT)
        left = deadline.remaining()
        timeout = conn.CONTROL_TIMEOUT if left is None else left
        try:
            return await self._io.ask(method, request, timeout=timeout, metadata=self._settings.metadata())
        except grpc.RpcError as rpc:
            error = error_from_rpc(rpc, self._settings.url)
        raise deadline.explained(error)

    async def _control_unless_restricted(
        self, method: str, request: Any, deadline: conn.Deadline | None
    ) -> Any | None:
        """Makes a call as `_control` does; returns None if the server restricts or does not implement it."""
        try:
            return await self._control(method, request, deadline)
        except QuireClientError as error:
            if isinstance(error, PermissionDenied) or error.code == "UNIMPLEMENTED":
                return None
            raise

    def _answer(self, prompt: str | bytes | Sequence[str] | None, **arguments: Any) -> AsyncStream:
        """Returns a request that asks for its answer without streaming."""
        return AsyncStream(self, prompt, stream=False, **arguments)

    async def _schema(self, model: str, deadline: conn.Deadline | None = None) -> ModelSchema:
        schema = self._schemas.get(model)
        if schema is None:
            schema = await self._fetch_schema(model, deadline)
            if len(self._schemas) >= MAX_SCHEMAS:
                self._schemas.clear()
            self._schemas[model] = schema
        return schema

    async def _fetch_schema(self, model: str, deadline: conn.Deadline | None) -> ModelSchema:
        for method, request, schema_from in (
            ("ModelConfig", service_pb2.ModelConfigRequest(name=model), schema_from_config),
            ("ModelMetadata", service_pb2.ModelMetadataRequest(name=model), schema_from_metadata),
        ):
            answer = await self._control_unless_restricted(method, request, deadline)
            if answer is not None:
                return schema_from(answer)
        return assumed_schema(model)

    async def _cancel_model(self, schema: ModelSchema) -> ModelSchema | None:
        """Returns the model that accepts cancel requests (a request's id with `cancel` true): this model, or
        the last member of the ensemble that has a `cancel` input; None if there is none."""
        if not schema.steps:
            return schema if "cancel" in schema.inputs else None
        for step in reversed(schema.steps):
            deadline = conn.Deadline(conn.CANCEL_TIMEOUT)
            found = await self._cancel_model(await self._schema(step, deadline))
            if found is not None:
                return found
        return None

    async def _cancel_by_id(
        self, schema: ModelSchema, request_id: str, tenant: str, *, late: bool = False
    ) -> bool:
        """Sends the cancel request; returns whether the generator knew the request, False also on an error.

        Args:
            late: True: the call itself has already ended, so repeat an ensemble's cancel request a few
                times: the generator may not have got the request from the ensemble yet.
        """
        try:
            model = await self._cancel_model(schema)
            if model is None:
                return False
            if await self._send_cancel(model, request_id, tenant):
                return True
            if late and schema.steps:
                for delay in conn.LATE_CANCEL_DELAYS:
                    await self._io.sleep(delay)
                    if await self._send_cancel(model, request_id, tenant):
                        return True
        except (QuireClientError, ValueError, grpc.aio.UsageError):
            pass  # Best effort: the call is cancelled in any case (the last two: the channel is closed).
        return False

    async def _send_cancel(self, model: ModelSchema, request_id: str, tenant: str) -> bool:
        call = self._send(build_cancel(model, request_id, tenant), conn.CANCEL_TIMEOUT)
        known = True
        try:
            while (response := await call.receive()) is not None:
                known = known and not response.error_message
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                return False
            raise error_from_rpc(error, self._settings.url) from None
        return known
