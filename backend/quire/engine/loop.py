"""The engine process: one ROUTER socket, one EngineCore, and one thread that owns both.

A second thread computes the steps, or waits for the processes that compute them. Meanwhile the first goes on
reading messages, so refusals and cancellations do not wait for the end of a step. New requests wait for a
later step.

A frontend (`engine/supervisor.py`) starts it as module `quire.engine.loop` with `--directory DIR`, where
DIR/config.json holds the configuration. It reports through DIR/state.json (`engine/runtime_directory.py`):
`ready` with the socket's address, `failed` with the reason in one line, or `stopped` after SIGTERM.

The process ends when its last frontend has said goodbye or died, when its tritonserver has ended, on SIGTERM,
if no frontend comes in FIRST_FRONTEND_TIMEOUT_S, and when the engine is broken. Frontends and server are
watched by pidfds, without polling.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import math
import os
import signal
import sys
import time
from collections import defaultdict, deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import zmq

from quire.config import EngineConfig
from quire.core.request import FinishReason
from quire.engine.cache_commands import Health, LoadAdapter, Profile, Sleep, UnloadAdapter, Wake
from quire.engine.core import PROBE_ID, EngineCore, error_output, make_executor
from quire.engine.heartbeat import Heartbeat
from quire.engine.messages import (
    COMMANDS,
    AbortRequests,
    AddRequest,
    CancelByExternalId,
    CommandResult,
    Control,
    EmbedsMessage,
    EngineInfo,
    EngineMessage,
    Goodbye,
    Hello,
    Outputs,
    Stats,
    encoder,
    frontend_message_decoder,
    header_decoder,
)
from quire.engine.processes import name_threads, open_verified_pidfd, start_time_of, wait_readable
from quire.engine.profile import StepProfile
from quire.engine.runtime_directory import EngineState, RuntimeDirectory
from quire.errors import (
    EngineError,
    InvalidArgumentError,
    NotFoundError,
    QuireError,
    describe,
)
from quire.outputs import EngineCoreOutput
from quire.request.multimodal import PromptEmbeds, check_spans
from quire.request.sampling_params import SamplingParams, check_together
from quire.request.scheduling_params import SchedulingParams
from quire.startup import StartTimeline, shown_phases
from quire_common import logs
from quire_common.errors import shown
from quire_common.machine import num_cpus

logger = logging.getLogger("quire")

FIRST_FRONTEND_TIMEOUT_S = 60.0
FRONTENDS_END_S = 1.0
"""Seconds that the frontends of a server that has ended have to end by themselves before they are killed."""
STATS_INTERVAL_S = 0.5
STEP_WAIT_MS = 1000
"""Most milliseconds between two checks whether a step has ended; its end also arrives as an event."""
COMPLAINT_INTERVAL_S = 10.0
"""Shortest time in seconds between two log lines on messages that cannot be handled."""
GC_THRESHOLDS = (50_000, 20, 100)
"""Thresholds of the garbage collector's three generations. A full collection visits every request and stalls
a step: with 1 000 running requests, 30 to 200 ms were measured. Hardly any garbage here is in cycles, so full
collections are made rare."""


@dataclass(slots=True)
class _Owner:
    """The frontend that sent a request, and the number of the request's open choices."""

    identity: bytes
    num_open_choices: int


class EngineLoop:
    """Connects an EngineCore to its frontends.

    Args:
        core: the engine.
        socket: bound ROUTER; its peers' identities are the frontends'.
        server_pid: the engine ends with this process; 0: no process is watched.
        server_start_time: start time of that process.
    """

    def __init__(
        self, core: EngineCore, socket: zmq.Socket[bytes], server_pid: int = 0, server_start_time: int = 0
    ) -> None:
        self.core = core
        self.socket = socket
        self.info = _engine_info(core)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._frontend_pidfds: dict[bytes, int] = {}
        self._owners: dict[str, _Owner] = {}
        self._had_frontend = False
        self._stopping = False
        self._profile: tuple[StepProfile, bytes, str] | None = None
        """Profile being recorded, the identity of the frontend that receives it, and the token of its
        command."""
        self._switches: deque[tuple[bytes, str, Sleep | Wake]] = deque()
        """Commands to sleep or wake that are not carried out yet, the oldest first: (frontend's identity,
        token, command). A Sleep waits until all requests have ended."""
        self.was_told_to_stop = False
        """Whether `stop` was called, for example by SIGTERM. The frontends of this engine should then start
        no other in its place."""
        self._next_stats = self._next_complaint = 0.0
        self.heartbeat: Heartbeat | None = None
        """The heartbeat that the loop writes; None: it writes none."""
        self._owes_stats = True
        """Whether stats are to be sent again: the engine's state may have changed, or there are worker
        processes to check."""
        self._first_frontend_by = math.inf
        self._step_done = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._step_done, zmq.POLLIN)
        core.adapters.on_done = functools.partial(os.eventfd_write, self._step_done, 1)
        self._server_pidfd = open_verified_pidfd(server_pid, server_start_time) if server_pid else None
        if self._server_pidfd is not None:
            self._poller.register(self._server_pidfd, zmq.POLLIN)
        elif server_pid:
            self._stopping = True

    def run(self) -> None:
        """Runs until the last frontend or the server is gone, `stop` was called, or no frontend has come in
        time.

        An exception means that the engine is broken. Its frontends may continue its requests in the next
        engine.
        """
        self._first_frontend_by = time.monotonic() + FIRST_FRONTEND_TIMEOUT_S
        while not self._stopping:
            if self.core.has_work or self._switches:
                self._receive(0)
            else:
                self._rest()
                self._receive(self._idle_ms())
            self._beat()
            if self._switches and not (self.core.has_work and self.core.is_resting):
                # One that is awake and to stay so has only wakes before it, which need no end of any request.
                self._switch(*self._switches.popleft())
            elif self.core.has_work:
                self._owes_stats = True
                self._send_outputs(self.core.step(self._serve))
            self._end_profile()
            self._push_stats()
            is_late = time.monotonic() > self._first_frontend_by
            if not self._frontend_pidfds and (self._had_frontend or is_late):
                logger.info("engine: no frontend is left, ending")
                break
        outputs = self.core.abort(list(self._owners), FinishReason.SHUTDOWN)
        self._send_outputs(outputs)
        if self._server_pidfd is not None and wait_readable(self._server_pidfd, 0.0):
            self._end_frontends()

    def _end_frontends(self) -> None:
        """Kills the frontends of a server that has ended, if they do not end within FRONTENDS_END_S.

        A frontend blocked in a call to the dead server may hold its interpreter's lock, which its own
        watchdog needs.
        """
        deadline = time.monotonic() + FRONTENDS_END_S
        for pidfd in self._frontend_pidfds.values():
            if not wait_readable(pidfd, max(deadline - time.monotonic(), 0.0)):
                logger.warning("engine: a frontend of the server that is gone hangs: it is killed")
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _switch(self, identity: bytes, token: str, command: Sleep | Wake) -> None:
        """Puts the engine to sleep or wakes it, and answers the command. Serves other messages meanwhile."""
        change = self.core.sleep if isinstance(command, Sleep) else self.core.wake
        self._rest()
        try:
            result = CommandResult(token, change(functools.partial(self._serve, is_watched=False)))
            if any(isinstance(later, Sleep) for _, _, later in self._switches):
                self.core.begin_sleep(Sleep(drain=True))  # who is let in now could keep it waiting for ever
        except QuireError as error:
            result = CommandResult(token, {}, str(error), error.code)
        except Exception as error:
            logger.exception("engine: cannot sleep or wake")
            result = CommandResult(token, {}, describe(error), EngineError.code)
        self._owes_stats = True
        self._send(identity, result)

    def _idle_ms(self) -> int:
        """Returns the milliseconds after which the idle loop must act even without a message; -1: no
        limit."""
        due = max(self._next_stats, 0.0 if self._owes_stats else self.core.next_expiry)
        if not self._had_frontend:
            due = min(due, self._first_frontend_by)
        if self._profile is not None:
            due = min(due, self._profile[0].ends_at)
        return -1 if due == math.inf else max(0, math.ceil((due - time.monotonic()) * 1000))

    def _serve(self, step: Future[Any], *, is_watched: bool = True) -> None:
        """Serves frontends until work on another thread is done: a step, or falling asleep or waking.

        Args:
            step: the work's future.
            is_watched: whether the work must end within a step's time limit.
        """
        if is_watched:
            self._beat()
        step.add_done_callback(lambda _: os.eventfd_write(self._step_done, 1))
        while not step.done():
            if not is_watched:
                self._rest()  # again behind each message: one that is answered is no sign of a stuck engine
            self._receive(STEP_WAIT_MS)

    def _rest(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.rest()

    def _beat(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.beat(self.core.scheduler.num_tokens_in_flight)

    def stop(self, *_: Any) -> None:
        """Ends `run` after the step, sleep or wake that is under way. Safe to call in a signal handler."""
        self._stopping = self.was_told_to_stop = True
        os.eventfd_write(self._step_done, 1)  # an idle loop waits without a limit

    def _receive(self, timeout_ms: int) -> None:
        events = dict(self._poller.poll(timeout_ms))
        self._owes_stats |= bool(events)
        if self._step_done in events:
            os.eventfd_read(self._step_done)
        # Before messages are read: a farewell closes a descriptor, and a newcomer's may get its number.
        dead = [identity for identity, pidfd in self._frontend_pidfds.items() if pidfd in events]
        if self.socket in events:
            self._drain_socket()
        if self._server_pidfd is not None and self._server_pidfd in events:
            logger.warning("engine: tritonserver is gone, ending")
            self._stopping = True
        for identity in dead:
            if identity in self._frontend_pidfds:
                logger.warning("engine: a frontend died, its requests are dropped")
                self._forget_frontend(identity)

    def _drain_socket(self) -> None:
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                continue  # an identity and one frame are a message
            identity, payload = frames
            try:
                self._handle(identity, frontend_message_decoder.decode(payload))
            except Exception as error:
                self._refuse(identity, payload, error)

    def _refuse(self, identity: bytes, payload: bytes, error: Exception) -> None:
        """Answers a request or a command that could not be decoded or handled, if its MessageHeader can be
        decoded."""
        header = None
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            header = header_decoder.decode(payload)
        if isinstance(error, msgspec.ValidationError) and header is not None and header.type == "add":
            error = InvalidArgumentError("request", describe(error))
        elif not isinstance(error, QuireError):
            if (now := time.monotonic()) >= self._next_complaint:
                self._next_complaint = now + COMPLAINT_INTERVAL_S
                log_fields = {} if header is None else {"request_id": header.request_id}
                logger.error("engine: a message could not be handled", exc_info=error, extra=log_fields)
            error = EngineError(f"the engine could not handle the request: {describe(error)}")
        if header is None:
            return
        if header.type == "add":
            self._send(identity, Outputs([error_output(header.request_id, error)]))
        elif header.type in COMMANDS:
            self._send(identity, CommandResult(header.token, {}, str(error), error.code))

    def _handle(self, identity: bytes, message: Any) -> None:
        match message:
            case AddRequest():
                self._add(identity, message)
            case AbortRequests():
                outputs = self.core.abort(message.request_ids, FinishReason(message.reason))
                self._trace_abort(message.request_ids, message.learned_at)
                self._send_outputs(outputs)
            case CancelByExternalId():
                request_ids = self.core.scheduler.roster.find(message.external_id, message.tenant)
                self._send_outputs(self.core.abort(request_ids, FinishReason.CANCELLED))
                self._trace_abort(request_ids, message.learned_at)
                if not request_ids:
                    raise NotFoundError(f"no request with id {shown(message.external_id)} is running")
                self._send(identity, CommandResult(message.token, {"num_cancelled": len(request_ids)}))
            case Control(command=Profile() as command):
                self._end_profile()  # of one whose time is over, the answer is not lost
                self._profile = self.core.observer.begin_profile(command), identity, message.token
            case Control(command=Sleep() | Wake() as command):
                if isinstance(command, Sleep):
                    self.core.begin_sleep(command)
                self._switches.append((identity, message.token, command))
            case Control(command=LoadAdapter() | UnloadAdapter() as command):
                self.core.adapters.begin(
                    command, functools.partial(self._answer_adapters, identity, message.token)
                )
            case Control():
                answer = self.core.control(message.command)
                if isinstance(message.command, Health):
                    answer["is_overdue"] = self.heartbeat is not None and self.heartbeat.is_overdue
                    if not (self.core.has_work or self.core.is_resting):
                        self._probe()
                self._send(identity, CommandResult(message.token, answer))
            case Hello():
                self._had_frontend = True
                try:
                    pidfd = os.pidfd_open(message.pid)
                except ProcessLookupError:
                    return
                self._unwatch(identity)
                self._frontend_pidfds[identity] = pidfd
                self._poller.register(pidfd, zmq.POLLIN)
                self._send(
                    identity, msgspec.structs.replace(self.info, adapters=self.core.adapters.listing())
                )
            case Goodbye():
                self._forget_frontend(identity)

    def _answer_adapters(self, identity: bytes, token: str, answer: dict[str, Any] | QuireError) -> None:
        """Sends all frontends the present adapters, and one of them the result of its command."""
        self._next_stats, self._owes_stats = 0.0, True
        self._push_stats()
        if isinstance(answer, QuireError):
            self._send(identity, CommandResult(token, {}, str(answer), answer.code))
        else:
            self._send(identity, CommandResult(token, answer))

    def _end_profile(self) -> None:
        if self._profile is not None and self._profile[0].is_over:
            (profile, identity, token), self._profile = self._profile, None
            self.core.observer.profile = None
            self._send(identity, CommandResult(token, profile.answer()))

    def _probe(self) -> None:
        """Adds a small request of the engine's own, whose result no client gets, so that repeated health
        checks of an idle engine see steps done."""
        params = self.core.internal_params(SamplingParams(max_tokens=1, temperature=0.0))
        self.core.add_request(PROBE_ID, [0], params, scheduling=SchedulingParams(is_internal=True))

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
        if message.request_id in self._owners:
            return  # an answer would end the other one
        if "#" in message.request_id:
            raise EngineError("request ids must not hold #, which names choices")
        check_together(message.sampling_params)
        _check_outputs(message)
        if message.scheduling.is_internal:
            raise InvalidArgumentError("scheduling", "only the engine's own requests are exempt from limits")
        embeds = None if message.embeds is None else self._open_embeds(message, message.embeds)
        try:
            self.core.add_request(
                message.request_id,
                message.prompt_token_ids,
                message.sampling_params,
                arrival_time=message.arrival_time or None,
                scheduling=message.scheduling,
                external_id=message.external_id,
                embeds=embeds,
                num_deaths=message.num_deaths,
                outputs=message.outputs,
                adapter=message.adapter,
                adapter_digest=message.adapter_digest,
            )
        except QuireError:
            raise
        except Exception:
            self.core.abort([message.request_id])  # it may be half in
            raise
        num_open = message.sampling_params.n if message.outputs is None else len(message.outputs)
        self._owners[message.request_id] = _Owner(identity, num_open)

    def _open_embeds(self, message: AddRequest, given: EmbedsMessage) -> PromptEmbeds:
        """Opens a request's embeddings: maps the frontend's shared memory, or copies its array on the device.
        The request no longer needs the frontend's buffer after that.

        Raises:
            InvalidArgumentError: they do not fit the prompt, the model or their spans.
            UnavailableError: the frontend's buffer is gone.
            EngineError: CUDA failed.
        """
        num_tokens = len(message.prompt_token_ids)
        rows, width = given.embeds.shape
        check_spans(given.spans, num_rows=rows, num_prompt_tokens=num_tokens)
        positions = None
        if given.position_ids:
            positions = np.frombuffer(given.position_ids, dtype=np.int32).reshape(3, num_tokens)
        if width != self.info.embeds_size or len(given.hashes) != len(given.spans):
            raise InvalidArgumentError("image_embeds", "do not fit the model or their spans")
        return PromptEmbeds(
            given.embeds.open(), tuple(given.spans), tuple(given.hashes), positions, given.is_joint
        )

    def _unwatch(self, identity: bytes) -> None:
        pidfd = self._frontend_pidfds.pop(identity, None)
        if pidfd is not None:
            self._poller.unregister(pidfd)
            os.close(pidfd)

    def _forget_frontend(self, identity: bytes) -> None:
        self._unwatch(identity)
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
        self.core.observer.sending()
        for identity, batch in by_frontend.items():
            self._send(identity, Outputs(batch))
        self.core.observer.end()

    def _send(self, identity: bytes, message: EngineMessage) -> None:
        self.socket.send_multipart([identity, encoder.encode(message)])

    def _push_stats(self) -> None:
        now = time.monotonic()
        if now < self._next_stats or not (self._owes_stats or self.core.next_expiry <= now):
            return
        self._next_stats = now + STATS_INTERVAL_S
        # A rank that is gone has to be noticed while nothing is to be done, too.
        self._owes_stats = self.core.config.model.tensor_parallel_size > 1
        self.core.executor.check()
        message = Stats(self.core.stats(), self.core.adapters.listing())
        for identity in self._frontend_pidfds:
            self._send(identity, message)


def _check_outputs(message: AddRequest) -> None:
    params, outputs = message.sampling_params, message.outputs
    if outputs is None:
        return
    if params.is_ranked or not outputs or not outputs.keys() <= set(range(params.n)):
        raise EngineError(f"a request with n={params.n} cannot go on with choices {sorted(outputs)}")


def _engine_info(core: EngineCore) -> EngineInfo:
    info = core.info
    return EngineInfo(
        pid=os.getpid(),
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        deepstack_levels=info.deepstack_levels,
        takes_position_ids=info.takes_position_ids,
        accepts_image_embeds=info.accepts_image_embeds,
        has_joint_images=info.has_joint_images,
        pooling=info.pooling,
        num_blocks=info.num_blocks,
        block_size=core.config.cache.tokens_per_block,
        kv_cache_bytes=info.kv_cache_bytes,
        dtype=info.dtype,
        device=info.device,
        num_threads=info.num_threads,
        num_cpus=num_cpus(),
        fingerprint=_result_fingerprint(core),
        adapters=core.adapters.listing(),
    )


def _result_fingerprint(core: EngineCore) -> str:
    """Returns the fingerprint for the result cache: `EngineCore.fingerprint`, max_model_len, the token ids
    that end a sequence, and how prompts are pooled. Empty: no result is cached."""
    if not core.info.kv_identity:
        return ""  # nobody needs it, or nothing is computed
    info = core.info
    return f"{core.fingerprint} {info.max_model_len} {sorted(info.eos_token_ids)} {info.pooling}"


@click.command()
@click.option("--directory", "path", type=click.Path(path_type=Path), required=True)
@click.option("--server-pid", type=int, default=0)
@click.option("--server-start-time", type=int, default=0)
@click.option("--generation", type=int, default=0)
def main(path: Path, server_pid: int, server_start_time: int, generation: int) -> None:
    """Runs an engine for the frontends that share DIRECTORY, after a byte has arrived on standard input."""
    logs.set_up("engine")
    timeline = StartTimeline.of_process()
    if not sys.stdin.buffer.read(1):
        raise SystemExit("engine: the frontend that started it died before it could announce it")
    directory = RuntimeDirectory(path)
    directory.hold()
    pid = os.getpid()
    state = EngineState("starting", pid, start_time_of(pid) or 0, generation)

    def publish(**values: Any) -> None:
        directory.write_state(msgspec.structs.replace(state, **values))

    try:
        config = EngineConfig.from_mapping(json.loads((path / "config.json").read_text(encoding="utf-8")))
        socket_path = directory.socket_path()
        core = EngineCore(config, make_executor(config, threaded=True), directory.read_adapters())
        timeline.end("imports")
        timeline.split("imports", core.info.start_s)
        core.warm_up()
        timeline.end("warm-up")
        core.adapters.on_change = directory.write_adapters
        directory.write_adapters(core.adapters.saved())
        core.observer.on_suspects = lambda suspects: directory.write_suspects(pid, suspects)
        if config.scheduler.trace_file:
            core.enable_trace(Path(config.scheduler.trace_file))
    except QuireError as error:
        publish(state="failed", error=str(error))
        raise SystemExit(1) from None
    except BaseException as error:
        publish(state="failed", error=f"engine start failed: {describe(error)}")
        raise
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    # Without a mark a ROUTER would drop messages to a slow frontend; how much can be under way is bounded by
    # admission (requests) and by max_tokens (tokens each).
    socket.set_hwm(0)
    socket.linger = 1000
    address = f"ipc://{socket_path}"
    socket.bind(address)
    loop = EngineLoop(core, socket, server_pid, server_start_time)
    loop.heartbeat = directory.heartbeat(pid, config.scheduler.watchdog_s)
    # What start-up made lives as long as the process: a full collection over it would only stall a step.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    name_threads()
    signal.signal(signal.SIGTERM, loop.stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logger.info(
        "engine ready in %.2f s (%s): %s on %s, %d blocks of %d tokens (%.1f MiB), max_model_len %d",
        timeline.total_s,
        shown_phases(timeline.phases),
        config.model.model,
        loop.info.device,
        loop.info.num_blocks,
        loop.info.block_size,
        loop.info.kv_cache_bytes / 2**20,
        loop.info.max_model_len,
    )
    publish(state="ready", address=address)
    try:
        loop.run()
    finally:
        if loop.was_told_to_stop:
            with contextlib.suppress(OSError):  # a full disk must not keep the tiers from being written
                publish(state="stopped")
        socket.close()
        context.term()
        socket_path.unlink(missing_ok=True)
        core.close()  # last: the disk tier writes what it has, and clients that wait for answers have them


if __name__ == "__main__":
    main()
