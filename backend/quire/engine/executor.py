"""Executor: computes the steps that the scheduler plans, in the order in which they are launched."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from quire.kv_tiers import BlockAccess, KVTiers
from quire.outputs import ModelRunnerOutput, RunnerInfo, SchedulerOutput

T = TypeVar("T")


class RunnerBase(Protocol):
    """Interface that runners and executors have in common."""

    @property
    def info(self) -> RunnerInfo: ...

    @property
    def kv_cache(self) -> BlockAccess: ...

    def attach(self, tiers: KVTiers | None) -> None:
        """Says where blocks go beside the pool, before the first step."""

    def reset(self) -> None:
        """Forgets the steps under way: one has failed, and the requests of all end."""

    def warm_up(self) -> None:
        """Does once what goes before requests, recording graphs for example."""

    def check(self) -> None:
        """Raises WorkerLostError where no worker is left to compute."""

    def close(self) -> None: ...


class Runner(RunnerBase, Protocol):
    """Computes steps: `ModelRunner` on its caller's thread, `WorkerGroup` in other processes."""

    def launch(self, output: SchedulerOutput) -> None:
        """Begins a step; what it samples stays on the device for the steps behind it."""

    def sleep(self) -> None:
        """Gives back the memory of weights and KV cache, of which nothing is in use; `info` stays."""

    def wake(self) -> None:
        """Loads the weights again, makes `kv_cache` anew, and warms up; called again where it failed.

        Raises:
            QuireError: what the model was made of is not there any more, or no memory is.
        """

    def collect(self) -> ModelRunnerOutput:
        """Waits for the oldest step that was launched; an exception if one of those under way has failed."""


class Executor(RunnerBase, Protocol):
    """Computes steps for the engine and gives futures of them; a `WorkerGroup`'s ranks are one executor."""

    depth: int
    """Steps that may be under way when the oldest is waited for: 1, or more where a device has a queue."""

    def launch(self, output: SchedulerOutput) -> None:
        """Takes a step; it is under way at the latest when the next collect() is called."""

    def sleep(self) -> Future[None]:
        """Sleeps as `Runner.sleep` does; called between steps."""

    def wake(self) -> Future[None]:
        """Wakes as `Runner.wake` does; called after `sleep`."""

    def collect(self) -> Future[ModelRunnerOutput]:
        """Result of the oldest step; called again only when that is known."""


class RunnerExecutor:
    """An Executor of one runner.

    Args:
        depth: steps that may be under way when the oldest is waited for.
        threaded: the runner works on a thread of its own; else on the caller's, and collect() returns when it
            is done.
    """

    def __init__(self, runner: Runner, *, depth: int = 1, threaded: bool = False) -> None:
        self.runner = runner
        self.depth = depth
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="quire-runner") if threaded else None
        self._taken: list[SchedulerOutput] = []

    @property
    def info(self) -> RunnerInfo:
        return self.runner.info

    @property
    def kv_cache(self) -> BlockAccess:
        return self.runner.kv_cache

    def attach(self, tiers: KVTiers | None) -> None:
        self.runner.attach(tiers)

    def launch(self, output: SchedulerOutput) -> None:
        # A thread is woken once per step: it launches this one when it goes to wait for the oldest.
        self._taken.append(output)

    def collect(self) -> Future[ModelRunnerOutput]:
        taken, self._taken = self._taken, []

        def work() -> ModelRunnerOutput:
            for output in taken:
                self.runner.launch(output)
            return self.runner.collect()

        return self._begin(work)

    def sleep(self) -> Future[None]:
        return self._begin(self.runner.sleep)

    def wake(self) -> Future[None]:
        return self._begin(self.runner.wake)

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        return _done(work) if self._pool is None else self._pool.submit(work)

    def reset(self) -> None:
        self._taken.clear()
        self.runner.reset()

    def warm_up(self) -> None:
        self.runner.warm_up()

    def check(self) -> None:
        self.runner.check()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self.runner.close()


def _done(work: Callable[[], T]) -> Future[T]:
    """The result of `work`, done here and now, or its error."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future
