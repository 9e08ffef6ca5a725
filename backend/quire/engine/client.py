"""EngineClient: a frontend's side of all the engines that serve its model."""

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
    """A command that some engines have not answered."""

    is_cancel: bool
    results: dict[EngineLink, CommandResult | None]
    """Answers of the engines that have it; None: to come."""

    def answer(self) -> CommandResult | None:
        """Makes one answer of those of all engines; None: one is still to come.

        What the only engine says is the answer as it is. Of several, a cancellation succeeds where one had
        the request; where none had and one died, that is the answer. Any other command fails where one of
        them fails, and else the answer lists what each says.
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
    """Takes messages to engines and brings their answers.

    Each engine has a link of its own, and each request one link from its beginning to its end. Losing a link
    concerns its own requests alone.

    One thread owns the client. Any other may call `wake` and ask for `info` and `is_ready`.

    Args:
        links: to engines of the same model and configuration; at least one.
    """

    def __init__(self, links: Sequence[EngineLink]) -> None:
        self.links = tuple(links)
        self._requests: dict[EngineLink, set[str]] = {link: set() for link in links}
        """Ids of the open requests of each link: its engine has them, or the next one will."""
        self._commands: dict[str, _Command] = {}
        """Commands that are not answered, by token."""
        self._poller = zmq.Poller()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        for link in links:
            link.attach(self._poller, self.wake)

    @property
    def info(self) -> EngineInfo:
        """Properties of the model, and limits, as the first engine states them."""
        return self.links[0].info

    def wake(self) -> None:
        """Ends a `wait`, or the next one. Called from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def wait(self, timeout_ms: int) -> None:
        """Returns when there is something to receive, after `wake`, or after the time; -1: no time."""
        events = dict(self._poller.poll(timeout_ms))
        if self._wake_fd in events:
            os.eventfd_read(self._wake_fd)
        for link in self.links:
            link.look(events)

    def send(self, request: AddRequest) -> None:
        """Hands a request to the engine that has it, or chooses one for it.

        Raises:
            UnavailableError: there is no engine; says why, and when there may be one.
        """
        link = self.link_of(request.request_id) or self._choose_link()
        link.send(request)
        self._requests[link].add(request.request_id)

    def _choose_link(self) -> EngineLink:
        """Chooses the link of a new request: among those with an engine the one with the fewest open
        requests."""
        return min(self.links, key=lambda link: (not link.is_up, len(self._requests[link])))

    def link_of(self, request_id: str) -> EngineLink | None:
        """Returns the link that has an open request; None: no engine was given it."""
        return next((link for link, request_ids in self._requests.items() if request_id in request_ids), None)

    def requests_of(self, link: EngineLink) -> AbstractSet[str]:
        """Returns the ids of a link's open requests."""
        return self._requests[link]

    def forget(self, request_id: str) -> None:
        """Ends what is known of a request that is open no longer."""
        for request_ids in self._requests.values():
            request_ids.discard(request_id)

    def abort(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """Ends open requests, or single choices of them ("<request id>#<index>"), where there is an engine
        that has them."""
        for link, own in self._requests.items():
            found = [request_id for request_id in request_ids if request_id.partition("#")[0] in own]
            if found:
                link.abort(found, reason)

    def command(self, message: CancelByExternalId | Control) -> None:
        """Hands a command to the engines. One CommandResult answers it, when all have.

        A cancellation goes to the engines that there are: requests of the others are paused here. Any other
        command is for all engines, and where one is missing none gets it.

        Raises:
            UnavailableError: as `send`.
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
        """Whether there is an engine."""
        return any(link.is_up for link in self.links)

    @property
    def is_ready(self) -> bool:
        """Whether there is an engine that is not overdue. Called from any thread; asks nobody."""
        return any(link.is_ready for link in self.links)

    @property
    def next_check(self) -> float:
        """When `check` is to be called; inf: not as long as nothing is sent."""
        return min(link.next_check for link in self.links)

    def check(self) -> None:
        """Kills engines that are overdue."""
        for link in self.links:
            link.check()

    def receive(self) -> list[Answer]:
        """Answers that are there now. `EngineLost` comes after the last ones of an engine that died, and then
        the ends of its commands, `EngineReplaced`, `EngineGone`, or one after the other."""
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
        """Takes one engine's answer to a command; returns the answer to its sender, once no other is
        missing."""
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
        """Takes leave of the engines, and of those that are still being started as soon as they are there."""
        for link in self.links:
            link.close()
