"""What a step's planning and accounting cost, in bytecodes: the same on every machine, busy or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.core.kv_cache_manager import KVCacheManager
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.outputs import NOTHING, ModelRunnerOutput, RowOutput
from quire.request.sampling_params import SamplingParams

BLOCK_SIZE = 16
PROMPT = 48
STEPS = BLOCK_SIZE
"""Each row comes to the end of a block once."""


class Bytecodes:
    """Counts those that calls made through it execute."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        def trace(frame: FrameType, event: str, _: Any) -> Any:
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            self.count += event == "opcode"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return function(*args)
        finally:
            sys.settrace(before)


class Loop:
    """Requests that all run; as one ends, the next one joins."""

    def __init__(self, num_running: int, reservation: str) -> None:
        config = EngineConfig.from_mapping(
            {
                "max_num_seqs": num_running,
                "max_num_batched_tokens": num_running * PROMPT,
                "max_waiting_requests": 2**31,
                "kv_reservation": reservation,
            }
        )
        kv = KVCacheManager(num_running * 40, BLOCK_SIZE, enable_prefix_caching=True)
        self.scheduler = Scheduler(config.scheduler, kv, 2048)
        self.num_added = 0
        # Ends at even intervals; from the start everybody is somewhere in the middle.
        for index in range(num_running):
            self.add(6 + 200 * index // num_running)
        for _ in range(4):
            self.step(lambda function, *args: function(*args))

    def add(self, num_output: int) -> None:
        prompt = [(self.num_added * 131 + i) % 1009 for i in range(PROMPT)]
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        self.scheduler.add_request(Request(str(self.num_added), prompt, params))
        self.num_added += 1

    def step(self, count: Callable[..., Any]) -> None:
        output = count(self.scheduler.schedule)
        rows = [RowOutput([7]) if row.samples else NOTHING for row in output.scheduled]
        for done in count(self.scheduler.update, output, ModelRunnerOutput(rows)):
            if done.finish_reason is not None:
                self.add(200)


def bytecodes_per_step(num_running: int, reservation: str) -> float:
    loop, bytecodes = Loop(num_running, reservation), Bytecodes()
    before = loop.num_added
    for _ in range(STEPS):
        loop.step(bytecodes)
    # Those that end and begin meanwhile are part of the cost.
    assert loop.num_added >= before + STEPS * num_running // 250
    return bytecodes.count / STEPS


@pytest.mark.parametrize("reservation", ["on_demand", "no_evict", "predicted"])
def test_the_work_of_a_step_grows_linearly_at_most(reservation: str) -> None:
    # With fewer than 200 of these requests there are steps in which nobody joins.
    small, large = (bytecodes_per_step(count, reservation) for count in (200, 800))
    print(
        f"{reservation}: {small:.0f} bytecodes at 200 running, {large:.0f} at 800: {large / small:.3f} times"
    )
    assert large < 4.1 * small
