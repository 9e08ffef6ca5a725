"""TritonPythonModel of the generator: a frontend of an engine, one per model instance."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from quire.config import EngineConfig
from quire.engine.processes import name_threads, wait_readable
from quire.errors import QuireError, UnavailableError
from quire.startup import StartTimeline, shown_phases
from quire.triton import config_completion

if TYPE_CHECKING:
    from quire.outputs import SchedulerStats
    from quire.triton.observers import RequestObserver

logger = logging.getLogger("quire")

SHUTDOWN_S = 3.0
MIN_INTAKE = 64
"""Number of requests that may wait to be parsed beyond `max_waiting_requests`. So requests are mostly refused
by the engine, which counts exactly, and not by the frontend."""
INTAKE_PROMPTS = 4
"""Size that the texts of all requests in the intake may have together, as a multiple of `max_prompt_bytes`; a
single request may be larger."""


class TritonPythonModel:
    """Life of a frontend: `initialize` joins or starts the engine, `execute` enqueues, `finalize` leaves.

    Threads among others: Triton's main thread runs `execute` and copies the request; the intake's check and
    tokenize; the responder talks to the engine and sends. The watchdog ends the process when tritonserver is
    gone, since a stub of that server may otherwise hang forever.
    """

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Declares the model's tensors. Triton calls it in a process of its own before it loads the model.

        Raises:
            TritonModelException: the configuration asks for what the generator cannot do.
        """
        try:
            return config_completion.complete(auto_complete_model_config)
        except QuireError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def initialize(self, args: dict[str, str]) -> None:
        """Joins or starts the engine, and starts the frontend's threads.

        Raises:
            TritonModelException: the model cannot be served; says why. Other exceptions are not expected.
        """
        from quire_common import logs

        logs.set_up(args["model_instance_name"])
        # A waiting request with images holds a descriptor.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._server_pid = os.getppid()
        threading.Thread(target=self._watchdog, name="quire-watchdog", daemon=True).start()
        try:
            self._initialize(args)
        except BaseException as error:
            if hasattr(self, "_supervisor"):
                self._supervisor.close(0.0)  # an engine that has begun in vain
            if not isinstance(error, QuireError):
                raise
            raise pb_utils.TritonModelException(f"quire: {args['model_name']}: {error}") from None

    def _initialize(self, args: dict[str, str]) -> None:
        timeline = StartTimeline.of_process()
        from quire.engine.supervisor import EngineSupervisor
        from quire.loader.info import read_configs

        model_config = config_completion.parse_model_config(args)
        version_directory = Path(args["model_repository"]) / args["model_version"]
        config = config_completion.read_engine_config(model_config, version_directory)
        config = config_completion.with_instance_kind(config, args)
        _, generation = read_configs(config.model.model)
        self._supervisor = EngineSupervisor(
            config, self._server_pid, environment=config_completion.visible_device(args)
        )
        # It starts while all that follows is imported and the tokenizer is loaded.
        self._supervisor.begin()
        import zmq

        from quire.engine.client import EngineClient
        from quire.engine.connection import connect
        from quire.engine.link import EngineLink
        from quire.frontend.grammar_checker import GrammarChecker
        from quire.request.sampling_params import defaults_from_generation_config
        from quire.triton.drain import Drain, ServerAnswer
        from quire.triton.intake import Intake
        from quire.triton.metrics import EngineMetrics, RequestMetrics
        from quire.triton.metrics_board import MetricsBoard
        from quire.triton.request_log import RequestLog
        from quire.triton.request_parser import RequestParser
        from quire.triton.request_traces import RequestTraces
        from quire.triton.responder import Responder
        from quire.triton.result_cache import ResultCache
        from quire.triton.vllm_metrics import VllmBackendMetrics
        from quire_common.errors import ReportedError

        timeline.end("imports")
        try:
            tokenizer = _load_tokenizer(config)
        except ReportedError as error:
            raise UnavailableError(str(error)) from None
        timeline.end("tokenizer")

        context: zmq.Context[Any] = zmq.Context()
        directory = self._supervisor.directory
        names = {"model_name": args["model_name"], "engine": directory.name.rpartition("-")[2]}
        shows_vllm = config_completion.shows_vllm_metrics(model_config, version_directory)
        self._board = MetricsBoard(pb_utils, names if shows_vllm else None)
        identity = args["model_name"], args["model_version"]
        metrics = RequestMetrics(self._board, *identity, config.scheduler.tenants)
        link = EngineLink(
            lambda: connect(context, self._supervisor), self._publish, config.scheduler.watchdog_s
        )
        engine = EngineClient([link])
        max_loras = config.adapters.max_loras if config.adapters.enable_lora else 0
        # The directory is there now.
        offloads = config.model.max_resident_experts is not None
        self._metrics = EngineMetrics(self._board, directory, *identity, max_loras, offloads=offloads)
        timeline.end("engine")
        self._vllm_board = None
        on_output = None
        if shows_vllm:
            self._vllm_board = MetricsBoard(pb_utils, period_s=0.0)
            on_output = VllmBackendMetrics(self._vllm_board, *identity, engine.info.max_model_len).on_output
        self._traces = RequestTraces.of_environment()
        observers: list[RequestObserver] = [metrics]
        if self._traces is not None:
            observers.append(self._traces)
        if os.environ.get("QUIRE_LOG_REQUESTS"):
            observers.append(RequestLog())
        server = ServerAnswer(*identity, self._server_pid)
        path = None if tokenizer is None else tokenizer.path
        self._results = ResultCache.from_config(config.cache.result_cache, path)
        self._responder = Responder(
            None if tokenizer is None else tokenizer.hf,
            engine,
            config_completion.num_instances(model_config),
            drain=Drain(server.is_wanted, config.frontend.drain_s),
            model=args["model_name"],
            max_pause_s=config.frontend.max_pause_s,
            meter=metrics,
            on_output=on_output,
            results=self._results,
            observers=observers,
        )
        self._grammars = None
        if tokenizer is not None:
            self._grammars = GrammarChecker(tokenizer.path, engine.info.vocab_size)
            self._grammars.start()
            timeline.end("grammars")
        self._parser = RequestParser(
            tokenizer,
            defaults_from_generation_config(generation),
            lambda: engine.info,
            config.frontend,
            decoupled=config_completion.is_decoupled(model_config),
            batched=config_completion.is_batched(model_config),
            declared=config_completion.declared_outputs(model_config),
            grammars=self._grammars,
            adapters=config.adapters,
        )
        self._prefix = uuid.uuid4().hex[:8]
        self._count = 0
        self._intake = Intake(
            self._parser,
            self._responder,
            max_requests=MIN_INTAKE + config.scheduler.max_waiting_requests,
            max_bytes=INTAKE_PROMPTS * config.frontend.max_prompt_bytes,
            results=self._results,
        )
        # Transformers' objects live as long as the process: collections over them would only stall streams.
        gc.collect()
        gc.freeze()
        self._board.start()
        if self._vllm_board is not None:
            self._vllm_board.start()
        server.start()
        self._responder.start()
        self._intake.start()
        name_threads()
        logger.info(
            "serving %s by engine process %d: ready in %.2f s (%s)",
            config.model.model,
            engine.info.pid,
            timeline.total_s,
            shown_phases(timeline.phases),
        )

    def execute(self, requests: list[Any]) -> None:
        """Copies and enqueues requests, or answers them with an error.

        It waits for nothing that takes long. It must not raise, as Triton would then answer requests that our
        threads answer too.
        """
        from quire.triton.request_handle import RequestHandle

        for request in requests:
            self._count += 1
            sender = request.get_response_sender()
            handle = RequestHandle(sender, f"{self._prefix}-{self._count}", "")
            try:
                if self._traces is not None:
                    handle.traces = self._traces.context_of(request)
                self._intake.check_room()
                raw = self._parser.read(request)
                handle.external_id = raw.external_id
                self._intake.put(handle, raw)
            except QuireError as error:
                self._responder.refuse(handle, error)
            except Exception as error:
                self._responder.refuse(handle, UnavailableError(f"the request cannot be read: {error}"))

    def is_ready(self) -> bool:
        """Whether the model is ready: servers from 26.03 on ask before they say READY.

        False while there is no running engine, while it is stuck, once it was noticed that the model is being
        unloaded, and once the responder's thread has ended. Earlier servers do not ask: to them a loaded
        model is always ready.
        """
        served = self._responder
        return served.is_alive() and served.engine.is_ready and not served.drain.is_on

    def _publish(self, stats: SchedulerStats) -> None:
        self._metrics.update(stats, self._responder.engine.info)

    def finalize(self) -> None:
        """Ends the frontend. Triton calls it after the model's last request has ended."""
        from quire.triton.request_handle import finish_reason_tensor

        if not hasattr(self, "_intake"):
            return
        self._intake.stop(SHUTDOWN_S)
        if self._grammars is not None:
            self._grammars.close()
        self._responder.stop()
        self._responder.join(SHUTDOWN_S)
        if self._traces is not None:
            self._traces.close(SHUTDOWN_S)
        if self._results is not None:
            self._results.close()
        self._board.stop(SHUTDOWN_S)
        if self._vllm_board is not None:
            self._vllm_board.stop(SHUTDOWN_S)
        self._metrics.close()
        finish_reason_tensor.cache_clear()
        self._supervisor.close(SHUTDOWN_S)

    def _watchdog(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            server = os.pidfd_open(self._server_pid)
            if os.getppid() == self._server_pid:
                wait_readable(server)
        os._exit(1)


def _load_tokenizer(config: EngineConfig) -> Any | None:
    from quire_common.errors import one_line
    from quire_ensemble.tokenizer import Tokenizer, forbid_torch

    forbid_torch()
    tokenizer = Tokenizer.find(config.model.tokenizer, config.model.model)
    if tokenizer is not None:
        try:
            tokenizer.warm_up()
        except Exception as error:  # of the library that read its file
            raise UnavailableError(f"{tokenizer.path}: the tokenizer fails: {one_line(error)}") from None
    return tokenizer
