"""EngineConnection: a frontend's socket to the engine, used by one thread at a time."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from typing import Any

import zmq

from quire.engine.messages import (
    EngineInfo,
    EngineMessage,
    FrontendMessage,
    Goodbye,
    Hello,
    encoder,
    engine_message_decoder,
)
from quire.engine.processes import open_verified_pidfd
from quire.engine.supervisor import EngineAddress, EngineSupervisor, wait_or_kill
from quire.errors import UnavailableError

logger = logging.getLogger("quire")

HELLO_TIMEOUT_S = 30.0
THAWED_S = 1.0
"""Seconds that a frontend waits on, after it first finds an engine overdue or without an answer, before it
kills the engine. After all processes were frozen, a healthy engine seems overdue for a moment."""
CONNECT_ATTEMPTS = 3


class EngineEndedError(UnavailableError):
    """The engine ended before it could be reached, or before it answered."""


def connect(context: zmq.Context[Any], supervisor: EngineSupervisor) -> tuple[EngineConnection, EngineInfo]:
    """Connects and registers this process with the supervisor's engine, which is started if there is none.

    An engine whose last frontend has just left ends without accepting new frontends; another one is started.
    With a watchdog, a stuck engine is killed here, because without another frontend no process watches it.

    Raises:
        QuireError: no engine can be started (`EngineSupervisor.ensure`), or engines end or do not answer.
    """
    watchdog_s = supervisor.config.scheduler.watchdog_s
    for attempts_left in reversed(range(CONNECT_ATTEMPTS)):
        address = supervisor.ensure()
        try:
            connection = EngineConnection(context, address)
            return connection, connection.hello(max(HELLO_TIMEOUT_S, watchdog_s))
        except EngineEndedError:
            if not attempts_left:
                raise
        except UnavailableError:
            if not watchdog_s or _is_busy(address):
                raise
            logger.error("frontend: engine process %d does not answer and is killed", address.pid)
            wait_or_kill(address.pid, address.start_time, 0.0)
            if not attempts_left:
                raise
    raise AssertionError("unreachable")


def _is_busy(address: EngineAddress) -> bool:
    """Returns whether the engine is computing and not overdue, for example in a long step for other
    frontends."""
    heartbeat = address.heartbeat()
    return heartbeat is not None and time.monotonic() <= heartbeat.read()[1] < math.inf


class EngineConnection:
    """Holds one DEALER socket and a pidfd of the engine, which becomes readable when the engine ends.

    Args:
        context: the frontend's ZeroMQ context.
        address: the engine to connect to.

    Raises:
        EngineEndedError: the engine's process has ended.
    """

    def __init__(self, context: zmq.Context[Any], address: EngineAddress) -> None:
        self.address = address
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.set_hwm(0)
        self.socket.linger = 200
        self.socket.connect(address.address)
        pidfd = open_verified_pidfd(address.pid, address.start_time)
        if pidfd is None:
            self.socket.close(0)
            raise EngineEndedError("the engine ended before it could be reached")
        self.pidfd = pidfd
        self.heartbeat = address.heartbeat()

    def hello(self, timeout_s: float) -> EngineInfo:
        """Registers this process with the engine.

        Raises:
            EngineEndedError: the engine ended; the connection is closed then, as with any exception.
            UnavailableError: no answer in time.
        """
        try:
            return self._hello(timeout_s)
        except BaseException:
            self.close(goodbye=False)
            raise

    def _hello(self, timeout_s: float) -> EngineInfo:
        self.send(Hello(os.getpid()))
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.pidfd, zmq.POLLIN)
        events = dict(poller.poll(int(timeout_s * 1000)) or poller.poll(int(THAWED_S * 1000)))
        for message in self.receive() if self.socket in events else ():
            if isinstance(message, EngineInfo):
                return message
        if self.pidfd in events:
            raise EngineEndedError("the engine ended before it answered")
        raise UnavailableError("the engine did not answer")

    def send(self, message: FrontendMessage) -> None:
        self.socket.send(encoder.encode(message))

    def kill(self) -> None:
        """Kills the engine's process, even if it is stopped (SIGSTOP)."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def receive(self) -> list[EngineMessage]:
        """Returns all messages that have arrived; never blocks."""
        messages: list[EngineMessage] = []
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(engine_message_decoder.decode(frame))

    def close(self, *, goodbye: bool) -> None:
        """Closes the socket and the descriptor, with `goodbye` after a Goodbye to the engine. Later calls do
        nothing, since another file may have the descriptor's number by then."""
        if self.pidfd < 0:
            return
        if goodbye:
            self.send(Goodbye())
        self.socket.close()
        os.close(self.pidfd)
        self.pidfd = -1
