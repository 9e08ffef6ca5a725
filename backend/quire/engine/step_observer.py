"""StepObserver: follows the engine's steps for whoever looks at them from outside."""

from __future__ import annotations

from collections.abc import Callable

from quire.core.probation import NO_SUSPECTS, InFlightSuspects
from quire.core.scheduler import Scheduler
from quire.engine.cache_commands import Profile
from quire.engine.profile import StepProfile
from quire.errors import UnavailableError
from quire.outputs import ModelRunnerOutput, RunnerInfo, SchedulerOutput


class StepObserver:
    """Records steps for a profile, and tells which suspects are in the next one.

    The engine calls `begin`, `planned`, `collected`, `updated` and `end` as it comes to these points of a
    step. Nothing here decides what a step computes.

    Args:
        info: of the runner.
    """

    def __init__(self, scheduler: Scheduler, info: RunnerInfo) -> None:
        self._scheduler, self._probation = scheduler, scheduler.probation
        self._info = info
        self.profile: StepProfile | None = None
        """Recorder of the steps for a profile; None: none is being recorded."""
        self.on_suspects: Callable[[InFlightSuspects], None] | None = None
        """Called with the suspects in the next step, before its launch, whenever they change."""
        self._suspects = NO_SUSPECTS

    def begin_profile(self, command: Profile) -> StepProfile:
        """Records the steps from now on, until it is over or taken out of `profile`.

        Raises:
            UnavailableError: one is being recorded.
        """
        if self.profile is not None and not self.profile.is_over:
            raise UnavailableError("a profile is being recorded, and there is one at a time")
        self.profile = StepProfile(command, self._info)
        return self.profile

    def begin(self) -> None:
        """A step begins: it is planned next."""
        if self.profile is not None:
            if self.profile.is_over:
                self.profile = None
            else:
                self.profile.phase("schedule")

    def planned(self, output: SchedulerOutput) -> None:
        """A step is planned; it is launched next."""
        if self.profile is not None:
            output.is_timed = True
            self.profile.phase("wait", output.step)
        suspects = self._probation.in_flight_suspects
        if suspects is not self._suspects:
            self._suspects = suspects
            if self.on_suspects is not None:
                self.on_suspects(suspects)

    def collected(self, output: SchedulerOutput) -> None:
        """The oldest step is computed; the scheduler learns of its results next."""
        if self.profile is not None:
            self.profile.phase("update", output.step)

    def updated(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """The scheduler has the results of the oldest step."""
        if self.profile is not None:
            self.profile.done(output, result, self._scheduler.stats())

    def sending(self) -> None:
        """The outputs of a step are sent next."""
        if self.profile is not None:
            self.profile.phase("send")

    def end(self) -> None:
        """The engine goes back to its messages."""
        if self.profile is not None:
            self.profile.phase("")
