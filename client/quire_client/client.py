"""`Client`: blocking calls and streams over one gRPC channel, safe to share between threads."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from quire_client import _connection as conn
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

NO_FINAL = "the stream ended without a final response"
INTERRUPTED_WAIT = 0.1
"""Seconds a call has for its own end where an interrupt (Ctrl-C) has broken off a read."""


class Stream(Iterator[Chunk]):
    """A running request: iterate over its chunks.

    Ends after the final response. Leaving it early (`close()`, the end of a `with` block, dropping the last
    reference, an exception such as KeyboardInterrupt while waiting) cancels the request on the server.
    `cancel()` may be called from any thread; a thread that iterates meanwhile gets `Cancelled`.
    """

    def __init__(
        self, client: Client, schema: ModelSchema, request: Any, tenant: str, deadline: conn.Deadline
    ) -> None:
        self.request_id: str = request.id
        self._tenant = tenant
        self.model = schema.name
        self._client = client
        self._schema = schema
        self._timeout = deadline.timeout
        self._pending: list[Chunk] = []
        self._final = False
        self._over = threading.Event()
        self._reading = threading.Lock()
        self._cancelling = threading.Lock()
        self._cancelled = False
        # A receive operation of the call is under way; an interrupt that breaks off the wait leaves it so.
        self._receiving = False
        self.started_at = time.perf_counter()
        # One call per request: the half-close right after it makes the end of the stream the server's word
        # that nothing more comes.
        self._call = client._stub.ModelStreamInfer(
            iter([request]),
            timeout=deadline.remaining(),
            metadata=client._settings.metadata(error_codes=bool(client._error_codes)),
        )

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        try:
            with self._reading:
                while not self._pending:
                    if self._over.is_set():
                        break
                    if self._final:
                        self._read_to_end()
                    else:
                        self._read()
                if self._cancelled:
                    raise self._cancelled_error()
                if self._pending:
                    return self._pending.pop(0)
                raise StopIteration
        except (QuireClientError, StopIteration):
            raise
        except BaseException:
            self.cancel()
            raise

    def _read(self) -> None:
        """Takes one response off the call; `_reading` is held."""
        self._receiving = True
        try:
            response = next(self._call)
        except StopIteration:
            self._receiving = False
            self._over.set()
            if not self._cancelled:
                raise ProtocolError(NO_FINAL, request_id=self.request_id) from None
            return
        except grpc.RpcError as error:
            self._receiving = False
            self._over.set()
            if not self._cancelled:
                raise self._failed(error_from_rpc(error, url=self._client._settings.url)) from None
            return
        self._receiving = False
        if response.error_message:
            self._read_to_end()
            if not self._cancelled:
                raise self._failed(error_from_text(response.error_message))
            return
        chunks, final = parse_response(response.infer_response, time.perf_counter())
        self._pending.extend(chunks)
        if final or (final is None and self._schema.decoupled is False):
            self._final = True

    def _read_to_end(self) -> None:
        """After the final response: take the status, so that the call ends cleanly on the server too."""
        self._exhaust(conn.DRAIN_TIMEOUT)
        self._over.set()

    def _exhaust(self, seconds: float) -> bool:
        """Reads the call to its end; True: the end came in time. `_reading` is held."""
        if self._receiving:
            # A call has one receive operation at a time, and an interrupted one cannot be taken up again.
            # Most often it gets the last response, and then the call ends by itself.
            ended = threading.Event()
            return not self._call.add_callback(ended.set) or ended.wait(min(seconds, INTERRUPTED_WAIT))
        with _time_limit(seconds, self._call) as expired:
            self._receiving = True
            try:
                for _ in self._call:
                    pass
            except grpc.RpcError:
                pass  # the answer is complete or not wanted, however the transport ends
            self._receiving = False
        return not expired.is_set()

    def _failed(self, error: QuireClientError) -> QuireClientError:
        error.request_id = self.request_id
        if isinstance(error, DeadlineExceeded):
            # The call is gone. Triton tells a model about that, but not the members of an ensemble.
            self._client._cancel_in_background(self._schema, self.request_id, self._tenant)
        elif isinstance(error, InvalidArgument | NotFound):
            # The model may have been replaced by one with other tensors.
            self._client._schemas.pop(self.model, None)
        return conn.timeout_error(self._timeout, error)

    def _cancelled_error(self) -> Cancelled:
        return Cancelled("the request was cancelled by this client", request_id=self.request_id)

    @property
    def done(self) -> bool:
        """True when nothing more will come from the server."""
        return self._final or self._over.is_set()

    def cancel(self) -> None:
        """Ends the request on the server; returns when the server knows (bounded by about 3 seconds).

        First by request id, which also reaches a generator inside an ensemble and lets the stream end by its
        own final response; then by cancelling the call. Does nothing when the request is over.
        """
        with self._cancelling:
            if self._over.is_set() or self._cancelled:
                return
            if self._final:
                if self._reading.acquire(blocking=False):
                    self._read_to_end()
                    self._reading.release()
                return
            self._cancelled = True
        told = self._client._cancel_by_id(self._schema, self.request_id, self._tenant)
        ended = self._drain(conn.DRAIN_TIMEOUT if told else conn.LATE_CANCEL_DELAYS[0])
        self._over.set()
        self._call.cancel()
        if not told and not ended:
            self._client._cancel_by_id(self._schema, self.request_id, self._tenant, late=True)

    def _drain(self, seconds: float) -> bool:
        """Waits for the end of the call, reading what is left unless another thread does; True: it came."""
        if not self._reading.acquire(blocking=False):
            return self._over.wait(seconds)
        try:
            return self._exhaust(seconds)
        finally:
            self._reading.release()

    close = cancel

    def result(self) -> Result:
        """Reads the stream to its end and returns all of it; for a stream that was not iterated yet."""
        collector = Collector(self.request_id, self.model, self.started_at)
        for chunk in self:
            collector.add(chunk)
        return collector.result()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is None or self.done or sys.is_finalizing():
            return
        # No waiting in a destructor: a thread tells the server.
        call.cancel()
        self._client._cancel_in_background(self._schema, self.request_id, self._tenant)


@contextmanager
def _time_limit(seconds: float, call: Any) -> Iterator[threading.Event]:
    """Cancels the call if the block takes longer; the event tells that it has."""
    expired = threading.Event()

    def expire() -> None:
        expired.set()  # first, so that whoever sees the call end sees why
        call.cancel()

    timer = threading.Timer(seconds, expire)
    timer.daemon = True
    timer.start()
    try:
        yield expired
    finally:
        timer.cancel()


class Client:
    """Blocking client of a Quire (or any KServe) server.

    Args:
        url: HOST:PORT of the gRPC endpoint.
        timeout: default for requests, seconds from call to last token; None: no limit.
        headers: gRPC metadata of every call (authorization, restricted protocols).
        credentials: TLS; None: plain text.
        channel_options: further gRPC channel arguments.
        error_codes: ask for the exact status code of errors in streams (`triton_grpc_error`). None: if the
            server's version is known to survive that; else codes are inferred from the wording.
    """

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
            self._channel = grpc.insecure_channel(url, options=self._settings.options)
        else:
            self._channel = grpc.secure_channel(url, credentials, options=self._settings.options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._schemas: dict[str, ModelSchema] = {}
        self._background: set[threading.Thread] = set()

    def generate(self, prompt: str | bytes | None = None, **arguments: Any) -> Result:
        """The whole answer in one response; arguments as of `stream`."""
        return self._open(prompt, stream=False, **arguments).result()

    def chat(self, messages: str | list[Message], *, system: str | None = None, **arguments: Any) -> Result:
        """The answer to a conversation (or to one message of the user); arguments as of `stream`."""
        return self.generate(messages=conn.chat_messages(messages, system), **arguments)

    def stream(self, prompt: str | bytes | None = None, **arguments: Any) -> Stream:
        """Starts a request and returns its chunks as they come.

        Args:
            prompt: text to continue.
            messages: chat messages instead: a list, or {"messages": [...], "tools": [...]}.
            input_ids: token ids instead.
            images: encoded images (bytes) or files, for the messages' image parts in order; without such
                parts they go before the text of the user's last message.
            model: default `vision_chat` with images, `generator` for token ids, else `chat`.
            request_id: default an unguessable one; whoever knows it can cancel the request.
            timeout: seconds for the whole request.
            parameters: Triton request parameters.
            outputs: names of the outputs to ask for instead of the usual ones.
            others: sampling parameters (`max_tokens`, `temperature`, `seed`, `stop`, `n` ...) and scheduling
                ones (`priority`, `tenant`, `session`, `cache_salt`, `ttft_deadline_ms` ...); the server
                judges names and values. `sampling_parameters` takes a mapping of them. `best_of` and
                `beam_width` are for `generate` and `chat`: their choices are known only at the end.

        Raises:
            QuireClientError: here for an unknown model or no connection, else while iterating.
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
    ) -> Stream:
        deadline = conn.Deadline(self._settings.timeout if timeout is None else timeout)
        asked = Prompt(prompt, messages, input_ids, images)
        schema = self._schema(model or asked.default_model, deadline)
        self._learn_server(deadline)
        request = build_request(
            schema,
            asked,
            request_id=request_id or conn.new_request_id(),
            stream=stream,
            sampling=sampling,
            parameters=parameters,
            timeout=deadline.remaining(),
            outputs=outputs,
        )
        return Stream(self, schema, request, tenant_of(sampling, parameters), deadline)

    def cache_control(
        self, command: Mapping[str, Any], *, model: str = GENERATOR_MODEL, timeout: float | None = None
    ) -> dict[str, Any]:
        """The generator's answer to a command to its KV cache.

        Raises:
            InvalidArgument: unknown command, or the model has no cache.
        """
        result = self.generate(model=model, timeout=timeout, outputs=["text_output"], cache_control=command)
        return cache_answer(result.text)

    def cache_reset(self, **arguments: Any) -> dict[str, Any]:
        """Empties prefix cache and tiers; running requests go on. Arguments as of `cache_control`."""
        return self.cache_control({"command": "reset"}, **arguments)

    def cache_inspect(self, **arguments: Any) -> dict[str, Any]:
        """Sizes, hit counters, pins, sessions and tiers. Arguments as of `cache_control`."""
        return self.cache_control({"command": "inspect"}, **arguments)

    def cache_unpin(
        self, session: str | None = None, *, tenant: str = "", **arguments: Any
    ) -> dict[str, Any]:
        """Lets go what a session (None: everybody) has pinned. Arguments as of `cache_control`."""
        return self.cache_control(unpin_command(session, tenant), **arguments)

    def cancel(self, request_id: str, *, model: str = "chat", tenant: str = "") -> bool:
        """Ends a tenant's running request by its id, whichever client started it.

        Returns:
            True when the server had such a request; False when not, or when the model cannot cancel by id.
        """
        schema = self._schema(model, conn.Deadline(conn.CONTROL_TIMEOUT))
        return self._cancel_by_id(schema, request_id, tenant)

    def models(self) -> list[ModelInfo]:
        """Every model of the repository, ready or not."""
        entries = self._control("RepositoryIndex", service_pb2.RepositoryIndexRequest()).models
        infos = []
        for entry in entries:
            ready = self._model_ready(entry.name, entry.version)
            # Fresh, not from the cache: this is how a caller learns that a model has changed.
            self._schemas.pop(entry.name, None)
            schema = self._schema(entry.name, conn.Deadline(conn.CONTROL_TIMEOUT)) if ready else None
            infos.append(conn.model_info(entry, ready, schema))
        return infos

    def _model_ready(self, name: str, version: str) -> bool:
        try:
            request = service_pb2.ModelReadyRequest(name=name, version=version)
            return bool(self._control("ModelReady", request).ready)
        except NotFound:
            return False

    def server_ready(self, *, timeout: float = 5.0) -> bool:
        """True when a server answers and says it is ready; False also when there is none."""
        try:
            return bool(self._control("ServerReady", service_pb2.ServerReadyRequest(), timeout).ready)
        except QuireClientError:
            return False

    def close(self) -> None:
        """Waits for cancellations under way, then closes the channel; running streams end `Cancelled`."""
        for thread in list(self._background):
            thread.join()
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _control(self, method: str, request: Any, timeout: float | None = conn.CONTROL_TIMEOUT) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=timeout, metadata=self._settings.metadata())
        except grpc.RpcError as error:
            raise error_from_rpc(error, url=self._settings.url) from None

    def _learn_server(self, deadline: conn.Deadline) -> None:
        """Once: whether streams of this server may ask for error codes."""
        if self._error_codes is not None:
            return
        left = deadline.remaining()
        try:
            answer = self._control(
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

    def _schema(self, model: str, deadline: conn.Deadline) -> ModelSchema:
        schema = self._schemas.get(model)
        if schema is None:
            schema = self._fetch_schema(model, deadline)
            self._schemas[model] = schema
        return schema

    def _fetch_schema(self, model: str, deadline: conn.Deadline) -> ModelSchema:
        def ask(method: str, request: Any) -> Any:
            left = deadline.remaining()
            try:
                return self._control(method, request, conn.CONTROL_TIMEOUT if left is None else left)
            except QuireClientError as error:
                raise conn.timeout_error(deadline.timeout, error) from None

        try:
            return schema_from_config(ask("ModelConfig", conn.config_request(model)).config)
        except QuireClientError as error:
            if not conn.is_restricted(error):
                raise
        try:
            return schema_from_metadata(ask("ModelMetadata", conn.metadata_request(model)))
        except QuireClientError as error:
            if not conn.is_restricted(error):
                raise
        return assumed_schema(model)

    def _cancel_model(self, schema: ModelSchema) -> ModelSchema | None:
        """The model that takes cancel requests: this one, or the last member of the ensemble that does."""
        if not schema.steps:
            return schema if schema.takes_cancel else None
        for step in reversed(schema.steps):
            found = self._cancel_model(self._schema(step, conn.Deadline(conn.CANCEL_TIMEOUT)))
            if found is not None:
                return found
        return None

    def _cancel_in_background(self, schema: ModelSchema, request_id: str, tenant: str) -> None:
        """For a call that is gone already; `close` waits for it (bounded by the timeouts of its calls)."""

        def work() -> None:
            self._cancel_by_id(schema, request_id, tenant, late=True)
            self._background.discard(threading.current_thread())

        thread = threading.Thread(target=work, name="quire-cancel")
        self._background.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down
            self._background.discard(thread)

    def _cancel_by_id(self, schema: ModelSchema, request_id: str, tenant: str, *, late: bool = False) -> bool:
        """Sends the cancel request; True when the generator knew the request.

        Args:
            late: the call itself is cancelled already. A request that an ensemble has not yet passed to its
                generator is unknown there, so ask again a few times.
        """
        try:
            model = self._cancel_model(schema)
            if model is None:
                return False
            if self._send_cancel(model, request_id, tenant):
                return True
            if late and schema.steps:
                for delay in conn.LATE_CANCEL_DELAYS:
                    time.sleep(delay)
                    if self._send_cancel(model, request_id, tenant):
                        return True
        except (QuireClientError, ValueError):
            # Best effort: the call is cancelled in any case (ValueError: the channel is closed).
            pass
        return False

    def _send_cancel(self, model: ModelSchema, request_id: str, tenant: str) -> bool:
        call = self._stub.ModelStreamInfer(
            iter([build_cancel(model, request_id, tenant)]),
            timeout=conn.CANCEL_TIMEOUT,
            metadata=self._settings.metadata(error_codes=bool(self._error_codes)),
        )
        try:
            return not any(response.error_message for response in list(call))
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                return False
            raise error_from_rpc(error, url=self._settings.url, request_id=request_id) from None
