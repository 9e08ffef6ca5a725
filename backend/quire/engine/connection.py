"""EngineConnection: a frontend's socket to the engine. Owned by one thread."""

from __future__ import annotations

import os
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
from quire.engine.supervisor import EngineAddress
from quire.errors import UnavailableError
from quire.processes import open_verified_pidfd


class EngineConnection:
    """One DEALER socket plus a pidfd of the engine, which becomes readable the moment the engine ends.

    Args:
        context: the frontend's ZeroMQ context.
        address: which engine.
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
            raise UnavailableError("the engine ended before it could be reached")
        self.pidfd = pidfd

    def hello(self, timeout_s: float) -> EngineInfo:
        """Registers this process with the engine.

        Raises:
            UnavailableError: no answer in time, or the engine died; the connection is closed then.
        """
        self.send(Hello(os.getpid()))
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.pidfd, zmq.POLLIN)
        events = dict(poller.poll(int(timeout_s * 1000)))
        for message in self.receive() if self.socket in events else ():
            if isinstance(message, EngineInfo):
                return message
        self.close(goodbye=False)
        raise UnavailableError("the engine did not answer")

    def send(self, message: FrontendMessage) -> None:
        self.socket.send(encoder.encode(message))

    def receive(self) -> list[EngineMessage]:
        """All messages that are there now; never blocks."""
        messages: list[EngineMessage] = []
        while True:
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(engine_message_decoder.decode(frame))

    def close(self, *, goodbye: bool) -> None:
        """May be called again: a closed descriptor's number is soon another's."""
        if self.pidfd < 0:
            return
        if goodbye:
            self.send(Goodbye())
        self.socket.close()
        os.close(self.pidfd)
        self.pidfd = -1
