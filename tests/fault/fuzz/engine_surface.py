"""The engine's ZeroMQ socket: frames that are no message, messages that no frontend would send."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
import zmq

from quire.engine.messages import (
    AbortRequests,
    AddRequest,
    CancelByExternalId,
    CommandResult,
    Control,
    Goodbye,
    Outputs,
    encoder,
    engine_message_decoder,
    frontend_message_decoder,
)
from quire.request.sampling_params import SamplingParams
from quire.request.scheduling_params import SchedulingParams
from tests.fault.fuzz import hostile
from tests.fault.fuzz.calls import IDS, token_ids
from tests.fault.fuzz.outcome import LIMIT_S, Outcome
from tests.fault.fuzz.target import Target

_NESTED = (b"\x91", b"\x81\xa1a")
"""msgpack: a list of one, an object of one key."""


@dataclass(frozen=True)
class EngineMessage:
    """Frames for a DEALER socket of their own, each a tuple of parts."""

    frames: list[tuple[bytes, ...]]

    def __str__(self) -> str:
        shown = []
        for parts in self.frames:
            try:
                shown.append(repr(frontend_message_decoder.decode(parts[0]))[:700])
            except Exception:
                shown.append(" | ".join(repr(part[:300]) for part in parts))
        return "\n".join(shown)


def make(rng: Random) -> EngineMessage:
    frames: list[tuple[bytes, ...]] = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        data = _payload(rng)
        match rng.randrange(25):
            case 0:
                frames.append((data, data))
            case 1:
                frames.append((b"", data))
            case 2:
                frames.append((b"",))
            case 3:
                frames.append((data, b"", rng.randbytes(9)))
            case _:
                frames.append((data,))
    return EngineMessage(frames)


def _payload(rng: Random) -> bytes:
    match rng.randrange(14):
        case 0:
            return rng.randbytes(rng.choice((1, 5, 60, 3_000)))
        case 1:
            return rng.choice(_NESTED) * rng.choice(hostile.DEPTHS) + b"\xc0"
        case 2:
            return hostile.damaged(rng, encoder.encode(_message(rng)))
        case 3:
            return encoder.encode(_message(rng))
        case 4 | 5 | 6 | 7:
            return encoder.encode(_with_unchecked_values(rng, _request(rng)))
        case _:
            builtins = msgspec.to_builtins(_message(rng))
            for _ in range(rng.choice((1, 1, 2))):
                builtins = _with_a_hostile_leaf(rng, builtins)
            return msgspec.msgpack.encode(builtins)


def _message(rng: Random) -> Any:
    token = f"t{rng.randrange(100)}"
    match rng.randrange(12):
        case 0:
            pid = rng.choice((os.getpid(), 1, 0, -1, 2**22 - 1, 2**31, 2**63 - 1, -(2**63)))
            return {"type": "hello", "pid": pid, "start_time": rng.choice((0, 1, -1, 2**63))}
        case 1:
            return AbortRequests(
                [*rng.sample(IDS, 2), "x#0", "x#99"], rng.choice(("cancelled", "stop", "length"))
            )
        case 2 | 3:
            external_id = rng.choice((*IDS, "", "warm-up"))
            return {"type": "cancel_external", "external_id": external_id, "tenant": "t", "token": token}
        case 4 | 5:
            command = {"command": rng.choice(("inspect", "reset", "unpin")), **_unpin(rng)}
            return {"type": "control", "command": command, "token": token}
        case 6:
            return Goodbye()
        case _:
            return _request(rng)


def _unpin(rng: Random) -> dict[str, Any]:
    return rng.choice(({}, {}, {"all": True}, {"session": "s", "tenant": "t"}))


def _request(rng: Random) -> dict[str, Any]:
    """A request as builtins, seldom with embeddings of which somebody says where they lie."""
    params: dict[str, Any] = {"max_tokens": rng.randrange(1, 9)}
    if rng.random() < 0.5:
        params |= {"temperature": 0.8, "top_k": 5, "seed": 7, "n": rng.randrange(1, 4), "logprobs": 2}
        params |= {"stop_token_ids": (7, 8), "logit_bias": {5: 1.0}, "bad_words_ids": ((5, 6),)}
    request = AddRequest(
        rng.choice((f"fuzz-{rng.getrandbits(48):x}", f"fuzz-{rng.getrandbits(48):x}", rng.choice(IDS))),
        token_ids(rng),
        SamplingParams(**params),
        scheduling=SchedulingParams(tenant="t", retention=50, session=rng.choice(("", "s"))),
        external_id=rng.choice(("", *IDS)),
        arrival_time=rng.choice((0.0, 1.0, -1.0, 1e30, float("nan"))),
    )
    builtins: dict[str, Any] = msgspec.to_builtins(request)
    if rng.random() < 0.15:
        where = {
            "pid": rng.choice((os.getpid(), 1, -1, 2**40)),
            "fd": rng.choice((-1, 0, 1, 5, 10**6, 2**40)),
        }
        array = {"type": "shared", **where, "shape": [2, 64], "device": 1, "inode": rng.choice((0, 1, -1))}
        builtins["embeds"] = {"embeds": array, "spans": [[0, rng.randrange(1, 4)]], "hashes": ["a"]}
    return builtins


def _with_unchecked_values(rng: Random, request: dict[str, Any]) -> dict[str, Any]:
    """A request of the right types with values that the frontend would have refused."""
    kind: type[msgspec.Struct]
    for _ in range(rng.choice((1, 1, 2))):
        match rng.randrange(6):
            case 0 | 1 | 2:
                params, kind = request["sampling_params"], SamplingParams
            case 3 | 4:
                params, kind = request.setdefault("scheduling", {}), SchedulingParams
            case _:
                request["prompt_token_ids"] = rng.choice(([], [5, _integer(rng)], [5] * 3_000, [5] * 256))
                continue
        field, name = rng.choice(
            list(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
        )
        hint = str(kind.__annotations__[field])
        if hint.startswith("int"):
            params[name] = _integer(rng)
        elif hint.startswith("float"):
            params[name] = float(_number(rng))
        elif hint.startswith("tuple[tuple"):
            params[name] = [[_integer(rng)], [], [5] * rng.choice((1, 2_000))]
        elif hint.startswith("tuple[int"):
            params[name] = [_integer(rng) for _ in range(rng.choice((1, 3_000)))]
        elif hint.startswith("tuple[str"):
            params[name] = rng.choice((hostile.many(rng), ["", "x"]))
        elif hint.startswith("dict"):
            params[name] = {_integer(rng): float(_number(rng)) for _ in range(rng.choice((1, 600)))}
        elif hint.startswith("str"):
            params[name] = hostile.text(rng).encode("utf-8", "replace").decode()
        else:
            params[name] = rng.random() < 0.5
    return request


def _number(rng: Random) -> Any:
    found = hostile.number(rng)
    return found if isinstance(found, float) or -(2**63) <= found < 2**64 else 2**64 - 1


def _integer(rng: Random) -> int:
    found = _number(rng)
    return found if isinstance(found, int) else 7


def _with_a_hostile_leaf(rng: Random, item: Any) -> Any:
    """A copy in which one value, at any depth, is another, is missing or has a brother."""
    if isinstance(item, dict) and item and rng.random() < 0.9:
        key = rng.choice(list(item))
        match rng.randrange(8):
            case 0:
                return {name: value for name, value in item.items() if name != key}
            case 1:
                return {**item, hostile.text(rng)[:300].encode("utf-8", "replace").decode(): _leaf(rng)}
            case _:
                return {**item, key: _with_a_hostile_leaf(rng, item[key])}
    if isinstance(item, list | tuple) and item and rng.random() < 0.7:
        place = rng.randrange(len(item))
        return [*item[:place], _with_a_hostile_leaf(rng, item[place]), *item[place + 1 :]]
    return _leaf(rng)


def _leaf(rng: Random) -> Any:
    match rng.randrange(6):
        case 0 | 1:
            return _number(rng)
        case 2:
            return hostile.text(rng).encode("utf-8", "replace").decode()
        case 3:
            return rng.choice(
                (None, True, b"\xff", [], {}, [None], {"a": []}, [[1, 2, 3]], list(range(2_000)))
            )
        case 4:
            return hostile.many(rng)
        case _:
            return msgspec.msgpack.Ext(rng.randrange(-5, 5), b"x")


class EngineSurface:
    """Sends messages, each from a socket of its own, as a new frontend would."""

    def __init__(self, target: Target) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._address = target.engine_address
        self._pidfd = os.pidfd_open(target.engine_pid)

    def close(self) -> None:
        os.close(self._pidfd)
        self._context.destroy(0)

    def send(self, message: EngineMessage) -> Outcome:
        """Each frame that can be read has its answer, and so has a question after all of them."""
        outcome, token = Outcome(), uuid.uuid4().hex
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.set_hwm(0)
        socket.connect(self._address)
        try:
            wanted = Wanted()
            for parts in message.frames:
                socket.send_multipart(list(parts))
                if len(parts) == 1:
                    wanted.note(parts[0])
            question = {"type": "control", "command": {"command": "inspect"}, "token": token}
            socket.send(msgspec.msgpack.encode(question))
            wanted.tokens.add(token)
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(self._pidfd, zmq.POLLIN)
            while not wanted.is_met:
                events = dict(poller.poll(int(LIMIT_S * 1000)))
                if socket not in events:
                    why = "the engine has ended" if events else f"no answer in {LIMIT_S} s: {wanted}"
                    outcome.end("DEADLINE_EXCEEDED", why)
                    return outcome
                wanted.take(engine_message_decoder.decode(socket.recv()), outcome)
            outcome.end("OK")
            socket.linger = 1_000
            socket.send(encoder.encode(Goodbye()))
        finally:
            socket.close()
        return outcome


class Wanted:
    """Answers that the engine owes."""

    def __init__(self) -> None:
        self.tokens: set[str] = set()
        self.requests: set[str] = set()

    def note(self, payload: bytes) -> None:
        """What a payload asks for; one that cannot be read asks for nothing.

        Who aborts or leaves has no answer to its requests: they end by its own word.
        """
        try:
            message = frontend_message_decoder.decode(payload)
        except (ValueError, RecursionError):
            return
        match message:
            case AddRequest():
                if message.request_id.startswith("fuzz-"):  # others may be another message's too
                    self.requests.add(message.request_id)
            case AbortRequests():
                self.requests.difference_update(message.request_ids)
            case Goodbye():
                self.requests.clear()
            case CancelByExternalId() | Control():
                self.tokens.add(message.token)
            case _:
                pass

    def take(self, message: Any, outcome: Outcome) -> None:
        match message:
            case Outputs():
                for output in message.outputs:
                    if output.error is not None:
                        self.requests.discard(output.request_id)
                        self._refused(output.error_code, output.error, outcome)
                    elif output.finish_reason is not None:
                        # Of several choices the first end is enough here; all of them are for other tests.
                        self.requests.discard(output.request_id)
            case CommandResult(token=token, error=error, error_code=code):
                self.tokens.discard(token)
                if error:
                    self._refused(code, error, outcome)
            case _:
                pass

    @staticmethod
    def _refused(code: str, error: str, outcome: Outcome) -> None:
        """What no frontend would send may be called INTERNAL, as long as it is refused before it is computed:
        a step that fails takes all its requests along."""
        outcome.end("REFUSED" if code == "INTERNAL" and "while computing" not in error else code, error)

    @property
    def is_met(self) -> bool:
        return not self.tokens and not self.requests

    def __str__(self) -> str:
        return f"{sorted(self.tokens)} {sorted(self.requests)}"
