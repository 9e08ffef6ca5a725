"""AdapterMetrics: metrics of an engine's LoRA adapters at /metrics, for people and for routers that look for
an adapter."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from quire.adapters import AdapterStatus
from quire.triton.metrics_board import MAX_ADAPTERS, Figure, MetricsBoard, known

_COUNTS = {"num_hits": "quire_adapter_hits_total", "num_loads": "quire_adapter_loads_total"}
MAX_TOLD = 400
"""Largest number of series of `vllm:lora_requests_info` that one process makes."""


class AdapterMetrics:
    """Figures of one engine's LoRA adapters, kept by the thread that receives the engine's statistics.

    Args:
        labels: labels of the engine.
        max_loras: number of the engine's slots for adapters.
    """

    def __init__(self, board: MetricsBoard, labels: Mapping[str, str], max_loras: int) -> None:
        self._board, self._labels = board, labels
        self._loaded = board.gauge("quire_adapters_loaded", **labels)
        self._names: set[str] = set()
        self._figures: dict[tuple[str, ...], Figure] = {}
        self._counted: dict[tuple[str, str], int] = {}
        """Count from which the next increase is measured, by field of `AdapterStatus` and adapter name."""
        self._info = None if board.vllm is None else _RequestsInfo(board, board.vllm, max_loras)

    def begin(self, adapters: Sequence[AdapterStatus]) -> None:
        """Sets the counts from which later increases are measured.

        The counters of an adapter that is not among `adapters` will grow by the whole count that is first
        reported of it.
        """
        self._counted = {(count, one.name): getattr(one, count) for one in adapters for count in _COUNTS}

    def update(self, adapters: Sequence[AdapterStatus]) -> None:
        """Updates all figures from an engine's latest report on its adapters."""
        self._loaded.value = sum(one.slot >= 0 for one in adapters)
        # Those that were unloaded are at 0.
        totals = {key: 0.0 for key in self._figures if key[0] not in _COUNTS.values()}
        for one in adapters:
            name = known(one.name, self._names, MAX_ADAPTERS)
            now: dict[tuple[str, ...], float] = {
                ("quire_adapter_loaded", name): one.slot >= 0,
                ("quire_adapter_requests", name, "running"): one.num_running,
                ("quire_adapter_requests", name, "waiting"): one.num_waiting,
            }
            for key, value in now.items():
                totals[key] = totals.get(key, 0.0) + value
            for count, family in _COUNTS.items():
                told: int = getattr(one, count)
                before = self._counted.get((count, one.name), 0)
                # A count that falls has begun at zero again: it is another adapter's of this name.
                more = told - before if told >= before else told
                self._figure((family, name), is_gauge=False).value += more
        for key, total in totals.items():
            self._figure(key, is_gauge=True).value = total
        self.begin(adapters)  # forgets those that are gone
        if self._info is not None:
            self._info.tell(
                (one.name for one in adapters if one.num_running),
                (one.name for one in adapters if one.num_waiting),
            )

    def _figure(self, key: tuple[str, ...], *, is_gauge: bool) -> Figure:
        if key not in self._figures:
            family, adapter, *state = key
            labels = {**self._labels, "adapter": adapter, **({"state": state[0]} if state else {})}
            make = self._board.gauge if is_gauge else self._board.counter
            self._figures[key] = make(family, **labels)
        return self._figures[key]


class _RequestsInfo:
    """`vllm:lora_requests_info`: labels name the adapters that have requests, the value is when that began
    (Unix time in seconds).

    The series with the latest time is for the present; the other series keep their times, as vLLM's do. No
    metric may be deleted (`immortal`), so a process makes MAX_TOLD series at most. The last quarter is kept
    for series that name an adapter once. If no series may be added for the present adapters, the existing
    series that names the most of them, and nothing else, is used instead. If that one names none, and the
    process may still make a series, it makes one that names one of them.

    Args:
        vllm: labels of vLLM's names.
    """

    def __init__(self, board: MetricsBoard, vllm: Mapping[str, str], max_loras: int) -> None:
        self._board, self._labels = board, {**vllm, "max_lora": str(max_loras)}
        self._figures: dict[tuple[frozenset[str], frozenset[str]], Figure] = {}
        """Gauges by the names of the adapters with running requests and of those with waiting requests."""
        self._told: tuple[frozenset[str], frozenset[str]] | None = None
        self._told_at = 0.0
        self.tell((), ())  # part of all others, so it must be there before them

    def tell(self, running: Iterable[str], waiting: Iterable[str]) -> None:
        now = frozenset(running), frozenset(waiting)
        most = MAX_TOLD if len(now[0]) + len(now[1]) <= 1 else MAX_TOLD * 3 // 4
        if now not in self._figures and len(self._figures) >= most:
            parts = [one for one in self._figures if one[0] <= now[0] and one[1] <= now[1]]
            best = max(parts, key=lambda one: len(one[0]) + len(one[1]))
            if not (best[0] or best[1]) and len(self._figures) < MAX_TOLD:
                # Rather one of them than nobody.
                best = (
                    frozenset(sorted(now[0])[:1]),
                    frozenset() if now[0] else frozenset(sorted(now[1])[:1]),
                )
            now = best
        if now == self._told:
            return
        if now not in self._figures:
            names = {
                f"{state}_lora_adapters": ",".join(sorted(adapters))
                for state, adapters in zip(("running", "waiting"), now, strict=True)
            }
            self._figures[now] = self._board.gauge("vllm:lora_requests_info", **self._labels, **names)
        # Later than all others even where the clock was set back.
        self._told_at = max(time.time(), self._told_at + 0.001)
        self._told, self._figures[now].value = now, self._told_at
