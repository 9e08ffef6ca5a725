"""StopMatcher: stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections import deque


class StopMatcher:
    """Finds the first stop string of a text that arrives in pieces (Aho and Corasick, CACM 18(6), 1975).

    First is the one that ends first, of those that end together the longest: the same however the text is
    cut into pieces. Cost is O(1) per character whatever the number of stop strings.
    """

    __slots__ = ("_children", "_fail", "_hold", "_match", "_node")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._match: list[str | None] = [None]
        depths = [0]
        for stop in stops:
            assert stop, "empty stop strings are refused when a request is parsed"
            node = 0
            for char in stop:
                child = self._children[node].get(char)
                if child is None:
                    child = self._children[node][char] = len(self._children)
                    self._children.append({})
                    self._match.append(None)
                    depths.append(depths[node] + 1)
                node = child
            self._match[node] = stop
        self._fail = [0] * len(self._children)
        self._hold = [0] * len(self._children)
        queue = deque(self._children[0].values())
        for node in queue:
            self._hold[node] = depths[node] if self._children[node] else 0
        while queue:
            parent = queue.popleft()
            for char, child in self._children[parent].items():
                fail = self._step(self._fail[parent], char)
                self._fail[child] = fail
                # A node on the way has its own string, the longer one, before that of its suffix.
                self._match[child] = self._match[child] or self._match[fail]
                self._hold[child] = depths[child] if self._children[child] else self._hold[fail]
                queue.append(child)
        self._node = 0

    def _step(self, node: int, char: str) -> int:
        children = self._children
        while node and char not in children[node]:
            node = self._fail[node]
        return children[node].get(char, 0)

    def feed(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """Reads `text[start:]` up to the first match.

        Returns:
            Index after the match, and the stop string; None when all is read without one.
        """
        node = self._node
        children, fail, matches = self._children, self._fail, self._match
        for index in range(start, len(text)):
            char = text[index]
            while node and char not in children[node]:
                node = fail[node]
            node = children[node].get(char, 0)
            stop = matches[node]
            if stop is not None:
                self._node = node
                return index + 1, stop
        self._node = node
        return None

    @property
    def held(self) -> int:
        """How many of the newest characters may yet become part of a stop string."""
        return self._hold[self._node]
