"""I/O of the clients: the same coroutines run over `AsyncioIO`, which awaits, and `BlockingIO`, which blocks.

A coroutine over `BlockingIO` never waits for an event loop: it ends within its first step (`run_blocking`).
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import contextvars
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any, TypeVar

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2_grpc

from quire_client._connection import Settings

T = TypeVar("T")
SIGNAL_S = 0.2
"""Seconds after which a wait for the result of a helper thread is broken off and begun again. A signal that
arrives just as a wait begins is handled after that wait."""


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine over `BlockingIO` in this thread and returns its result; an event loop may run
    here."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a coroutine over blocking I/O waits for an event loop")


def _safely(work: Callable[[], T]) -> T:
    """Runs a gRPC operation and returns its result. For the main thread, a helper thread runs it, if the
    interpreter still starts threads.

    A signal handler (Ctrl-C) may raise an exception anywhere in the main thread. Inside gRPC that could leave
    a lock held, so that all calls of the channel hang, or release a lock twice, which raises RuntimeError.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            outcome.put((context.run(work), None))
        except BaseException as error:
            outcome.put((None, error))

    try:
        _thread.start_new_thread(run, ())  # Thread.start might leave a lock held
    except RuntimeError:  # the interpreter is shutting down
        return work()
    while True:
        with contextlib.suppress(queue.Empty):
            result, error = outcome.get(timeout=SIGNAL_S)
            break
    if error is not None:
        raise error
    return result


class _Call:
    """One gRPC call with a stream of responses; only one thread or task may read it at a time."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def receive(self) -> Any:
        """Returns the next response, or None when the call has ended normally.

        Raises:
            grpc.RpcError: the call ended in any other way, also by `CANCELLED`.
        """
        raise NotImplementedError

    async def _receive_all(self) -> None:
        try:
            while await self.receive() is not None:
                pass
        except grpc.RpcError:
            pass  # the answer is complete or not wanted, however the transport ends

    def cancel(self) -> None:
        self._call.cancel()


class AsyncioCall(_Call):
    """A call that is read by a task of its own, up to two responses ahead.

    When a task is cancelled while it waits for a gRPC call, grpc cancels the call too. Reading in another
    task leaves time to end the request by its id first.
    """

    def __init__(self, call: Any) -> None:
        super().__init__(call)
        self._loop = asyncio.get_running_loop()
        self._response: Any = None
        """The response that was read from gRPC but not yet returned by `receive`; None if there is none."""
        self._waiting: asyncio.Future[None] = self._loop.create_future()
        """Future that wakes the reader, which waits until `_response` is free, or the receiver, which waits
        for a response. They never wait at the same time."""
        self._reader = self._loop.create_task(self._read())

    async def _read(self) -> grpc.RpcError | None:
        """Reads the call to its end; returns the error that it ended with, or None."""
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                if response is None:  # grpc has logged why
                    self._call.cancel()
                    return self._error(grpc.StatusCode.INTERNAL, "Exception deserializing response!")
                while self._response is not None:
                    await self._wait()
                self._response = response
                self._wake()
                await asyncio.sleep(0)  # the receiver goes first: starting the next read takes time
        except grpc.RpcError as error:
            return error
        except asyncio.CancelledError:
            # Either side has cancelled the call, or the event loop is ending.
            self._call.cancel()
            return self._error(grpc.StatusCode.CANCELLED, await self._call.details())
        finally:
            self._wake()
        return None

    @staticmethod
    def _error(code: grpc.StatusCode, details: str) -> grpc.RpcError:
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)

    async def _wait(self) -> None:
        self._waiting = self._loop.create_future()
        await self._waiting

    def _wake(self) -> None:
        if not self._waiting.done():
            self._waiting.set_result(None)

    async def receive(self) -> Any:
        while self._response is None:
            if self._reader.done():
                if (error := self._reader.result()) is not None:
                    raise error
                return None
            await self._wait()
        response, self._response = self._response, None
        self._wake()
        return response

    def cancel(self) -> None:
        super().cancel()
        self._response = None  # nobody will receive it, and the reader may be waiting for it to be taken
        self._wake()

    async def exhaust(self, seconds: float) -> bool:
        """Reads the call to its end; returns False, and cancels the call, if that takes more than
        `seconds`."""
        try:
            await asyncio.wait_for(self._receive_all(), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            self.cancel()
            return False
        return True


class BlockingCall(_Call):
    """A call whose `receive` blocks. If the main thread starts it, a helper thread reads the responses (see
    `_safely`).

    Args:
        reads_ahead: True: start a helper thread, which reads all responses into a queue.
    """

    def __init__(self, call: Any, *, reads_ahead: bool) -> None:
        super().__init__(call)
        self._end: list[Exception | None] = []
        """Empty until the helper thread has put all responses into the queue; then its one entry is the
        call's error, or None. Without a helper thread it stays empty."""
        responses: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._responses = responses if reads_ahead else None
        if reads_ahead:
            # The thread holds no reference to this object, which cancels the call when it is dropped.
            _thread.start_new_thread(_read, (call, responses, self._end))

    def __del__(self) -> None:
        if self._responses is not None and not self._end and not sys.is_finalizing():
            self._call.cancel()

    async def receive(self) -> Any:
        if self._responses is None:
            return next(self._call, None)
        while not (self._end and self._responses.empty()):
            with contextlib.suppress(queue.Empty):
                if (response := self._responses.get(timeout=SIGNAL_S)) is not None:
                    return response
        if (error := self._end[0]) is not None:
            raise error
        return None

    def cancel(self) -> None:
        _safely(super().cancel)

    async def exhaust(self, seconds: float) -> bool:
        expired = threading.Event()

        def expire() -> None:
            expired.set()  # first, so that whoever sees the call end sees why
            self.cancel()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        try:
            await self._receive_all()
        finally:
            timer.cancel()
        return not expired.is_set()


def _read(call: Any, responses: queue.SimpleQueue[Any], end: list[Exception | None]) -> None:
    try:
        for response in call:
            responses.put(response)
        end.append(None)
    except Exception as error:
        end.append(error)
    responses.put(None)  # so that nobody waits for more


class _Channel:
    """One channel to a server."""

    def __init__(self, settings: Settings, module: ModuleType) -> None:
        url, options = settings.url, settings.options
        if settings.credentials is None:
            self._channel = module.insecure_channel(url, options=options)
        else:
            self._channel = module.secure_channel(url, settings.credentials, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _stream(self, request: Any, options: dict[str, Any]) -> Any:
        # The half-close right after the request makes the end of the stream the server's word that nothing
        # more comes.
        return self._stub.ModelStreamInfer(iter([request]), **options)


class AsyncioIO(_Channel):
    """I/O in one event loop."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, grpc.aio)
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def is_alive(self) -> bool:
        """Whether requests can be sent from this thread, in which an event loop must run. None does, for
        example, when the interpreter is shutting down."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return False
        return True

    async def ask(self, method: str, request: Any, **options: Any) -> Any:
        """Calls a method that has one response, and returns it; raises grpc.RpcError if the call fails."""
        return await getattr(self._stub, method)(request, **options)

    def stream(self, request: Any, **options: Any) -> AsyncioCall:
        """Starts a streaming call that sends one request, and returns the call."""
        return AsyncioCall(self._stream(request, options))

    def lock(self) -> Any:
        """Returns a new lock, which `acquire` takes and its own method `release()` gives back."""
        return asyncio.Lock()

    async def acquire(self, lock: Any, seconds: float | None = None) -> bool:
        """Acquires the lock; returns False if somebody else held it for all of `seconds`, else True."""
        try:
            return await asyncio.wait_for(lock.acquire(), seconds)
        except (TimeoutError, asyncio.TimeoutError):
            return False

    async def compute(self, work: Callable[[], T]) -> T:
        """Runs slow work in a thread, where it does not delay other streams, and returns its result."""
        return await asyncio.to_thread(work)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs the work to its end, even if the task that waits for it is cancelled."""
        await asyncio.shield(self.spawn(work))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs the work concurrently with the caller; `close` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def close(self) -> None:
        """Waits for all spawned work, then closes the channel."""
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)
        await self._channel.close()


class BlockingIO(_Channel):
    """I/O that blocks, for any number of calling threads, with the methods of `AsyncioIO`."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, grpc)
        self._background: set[threading.Thread] = set()

    @property
    def is_alive(self) -> bool:
        return not sys.is_finalizing()

    async def ask(self, method: str, request: Any, **options: Any) -> Any:
        return _safely(lambda: getattr(self._stub, method)(request, **options))

    def stream(self, request: Any, **options: Any) -> BlockingCall:
        reads_ahead = threading.current_thread() is threading.main_thread()
        return _safely(lambda: BlockingCall(self._stream(request, options), reads_ahead=reads_ahead))

    def lock(self) -> Any:
        # Re-entrant: an interrupt may strike between taking it and the block that gives it back.
        return threading.RLock()

    async def acquire(self, lock: Any, seconds: float = -1) -> bool:
        acquired: bool = lock.acquire(timeout=seconds)
        return acquired

    async def compute(self, work: Callable[[], T]) -> T:
        return work()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        await work

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        def run() -> None:
            run_blocking(work)
            self._background.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="quire-cancel")
        self._background.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down
            self._background.discard(thread)
            work.close()

    async def close(self) -> None:
        for thread in list(self._background):
            thread.join()
        _safely(self._channel.close)
