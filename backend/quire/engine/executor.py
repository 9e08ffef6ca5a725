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
        """Sets the KV tiers that blocks move to and from; None: there are none. Called while no step is in
        flight."""

    def reset(self) -> None:
        """Drops the steps in flight: one has failed or was interrupted, and the requests of all of them
        end."""

    def warm_up(self) -> None:
        """Does the work that must precede requests, such as recording graphs."""

    def check(self) -> None:
        """Raises WorkerLostError if a worker process has ended, so that no step can be computed any more."""

    def close(self) -> None: ...


class Runner(RunnerBase, Protocol):
    """Computes steps: `ModelRunner` on its caller's thread, `WorkerGroup` in other processes."""

    def launch(self, output: SchedulerOutput) -> None:
        """Begins a step, or computes it at once; `collect` returns its result. Later steps find its sampled
        tokens in the runner."""

    def sleep(self) -> None:
        """Frees the memory of weights and KV cache; `info` stays. Called while no step is in flight."""

    def wake(self) -> None:
        """Loads the weights again, makes a new `kv_cache`, and warms up; may be called again after a failure.

        Raises:
            QuireError: for example, the checkpoint is gone or has changed, or there is not enough memory.
        """

    def collect(self) -> ModelRunnerOutput:
        """Waits for the oldest launched step and returns its result. Raises if that step has failed; on some
        devices also if one launched behind it has."""


class Executor(RunnerBase, Protocol):
    """Computes steps for the engine and returns futures. All ranks of a `WorkerGroup` together are one
    executor."""

    depth: int
    """Most steps in flight when the oldest is waited for: 1, or more if steps are launched ahead."""

    def launch(self, output: SchedulerOutput) -> None:
        """Accepts a step, which begins at the latest when collect() is called next."""

    def sleep(self) -> Future[None]:
        """Puts the runner to sleep as `Runner.sleep` does; called between steps."""

    def wake(self) -> Future[None]:
        """Wakes the runner as `Runner.wake` does; called after `sleep`."""

    def collect(self) -> Future[ModelRunnerOutput]:
        """Returns the future result of the oldest step; may be called again only when that is done."""


class RunnerExecutor:
    """An Executor with one runner.

    Args:
        depth: most steps in flight when the oldest is waited for.
        threaded: whether the runner computes on a thread of its own; if not, it computes on the caller's
            thread, and collect() returns when the step is done.
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
    """Does the work at once; returns a finished future with its result or its error, if that is an
    `Exception`."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future
