"""StepObserver: reports the engine's steps to profiles and to the record of suspects."""

from __future__ import annotations

from collections.abc import Callable

from quire.core.probation import NO_SUSPECTS, InFlightSuspects
from quire.core.scheduler import Scheduler
from quire.engine.cache_commands import Profile
from quire.engine.profile import StepProfile
from quire.errors import UnavailableError
from quire.outputs import ModelRunnerOutput, RunnerInfo, SchedulerOutput


class StepObserver:
    """Records steps for a profile, and reports the suspects in the next step and in the steps in flight.

    The engine calls `begin`, `planned`, `collected`, `updated`, `sending` and `end`, each when its docstring
    says. Nothing here affects what a step computes.

    Args:
        info: the runner's `RunnerInfo`.
    """

    def __init__(self, scheduler: Scheduler, info: RunnerInfo) -> None:
        self._scheduler, self._probation = scheduler, scheduler.probation
        self._info = info
        self.profile: StepProfile | None = None
        """The profile being recorded, or one that is over and was not dropped yet; None: there is none."""
        self.on_suspects: Callable[[InFlightSuspects], None] | None = None
        """Called when a step is planned and not launched yet, with the suspects in it and in the steps in
        flight, if they have changed. None: nothing is called."""
        self._suspects = NO_SUSPECTS

    def begin_profile(self, command: Profile) -> StepProfile:
        """Starts to record steps, until the recording is over or `profile` is set to None.

        Raises:
            UnavailableError: another profile is being recorded.
        """
        if self.profile is not None and not self.profile.is_over:
            raise UnavailableError("a profile is being recorded, and there is one at a time")
        self.profile = StepProfile(command, self._info)
        return self.profile

    def begin(self) -> None:
        """Called before a step is planned."""
        if self.profile is not None:
            if self.profile.is_over:
                self.profile = None
            else:
                self.profile.phase("schedule")

    def planned(self, output: SchedulerOutput) -> None:
        """Called when a step is planned, before it is launched."""
        if self.profile is not None:
            output.is_timed = True
            self.profile.phase("wait", output.step)
        suspects = self._probation.in_flight_suspects
        if suspects is not self._suspects:
            self._suspects = suspects
            if self.on_suspects is not None:
                self.on_suspects(suspects)

    def collected(self, output: SchedulerOutput) -> None:
        """Called when the oldest step in flight has been computed, before the scheduler gets its results."""
        if self.profile is not None:
            self.profile.phase("update", output.step)

    def updated(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Called after the scheduler has processed the results of a step."""
        if self.profile is not None:
            self.profile.done(output, result, self._scheduler.stats())

    def sending(self) -> None:
        """Called before outputs are sent to frontends."""
        if self.profile is not None:
            self.profile.phase("send")

    def end(self) -> None:
        """Called when the processing of a step has ended, and when outputs have been sent."""
        if self.profile is not None:
            self.profile.phase("")
