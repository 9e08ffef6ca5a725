"""StopMatcher: finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections import deque


class StopAutomaton:
    """A request's stop strings, ready to be looked for (Aho and Corasick, CACM 18(6), 1975).

    Never changes once it is made, so choices can share it. It takes some 300 bytes and a microsecond for each
    character of the stop strings.
    """

    __slots__ = ("children", "fail", "hold", "match")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.match: list[str | None] = [None]
        depths = [0]
        for stop in stops:
            assert stop, "empty stop strings are refused when a request is parsed"
            node = 0
            for char in stop:
                child = self.children[node].get(char)
                if child is None:
                    child = self.children[node][char] = len(self.children)
                    self.children.append({})
                    self.match.append(None)
                    depths.append(depths[node] + 1)
                node = child
            self.match[node] = stop
        self.fail = [0] * len(self.children)
        self.hold = [0] * len(self.children)
        """Number of newest characters, by node, that may yet become part of a stop string."""
        queue = deque(self.children[0].values())
        for node in queue:
            self.hold[node] = depths[node] if self.children[node] else 0
        while queue:
            parent = queue.popleft()
            for char, child in self.children[parent].items():
                fail = self._step(self.fail[parent], char)
                self.fail[child] = fail
                # A node on the way has its own string, the longer one, before that of its suffix.
                self.match[child] = self.match[child] or self.match[fail]
                self.hold[child] = depths[child] if self.children[child] else self.hold[fail]
                queue.append(child)

    def _step(self, node: int, char: str) -> int:
        children = self.children
        while node and char not in children[node]:
            node = self.fail[node]
        return children[node].get(char, 0)


class StopMatcher:
    """Finds the stop strings of one text that arrives in pieces, in the order in which they end.

    If several end at the same place, it finds the longest. What it finds does not depend on how the text is
    cut into pieces. Cost is O(1) per character, amortised, for any number of stop
    strings.
    """

    __slots__ = ("_automaton", "_node")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._node = 0

    def feed(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """Reads `text[start:]` up to the first match.

        Returns:
            Index after the match, and the stop string; None when all is read without one.
        """
        node = self._node
        automaton = self._automaton
        children, fail, matches = automaton.children, automaton.fail, automaton.match
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
        """Number of newest characters that may yet become part of a stop string."""
        return self._automaton.hold[self._node]
