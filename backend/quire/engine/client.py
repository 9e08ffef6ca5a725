"""EngineClient: connects a frontend to all the engines that serve its model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import zmq

from quire.core.request import FinishReason
from quire.engine.link import Answer, EngineLink, EngineLost
from quire.engine.messages import AddRequest, CancelByExternalId, CommandResult, Control, EngineInfo

DIED = "the engine process died while it worked on the request"


@dataclass
class _Command:
    """A command that at least one engine has yet to answer."""

    is_cancel: bool
    results: dict[EngineLink, CommandResult | None]
    """Answer of each engine that received the command; None: not answered yet."""

    def answer(self) -> CommandResult | None:
        """Combines the answers of the engines that received the command; None: one is still missing.

        The answer of a single engine is returned unchanged. With several engines, a cancellation succeeds if
        one of them had the request; if none had it and one died, the error of that one is returned. Any other
        command fails if one engine fails, else the answer lists each engine's.
        """
        results = [result for result in self.results.values() if result is not None]
        if len(results) < len(self.results):
            return None
        if len(results) == 1:
            return results[0]
        if self.is_cancel:
            return min(results, key=lambda one: (one.error != "", one.error_code != "UNAVAILABLE"))
        for result in results:
            if result.error:
                return result
        return CommandResult(results[0].token, {"engines": [result.result for result in results]})


class EngineClient:
    """Sends messages to engines and receives their answers.

    Each engine has a link of its own, and each request uses one link from its beginning to its end. The death
    of an engine affects only its link's requests, the commands that it has not answered, and new commands
    until another engine replaces it.

    One thread owns the client. Other threads may call only `wake`, `info` and `is_ready`.

    Args:
        links: to engines of the same model and configuration; at least one.
    """

    def __init__(self, links: Sequence[EngineLink]) -> None:
        self.links = tuple(links)
        self._requests: dict[EngineLink, set[str]] = {link: set() for link in links}
        """Ids of the open requests of each link. The link's engine has them; after its death they wait for
        the next engine."""
        self._commands: dict[str, _Command] = {}
        """Commands without a full answer yet, by token."""
        self._poller = zmq.Poller()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        for link in links:
            link.attach(self._poller, self.wake)

    @property
    def info(self) -> EngineInfo:
        """The first engine's model properties and limits."""
        return self.links[0].info

    def wake(self) -> None:
        """Ends the present `wait`, or the next one. Any thread may call it."""
        os.eventfd_write(self._wake_fd, 1)

    def wait(self, timeout_ms: int) -> None:
        """Returns when there is something to receive, after `wake`, or after `timeout_ms` milliseconds; -1:
        no limit."""
        events = dict(self._poller.poll(timeout_ms))
        if self._wake_fd in events:
            os.eventfd_read(self._wake_fd)
        for link in self.links:
            link.look(events)

    def send(self, request: AddRequest) -> None:
        """Sends a request to the engine that has it, or to one chosen for it.

        Raises:
            UnavailableError: that engine is not running (for a new request: none is); says why, and when to
                retry if known.
        """
        link = self.link_of(request.request_id) or self._choose_link()
        link.send(request)
        self._requests[link].add(request.request_id)

    def _choose_link(self) -> EngineLink:
        """Returns the link for a new request: the one with the fewest open requests among those with an
        engine or, if none has an engine, among all."""
        return min(self.links, key=lambda link: (not link.is_up, len(self._requests[link])))

    def link_of(self, request_id: str) -> EngineLink | None:
        """Returns the link that has an open request; None: no link has it."""
        return next((link for link, request_ids in self._requests.items() if request_id in request_ids), None)

    def requests_of(self, link: EngineLink) -> AbstractSet[str]:
        """Returns the ids of a link's open requests."""
        return self._requests[link]

    def forget(self, request_id: str) -> None:
        """Forgets a request that is no longer open."""
        for request_ids in self._requests.values():
            request_ids.discard(request_id)

    def abort(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """Ends open requests, or single choices ("<request id>#<index>"); skips those whose engine is not
        running."""
        for link, own in self._requests.items():
            found = [request_id for request_id in request_ids if request_id.partition("#")[0] in own]
            if found:
                link.abort(found, reason)

    def command(self, message: CancelByExternalId | Control) -> None:
        """Sends a command to the engines. One CommandResult is received when all have answered.

        A cancellation goes to the running engines; the requests of a dead engine wait in this frontend for
        the next one. Any other command needs all engines, and if one is missing, none gets it.

        Raises:
            UnavailableError: an engine that must get the command is not running; as `send`.
        """
        is_cancel = isinstance(message, CancelByExternalId)
        up = [link for link in self.links if link.is_up]
        links = up if is_cancel and up else self.links
        for link in links:
            link.require_engine()
        for link in links:
            link.send(message)
        self._commands[message.token] = _Command(is_cancel, dict.fromkeys(links))

    @property
    def is_up(self) -> bool:
        """Returns whether at least one engine is running."""
        return any(link.is_up for link in self.links)

    @property
    def is_ready(self) -> bool:
        """Whether at least one engine runs and is not overdue. Any thread may read it; it sends no
        message."""
        return any(link.is_ready for link in self.links)

    @property
    def next_check(self) -> float:
        """When `check` must be called next, in CLOCK_MONOTONIC seconds; inf: not before something is sent."""
        return min(link.next_check for link in self.links)

    def check(self) -> None:
        """Kills engines that are overdue, as `EngineLink.check` does."""
        for link in self.links:
            link.check()

    def receive(self) -> list[Answer]:
        """Returns the answers that have arrived. After the last answers of an engine that died come
        `EngineLost` and the results of the commands for which only its answer was missing. Later calls
        return `EngineGone` if no engine can be started, and `EngineReplaced` once one was."""
        answers: list[Answer] = []
        for link in self.links:
            for answer in link.receive():
                if isinstance(answer, CommandResult):
                    answers += self._answer_command(link, answer)
                    continue
                answers.append(answer)
                if isinstance(answer, EngineLost):
                    for token in list(self._commands):
                        answers += self._answer_command(link, CommandResult(token, {}, DIED, "UNAVAILABLE"))
        return answers

    def _answer_command(self, link: EngineLink, result: CommandResult) -> list[CommandResult]:
        """Records one engine's answer to a command; returns the combined answer once none is missing."""
        command = self._commands.get(result.token)
        if command is None or command.results.get(link, result) is not None:
            return []
        command.results[link] = result
        answer = command.answer()
        if answer is None:
            return []
        del self._commands[result.token]
        return [answer]

    def close(self) -> None:
        """Says goodbye to the engines; engines that are still starting are left as soon as they are up."""
        for link in self.links:
            link.close()
