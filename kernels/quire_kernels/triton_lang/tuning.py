"""Autotuning: finds the fastest configuration of a kernel for this device and shape, and keeps it on disk.

Candidates are timed only inside `warm_up()`, outside CUDA graph capture and outside the interpreter.
Elsewhere, a shape that was never timed runs with its default. Results are kept in the cache folder, in one
small JSON file (`cache.keep`) per device model, Triton version, kernel, source and shape. So a later start
need not time the same again, and processes that tune at the same time do not disturb each other.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire_common import cache
from quire_kernels.triton_lang import operators

logger = logging.getLogger("quire_kernels")

_FLUSHED_BYTES = 256 << 20
"""Bytes written to flush the level-2 cache, more than any such cache has. In a model, a kernel reads from
memory, so it must do so when it is timed."""
_TIMED_RUNS = 12


@dataclass(frozen=True)
class Config:
    """Configuration with which a kernel is launched."""

    constants: tuple[tuple[str, int], ...]
    """Values of the constexpr parameters that may be chosen, by name."""
    num_warps: int = 4
    num_stages: int = 3

    @classmethod
    def build(cls, num_warps: int, num_stages: int, **constants: int) -> Config:
        """Makes a configuration, with the constants as keywords."""
        return cls(tuple(sorted(constants.items())), num_warps, num_stages)

    def __getitem__(self, name: str) -> int:
        return self.launch[name]

    @functools.cached_property
    def launch(self) -> dict[str, int]:
        """Keyword arguments with which a kernel is launched."""
        return {**dict(self.constants), "num_warps": self.num_warps, "num_stages": self.num_stages}


@dataclass(frozen=True)
class Device:
    """Model of a device. Timings are comparable only between devices of the same model."""

    name: str
    capability: tuple[int, int]


def kernel_key(kernel: str, source: str, shape: Mapping[str, int | str]) -> str:
    """Returns the key of a kernel, its source (`source_hash`) and a shape. The caller makes it once per shape
    and uses it at each launch."""
    return json.dumps({"kernel": kernel, "source": source, "shape": dict(shape)}, sort_keys=True)


@functools.cache
def source_hash(*paths: str) -> str:
    """Returns a digest of the contents of files, such as those that define a kernel."""
    digest = hashlib.sha256()
    for path in paths:
        data = Path(path).read_bytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


class Tuner:
    """Chooses configurations, and keeps them in memory and on disk.

    Args:
        directory: directory of the files; made when the first one is written.
        device: model of the device; part of every key.
        version: compiler version; part of every key.
        timer: returns the seconds that a call of the function takes on the device. It raises one of
            `failures` for a configuration that the device cannot run.
        failures: types of exceptions after which a configuration is passed over; others are raised.
    """

    def __init__(
        self,
        directory: Path,
        device: Device,
        version: str,
        timer: Callable[[Callable[[], None]], float],
        failures: tuple[type[Exception], ...] = (),
    ) -> None:
        self.directory, self.device, self.version = directory, device, version
        self.timer, self.failures = timer, failures
        self.num_timed = 0
        """Number of configurations that this tuner has timed or tried to time."""
        self._known: dict[str, Config] = {}
        self._absent: set[str] = set()
        """Keys for which the disk had no entry when it was read."""

    def choose(
        self,
        key: str,
        default: Config,
        candidates: Callable[[], Sequence[Config]],
        run: Callable[[Config], None],
    ) -> Config:
        """Returns the fastest known configuration for a key.

        Args:
            key: from `kernel_key`.
            default: used if nothing is known and timing is not allowed, or if no configuration can run.
            candidates: returns configurations worth timing; the default is timed too.
            run: launches the kernel once with a configuration. It may be called any number of times.
        """
        known = self._known.get(key)
        if known is not None:
            return known
        if key not in self._absent:
            known = self._read(key)
            if known is not None:
                self._known[key] = known
                return known
            self._absent.add(key)
        if not may_tune():
            return default
        best, seconds = self._time(key, default, candidates(), run)
        self._known[key] = best
        if seconds < float("inf"):
            self._write(key, best, seconds)
        return best

    def path(self, key: str) -> Path:
        """Returns the path of a key's file."""
        full = json.dumps(self._full_key(key), sort_keys=True)
        digest = hashlib.sha256(full.encode()).hexdigest()[:24]
        return self.directory / f"{json.loads(key)['kernel']}-{digest}.json"

    def _full_key(self, key: str) -> dict[str, Any]:
        device = {"name": self.device.name, "capability": list(self.device.capability)}
        return {**json.loads(key), "device": device, "triton": self.version}

    def _time(
        self, key: str, default: Config, candidates: Sequence[Config], run: Callable[[Config], None]
    ) -> tuple[Config, float]:
        best, least = default, float("inf")
        # The default comes first, so that it wins among equals.
        for config in dict.fromkeys((default, *candidates)):
            self.num_timed += 1
            try:
                seconds = self.timer(functools.partial(run, config))
            except self.failures as error:
                logger.debug("%s: %s cannot run: %s", key, config, error)
                continue
            if seconds < least:
                best, least = config, seconds
        logger.info("tuned %s: %s, %.1f us", key, best, least * 1e6)
        return best, least

    def _read(self, key: str) -> Config | None:
        data = cache.kept(self.path(key))
        if data is None:
            return None
        stored = json.loads(data)
        return Config.build(stored["num_warps"], stored["num_stages"], **stored["constants"])

    def _write(self, key: str, config: Config, seconds: float) -> None:
        entry = {
            "key": self._full_key(key),
            "constants": dict(config.constants),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "seconds": seconds,
        }
        cache.keep(self.path(key), json.dumps(entry, indent=1, sort_keys=True).encode())


_warming_up = False


@contextmanager
def warm_up() -> Iterator[None]:
    """Allows tuners to time kernels of unknown shapes inside the `with` block, as far as `may_tune` does.
    Other threads must not launch kernels meanwhile."""
    global _warming_up
    before, _warming_up = _warming_up, True
    try:
        yield
    finally:
        _warming_up = before


def may_tune() -> bool:
    """Whether tuners may time kernels now: inside `warm_up`, outside the interpreter and graph capture."""
    if not _warming_up or operators.is_interpreted():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def cache_directory() -> Path:
    """Returns the directory of the tuners' files."""
    return cache.cache_directory("tuning")


def tuner_of(device: torch.device) -> Tuner:
    """Returns this process's tuner for a device."""
    if device.type != "cuda":
        return _tuner(Device("interpreter", (0, 0)))
    properties = torch.cuda.get_device_properties(device)
    return _tuner(Device(properties.name, (properties.major, properties.minor)))


@functools.cache
def _tuner(device: Device) -> Tuner:
    import triton
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    failures = (OutOfResources, PTXASError, CompilationError)
    return Tuner(cache_directory(), device, triton.__version__, time_on_device, failures)


def time_on_device(run: Callable[[], None]) -> float:
    """Returns the seconds of a call on the current CUDA device: the median of several, each with a cold
    level-2 cache."""
    run()
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(_TIMED_RUNS)
    ]
    for begin, end in events:
        flushed.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in events)
    return times[len(times) // 2] / 1e3
