"""KVEventPublisher: sends KV events to subscribers over ZeroMQ and repeats those they missed."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import deque
from typing import Any

import msgspec
import zmq

from quire.core.kv_events import KVEventBatch
from quire.errors import ConfigError

logger = logging.getLogger("quire")

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
SEND_MARK = 100_000
"""Most messages queued here for a subscriber that does not read; later ones are dropped, which it sees by
their numbers."""
CLOSE_TIMEOUT_S = 1.0
LINGER_MS = 200

_OF_THIS_MACHINE = re.compile(r"^(ipc|inproc)://|//(localhost|127\.[0-9.]+|\[::1\]):")
_BOUND = re.compile(r"^(ipc|inproc)://|\*|//(localhost|0\.0\.0\.0|127\.[0-9.]+|\[::1?\]):")


class KVEventPublisher:
    """Publishes events on a PUB socket and replays them on a ROUTER; a separate thread owns both.

    As in vLLM, an event message is [topic, number, payload]. The number has 8 bytes, big endian, and counts
    from 0; the payload is a msgpack KVEventBatch. A replay request is [empty, first number wanted]. The
    answer is one [empty, number, payload] for each batch from there that is still kept, then [empty, -1,
    empty].

    Args:
        endpoint: address of the PUB socket. It is bound if it names this machine (a wildcard, loopback, ipc,
            inproc), else connected to, for subscribers that bind.
        replay_endpoint: address of the ROUTER, always bound; empty: no replay.
        topic: first frame of every event message.
        buffer_batches: most batches that are kept for replay, and most that wait to be sent.

    Raises:
        ConfigError: an address cannot be used.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str = "",
        topic: str = "",
        buffer_batches: int = 10_000,
    ) -> None:
        for address in filter(None, (endpoint, replay_endpoint)):
            if not _OF_THIS_MACHINE.search(address):
                logger.warning(
                    "kv events: %s tells the token ids of all prompts, unencrypted, to whoever reaches it "
                    "(docs/kv-events.md)",
                    address,
                )
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._next_number = 0
        self._pending: deque[tuple[int, KVEventBatch]] = deque(maxlen=buffer_batches)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._stopping = False
        self._context: zmq.Context[Any] = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(SEND_MARK)
        self._pub.linger = LINGER_MS
        self._replay = self._context.socket(zmq.ROUTER)
        # Room for one whole replay per peer: a ROUTER drops what exceeds its mark.
        self._replay.set_hwm(buffer_batches + 1)
        self._replay.linger = LINGER_MS
        try:
            if _BOUND.search(endpoint):
                self._pub.bind(endpoint)
            else:
                self._pub.connect(endpoint)
            if replay_endpoint:
                self._replay.bind(replay_endpoint)
        except (zmq.ZMQError, ValueError) as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"kv_events: endpoint {endpoint!r} or replay_endpoint {replay_endpoint!r} cannot be used: "
                f"{error}"
            ) from None
        self.endpoint = self._address(self._pub)
        """Address of the events' socket, with the actual port in place of a wildcard."""
        self.replay_endpoint = self._address(self._replay)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # From here on the sockets are the thread's alone.
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, batch: KVEventBatch) -> None:
        """Passes a batch to the thread; never blocks. If more than `buffer_batches` are queued, the oldest
        are lost, which subscribers see by a gap in the numbers."""
        self._pending.append((self._next_number, batch))
        self._next_number += 1
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Has the thread send what is queued and end; waits at most CLOSE_TIMEOUT_S. publish() must not be
        called afterwards."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake in ready:
                os.eventfd_read(self._wake)
            stopping = self._stopping  # read before the queue is emptied: nothing is put in after it
            self._send_pending()
            if self._replay in ready:
                self._answer(self._replay.recv_multipart())
            if stopping:
                break
        self._context.destroy()  # waits for the sockets' linger at most

    def _send_pending(self) -> None:
        while self._pending:
            number, batch = self._pending.popleft()
            payload = self._encoder.encode(batch)
            self._kept.append((number, payload))
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("kv events: a replay request of %d frames is ignored", len(frames))
            return
        identity, _, first = frames
        for number, payload in self._kept:
            if number >= int.from_bytes(first, "big"):
                self._replay.send_multipart((identity, b"", number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((identity, b"", END_OF_REPLAY, b""))

    @staticmethod
    def _address(socket: zmq.Socket[bytes]) -> str:
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)
