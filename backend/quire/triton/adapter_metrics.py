"""What /metrics tells of an engine's LoRA adapters, for people and for routers that look for one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from quire.adapters import AdapterStatus
from quire.triton.metrics import MAX_ADAPTERS, Figure, MetricsBoard, known

_COUNTS = {"num_hits": "quire_adapter_hits_total", "num_loads": "quire_adapter_loads_total"}


class AdapterMetrics:
    """Of one engine; called by the thread that hears of it.

    Args:
        labels: of the engine.
        max_loras: its slots.
    """

    def __init__(self, board: MetricsBoard, labels: Mapping[str, str], max_loras: int) -> None:
        self._board, self._labels = board, labels
        self._loaded = board.gauge("quire_adapters_loaded", **labels)
        self._names: set[str] = set()
        self._figures: dict[tuple[str, ...], Figure] = {}
        self._counted: dict[tuple[str, str], int] = {}
        """What the engine has told of each count of each adapter."""
        self._info = None
        if board.vllm is not None:
            self._info = board.info("vllm:lora_requests_info", **board.vllm, max_lora=str(max_loras))

    def begin(self, adapters: Sequence[AdapterStatus]) -> None:
        """The counts of these are at /metrics already; those of others are not."""
        self._counted = {(count, one.name): getattr(one, count) for one in adapters for count in _COUNTS}

    def update(self, adapters: Sequence[AdapterStatus]) -> None:
        """Takes what an engine says of its adapters."""
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
            running = ",".join(one.name for one in adapters if one.num_running)
            waiting = ",".join(one.name for one in adapters if one.num_waiting)
            self._info.tell(time.time(), running_lora_adapters=running, waiting_lora_adapters=waiting)

    def _figure(self, key: tuple[str, ...], *, is_gauge: bool) -> Figure:
        if key not in self._figures:
            family, adapter, *state = key
            labels = {**self._labels, "adapter": adapter, **({"state": state[0]} if state else {})}
            make = self._board.gauge if is_gauge else self._board.counter
            self._figures[key] = make(family, **labels)
        return self._figures[key]
