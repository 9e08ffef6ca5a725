"""`AsyncClient`: the same calls for asyncio; one channel carries thousands of concurrent streams."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from quire_client import _connection as conn
from quire_client.client import NO_FINAL
from quire_client.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ProtocolError,
    QuireClientError,
    error_from_rpc,
    error_from_text,
)
from quire_client.protocol import (
    GENERATOR_MODEL,
    ModelSchema,
    Prompt,
    assumed_schema,
    build_cancel,
    build_request,
    cache_answer,
    parse_response,
    schema_from_config,
    schema_from_metadata,
    tenant_of,
    unpin_command,
)
from quire_client.types import Chunk, Collector, Message, ModelInfo, Result


class AsyncStream(AsyncIterator[Chunk]):
    """A running request: `async for chunk in stream`.

    The request is sent by the first `async for` step, `async with` or `start()`. Leaving it early
    (`aclose()`, the end of an `async with` block, cancellation of the waiting task) cancels it on the server.
    A plain `break` without `async with` cancels too, when the stream is collected.
    """

    def __init__(self, client: AsyncClient, prompt: Prompt, arguments: dict[str, Any]) -> None:
        self._client = client
        self._prompt = prompt
        self.request_id: str = arguments.pop("request_id") or conn.new_request_id()
        self.model: str = arguments.pop("model") or prompt.default_model
        self._timeout: float | None = arguments.pop("timeout")
        self._tenant = tenant_of(arguments["sampling"], arguments["parameters"])
        self._arguments = arguments
        self._schema: ModelSchema | None = None
        self._call: Any = None
        self._receiving: asyncio.Future[Any] | None = None
        self._pending: list[Chunk] = []
        self._final = False
        self._over = asyncio.Event()
        self._reading = asyncio.Lock()
        self._cancelled = False
        self.started_at = 0.0

    async def start(self) -> None:
        """Sends the request; does nothing when it was sent.

        Raises:
            QuireClientError: unknown model, no connection.
        """
        if self._call is not None or self._over.is_set():
            return
        deadline = conn.Deadline(self._timeout)
        schema = await self._client._schema(self.model, deadline)
        await self._client._learn_server(deadline)
        build = functools.partial(
            build_request,
            schema,
            self._prompt,
            request_id=self.request_id,
            timeout=deadline.remaining(),
            **self._arguments,
        )
        # In a thread where it would hold up the other streams of this loop.
        request = await asyncio.to_thread(build) if self._prompt.is_large else build()
        # The answer may take long, and needs none of it.
        self._prompt, self._arguments = Prompt(), {}
        del build
        if self._over.is_set():
            return  # cancelled meanwhile
        self._schema = schema
        self.started_at = time.perf_counter()
        self._call = self._client._stub.ModelStreamInfer(
            iter([request]),
            timeout=deadline.remaining(),
            metadata=self._client._settings.metadata(error_codes=bool(self._client._error_codes)),
        )

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        try:
            async with self._reading:
                await self.start()
                while not self._pending:
                    if self._over.is_set():
                        break
                    if self._final:
                        await self._read_to_end(conn.DRAIN_TIMEOUT)
                    else:
                        await self._read()
                if self._cancelled:
                    raise Cancelled("the request was cancelled by this client", request_id=self.request_id)
                if self._pending:
                    return self._pending.pop(0)
                raise StopAsyncIteration
        except (QuireClientError, StopAsyncIteration):
            raise
        except BaseException:
            # The cancellation of this task must not stop that of the request.
            await asyncio.shield(self._client._spawn(self.cancel()))
            raise

    async def _read(self) -> None:
        """Takes one response off the call; `_reading` is held."""
        try:
            response = await self._receive()
        except grpc.RpcError as error:
            self._over.set()
            if not self._cancelled:
                raise self._failed(error_from_rpc(error, url=self._client._settings.url)) from None
            return
        if response is grpc.aio.EOF:
            self._over.set()
            if not self._cancelled:
                raise ProtocolError(NO_FINAL, request_id=self.request_id)
            return
        if response.error_message:
            await self._read_to_end(conn.DRAIN_TIMEOUT)
            if not self._cancelled:
                raise self._failed(error_from_text(response.error_message))
            return
        chunks, final = parse_response(response.infer_response, time.perf_counter())
        self._pending.extend(chunks)
        if final or (final is None and self._schema is not None and self._schema.decoupled is False):
            self._final = True

    async def _receive(self) -> Any:
        """The next response or EOF; an AioRpcError for any other end.

        The read is a task of its own: grpc cancels a call together with the task that waits for it, and then
        the request could not be ended by its id first. A read that nobody waits for is taken up by the next
        call, since a call has one read at a time.
        """
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self._call.read())
        receiving = self._receiving
        try:
            return await asyncio.shield(receiving)
        except asyncio.CancelledError:
            if not receiving.cancelled():
                raise  # this task is cancelled, not the call
            # grpc.aio also raises CancelledError where the server ended the call with that status.
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.CANCELLED,
                await self._call.initial_metadata(),
                await self._call.trailing_metadata(),
                details=await self._call.details(),
            ) from None
        finally:
            if receiving.done():
                self._receiving = None

    async def _read_to_end(self, seconds: float) -> bool:
        """Takes the status, so that the call ends cleanly on the server too; True: it came in time."""

        async def read() -> None:
            try:
                while await self._receive() is not grpc.aio.EOF:
                    pass
            except grpc.RpcError:
                pass  # the answer is complete or not wanted, however the transport ends

        try:
            await asyncio.wait_for(read(), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            self._call.cancel()
            return False
        finally:
            self._over.set()
        return True

    def _failed(self, error: QuireClientError) -> QuireClientError:
        assert self._schema is not None
        error.request_id = self.request_id
        if isinstance(error, DeadlineExceeded):
            # The call is gone. Triton tells a model about that, but not the members of an ensemble.
            self._client._spawn(
                self._client._cancel_by_id(self._schema, self.request_id, self._tenant, late=True)
            )
        elif isinstance(error, InvalidArgument | NotFound):
            # The model may have been replaced by one with other tensors.
            self._client._schemas.pop(self.model, None)
        return conn.timeout_error(self._timeout, error)

    @property
    def done(self) -> bool:
        """True when nothing more will come from the server."""
        return self._final or self._over.is_set()

    async def cancel(self) -> None:
        """Ends the request on the server; returns when the server knows (bounded by about 3 seconds).

        First by request id, which also reaches a generator inside an ensemble and lets the stream end by its
        own final response; then by cancelling the call. Does nothing when the request is over.
        """
        if self._over.is_set() or self._cancelled:
            return
        if self._final:
            if not self._reading.locked():
                async with self._reading:
                    await self._read_to_end(conn.DRAIN_TIMEOUT)
            return
        self._cancelled = True
        if self._call is None or self._schema is None:
            self._over.set()
            return
        told = await self._client._cancel_by_id(self._schema, self.request_id, self._tenant)
        seconds = conn.DRAIN_TIMEOUT if told else conn.LATE_CANCEL_DELAYS[0]
        ended = await self._drain(seconds)
        self._call.cancel()
        self._over.set()
        if not told and not ended:
            await self._client._cancel_by_id(self._schema, self.request_id, self._tenant, late=True)

    async def _drain(self, seconds: float) -> bool:
        """Waits for the end of the call, reading what is left unless another task does; True: it came."""
        if not self._reading.locked():
            async with self._reading:
                return await self._read_to_end(seconds)
        try:
            await asyncio.wait_for(self._over.wait(), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            return False
        return True

    aclose = cancel

    async def result(self) -> Result:
        """Reads the stream to its end and returns all of it; for a stream that was not iterated yet."""
        chunks = [chunk async for chunk in self]
        return Collector(self.request_id, self.model, self.started_at, chunks).result()

    async def __aenter__(self) -> AsyncStream:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_call", None) is None or self._schema is None or self.done or self._cancelled:
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # the loop is gone, and the channel with it
            return
        self._call.cancel()
        self._client._spawn(
            self._client._cancel_by_id(self._schema, self.request_id, self._tenant, late=True)
        )


class AsyncClient:
    """Asyncio client of a Quire (or any KServe) server; arguments as of `Client`. Lives in one event loop."""

    def __init__(
        self,
        url: str = conn.DEFAULT_URL,
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        channel_options: Iterable[tuple[str, Any]] = (),
        error_codes: bool | None = None,
    ) -> None:
        self._settings = conn.Settings(
            url, timeout, dict(headers or {}), credentials, tuple(channel_options), error_codes
        )
        self._error_codes = error_codes
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(url, options=self._settings.options)
        else:
            self._channel = grpc.aio.secure_channel(url, credentials, options=self._settings.options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._schemas: dict[str, ModelSchema] = {}
        self._background: set[asyncio.Task[Any]] = set()

    async def generate(self, prompt: str | bytes | None = None, **arguments: Any) -> Result:
        """The whole answer in one response; arguments as of `stream`."""
        return await self._open(prompt, stream=False, **arguments).result()

    async def chat(
        self, messages: str | list[Message], *, system: str | None = None, **arguments: Any
    ) -> Result:
        """The answer to a conversation (or to one message of the user); arguments as of `stream`."""
        return await self.generate(messages=conn.chat_messages(messages, system), **arguments)

    def stream(self, prompt: str | bytes | None = None, **arguments: Any) -> AsyncStream:
        """A request whose chunks come as they are generated; arguments as of `Client.stream`.

        Nothing is sent before the stream is started or iterated; all errors are raised there.
        """
        return self._open(prompt, stream=True, **arguments)

    def _open(
        self,
        prompt: str | bytes | None,
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
    ) -> AsyncStream:
        arguments = {
            "model": model,
            "request_id": request_id,
            "timeout": self._settings.timeout if timeout is None else timeout,
            "stream": stream,
            "sampling": sampling,
            "parameters": parameters,
            "outputs": outputs,
        }
        return AsyncStream(self, Prompt(prompt, messages, input_ids, images), arguments)

    async def cache_control(
        self, command: Mapping[str, Any], *, model: str = GENERATOR_MODEL, timeout: float | None = None
    ) -> dict[str, Any]:
        """The generator's answer to a command to its KV cache.

        Raises:
            InvalidArgument: unknown command, or the model has no cache.
        """
        result = await self.generate(
            model=model, timeout=timeout, outputs=["text_output"], cache_control=command
        )
        return cache_answer(result.text)

    async def cache_reset(self, **arguments: Any) -> dict[str, Any]:
        """Empties prefix cache and tiers; running requests go on. Arguments as of `cache_control`."""
        return await self.cache_control({"command": "reset"}, **arguments)

    async def cache_inspect(self, **arguments: Any) -> dict[str, Any]:
        """Sizes, hit counters, pins, sessions and tiers. Arguments as of `cache_control`."""
        return await self.cache_control({"command": "inspect"}, **arguments)

    async def cache_unpin(
        self, session: str | None = None, *, tenant: str = "", **arguments: Any
    ) -> dict[str, Any]:
        """Lets go what a session (None: everybody) has pinned. Arguments as of `cache_control`."""
        return await self.cache_control(unpin_command(session, tenant), **arguments)

    async def cancel(self, request_id: str, *, model: str = "chat", tenant: str = "") -> bool:
        """Ends a tenant's running request by its id, whichever client started it.

        Returns:
            True when the server had such a request; False when not, or when the model cannot cancel by id.
        """
        schema = await self._schema(model, conn.Deadline(conn.CONTROL_TIMEOUT))
        return await self._cancel_by_id(schema, request_id, tenant)

    async def models(self) -> list[ModelInfo]:
        """Every model of the repository, ready or not."""
        entries = (await self._control("RepositoryIndex", service_pb2.RepositoryIndexRequest())).models
        infos = []
        for entry in entries:
            ready = await self._model_ready(entry.name, entry.version)
            # Fresh, not from the cache: this is how a caller learns that a model has changed.
            self._schemas.pop(entry.name, None)
            deadline = conn.Deadline(conn.CONTROL_TIMEOUT)
            schema = await self._schema(entry.name, deadline) if ready else None
            infos.append(conn.model_info(entry, ready, schema))
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
            answer = await self._control("ServerReady", service_pb2.ServerReadyRequest(), timeout)
        except QuireClientError:
            return False
        return bool(answer.ready)

    async def close(self) -> None:
        """Waits for cancellations under way, then closes the channel."""
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        """Runs a coroutine that must outlive its caller; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _control(self, method: str, request: Any, timeout: float | None = conn.CONTROL_TIMEOUT) -> Any:
        try:
            call = getattr(self._stub, method)
            return await call(request, timeout=timeout, metadata=self._settings.metadata())
        except grpc.RpcError as error:
            raise error_from_rpc(error, url=self._settings.url) from None

    async def _learn_server(self, deadline: conn.Deadline) -> None:
        """Once: whether streams of this server may ask for error codes."""
        if self._error_codes is not None:
            return
        left = deadline.remaining()
        try:
            answer = await self._control(
                "ServerMetadata",
                service_pb2.ServerMetadataRequest(),
                conn.CONTROL_TIMEOUT if left is None else left,
            )
        except QuireClientError as error:
            if not conn.is_restricted(error):
                raise conn.timeout_error(deadline.timeout, error) from None
            self._error_codes = False
        else:
            self._error_codes = conn.gives_error_codes(answer)

    async def _schema(self, model: str, deadline: conn.Deadline) -> ModelSchema:
        schema = self._schemas.get(model)
        if schema is None:
            schema = await self._fetch_schema(model, deadline)
            self._schemas[model] = schema
        return schema

    async def _fetch_schema(self, model: str, deadline: conn.Deadline) -> ModelSchema:
        async def ask(method: str, request: Any) -> Any:
            left = deadline.remaining()
            try:
                return await self._control(method, request, conn.CONTROL_TIMEOUT if left is None else left)
            except QuireClientError as error:
                raise conn.timeout_error(deadline.timeout, error) from None

        try:
            return schema_from_config((await ask("ModelConfig", conn.config_request(model))).config)
        except QuireClientError as error:
            if not conn.is_restricted(error):
                raise
        try:
            return schema_from_metadata(await ask("ModelMetadata", conn.metadata_request(model)))
        except QuireClientError as error:
            if not conn.is_restricted(error):
                raise
        return assumed_schema(model)

    async def _cancel_model(self, schema: ModelSchema) -> ModelSchema | None:
        """The model that takes cancel requests: this one, or the last member of the ensemble that does."""
        if not schema.steps:
            return schema if schema.takes_cancel else None
        for step in reversed(schema.steps):
            deadline = conn.Deadline(conn.CANCEL_TIMEOUT)
            found = await self._cancel_model(await self._schema(step, deadline))
            if found is not None:
                return found
        return None

    async def _cancel_by_id(
        self, schema: ModelSchema, request_id: str, tenant: str, *, late: bool = False
    ) -> bool:
        """Sends the cancel request; True when the generator knew the request.

        Args:
            late: the call itself is cancelled already. A request that an ensemble has not yet passed to its
                generator is unknown there, so ask again a few times.
        """
        try:
            model = await self._cancel_model(schema)
            if model is None:
                return False
            if await self._send_cancel(model, request_id, tenant):
                return True
            if late and schema.steps:
                for delay in conn.LATE_CANCEL_DELAYS:
                    await asyncio.sleep(delay)
                    if await self._send_cancel(model, request_id, tenant):
                        return True
        except QuireClientError:
            pass  # best effort: the call is cancelled in any case
        return False

    async def _send_cancel(self, model: ModelSchema, request_id: str, tenant: str) -> bool:
        call = self._stub.ModelStreamInfer(
            iter([build_cancel(model, request_id, tenant)]),
            timeout=conn.CANCEL_TIMEOUT,
            metadata=self._settings.metadata(error_codes=bool(self._error_codes)),
        )
        try:
            async for response in call:
                if response.error_message:
                    return False
            return True
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                return False
            raise error_from_rpc(error, url=self._settings.url, request_id=request_id) from None
