"""Replays: requests that are answered without an engine, mostly from the result cache."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from quire.outputs import EngineCoreOutput
from quire.triton.request_handle import RequestHandle
from quire.triton.result_cache import replayed
from quire.triton.results import Results
from quire.triton.sending.generation import Generation
from quire.triton.sending.open_requests import OpenRequests
from quire.triton.sending.pacing import SENDS_PER_PASS


class Replays:
    """Replays results as outputs of an engine, one output at a time.

    Args:
        requests: the open requests; a replay stops when its request has ended.
    """

    def __init__(self, requests: OpenRequests) -> None:
        self._requests = requests
        self._replays: deque[Iterator[EngineCoreOutput]] = deque()

    def __bool__(self) -> bool:
        return bool(self._replays)

    def add(self, handle: RequestHandle, results: Results) -> None:
        request_ids = [processor.request_id for processor in handle.processors]
        self._replays.append(replayed(results, request_ids, handle.parsed))

    def outputs(self) -> Iterator[tuple[Generation, EngineCoreOutput]]:
        """Yields the next output of each replay, for SENDS_PER_PASS of them at most."""
        for _ in range(min(len(self._replays), SENDS_PER_PASS)):
            replay = self._replays.popleft()
            output = next(replay, None)
            generation = None if output is None else self._requests.generations.get(output.request_id)
            if output is None or generation is None:
                continue  # there is no more, or its client has gone
            output.admitted_at = output.first_token_at = time.monotonic()
            self._replays.append(replay)
            yield generation, output
