"""`quire serve`: runs a tritonserver in the foreground, with safe flags, and cleans up behind it.

The server runs in a session of its own, so that a Ctrl-C reaches it once, through `quire serve`, which is the
subreaper of everything below it: a stub or an engine whose parent died becomes its child, is reaped, and is
killed at the end at the latest. The stubs' shared-memory regions carry a name of this run and are removed at
its end. Those of runs that were killed are recognised by their unheld lock and removed at the next start.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec
import psutil

from quire.engine.processes import open_verified_pidfd
from quire.engine.runtime_directory import RuntimeDirectory
from quire.errors import ConfigError, QuireError, UnavailableError
from quire.server import http_stack, run_files, tritonserver
from quire.server.gateway import Gateway, check_installed
from quire.server.lost_stubs import GRACE_S, KILL_GRACE_S, LostStubs
from quire.server.model_links import link_models
from quire.server.run_files import RunFiles
from quire.server.tritonserver import TritonServer
from quire.triton.scheduling_fields import HEADERS, TRACE_HEADERS
from quire_common.checkpoint_files import with_ascii_name
from quire_common.errors import ReportedError
from quire_common.hub import find_checkpoint
from quire_ensemble.builder import build_repository
from quire_ensemble.cli import parse_option

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
LOOPBACK = "127.0.0.1"

FORWARDED_HEADERS = f"(?i)({'|'.join([*HEADERS, *TRACE_HEADERS])})"
"""Regular expression of the clients' headers that reach the models, unless `--forward-headers` gives another.
It ignores case, as a header keeps its case in HTTP and has lower case in gRPC."""

NOBODY = "quire-admin=no\nbody"
"""Header and value that would open the restricted APIs. Nobody can send them, as neither HTTP nor gRPC allows
a line feed in a value. A random value would be in the command line, which every local user can read."""

MAX_HTTP_BODY = 64 << 20
"""Largest HTTP request body, in bytes, that servers from 25.10 on accept, unless the user's own arguments for
the server set another limit."""
# The way from SIGTERM to our exit: requests in flight go on until UNLOAD_S before --exit-timeout, then the
# engines end them and Triton unloads; what is left after the grace is killed. Servers from 26.09 on wait for
# each unload in whole seconds: eleven models take 4 to 5 s. Servers before 26.04 leak streams, and wait for
# these until the timeout is over: they have what an unload takes on a busy machine, and no more.
EXIT_TIMEOUT_S, UNLOAD_S = 10, 7.0
OLD_EXIT_TIMEOUT_S, OLD_UNLOAD_S = 5, 4.5
RELAY_S = 4
STOP_GRACE_S = 1.0
STOP_AGAIN_S = 0.2
LEFTOVER_GRACE_S = 0.5
READY_POLL_S = 0.1
LOAD_RETRIES = (0, 8, 8)
"""Further attempts to load each model, one number for each start: a start that lost a stub is followed by the
next one. The first start has none, so that an error in a model is reported once, and at once."""
IDLE_S = 3600.0
"""Longest wait for a signal while there is nothing else to do, in seconds."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
_CRASHES = {-signal.SIGABRT, -signal.SIGSEGV}
"""Exit statuses of a server that a lost stub may have crashed before `LostStubs.look` found the stub."""
PORT = click.IntRange(0, 65535)
_LISTENING = tuple(f"--{name}-{what}" for name in ("http", "grpc", "metrics") for what in ("port", "address"))
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class ServeConfig:
    """Options of `quire serve`; ports of 0 mean any free one."""

    repositories: tuple[Path, ...] = ()
    checkpoint: str | None = None
    """Checkpoint to serve besides the repositories, under the model names of `quire repository build`; None:
    none."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys of quire.json, for the checkpoint's engine."""
    address: str = LOOPBACK
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    openai_port: int | None = None
    """Port of the OpenAI gateway; None: there is none."""
    load_models: tuple[str, ...] = ()
    exit_timeout_s: int | None = None
    """Seconds for running requests and unloading; None: see `stop_times`."""
    forward_headers: str = FORWARDED_HEADERS
    verbose: bool = False
    log_format: str = "plain"
    log_requests: bool = False
    ready_file: Path | None = None
    tritonserver: str | None = None
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.repositories and self.checkpoint is None:
            raise ConfigError("nothing to serve: name a checkpoint, or a --model-repository")
        if self.engine_options and self.checkpoint is None:
            raise ConfigError("--option is about a checkpoint; a repository's options are in its quire.json")
        for repository in self.repositories:
            if not repository.is_dir():
                raise ConfigError(f"--model-repository: {repository} is not a directory")
        if self.exit_timeout_s is not None and self.exit_timeout_s < 0:
            raise ConfigError(f"--exit-timeout: {self.exit_timeout_s} is negative")
        if self.ready_file is not None and (not self.ready_file.parent.is_dir() or self.ready_file.is_dir()):
            raise ConfigError(f"--ready-file: {self.ready_file} cannot be a file")
        if self.openai_port is not None:
            check_installed()
        self._check_ports()
        _check_extra_args(self.extra_args, has_gateway=self.openai_port is not None)

    @property
    def ports(self) -> dict[str, int]:
        """Ports to listen on, by option: HTTP, gRPC, metrics, and the gateway's where there is one."""
        ports = {
            "--http-port": self.http_port,
            "--grpc-port": self.grpc_port,
            "--metrics-port": self.metrics_port,
        }
        return ports if self.openai_port is None else {**ports, "--openai-port": self.openai_port}

    def _check_ports(self) -> None:
        """Raises ConfigError if two options name the same port other than 0, because `bind_port` would bind
        it twice."""
        owners: dict[int, str] = {}
        for option, port in self.ports.items():
            if port and owners.setdefault(port, option) != option:
                raise ConfigError(f"{option}: {port} is {owners[port]}, too (0 takes a free one)")


def _check_extra_args(extra_args: Sequence[str], *, has_gateway: bool) -> None:
    """Checks the user's own arguments for tritonserver.

    Raises:
        ConfigError: they turn on explicit model control without restricting it, so that every client could
            load code into the server; turn off HTTP, by which the server is asked whether it is ready; cut
            off the gateway; or set a port or address of HTTP, gRPC or metrics.
    """

    def values(flag: str) -> list[str]:
        # As getopt_long takes them: shortened, and with the value behind = or as the next word.
        found = []
        for index, word in enumerate(extra_args):
            name, equals, value = word.partition("=")
            if len(name) > 2 and flag.startswith(name):
                found.append(value if equals else "".join(extra_args[index + 1 : index + 2]))
        return found

    if {*values("--allow-http")} - {"true", "1"}:
        raise ConfigError("--allow-http=false: over HTTP it is asked whether the server is ready")
    if has_gateway and {*values("--allow-grpc")} - {"true", "1"}:
        raise ConfigError("--allow-grpc=false: the gateway of --openai-port asks the server by gRPC")
    if has_gateway and {*values("--grpc-use-ssl")} - {"false", "0"}:
        raise ConfigError("--grpc-use-ssl: the gateway of --openai-port asks the server without TLS")
    if own := [flag for flag in _LISTENING if values(flag)]:
        option = own[0] if own[0].endswith("port") else "--address"
        raise ConfigError(f"{own[0]}: give {option} before --: quire serve listens where it says")
    is_closed = all(
        any("model-repository" in value.partition(":")[0].split(",") for value in values(flag))
        for flag in ("--http-restricted-api", "--grpc-restricted-protocol")
    )
    if "explicit" in values("--model-control-mode") and not is_closed:
        raise ConfigError(
            "--model-control-mode=explicit lets every client load models, with Python of its own: choose "
            "models with --load-model, or restrict model-repository with --http-restricted-api and "
            "--grpc-restricted-protocol too"
        )


def bind_port(address: str, port: int, option: str) -> socket.socket:
    """Binds `port` (0: any free one) without listening, so that the kernel gives it to nobody else as a free
    port while models load. Raises ConfigError, which names `option`, if the port cannot be bound.

    Triton opens its ports after the models are loaded, which may take minutes. A bound socket that does not
    listen lets the server bind the same port, as both sides set SO_REUSEADDR.
    """
    holder = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    if port:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((address, port))
    except OSError as error:
        holder.close()
        where = f"{option}: cannot use port {port} on {address}"
        raise ConfigError(f"{where}: {error.strerror} (0 takes a free one)") from error
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def stop_times(config: ServeConfig, flags: frozenset[str]) -> tuple[int, float]:
    """Returns the exit timeout of a server with these flags, and how long before its end the engines are told
    to end their requests, so that models can be unloaded; in seconds. The second may be the longer one if the
    user has set a short timeout."""
    is_old = "allow-client-shm" not in flags  # before 26.04
    timeout_s, unload_s = (OLD_EXIT_TIMEOUT_S, OLD_UNLOAD_S) if is_old else (EXIT_TIMEOUT_S, UNLOAD_S)
    return timeout_s if config.exit_timeout_s is None else config.exit_timeout_s, unload_s


def gateway_exit_timeout_s(timeout_s: int, unload_s: float) -> int:
    """Returns the exit timeout in seconds of the gateway in front of a server. The arguments are what
    `stop_times` returned for this server.

    It leaves RELAY_S seconds to pass on the engines' last responses, unless the server's own timeout is over
    before. It is not longer, because clients that do not read may use it up.
    """
    return min(timeout_s, math.ceil(max(0.0, timeout_s - unload_s)) + RELAY_S)


def server_arguments(
    config: ServeConfig,
    flags: frozenset[str],
    backends: Path,
    ports: tuple[int, int, int],
    shm_prefix: str,
    repositories: Sequence[Path],
    load_retries: int = 0,
) -> list[str]:
    """Returns tritonserver's command line without the binary.

    Our flags that the server does not know are left out. Of most flags given twice the later one wins, so the
    user's own arguments come last.

    Args:
        config: the options; its repositories are not used.
        flags: names of the flags that the server knows, without leading dashes.
        backends: the backend directory.
        ports: ports of HTTP, gRPC and metrics.
        shm_prefix: prefix of the names of shared-memory regions.
        repositories: model repositories, in which every model is served.
        load_retries: further attempts to load a model that fails.
    """
    http_port, grpc_port, metrics_port = ports
    address = config.address
    of_http, of_grpc = (f"ipv6:{address}", f"[{address}]") if ":" in address else (address, address)
    wanted = [
        *(("model-repository", str(repository)) for repository in repositories),
        ("backend-directory", str(backends)),
        ("http-address", of_http),
        ("http-port", str(http_port)),
        ("grpc-address", of_grpc),
        ("grpc-port", str(grpc_port)),
        ("metrics-address", of_http),
        ("metrics-port", str(metrics_port)),
        ("model-control-mode", "none"),
        ("model-load-retry-count", str(load_retries)),
        ("exit-on-error", "true"),
        ("strict-readiness", "true"),
        ("exit-timeout-secs", str(stop_times(config, flags)[0])),
        ("http-header-forward-pattern", config.forward_headers),
        ("grpc-header-forward-pattern", config.forward_headers),
        ("allow-client-shm", "false"),
        ("allow-gpu-metrics", "true" if NVIDIA_DRIVER.exists() else "false"),
        ("http-max-input-size", str(MAX_HTTP_BODY)),
        # Nobody needs these to use a model, and they are the core of the server's security history.
        ("http-restricted-api", f"shared-memory,trace,logging:{NOBODY}"),
        ("grpc-restricted-protocol", f"shared-memory,trace,logging:{NOBODY}"),
        ("log-info", "true" if config.verbose else "false"),
        ("log-warning", "true" if config.verbose else "false"),
        ("backend-config", f"python,shm-region-prefix-name={shm_prefix}"),
        # Regions grow to the high-water mark in these steps and never shrink; text needs little.
        ("backend-config", f"python,shm-default-byte-size={2 << 20}"),
        ("backend-config", f"python,shm-growth-byte-size={2 << 20}"),
    ]
    return [*(f"--{flag}={value}" for flag, value in wanted if flag in flags), *config.extra_args]


class StubLostError(UnavailableError):
    """While models were loading, tritonserver lost a stub (`lost_stubs`), or a signal ended the server, which
    may happen after it has lost a stub.

    Args:
        names: names of stubs that are or may be lost; empty: none is known, and a signal ended the server.
    """

    def __init__(self, names: Sequence[str]) -> None:
        what = f"lost {', '.join(names)}" if names else "crashed"
        super().__init__(
            f"tritonserver has {what} while models were loading: the machine is too busy, "
            "was paused, or has killed it, or it ended by itself, for a reason that is above"
        )


class ServerRun:
    """One run of tritonserver, from its start until nothing of it is left.

    Args:
        load_retries: further attempts to load a model that fails or loses its stub (`lost_stubs`).
    """

    def __init__(
        self, config: ServeConfig, server: TritonServer, backends: Path, load_retries: int = 0
    ) -> None:
        self._config = config
        self._load_retries = load_retries
        self._server = server
        self._backends = backends
        self._deadline = math.inf  # set by the first stop signal; then everything is killed
        self._drain_until = math.inf  # set with it; then the engines end what is in flight
        self._stop_times = 0, 0.0
        self._gateway: Gateway | None = None
        self._files = RunFiles()
        self._ready_text = ""  # of the ready file, once there is one
        self._began = time.monotonic()

    def run(self) -> int:
        """Serves until stopped or until tritonserver ends; returns the exit status for `quire serve`.

        Raises:
            StubLostError: the start lost a stub and does not load its model again, or the server crashed
                before it was ready.
            UnavailableError: the OpenAI gateway ended before the server was ready.
            ConfigError: a port cannot be used, the models of `load_models` cannot be linked, or this Python
                has no shared library.
            ReportedError: the checkpoint cannot be fetched, or no repository can be built for it.
        """
        config = self._config
        run_files.remove_stale()
        # One that is blocked reaches us although it is ignored, which nohup wants it to be.
        is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        caught = _SIGNALS - {signal.SIGHUP} if is_kept else _SIGNALS
        for number in caught - {signal.SIGCHLD}:
            signal.signal(number, self._leave)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        holders: list[socket.socket] = []
        try:
            for option, port in config.ports.items():
                holders.append(bind_port(config.address, port, option))
            http_port, grpc_port, metrics_port, *others = (holder.getsockname()[1] for holder in holders)
            ports = (http_port, grpc_port, metrics_port)
            repositories = self._repositories()
            # Not before: a checkpoint may be fetched for minutes, which a signal has to end.
            signal.pthread_sigmask(signal.SIG_BLOCK, caught)
            process = self._start(ports, repositories)
            for port in others:
                prepare = _in_child(os.getpid(), resource.getrlimit(resource.RLIMIT_STACK))
                exit_timeout_s = gateway_exit_timeout_s(*self._stop_times)
                self._gateway = Gateway(config.address, port, self._url(grpc_port), exit_timeout_s, prepare)
            if self._wait_ready(process, http_port):
                self._announce((*ports, *others))
            elif process.returncode is not None:
                click.echo("quire: tritonserver ended before it was ready; its reasons are above", err=True)
            while (status := self._handle_signal(process, IDLE_S)) is None:
                pass
        finally:
            for holder in holders:
                holder.close()
            _end_leftovers()
            self._files.remove()
            self._remove_ready_file()
        return status if status >= 0 else 128 - status

    def _remove_ready_file(self) -> None:
        """Removes the ready file, unless a newer server has put its own there."""
        path = self._config.ready_file
        if path is not None and path.is_file() and path.read_text("utf-8") == self._ready_text:
            path.unlink()

    def _leave(self, number: int, _: object) -> None:
        """Signal handler before there is a server: removes the run's files and ends this process at once.

        An exception would wait for a download's threads.
        """
        self._files.remove()
        os._exit(128 + number)

    def _repositories(self) -> tuple[Path, ...]:
        """Returns the model repositories to serve.

        For a checkpoint, which is fetched if need be, a repository is written. With `load_models` the only
        repository to serve is one of links to these models and to members of ensembles among them.
        """
        files, repositories = self._files, self._config.repositories
        if self._config.checkpoint is not None:
            made, options = files.directory / "repository", self._config.engine_options
            # The stubs open no others.
            checkpoint = with_ascii_name(
                find_checkpoint(self._config.checkpoint), files.directory / "checkpoint"
            )
            build_repository(checkpoint, made, placement="path", engine_options=options)
            repositories = (*repositories, made)
        if self._config.load_models:
            chosen = files.directory / "models"
            link_models(repositories, self._config.load_models, chosen)
            repositories = (chosen,)
        return repositories

    def _start(self, ports: tuple[int, int, int], repositories: Sequence[Path]) -> subprocess.Popen[bytes]:
        files = self._files
        environment = self._server.environment()
        environment["QUIRE_RUNTIME_DIR"] = str(files.directory)
        environment["QUIRE_LOG_FORMAT"] = self._config.log_format
        environment["QUIRE_LOG_REQUESTS"] = "1" if self._config.log_requests else ""
        flags = self._server.flags(self._backends)
        self._stop_times = stop_times(self._config, flags)
        arguments = server_arguments(
            self._config, flags, self._backends, ports, files.shm_prefix, repositories, self._load_retries
        )
        limits = resource.getrlimit(resource.RLIMIT_STACK)
        # These read bodies without taking stack.
        stack = limits if "http-max-input-size" in flags else http_stack.limits_for_server(limits)
        if self._config.verbose:
            click.echo(f"quire: {self._server.binary} {' '.join(arguments)}", err=True)
        process = subprocess.Popen(
            [str(self._server.binary), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(files.lock_fd,),
            preexec_fn=_in_child(os.getpid(), stack),
        )
        if stack != limits:
            http_stack.restore_limits(process, limits)
        return process

    def _handle_signal(self, process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
        """Waits at most `timeout_s` for the next signal and acts on it.

        Before that it stops the engines, kills the server or starts the gateway, if that is due.

        Returns:
            Exit status of the server; None: it has not ended.
        """
        if process.returncode is not None:
            return process.returncode
        now = time.monotonic()
        if now >= self._drain_until:
            self._drain_until = now + STOP_AGAIN_S  # one may be just being started
            _stop_engines(self._files.directory)
        if now >= self._deadline:
            process.kill()
            return process.wait()
        due = math.inf if self._gateway is None else self._gateway.due
        if self._gateway is not None and now >= due:
            self._gateway.start()
            due = math.inf
        next_s = min(self._drain_until, self._deadline, due) - now
        received = _next_signal(min(timeout_s, next_s))
        if received is None:
            return None
        if received == signal.SIGCHLD:
            return _reap(process, self._gateway)
        if not self._stopping:
            now = time.monotonic()
            limit, unload_s = self._stop_times
            self._deadline = now + limit + STOP_GRACE_S
            self._drain_until = now + max(0.0, limit - unload_s)
            process.terminate()
            if self._gateway is not None:
                self._gateway.terminate()
        else:
            self._deadline = 0.0  # asked a second time: at once
        return None

    def _wait_ready(self, process: subprocess.Popen[bytes], http_port: int) -> bool:
        """Waits until the server is ready (see `_is_ready`), and so is the gateway, if there is one.

        Returns:
            False if the server ended, or if it is being stopped.

        Raises:
            StubLostError, UnavailableError: see `run`.
        """
        stubs = LostStubs(process.pid, KILL_GRACE_S if self._load_retries else GRACE_S)
        while not self._stopping:
            if self._handle_signal(process, READY_POLL_S) is not None:
                is_first_crash = process.returncode in _CRASHES and not self._load_retries
                if is_first_crash or (process.returncode < 0 and stubs.suspects):
                    raise StubLostError(stubs.suspects)
                return False
            if self._stopping:  # a stub may be lost at the same moment
                break
            if self._gateway is not None and self._gateway.due < math.inf:
                raise UnavailableError("--openai-port: the gateway does not start")
            if _is_ready(process.pid, self._probe_address(), http_port) and (
                self._gateway is None or self._gateway.is_ready(self._probe_address())
            ):
                return True
            for pid, name in stubs.look().items():
                if not self._load_retries or not stubs.kill(pid):
                    raise StubLostError([name])
                click.echo(f"quire: {StubLostError([name])}: it is loaded again", err=True)
        return False

    @property
    def _stopping(self) -> bool:
        return self._deadline < math.inf

    def _probe_address(self) -> str:
        return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self._config.address, self._config.address)

    def _url(self, port: int) -> str:
        host = self._probe_address()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _announce(self, ports: Sequence[int]) -> None:
        """Prints the server's addresses, and writes the ready file if one is wanted. `ports`: of HTTP, gRPC,
        metrics and, if there is one, the gateway."""
        names = ("http", "grpc", "metrics", "openai")
        urls = {name: self._url(port) for name, port in zip(names, ports, strict=False)}
        click.echo(
            f"quire: ready after {time.monotonic() - self._began:.1f} s: http://{urls['http']}  "
            f"grpc {urls['grpc']}  http://{urls['metrics']}/metrics  (Ctrl-C stops it)"
        )
        if "openai" in urls:
            click.echo(f"quire: chat page http://{urls['openai']}/  OpenAI API http://{urls['openai']}/v1")
        sys.stdout.flush()
        if (path := self._config.ready_file) is not None:
            document = {**urls, "pid": os.getpid(), "shm_prefix": self._files.shm_prefix}
            self._ready_text = json.dumps(document) + "\n"
            # Under a name that nobody could foresee and make a link of.
            handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                os.fchmod(handle, 0o644)
                file.write(self._ready_text)
            Path(unfinished).replace(path)


def _next_signal(timeout_s: float) -> int | None:
    """Waits for the next of `_SIGNALS`, which must be blocked or ignored, and returns it. None: the time is
    over, or the wait was interrupted.

    `signal.sigtimedwait` is not used. If the time is over when a stopped process is continued, CPython
    returns uninitialised memory, which would be mistaken for a signal.
    """
    wanted = (ctypes.c_ulong * 16)()  # a sigset_t
    for number in _SIGNALS:
        _LIBC.sigaddset(wanted, number)
    seconds, rest = divmod(max(0.0, timeout_s), 1.0)
    limit = (ctypes.c_long * 2)(int(seconds), int(rest * 1e9))  # a timespec
    found = int(_LIBC.sigtimedwait(wanted, None, limit))
    return found if found > 0 else None


def _reap(process: subprocess.Popen[bytes], beside: Gateway | None) -> int | None:
    """Reaps ended children, adopted ones too, up to the server. Returns the server's status; None: the server
    has not ended.

    Args:
        process: the server.
        beside: the gateway, whose `reap` is called if the gateway has ended; None: there is none.
    """
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if ended.si_pid == process.pid:
            return process.wait()
        if beside is not None and ended.si_pid == beside.pid:
            beside.reap()
        else:
            os.waitpid(ended.si_pid, 0)
    return None


def _stop_engines(directory: Path) -> None:
    """Tells the engines of this run to stop, which ends their requests with a final response.

    An engine that has died is usually marked as stopped, so that no other takes its place.
    """
    for path in directory.glob("*/state.json"):
        with contextlib.suppress(OSError, ConfigError):
            with contextlib.closing(RuntimeDirectory(path.parent)) as found:
                state = found.read_state()
            if state is None:
                continue
            pidfd = open_verified_pidfd(state.pid, state.start_time)
            if pidfd is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGTERM)
                os.close(pidfd)
                continue
            # Who has it locked starts one: it is told when it is there.
            with RuntimeDirectory.locked(path.parent, 0.0, make=False) as found:
                last = found.read_state()
                if last is not None and not last.is_alive:
                    found.write_state(msgspec.structs.replace(last, state="stopped"))


def _end_leftovers() -> None:
    """Ends all descendants of this process: they have LEFTOVER_GRACE_S to end themselves, then are killed."""
    leftovers = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(leftovers, timeout=LEFTOVER_GRACE_S)
    # Killing one hands its children to us, so look again until nobody is left.
    while alive:
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive)
        alive = psutil.Process().children(recursive=True)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _in_child(parent: int, stack: tuple[int, int]) -> Callable[[], None]:
    # Loaded before the fork: nothing may be imported or allocated much after it.
    prctl = _LIBC.prctl

    def prepare() -> None:
        # Tied to our main thread, which forks here and lives as long as we do: if we are killed, the server
        # is told to stop.
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        resource.setrlimit(resource.RLIMIT_STACK, stack)

    return prepare


def _is_ready(server: int, address: str, port: int) -> bool:
    """Whether a server at this address answers that it is ready, or forbids the question, and `server` is the
    process that listens at the port. If the system does not tell who listens, the answer suffices."""
    connection = http.client.HTTPConnection(address, port, timeout=2)
    try:
        connection.request("GET", "/v2/health/ready")
        # One that restricts `health` has opened its port, which it does when all models are loaded.
        if connection.getresponse().status not in (200, 403):
            return False
        listening = psutil.Process(server).net_connections("tcp")
        return any(one.status == psutil.CONN_LISTEN and one.laddr[1] == port for one in listening)
    except psutil.AccessDenied:  # a binary with capabilities, for example: the system does not say
        return True
    except (OSError, http.client.HTTPException, psutil.NoSuchProcess):
        return False
    finally:
        connection.close()


def _run(config: ServeConfig, server: TritonServer, backends: Path) -> int:
    """Runs a server (`ServerRun.run`) and returns the exit status. Starts again after a StubLostError, as
    often as LOAD_RETRIES says.

    Raises:
        StubLostError: the last start has ended with one, too.
    """
    *others, last = LOAD_RETRIES
    for load_retries in others:
        try:
            return ServerRun(config, server, backends, load_retries).run()
        except StubLostError as error:
            click.echo(f"quire: {error}: everything starts again", err=True)
    return ServerRun(config, server, backends, last).run()


def _ip_address(text: str) -> str:
    """Returns the IPv4 address of a host name, or the given IP address: with a name, Triton's HTTP would be
    unreachable. IPv6 addresses are not checked. Raises click.BadParameter if the text is empty or the name is
    unknown."""
    if not text:
        raise click.BadParameter("is empty; 0.0.0.0 is every address of the machine")
    if ":" in text:
        return text
    try:
        return socket.gethostbyname(text)
    except (OSError, UnicodeError) as error:
        raise click.BadParameter(f"{text}: {error}") from error


class _Command(click.Command):
    """Command that passes the arguments after -- as `extra_args` and parses only those before."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.params["extra_args"] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])


@click.command(cls=_Command, options_metavar="[OPTIONS]")
@click.argument("checkpoint", required=False)
@click.option(
    "--option",
    "engine_options",
    multiple=True,
    callback=lambda _context, _option, texts: dict(map(parse_option, texts)),
    metavar="KEY=VALUE",
    help="Key of quire.json for CHECKPOINT, such as max_num_seqs=128 (repeatable).",
)
@click.option(
    "--model-repository",
    "repositories",
    multiple=True,
    type=click.Path(path_type=Path),
    callback=lambda _context, _option, paths: tuple(path.absolute() for path in paths),
    metavar="DIR",
)
@click.option("--http-port", default=8000, show_default=True, type=PORT, help="0 takes a free port.")
@click.option("--grpc-port", default=8001, show_default=True, type=PORT, help="0 takes a free port.")
@click.option("--metrics-port", default=8002, show_default=True, type=PORT, help="0 takes a free port.")
@click.option(
    "--openai-port",
    type=PORT,
    help="Serve OpenAI's API and a chat page there too, without keys; 0 takes a free port. Default: no.",
)
@click.option(
    "--address",
    default=LOOPBACK,
    show_default=True,
    callback=lambda _context, _option, text: _ip_address(text),
    help="Address all of them listen on.",
)
@click.option(
    "--load-model",
    "load_models",
    multiple=True,
    metavar="NAME",
    help="Serve only this one and what it is made of (repeatable).",
)
@click.option(
    "--exit-timeout",
    "exit_timeout_s",
    type=int,
    default=None,
    show_default=f"{EXIT_TIMEOUT_S}; {OLD_EXIT_TIMEOUT_S} with a server before 26.04",
    help="Seconds for running requests and unloading.",
)
@click.option(
    "--forward-headers",
    default=FORWARDED_HEADERS,
    show_default=True,
    metavar="REGEX",
    help="Headers of clients that reach the models, as request parameters; empty: none.",
)
@click.option("--verbose", is_flag=True, help="Show tritonserver's command line, information and warnings.")
@click.option(
    "--log-format",
    type=click.Choice(["plain", "json"]),
    default="plain",
    envvar="QUIRE_LOG_FORMAT",
    show_default=True,
    help="Of what our own processes log; tritonserver's lines stay as they are.",
)
@click.option(
    "--log-requests",
    is_flag=True,
    envvar="QUIRE_LOG_REQUESTS",
    help="Log a line for each request that has ended, without its text.",
)
@click.option("--ready-file", type=click.Path(path_type=Path), help="Write addresses here (JSON) once ready.")
@click.option("--tritonserver", envvar="QUIRE_TRITONSERVER", metavar="FILE", help="The server to run.")
def serve(**options: Any) -> None:
    """Serve a checkpoint, or model repositories, with tritonserver; arguments after -- go to it unchanged.

    CHECKPOINT is a Hugging Face directory, a .gguf file, or a hub's OWNER/NAME[/FILE.gguf|:TYPE][@REVISION].
    """
    try:
        config = ServeConfig(**options)
        server = tritonserver.find(config.tritonserver)
        status = _run(config, server, tritonserver.backend_directory(server))
    except (QuireError, ReportedError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(status)
