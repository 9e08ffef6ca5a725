"""RankHeap: waiting requests by rank, with removal anywhere and walks in order that leave it as it is."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quire.request import Request


class RankHeap:
    """Requests, smallest rank first; among equal ranks the one pushed first.

    push: O(log n); remove: O(1), which marks the entry dead; the first k of in_order: O(k log k). Dead
    entries are dropped when they surface, and all at once when they are the majority: O(log n) each,
    amortised.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int]] = []  # (rank, push number)
        self._by_push: dict[int, Request] = {}  # the entries that live
        self._push_of: dict[str, int] = {}
        self._num_pushes = 0

    def __len__(self) -> int:
        return len(self._push_of)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._push_of

    def push(self, request: Request) -> None:
        """Adds a request that is not there; its rank must not change while it is."""
        assert request.request_id not in self._push_of, request
        self._drop_dead()
        self._num_pushes += 1
        self._by_push[self._num_pushes] = request
        self._push_of[request.request_id] = self._num_pushes
        heapq.heappush(self._heap, (request.rank, self._num_pushes))

    def remove(self, request: Request) -> None:
        """Takes out a request that is there; allowed during a walk."""
        del self._by_push[self._push_of.pop(request.request_id)]

    def pop(self) -> Request:
        """Takes out the first one of a heap that is not empty."""
        request = next(self.in_order())
        self.remove(request)
        return request

    def in_order(self) -> Iterator[Request]:
        """Walks from the smallest rank on. The walk may end early; meanwhile nothing may be pushed, and what
        is removed ahead of it is passed over.

        The children of a heap's entry are behind it, so the next one is always among the children of those
        seen: a second heap of these gives the order without taking the first apart.
        """
        self._drop_dead()
        heap, by_push = self._heap, self._by_push
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            (_, push), index = heapq.heappop(frontier)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child], child))
            if push in by_push:
                yield by_push[push]

    def _drop_dead(self) -> None:
        heap, by_push = self._heap, self._by_push
        if len(heap) > 2 * len(by_push) + 64:
            heap[:] = [entry for entry in heap if entry[1] in by_push]
            heapq.heapify(heap)
        while heap and heap[0][1] not in by_push:
            heapq.heappop(heap)
