"""RankedRequests: waiting requests by rank."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from quire.core.request import Request


class RankedRequests:
    """Requests of different ranks, the smallest first.

    A sorted array: push and remove are a binary search and one move of memory, which 100 000 requests make
    some 20 us long; a walk costs a binary search per request.
    """

    def __init__(self) -> None:
        self._ranks: list[tuple[float, ...]] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        index = bisect.bisect_left(self._ranks, request.rank)
        return index < len(self._requests) and self._requests[index] is request

    def push(self, request: Request) -> None:
        """Adds a request that is not there; its rank must not change while it is."""
        index = bisect.bisect_left(self._ranks, request.rank)
        assert self._ranks[index : index + 1] != [request.rank], request
        self._ranks.insert(index, request.rank)
        self._requests.insert(index, request)

    def remove(self, request: Request) -> None:
        """Takes out a request that is there; allowed during a walk."""
        index = bisect.bisect_left(self._ranks, request.rank)
        assert self._requests[index] is request, request
        del self._ranks[index], self._requests[index]

    def pop(self) -> Request:
        """Takes out the first one."""
        del self._ranks[0]
        return self._requests.pop(0)

    def in_order(self) -> Iterator[Request]:
        """Walks from the smallest rank on; what is removed ahead of the walk is passed over."""
        index = 0
        while index < len(self._requests):
            request = self._requests[index]
            yield request
            index = bisect.bisect_right(self._ranks, request.rank)
