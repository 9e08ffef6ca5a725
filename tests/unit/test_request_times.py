"""What the engine tells the frontend of a request's course: admission, first token, preemptions."""

from __future__ import annotations

from typing import Any

import pytest

from quire.outputs import EngineCoreOutput
from tests.fixtures.fake_engine import FakeEngine


class Watched(FakeEngine):
    """Keeps the outputs; a step takes a second, and time begins at 100."""

    def __init__(self, **options: Any) -> None:
        super().__init__(step_s=1.0, **options)
        self.clock.now = 100.0
        self.seen: list[EngineCoreOutput] = []

    def collect(self, outputs: list[EngineCoreOutput]) -> None:
        super().collect(outputs)
        self.seen += outputs

    def of(self, request_id: str, index: int = 0) -> list[EngineCoreOutput]:
        return [o for o in self.seen if (o.request_id, o.index) == (request_id, index)]


def test_admission_and_first_token_are_told_once_on_the_first_output() -> None:
    engine = Watched(max_num_seqs=1, max_num_batched_tokens=4)
    engine.add("first", 8, 3)
    engine.add("second", 8, 2)
    engine.run()
    one, two = engine.of("first"), engine.of("second")
    assert (one[0].admitted_at, one[0].first_token_at) == (100.0, 102.0), "two chunks of prompt"
    # The first one has ended with step 4, and the second is admitted by the fifth.
    assert (two[0].admitted_at, two[0].first_token_at) == (104.0, 106.0)
    assert not any(output.admitted_at or output.first_token_at for output in one[1:] + two[1:])
    assert not any(output.num_preemptions for output in engine.seen)


def test_what_was_ended_from_outside_says_whether_it_ever_ran() -> None:
    engine = Watched(max_num_seqs=1, max_num_batched_tokens=4)
    engine.add("runs", 12, 3)
    engine.add("waits", 8, 2)
    engine.step()
    engine.abort("runs", "waits")
    assert [(o.request_id, o.admitted_at, o.finish_reason) for o in engine.seen] == [
        ("runs", 100.0, "cancelled"),
        ("waits", 0.0, "cancelled"),
    ]


def test_a_preempted_request_keeps_its_times_and_counts_its_preemptions() -> None:
    engine = Watched(num_blocks=8)
    for name in ("a", "b"):
        engine.add(name, 8, 20)
    engine.run()
    engine.check_outputs()
    last = engine.of("b")[-1]
    assert last.finish_reason == "length"
    assert last.num_preemptions == engine.requests["b"].num_preemptions >= 1
    assert engine.of("b")[0].admitted_at == 100.0
    assert sum(output.admitted_at > 0 for output in engine.of("b")) == 1
    assert engine.of("a")[-1].num_preemptions == 0


@pytest.mark.parametrize("options", [{"n": 3}, {"n": 2, "beam_width": 3}], ids=lambda o: "-".join(o))
def test_each_choice_has_its_times(options: dict[str, Any]) -> None:
    engine = Watched(max_num_batched_tokens=4)
    temperature = 0.0 if "beam_width" in options else 1.0
    engine.add("several", 8, 4, temperature=temperature, seed=1, **options)
    engine.run()
    for index in range(options["n"]):
        outputs = engine.of("several", index)
        assert (outputs[0].admitted_at, outputs[0].first_token_at) == (100.0, 102.0)
        assert not any(output.admitted_at for output in outputs[1:])
        assert outputs[-1].finish_reason
