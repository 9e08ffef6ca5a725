"""EngineLink: connects a frontend to one engine, and to the processes that replace it after a death."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import zmq

from quire.core.probation import NO_SUSPECTS, InFlightSuspects
from quire.core.request import FinishReason
from quire.engine.connection import THAWED_S, EngineConnection
from quire.engine.messages import (
    AbortRequests,
    CommandResult,
    EngineInfo,
    FrontendMessage,
    Outputs,
    Stats,
)
from quire.engine.supervisor import EngineAddress
from quire.errors import EngineStoppedError, UnavailableError
from quire.outputs import SchedulerStats

logger = logging.getLogger("quire")

RESTART_PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds before each attempt to replace an engine that died; further attempts use the last value."""
SOUND_S = 60.0
"""Seconds of connection after which the death of an engine is followed at once by an attempt to replace it.
The same holds for an engine that has answered a request or a command."""
STOP_LOOK_S = 0.2
"""Most seconds between two checks whether the engine was told to stop, while a restart is delayed."""
MAX_FAILED_STARTS = 3
"""Number of failed starts in a row after which requests that wait for an engine end."""


@dataclass(frozen=True)
class EngineLost:
    """Says that the engine died. The requests that this link sent to it may continue in the next engine."""

    link: EngineLink
    suspects: InFlightSuspects = NO_SUSPECTS


@dataclass(frozen=True)
class EngineReplaced:
    """Says that the link has another engine in place of one that died, and has sent it no requests yet."""

    link: EngineLink


@dataclass(frozen=True)
class EngineGone:
    """Says that the engine died and no other could be started so far, or none may be started: requests should
    not wait for one."""

    link: EngineLink
    reason: str


Connected: TypeAlias = tuple[EngineConnection, EngineInfo]
Answer: TypeAlias = Outputs | CommandResult | EngineLost | EngineReplaced | EngineGone


class EngineLink:
    """Sends messages to one engine and receives its answers; replaces an engine that died.

    The client's thread owns it, once `attach` was called. Other threads may read `info` and `is_ready`.

    Args:
        connect: connects to a running engine, starting one if necessary. After an engine's death it is called
            on a separate thread.
        on_stats: called with statistics that the engine sends; None: they are not used.
        watchdog_s: seconds that an idle engine may take to read a message; 0: no limit.

    Raises:
        QuireError: as `connect`.
    """

    _poller: zmq.Poller
    _wake: Callable[[], None]

    def __init__(
        self,
        connect: Callable[[], Connected],
        on_stats: Callable[[SchedulerStats], None] | None = None,
        watchdog_s: float = 0.0,
    ) -> None:
        self._connect = connect
        self._on_stats = on_stats
        self._connection: EngineConnection | None
        self._connection, self.info = connect()
        self._watchdog_s = watchdog_s
        self._sent_at = self._overdue_at = 0.0
        """`_sent_at`: when the oldest message of `send` was sent that the engine may not have read (without a
        heartbeat, the latest message); if it has read all, an earlier time. `_overdue_at`: since when each
        `check` has found the engine overdue, or when it was killed for that; 0: the latest `check` did not
        find so. Both are CLOCK_MONOTONIC seconds."""
        self._has_died = False
        """Whether `look` has found that the engine's process has ended, and `receive` has not reported it
        yet."""
        self._down_reason = ""
        self._next_attempt: float | None = 0.0
        """Time planned for the latest or next attempt to replace a dead engine, in CLOCK_MONOTONIC seconds;
        0: no engine has died yet. None: there will be no more attempts, because the engine was told to stop
        or no thread could be started."""
        self._num_restarts = 0
        """Number of this link's attempts to replace an engine. The death of an engine that was connected for
        SOUND_S or has answered sets it to 0."""
        self._has_answered = False
        """Whether outputs or the result of a command have arrived from the latest engine."""
        self._is_hopeless = threading.Event()
        """Set when requests should no longer wait for an engine; `_take_over` clears it."""
        self._closed = threading.Event()
        self._lock = threading.Lock()
        """Guards the next engine's connection while it is handed over or closed."""
        self._successor: Connected | None = None
        self._restarter: threading.Thread | None = None
        """Latest thread that replaces a dead engine; None: no engine has died yet. It may run until long
        after `close`, and the ZeroMQ context must outlive it."""

    def attach(self, poller: zmq.Poller, wake: Callable[[], None]) -> None:
        """Registers the engine's socket and process with a poller, and later those of its successors.

        Args:
            poller: its owner passes each poll's events to `look`.
            wake: ends the poll when there is something to receive without an event.
        """
        assert self._connection is not None
        self._poller, self._wake = poller, wake
        self._watch(self._connection)

    def look(self, events: dict[Any, int]) -> None:
        """Notes whether a poll's events show that the engine has ended."""
        self._has_died = self._connection is not None and self._connection.pidfd in events

    @property
    def is_up(self) -> bool:
        """Whether the link is connected to an engine. The death of that engine may not have been noticed
        yet."""
        return self._connection is not None

    def require_engine(self) -> EngineConnection:
        """Returns the connection to the engine.

        Raises:
            UnavailableError: no engine is connected; usually says why, and when to retry.
        """
        if self._connection is None:
            due = self._next_attempt
            wait_s = None if due is None else max(1.0, due - time.monotonic())
            raise UnavailableError(self._down_reason, wait_s)
        return self._connection

    def send(self, message: FrontendMessage) -> None:
        """Sends the engine a message. Raises as `require_engine`."""
        connection = self.require_engine()
        heartbeat = connection.heartbeat
        if heartbeat is None or self._sent_at <= heartbeat.read()[0]:
            self._sent_at = time.monotonic()
        connection.send(message)

    @property
    def is_ready(self) -> bool:
        """Whether an engine is connected and not overdue. Any thread may read this; it sends no message."""
        connection = self._connection
        return connection is not None and time.monotonic() <= self._due_of(connection)

    @property
    def next_check(self) -> float:
        """When `check` must be called next, in CLOCK_MONOTONIC seconds; inf: at present it need not be."""
        if self._connection is None:
            return math.inf
        return self._overdue_at + THAWED_S if self._overdue_at else self._due_of(self._connection)

    def check(self) -> None:
        """Kills the engine once calls have found it overdue for THAWED_S seconds without a break."""
        now, connection = time.monotonic(), self._connection
        if connection is None or now <= self._due_of(connection):
            self._overdue_at = 0.0
            return
        self._overdue_at = self._overdue_at or now
        if now - self._overdue_at >= THAWED_S:
            logger.error("frontend: engine process %d is stuck and is killed", connection.address.pid)
            connection.kill()
            self._overdue_at = now  # its end takes a moment, or for ever where the kernel holds it

    def _due_of(self, connection: EngineConnection) -> float:
        """Returns when the engine is overdue, in CLOCK_MONOTONIC seconds; inf: it waits for messages and has
        given a sign of life after those of `send`, or it has no heartbeat or no limit."""
        if connection.heartbeat is None:
            return math.inf
        beat, due = connection.heartbeat.read()
        if due == math.inf and self._sent_at > beat and self._watchdog_s:
            return self._sent_at + self._watchdog_s  # it rests, and does not see that there is a message
        return due

    def abort(self, request_ids: list[str], reason: FinishReason) -> None:
        """Tells the engine to end requests, or single choices ("<request id>#<index>"). Does nothing without
        an engine."""
        if self._connection is not None:
            self._connection.send(AbortRequests(request_ids, reason.value, time.monotonic()))

    def receive(self) -> list[Answer]:
        """Returns the answers that have arrived. If the engine has died, `EngineLost` follows them. A later
        call returns `EngineGone` when requests should no longer wait for an engine, and one returns
        `EngineReplaced` when another engine is connected."""
        if self._connection is None:
            return self._take_over()
        answers: list[Answer] = []
        for message in self._connection.receive():
            if isinstance(message, Stats):
                self.info = msgspec.structs.replace(self.info, adapters=message.adapters)
                self._publish(message)
            elif not isinstance(message, EngineInfo):
                answers.append(message)
        self._has_answered |= bool(answers)
        if self._has_died:
            answers.append(EngineLost(self, self._connection.address.in_flight_suspects()))
            self._bury(self._connection)
        return answers

    def close(self) -> None:
        """Says goodbye to the engine and leaves it. If an attempt to replace a dead engine succeeds later,
        the new engine is left at once, too."""
        with self._lock:
            self._closed.set()
            successor, self._successor = self._successor, None
        for connection in (self._connection, successor and successor[0]):
            if connection is not None:
                connection.close(goodbye=True)
        self._connection = None

    def _publish(self, stats: Stats) -> None:
        if self._on_stats is not None:
            try:
                self._on_stats(stats.scheduler)
            except Exception:
                logger.exception("frontend: the engine's figures could not be published")

    def _watch(self, connection: EngineConnection) -> None:
        self._connected_at = time.monotonic()
        self._has_answered = False
        self._poller.register(connection.socket, zmq.POLLIN)
        self._poller.register(connection.pidfd, zmq.POLLIN)

    def _bury(self, connection: EngineConnection) -> None:
        self._poller.unregister(connection.socket)
        self._poller.unregister(connection.pidfd)
        connection.close(goodbye=False)
        self._connection = None
        self._has_died = False
        logger.warning("frontend: engine process %d ended", connection.address.pid)
        self._down_reason = "the engine process died and is being restarted: try again"
        self._next_attempt = time.monotonic()
        if self._has_answered or time.monotonic() - self._connected_at >= SOUND_S:
            self._num_restarts = 0
        self._restarter = threading.Thread(
            target=self._restart, args=(connection.address,), name="quire-restart", daemon=True
        )
        try:
            self._restarter.start()
        except RuntimeError as error:  # what was in flight must be ended all the same
            self._give_up(f"the engine process died and no other can be started: {error}")

    def _restart(self, died: EngineAddress) -> None:
        """Tries to start an engine until it succeeds, since a missing checkpoint or memory may come back.

        It gives up only if this link is closed or the engine was told to stop.
        """
        for num_failed in itertools.count(1):
            pause_s = RESTART_PAUSES_S[min(self._num_restarts, len(RESTART_PAUSES_S) - 1)]
            self._next_attempt = time.monotonic() + pause_s
            self._num_restarts += 1
            self._pause(pause_s, died)
            if self._closed.is_set():
                return
            try:
                successor = self._connect()
            except EngineStoppedError as error:
                self._give_up(str(error))
                return
            except Exception as error:
                self._down_reason = f"the engine could not be restarted, which is tried again: {error}"
                logger.error("frontend: %s", self._down_reason)
                if num_failed == MAX_FAILED_STARTS:
                    self._is_hopeless.set()
                    self._wake()
            else:
                break
        with self._lock:
            if not self._closed.is_set():
                self._successor = successor
                self._wake()
                return
        successor[0].close(goodbye=True)

    def _pause(self, seconds: float, died: EngineAddress) -> None:
        """Waits for `seconds`, but stops when this link is closed or an engine was told to stop."""
        ends_at = time.monotonic() + seconds
        while not died.was_stopped() and (left_s := ends_at - time.monotonic()) > 0:
            if self._closed.wait(min(left_s, STOP_LOOK_S)):
                return

    def _give_up(self, reason: str) -> None:
        self._next_attempt = None
        self._down_reason = reason
        logger.error("frontend: %s", reason)
        self._is_hopeless.set()
        self._wake()

    def _take_over(self) -> list[Answer]:
        answers: list[Answer] = []
        if self._is_hopeless.is_set():
            self._is_hopeless.clear()
            answers.append(EngineGone(self, self._down_reason))
        with self._lock:
            successor, self._successor = self._successor, None
        if successor is not None:
            self._connection, self.info = successor
            self._watch(self._connection)
            logger.warning("frontend: engine process %d took over", self._connection.address.pid)
            answers.append(EngineReplaced(self))
        return answers
