"""AdapterRegistry: the LoRA adapters that an engine knows, by name, and their weights in host memory.

After the engine's start, a separate thread reads the directories, so that no step waits for them. All
other work is done on the engine's thread.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.adapters import Adapter, AdapterStatus, AdapterWeights, SavedAdapter, SavedAdapters
from quire.config import AdapterConfig
from quire.core.adapter_slots import AdapterSlots
from quire.core.request import Request, RequestStatus
from quire.engine.cache_commands import LoadAdapter, UnloadAdapter
from quire.errors import (
    CheckpointError,
    EngineError,
    InvalidArgumentError,
    NotFoundError,
    QuireError,
    UnavailableError,
    describe,
)
from quire.outputs import RunnerInfo
from quire_common.errors import one_line, shown

if TYPE_CHECKING:
    from quire.loader.adapter import ReadAdapter

logger = logging.getLogger("quire")

MAX_ADAPTERS = 1024
"""Number of adapters at which an engine refuses to load more by command."""
READ_WAIT_S = 0.01
"""Most seconds that an engine with nothing to compute waits for weights before it looks for messages
again."""
MAX_PENDING = 64
"""Most commands that wait for their directories to be read or for requests to end."""

Answer = Callable[[dict[str, Any] | QuireError], None]
"""Receives the result or the error of a command."""


class AdapterRegistry:
    """Holds the LoRA adapters that requests may name, and their weights.

    Args:
        info: the runner's `RunnerInfo`.
        saved: adapters of an engine that died; None: there was none, and those of the configuration are read.

    Raises:
        CheckpointError: an adapter of the configuration cannot be read. (A dead engine's adapter that cannot
            be read is recorded as missing instead. The requests that name it end, and others continue.)
    """

    def __init__(self, config: AdapterConfig, info: RunnerInfo, saved: SavedAdapters | None = None) -> None:
        self._config, self._info = config, info
        self._by_name: dict[str, Adapter] = {}
        self._missing: dict[str, tuple[SavedAdapter, str]] = {}
        """Adapters of a dead engine that could not be read again or have changed, and the error."""
        self._weights: OrderedDict[Adapter, AdapterWeights] = OrderedDict()
        """Weights in host memory, the least recently used first."""
        self._numbers = itertools.count(1)
        self._pool = ThreadPoolExecutor(1, "quire-adapters") if config.enable_lora else None
        self._reads: dict[Adapter, Future[ReadAdapter]] = {}
        """Reads under way of weights that were dropped and are needed again, by adapter, until `poll`
        collects them."""
        self._loads: deque[tuple[LoadAdapter, Path, Answer, Future[ReadAdapter]]] = deque()
        self._drains: list[tuple[Adapter, Answer]] = []
        self.slots = AdapterSlots(config.max_loras, self._find_weights) if config.enable_lora else None
        self.requests: Mapping[str, Request] = {}
        """The scheduler's unfinished requests by id."""
        self.on_done: Callable[[], None] = lambda: None
        """Called when a background read has ended, usually on the reading thread; `poll` processes the
        result."""
        self.on_change: Callable[[SavedAdapters], None] = lambda saved: None
        """Called with the result of `saved` when an adapter was added, dropped or got another path."""
        if saved is None:
            for name, path in config.lora_modules.items():
                self._add(name, path, self._read(Path(path), None))
        else:
            self._restore(saved)

    def _restore(self, saved: SavedAdapters) -> None:
        for name, one in saved.items():
            try:
                read = self._read(Path(one.path), self._root_of(name, one.path))
                if read.digest.hex() != one.digest:
                    raise CheckpointError(f"{one.path}: has changed since it was loaded: load it again")
                self._add(name, one.path, read)
            except Exception as error:  # whatever lies there now: others go on
                reason = str(_as_ours(error))
                logger.error("adapter %s cannot be loaded again: %s", shown(name), reason)
                self._missing[name] = one, reason

    def saved(self) -> SavedAdapters:
        """Returns the adapters for an engine that replaces this one. They include adapters that this engine
        could not read, because the next engine may be able to."""
        missing = {name: one for name, (one, _) in self._missing.items()}
        present = {one.name: SavedAdapter(one.path, one.digest.hex()) for one in self._by_name.values()}
        return missing | present

    def get(self, name: str, digest: str = "") -> Adapter:
        """Returns the adapter that a request names when it comes to this engine.

        Args:
            digest: hexadecimal digest of the content that it must have; empty: any.

        Raises:
            InvalidArgumentError: there is none, or its content has another digest.
            UnavailableError: it is being unloaded.
        """
        if self.slots is None:
            raise InvalidArgumentError("lora_name", "the model has no adapters: enable_lora is not set")
        found = self._by_name.get(name)
        if found is None:
            unknown = None, f"{shown(name)} is not the name of an adapter"
            raise InvalidArgumentError("lora_name", self._missing.get(name, unknown)[1])
        if digest not in ("", found.digest.hex()):
            raise InvalidArgumentError("lora_name", f"{shown(name)} has another content by now")
        if self._is_leaving(found):
            raise UnavailableError(f"lora_name: {shown(name)} is being unloaded")
        return found

    def _is_leaving(self, adapter: Adapter) -> bool:
        return any(one is adapter for one, _ in self._drains)

    def listing(self) -> list[AdapterStatus]:
        """Returns the status of all loaded adapters, in the order of their names."""
        if self.slots is None:
            return []
        counts = {one: [0, 0] for one in self._by_name.values()}
        for request in self.requests.values():
            if request.adapter is not None and request.adapter in counts:
                counts[request.adapter][request.status is RequestStatus.RUNNING] += 1
        return [self._status(one, *counts[one]) for _, one in sorted(self._by_name.items())]

    def _status(self, adapter: Adapter, num_waiting: int = 0, num_running: int = 0) -> AdapterStatus:
        assert self.slots is not None
        return AdapterStatus(
            adapter.name,
            adapter.path,
            adapter.rank,
            adapter.digest.hex(),
            self.slots.slot_of(adapter),
            num_running,
            num_waiting,
            adapter.num_hits,
            adapter.num_loads,
        )

    def begin(self, command: LoadAdapter | UnloadAdapter, answer: Answer) -> None:
        """Starts a command. `answer` receives its result or error in a later `poll`.

        Raises:
            InvalidArgumentError, NotFoundError, UnavailableError: the command is refused.
        """
        if self.slots is None or self._pool is None:
            raise InvalidArgumentError("cache_control", "the model has no adapters: enable_lora is not set")
        if len(self._loads) + len(self._drains) >= MAX_PENDING:
            raise UnavailableError(f"{MAX_PENDING} commands of adapters are being carried out")
        if isinstance(command, LoadAdapter):
            path = self._path_of(command)
            future = self._pool.submit(self._read, path, Path(self._config.lora_root))
            future.add_done_callback(lambda _: self.on_done())
            self._loads.append((command, path, answer, future))
            return
        found = self._by_name.get(command.name)
        if found is None:
            raise NotFoundError(f"name: {shown(command.name)} is not the name of an adapter")
        count = self._num_users(found)
        if count and not command.drain:
            raise UnavailableError(f'{_in_use(found, count)}: "drain": true waits for their ends')
        self._drains.append((found, answer))

    def _path_of(self, command: LoadAdapter) -> Path:
        root = self._config.lora_root
        if not root:
            raise InvalidArgumentError("path", "no adapters can be loaded at run time: lora_root is not set")
        try:
            path = (Path(root) / command.path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a NUL in it, or a link to itself
            raise InvalidArgumentError("path", f"is none: {one_line(error)}") from None
        if not path.is_relative_to(Path(root).resolve()):
            raise InvalidArgumentError("path", f"must lie below lora_root ({root})")
        return path

    def _root_of(self, name: str, path: str) -> Path | None:
        return None if self._config.lora_modules.get(name) == path else Path(self._config.lora_root)

    @property
    def has_news(self) -> bool:
        """Returns whether `poll` has something to do."""
        return (
            (bool(self._loads) and self._loads[0][-1].done())
            or any(future.done() for future in self._reads.values())
            or any(not self._num_users(adapter) for adapter, _ in self._drains)
        )

    def wait(self) -> None:
        """Waits until a background read of dropped weights ends, at most READ_WAIT_S. Returns at once if none
        is under way."""
        if self._reads:
            wait(self._reads.values(), READ_WAIT_S, return_when=FIRST_COMPLETED)

    def poll(self) -> list[tuple[Adapter, QuireError]]:
        """Keeps the weights of finished reads, unloads leaving adapters that no request uses any more, adds
        the adapters that commands have loaded, and answers commands that are done. Returns the adapters whose
        weights could not be read again, each with the error."""
        failed = []
        for adapter, future in [one for one in self._reads.items() if one[1].done()]:
            del self._reads[adapter]
            try:
                read = future.result()
                if read.digest != adapter.digest:
                    raise CheckpointError(f"{adapter.path}: has changed since it was loaded: load it again")
                if self._by_name.get(adapter.name) is adapter:
                    self._keep(adapter, read.weights)
            except Exception as error:
                failed.append((adapter, _as_ours(error)))
        # Before loads: who has gone is not in the way of one that comes.
        for adapter, answer in self._drains[:]:
            if not self._num_users(adapter):
                self._drains.remove((adapter, answer))
                if self._by_name.get(adapter.name) is adapter:
                    self._forget(adapter)
                answer({"name": adapter.name})
        while self._loads and self._loads[0][-1].done():
            command, path, answer, future = self._loads.popleft()
            try:
                status = self._register(command.name, path, future.result())
            except Exception as error:
                answer(_as_ours(error))
            else:
                answer(msgspec.to_builtins(status))
        return failed

    def _register(self, name: str, path: Path, read: ReadAdapter) -> AdapterStatus:
        old = self._by_name.get(name)
        if old is not None and self._is_leaving(old):
            raise UnavailableError(f"name: {shown(name)} is being unloaded")
        if old is not None and old.digest == read.digest:
            if old.path != str(path):  # the one before may go
                old.path = str(path)
                self.on_change(self.saved())
            return self._status(old)
        if old is not None:
            count = self._num_users(old)
            if count:
                raise UnavailableError(f"{_in_use(old, count)}, and this one has another content")
            self._forget(old)
        if len(self._by_name) >= MAX_ADAPTERS:
            raise UnavailableError(f"there are {MAX_ADAPTERS} adapters: unload one")
        return self._status(self._add(name, str(path), read))

    def _add(self, name: str, path: str, read: ReadAdapter) -> Adapter:
        adapter = Adapter(name, path, read.rank, read.digest, next(self._numbers))
        self._by_name[name] = adapter
        self._missing.pop(name, None)
        self._keep(adapter, read.weights)
        self.on_change(self.saved())
        return adapter

    def _forget(self, adapter: Adapter) -> None:
        assert self.slots is not None
        self.slots.forget(adapter)
        self._weights.pop(adapter, None)
        del self._by_name[adapter.name]
        self.on_change(self.saved())

    def _keep(self, adapter: Adapter, weights: AdapterWeights) -> None:
        self._weights[adapter] = weights
        while len(self._weights) > max(self._config.max_cpu_loras, self._config.max_loras):
            self._weights.popitem(last=False)

    def _find_weights(self, adapter: Adapter) -> AdapterWeights | None:
        """Returns an adapter's weights from host memory; None: they are not there, and a read of them begins
        or is under way."""
        found = self._weights.get(adapter)
        if found is not None:
            self._weights.move_to_end(adapter)
        elif adapter not in self._reads:
            assert self._pool is not None
            root = self._root_of(adapter.name, adapter.path)
            future = self._reads[adapter] = self._pool.submit(self._read, Path(adapter.path), root)
            future.add_done_callback(lambda _: self.on_done())
        return found

    def _read(self, path: Path, root: Path | None) -> ReadAdapter:
        from quire.loader.adapter import read_adapter

        info = self._info
        return read_adapter(path, info.adapter_targets, info.dtype, self._config.max_lora_rank, root)

    def _num_users(self, adapter: Adapter) -> int:
        """Returns the number of unfinished requests with this adapter; choices count as one."""
        return len({one.group_id for one in self.requests.values() if one.adapter is adapter})

    def drop_weights(self) -> None:
        """Frees the memory of all weights, because the engine goes to sleep, and empties the slots. Weights
        are read again when they are needed."""
        self._weights.clear()
        if self.slots is not None:
            self.slots.clear()

    def close(self) -> None:
        """Lets the reading thread end after the read under way; does not wait for it."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _in_use(adapter: Adapter, count: int) -> str:
    return f"name: {shown(adapter.name)} is in use by {count} request{'s' * (count > 1)}"


def _as_ours(error: Exception) -> QuireError:
    if isinstance(error, QuireError):
        return error
    return EngineError(f"an adapter cannot be read: {describe(error)}")
