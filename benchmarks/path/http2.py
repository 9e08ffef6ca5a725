"""Many gRPC calls with one request and a stream of responses each, over one HTTP/2 connection, cheaply.

A gRPC library costs a client more per response than Triton's server does; on a machine that both share it
would be measured too. This one reads frames from a socket, and of HTTP/2 knows what a gRPC server needs.
Headers of answers are not decoded, so a call that fails says no more than that it ended.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from itertools import count

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_INITIAL_WINDOW_SIZE = 4
_RECEIVE_BYTES = 2**18


class Connection:
    """Calls of one method of one server.

    Args:
        url: HOST:PORT of the server.
        method: as "/inference.GRPCInferenceService/ModelStreamInfer".
        timeout: seconds without a byte from the server after which reading raises TimeoutError.
    """

    def __init__(self, url: str, method: str, timeout: float) -> None:
        host, _, port = url.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": url,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        self._headers = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self._window = DEFAULT_WINDOW
        """Bytes that the server still takes, of all calls together."""
        self._ids = count(1, 2)
        settings = struct.pack(">HI", _INITIAL_WINDOW_SIZE, WINDOW)
        grown = struct.pack(">I", WINDOW - DEFAULT_WINDOW)
        self._socket.sendall(_PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, grown))

    def close(self) -> None:
        self._socket.close()

    def calls(self, messages: Sequence[bytes]) -> Iterator[list[tuple[int, bytes | None]]]:
        """Sends each message as a call of its own; yields what arrives, to the end of all calls.

        Each list is what one read of the socket brought: (call, response), or (call, None) at a call's end.

        Raises:
            ConnectionError: the server closed the connection.
            TimeoutError: nothing came for too long.
        """
        waiting = list(enumerate(messages))[::-1]
        buffers: dict[int, bytes] = {}
        numbers: dict[int, int] = {}
        rest = b""
        while waiting or numbers:
            while waiting and len(waiting[-1][1]) + 5 <= self._window:
                number, message = waiting.pop()
                stream = next(self._ids)
                numbers[stream], buffers[stream] = number, b""
                self._window -= len(message) + 5
                data = _frame(DATA, END_STREAM, stream, b"\0" + struct.pack(">I", len(message)) + message)
                self._socket.sendall(_frame(HEADERS, END_HEADERS, stream, self._headers) + data)
            part = self._socket.recv(_RECEIVE_BYTES)
            if not part:
                raise ConnectionError("the server has closed the connection")
            rest += part
            at = 0
            arrived: list[tuple[int, bytes | None]] = []
            while len(rest) - at >= 9:
                length = int.from_bytes(rest[at : at + 3], "big")
                if len(rest) - at - 9 < length:
                    break
                kind, flags = rest[at + 3], rest[at + 4]
                stream = int.from_bytes(rest[at + 5 : at + 9], "big") & WINDOW
                payload = rest[at + 9 : at + 9 + length]
                at += 9 + length
                if kind == DATA and stream in numbers:
                    buffer = buffers[stream] + payload
                    while len(buffer) >= 5 and len(buffer) - 5 >= (
                        size := int.from_bytes(buffer[1:5], "big")
                    ):
                        arrived.append((numbers[stream], buffer[5 : 5 + size]))
                        buffer = buffer[5 + size :]
                    buffers[stream] = buffer
                elif kind == WINDOW_UPDATE and not stream:
                    self._window += int.from_bytes(payload, "big")
                elif kind in (SETTINGS, PING) and not flags & ACK:
                    self._socket.sendall(_frame(kind, ACK, 0, payload if kind == PING else b""))
                elif kind == GOAWAY:
                    raise ConnectionError(f"the server goes away: {payload[8:].decode(errors='replace')}")
                ends = (kind in (DATA, HEADERS) and flags & END_STREAM) or kind == RST_STREAM
                if ends and stream in numbers:
                    arrived.append((numbers.pop(stream), None))
            rest = rest[at:]
            self._refill(len(part))
            if arrived:
                yield arrived

    _taken = 0

    def _refill(self, size: int) -> None:
        """Gives the server back the window of what was read, in large parts."""
        self._taken += size
        if self._taken >= 2**24:
            self._socket.sendall(_frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._taken)))
            self._taken = 0


def _text(value: str) -> bytes:
    """HPACK's literal, of less than 127 bytes."""
    assert len(value) < 127, value
    return bytes((len(value),)) + value.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    assert len(payload) <= 2**14, "larger frames need the server's consent"
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload
