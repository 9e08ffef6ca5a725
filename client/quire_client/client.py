"""`Client`: blocking calls and streams over one gRPC channel, safe to share between threads.

Their logic is in `aio.py` and `embedding.py`; this module runs the coroutines of `aio.py` over blocking I/O.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from quire_client._io import BlockingIO, run_blocking
from quire_client.aio import AsyncClient, AsyncStream
from quire_client.types import Chunk

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A", AsyncClient, AsyncStream)
B = TypeVar("B", bound="_Blocking[Any]")


class _Calls(AsyncClient):
    """An `AsyncClient` over blocking I/O; `run_blocking` runs each of its coroutines."""

    _io_type = BlockingIO


class _Blocking(Generic[A]):
    """Base of `Client` and `Stream`: they work as context managers that close themselves."""

    _async: A

    def __enter__(self: B) -> B:
        return self

    def __exit__(self, *raised: object) -> None:
        run_blocking(self._async.__aexit__(*raised))


def _blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Blocking[A], P], T]:
    """Wraps an asynchronous method as a blocking one with the same name, signature, docstring and result."""

    @functools.wraps(method)
    def call(self: _Blocking[A], *args: P.args, **kwargs: P.kwargs) -> T:
        return run_blocking(method(self._async, *args, **kwargs))

    return call


def _made_by(make: Callable[P, _Calls]) -> Callable[Concatenate[Client, P], None]:
    """Returns a constructor that takes the same arguments as the asynchronous client's."""

    @functools.wraps(_Calls.__init__)
    def init(self: Client, *args: P.args, **kwargs: P.kwargs) -> None:
        self._async = make(*args, **kwargs)

    return init


class Stream(_Blocking[AsyncStream], Iterator[Chunk]):
    """A running request: iterate over its chunks.

    Ends after the final response. Leaving it early (`close()`, the end of a `with` block, dropping the last
    reference, an exception such as KeyboardInterrupt while waiting) cancels the request on the server.
    `cancel()` may be called from any thread; a thread that iterates meanwhile gets `Cancelled`.
    """

    def __init__(self, stream: AsyncStream) -> None:
        run_blocking(stream.start())
        self._async = stream
        self.request_id = stream.request_id
        self.model = stream.model
        self.started_at = stream.started_at

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        try:
            return run_blocking(self._async.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    @property
    def done(self) -> bool:
        """Whether nothing more will come from the server; chunks that came may still be unread."""
        return self._async.done

    cancel = _blocking(AsyncStream.cancel)
    close = cancel
    result = _blocking(AsyncStream.result)


class Client(_Blocking[AsyncClient]):
    """Blocking client of a Quire server, or of another one with Triton's gRPC API; arguments as for
    `AsyncClient`."""

    __init__ = _made_by(_Calls)

    def stream(self, prompt: str | bytes | Sequence[str] | None = None, **arguments: Any) -> Stream:
        """Starts a request and returns its chunks as they come.

        Args:
            prompt: a text to continue, or several; `batch_index` of chunks and choices then says which.
            messages: chat messages instead: a list, or an object of OpenAI's {"messages": [...], "tools":
                [...], "tool_choice": ..., "response_format": ...}.
            input_ids: token ids instead.
            images: encoded images (bytes) or files, for the messages' image parts in order; without such
                parts they go before the text of the user's last message.
            model: default `vision_chat` with images, `generator` for token ids, else `chat`.
            request_id: default an unguessable one; whoever knows it and the tenant can cancel the request.
            timeout: seconds for the whole request; default the client's.
            parameters: Triton request parameters.
            outputs: names of the outputs to ask for instead of the usual ones.
            others: sampling parameters (`max_tokens`, `temperature`, `seed`, `stop`, `n`, `logprobs`,
                `prompt_logprobs`, `structured_output={"json": schema}`, `return_timing` ...) and scheduling
                ones (`priority`, `tenant`, `session`, `cache_salt`, `ttft_deadline_ms`, `num_draft` ...); the
                server judges names and values. `sampling_parameters` takes a mapping of them. `best_of` and
                `beam_width` are for `generate` and `chat`: their choices are known only at the end.

        Raises:
            QuireClientError: here if the request cannot be sent, for example because of an unknown model or a
                value that the model has no input for; else while iterating.
        """
        return Stream(self._async.stream(prompt, **arguments))

    generate = _blocking(AsyncClient.generate)
    chat = _blocking(AsyncClient.chat)
    embed = _blocking(AsyncClient.embed)
    classify = _blocking(AsyncClient.classify)
    score = _blocking(AsyncClient.score)
    cache_control = _blocking(AsyncClient.cache_control)
    requests = _blocking(AsyncClient.requests)
    cache_reset = _blocking(AsyncClient.cache_reset)
    cache_inspect = _blocking(AsyncClient.cache_inspect)
    cache_unpin = _blocking(AsyncClient.cache_unpin)
    sleep = _blocking(AsyncClient.sleep)
    wake = _blocking(AsyncClient.wake)
    adapters = _blocking(AsyncClient.adapters)
    load_adapter = _blocking(AsyncClient.load_adapter)
    unload_adapter = _blocking(AsyncClient.unload_adapter)
    cancel = _blocking(AsyncClient.cancel)
    models = _blocking(AsyncClient.models)
    server_ready = _blocking(AsyncClient.server_ready)
    close = _blocking(AsyncClient.close)
