"""The engine process: one ROUTER socket, one EngineCore, and one thread that owns both.

A second thread computes the steps. Meanwhile the first one goes on reading messages, so that a refusal or a
cancellation does not wait for the end of a step; new requests take part in the next one.

Started by a frontend (`engine/supervisor.py`) as `python -m quire.engine.loop --directory DIR`, where
DIR/config.json holds the configuration. It reports through DIR/state.json (written atomically): `ready` with
the socket's address, or `failed` with one line of reason.

The process ends when its last frontend has said goodbye or died, or when the tritonserver it works for is
gone. Frontends and server are watched by pidfds, so nothing is polled for and nothing survives its owner.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import zmq

from quire.config import EngineConfig
from quire.engine.core import EngineCore, error_output
from quire.engine.messages import (
    AbortRequests,
    AddRequest,
    CancelByExternalId,
    CancelResult,
    Control,
    ControlResult,
    EmbedsMessage,
    EngineInfo,
    EngineMessage,
    GetStats,
    Goodbye,
    Hello,
    Outputs,
    Stats,
    encoder,
    frontend_message_decoder,
)
from quire.errors import QuireError
from quire.multimodal import PromptEmbeds
from quire.outputs import EngineCoreOutput
from quire.processes import start_time_of
from quire.request import FinishReason

logger = logging.getLogger("quire")

FIRST_FRONTEND_TIMEOUT_S = 60.0
STATS_INTERVAL_S = 0.5
STEP_WAIT_MS = 1000
"""Longest wait for the end of a step, which is an event; a limit all the same."""
GC_THRESHOLDS = (50_000, 20, 100)
"""Full collections look at every request and stall a step (by 30 to 200 ms at 1 000 running, where planning
one takes 10), and nearly nothing here is garbage in cycles: they are to be rare."""


@dataclass(slots=True)
class _Owner:
    """Whose request it is."""

    identity: bytes
    num_open_choices: int


class EngineLoop:
    """Joins an EngineCore to its frontends.

    Args:
        core: the engine.
        socket: bound ROUTER; identities are the frontends'.
        server_pid: the engine ends with this process; 0: nobody is watched.
    """

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes], server_pid: int = 0) -> None:
        self.core = core
        self.socket = socket
        self.info = _engine_info(core)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._frontend_pidfds: dict[bytes, int] = {}
        self._owners: dict[str, _Owner] = {}
        self._had_frontend = False
        self._stopping = False
        self.was_told_to_stop = False
        """An end by SIGTERM is meant: frontends start no other engine after it."""
        self._next_stats = 0.0
        self._step_done = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._step_done, zmq.POLLIN)
        self._server_pidfd = _open_pidfd(server_pid) if server_pid else None
        if self._server_pidfd is not None:
            self._poller.register(self._server_pidfd, zmq.POLLIN)
        elif server_pid:
            self._stopping = True

    def run(self) -> None:
        """Runs until the last frontend or the server is gone, or `stop` was called."""
        deadline = time.monotonic() + FIRST_FRONTEND_TIMEOUT_S
        while not self._stopping:
            busy = self.core.has_work
            timeout = 0 if busy else int(STATS_INTERVAL_S * 1000)
            self._receive(timeout)
            if self.core.has_work:
                self._send_outputs(self.core.step(self._serve))
            self._push_stats()
            if not self._frontend_pidfds and (self._had_frontend or time.monotonic() > deadline):
                logger.info("engine: no frontend is left, ending")
                break
        outputs = self.core.abort(list(self._owners), FinishReason.SHUTDOWN)
        self._send_outputs(outputs)

    def _serve(self, step: Future[Any]) -> None:
        """Answers frontends while a step is computed: refusals and cancellations do not wait for its end."""
        step.add_done_callback(lambda _: os.eventfd_write(self._step_done, 1))
        while not step.done():
            self._receive(STEP_WAIT_MS)

    def stop(self, *_: Any) -> None:
        """Ends `run` after the current step; safe in a signal handler."""
        self._stopping = self.was_told_to_stop = True

    def _receive(self, timeout_ms: int) -> None:
        events = dict(self._poller.poll(timeout_ms))
        if self._step_done in events:
            os.eventfd_read(self._step_done)
        if self.socket in events:
            self._drain_socket()
        if self._server_pidfd is not None and self._server_pidfd in events:
            logger.warning("engine: tritonserver is gone, ending")
            self._stopping = True
        for identity, pidfd in list(self._frontend_pidfds.items()):
            if pidfd in events:
                logger.warning("engine: a frontend died, its requests are dropped")
                self._forget_frontend(identity)

    def _drain_socket(self) -> None:
        while True:
            try:
                identity, payload = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(identity, frontend_message_decoder.decode(payload))

    def _handle(self, identity: bytes, message: Any) -> None:
        match message:
            case AddRequest():
                self._add(identity, message)
            case AbortRequests():
                outputs = self.core.abort(message.request_ids, FinishReason(message.reason))
                self._trace_abort(message.request_ids, message.learned_at)
                self._send_outputs(outputs)
            case CancelByExternalId():
                request_ids = self.core.scheduler.find(message.external_id)
                self._send_outputs(self.core.abort(request_ids, FinishReason.CANCELLED))
                self._trace_abort(request_ids, message.learned_at)
                self._send(identity, CancelResult(message.token, len(request_ids)))
            case GetStats():
                self._send(identity, Stats(message.token, self._stats()))
            case Control():
                self._send(identity, self._control(message))
            case Hello():
                self._had_frontend = True
                pidfd = _open_pidfd(message.pid)
                if pidfd is None:
                    return
                self._frontend_pidfds[identity] = pidfd
                self._poller.register(pidfd, zmq.POLLIN)
                self._send(identity, self.info)
            case Goodbye():
                self._forget_frontend(identity)

    def _trace_abort(self, request_ids: list[str], learned_at: float) -> None:
        if self.core.trace is not None:
            stats = self.core.stats()
            self.core.trace.event(
                "abort",
                request_ids=request_ids,
                learned_at=learned_at,
                step=stats.step,
                num_free_blocks=stats.num_free_blocks,
                num_running=stats.num_running,
            )

    def _add(self, identity: bytes, message: AddRequest) -> None:
        try:
            self.core.add_request(
                message.request_id,
                message.prompt_token_ids,
                message.sampling_params,
                arrival_time=message.arrival_time or None,
                scheduling=message.scheduling,
                external_id=message.external_id,
                embeds=_open_embeds(message.embeds),
            )
        except QuireError as error:
            self._send(identity, Outputs([error_output(message.request_id, error)]))
        else:
            self._owners[message.request_id] = _Owner(identity, message.sampling_params.n)

    def _control(self, message: Control) -> ControlResult:
        try:
            return ControlResult(message.token, self.core.control(message.command))
        except QuireError as error:
            return ControlResult(message.token, {}, str(error), error.code)

    def _forget_frontend(self, identity: bytes) -> None:
        pidfd = self._frontend_pidfds.pop(identity, None)
        if pidfd is not None:
            self._poller.unregister(pidfd)
            os.close(pidfd)
        gone = [request_id for request_id, owner in self._owners.items() if owner.identity == identity]
        self.core.abort(gone, FinishReason.CANCELLED)
        for request_id in gone:
            del self._owners[request_id]

    def _send_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        by_frontend: defaultdict[bytes, list[EngineCoreOutput]] = defaultdict(list)
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue
            by_frontend[owner.identity].append(output)
            owner.num_open_choices -= output.finish_reason is not None
            if output.error is not None or not owner.num_open_choices:
                del self._owners[output.request_id]
        for identity, batch in by_frontend.items():
            self._send(identity, Outputs(batch))

    def _send(self, identity: bytes, message: EngineMessage) -> None:
        self.socket.send_multipart([identity, encoder.encode(message)])

    def _stats(self) -> dict[str, float]:
        stats = self.core.stats()
        return {name: float(getattr(stats, name)) for name in stats.__slots__}

    def _push_stats(self) -> None:
        now = time.monotonic()
        if now < self._next_stats:
            return
        self._next_stats = now + STATS_INTERVAL_S
        message = Stats("", self._stats())
        for identity in self._frontend_pidfds:
            self._send(identity, message)


def _engine_info(core: EngineCore) -> EngineInfo:
    runner: Any = core.runner
    return EngineInfo(
        pid=os.getpid(),
        max_model_len=core.max_model_len,
        vocab_size=core.vocab_size,
        hidden_size=runner.hidden_size,
        takes_position_ids=runner.takes_position_ids,
        num_blocks=runner.num_blocks,
        block_size=core.config.cache.block_size,
        kv_cache_bytes=runner.kv_cache_bytes,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(runner.device),
    )


def _open_embeds(message: EmbedsMessage | None) -> PromptEmbeds | None:
    """Maps the frontend's memory; it may be given back there once the engine has answered."""
    if message is None:
        return None
    positions = None
    if message.position_ids:
        positions = np.frombuffer(message.position_ids, dtype=np.int32).reshape(3, -1)
    return PromptEmbeds(message.embeds.open(), tuple(message.spans), tuple(message.hashes), positions)


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def write_state(directory: Path, **values: Any) -> None:
    """Publishes the engine's state; readers see the old or the new file, never a half."""
    temporary = directory / f"state.{os.getpid()}.tmp"
    values["start_time"] = start_time_of(os.getpid())
    temporary.write_text(json.dumps(values), encoding="utf-8")
    temporary.replace(directory / "state.json")


@click.command()
@click.option("--directory", type=click.Path(path_type=Path), required=True)
@click.option("--server-pid", type=int, default=0)
@click.option("--generation", type=int, default=0)
def main(directory: Path, server_pid: int, generation: int) -> None:
    """Runs an engine for the frontends that share DIRECTORY."""
    logging.basicConfig(
        level=os.environ.get("QUIRE_LOG_LEVEL", "INFO"),
        format="%(asctime)s quire engine[%(process)d] %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    pid = os.getpid()
    config = EngineConfig.from_mapping(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    try:
        core = EngineCore(config, threaded=True)
        core.warm_up()
        if config.frontend.trace_file:
            core.enable_trace(Path(config.frontend.trace_file))
    except QuireError as error:
        write_state(directory, state="failed", pid=pid, generation=generation, error=str(error))
        raise SystemExit(1) from None
    except BaseException as error:
        reason = f"engine start failed: {type(error).__name__}: {error}"
        write_state(directory, state="failed", pid=pid, generation=generation, error=reason)
        raise
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    # Without a mark a ROUTER would drop messages to a slow frontend; how much can be under way is bounded by
    # admission (requests) and by max_tokens (tokens each).
    socket.set_hwm(0)
    socket.linger = 1000
    socket_path = directory / f"engine-{generation}.ipc"
    address = f"ipc://{socket_path}"
    socket.bind(address)
    loop = EngineLoop(core, socket, server_pid)
    # What start-up made lives as long as the process: a full collection over it would only stall a step.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    signal.signal(signal.SIGTERM, loop.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    write_state(directory, state="ready", pid=pid, generation=generation, address=address)
    logger.info(
        "engine ready: %s on %s, %d blocks of %d tokens (%.1f MiB), max_model_len %d",
        config.model.model,
        loop.info.device,
        loop.info.num_blocks,
        loop.info.block_size,
        loop.info.kv_cache_bytes / 2**20,
        loop.info.max_model_len,
    )
    try:
        loop.run()
    finally:
        if loop.was_told_to_stop:
            write_state(directory, state="stopped", pid=pid, generation=generation)
        socket.close()
        context.term()
        socket_path.unlink(missing_ok=True)
        core.close()  # last: the disk tier writes what it has, and whoever waits for answers has them


if __name__ == "__main__":
    main()
