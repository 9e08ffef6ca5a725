"""The cheap client of `benchmarks.path` against a real gRPC server, and the arithmetic, computed by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.fake_device import FakeDevice, environment
from benchmarks.path.client import Job, Measured, _receive
from benchmarks.path.run import (
    MODEL,
    Plan,
    Row,
    engine_options,
    figures,
    measure_generator,
    medians,
    run,
    table,
)
from benchmarks.served import served
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.executor import RunnerExecutor
from quire.engine.loop import _engine_info
from quire.engine.messages import Stats, encoder, engine_message_decoder
from quire.outputs import SchedulerStats
from quire.request.sampling_params import SamplingParams
from quire.triton.metrics import EngineMetrics, RequestMetrics
from quire.triton.metrics_board import MetricsBoard
from quire.triton.observers import RequestEnded
from tests.e2e.conftest import write_model
from tests.e2e.triton_calls import infer
from tests.fixtures.threads import cpu_s, main_cpu_s, waits_of
from tests.unit.fake_kserve import FakeKServe


def test_the_cheap_client_counts_the_tokens_of_every_stream() -> None:
    """Those of a batch together are larger than what a server takes at first, and so wait for its consent."""
    prompts = [f"tokens {count}{' ' * 3000}" for count in range(1, 61)]
    with FakeKServe() as server:
        records = _receive(Job(server.url, "generator", {}, 25, 1, prompts))
    assert [record.num_tokens for record in records] == list(range(1, 61))
    for record in records:
        assert record.error is None
        assert record.start < record.response_times[0]
        assert list(record.response_times) == sorted(record.response_times)


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "error"),
    [
        ("error INVALID_ARGUMENT max_tokens: must be positive", 0, "max_tokens: must be positive"),
        ("midway 3", 3, "the engine died"),
        ("no final 2", 2, "0 FINAL"),
        ("flag final 2", 2, None),
    ],
)
def test_the_cheap_client_tells_what_went_wrong(prompt: str, num_tokens: int, error: str | None) -> None:
    with FakeKServe() as server:
        first, second = _receive(Job(server.url, "generator", {}, 2, 1, [prompt, "tokens 4"]))
    assert (first.num_tokens, first.error) == (num_tokens, error)
    assert (second.num_tokens, second.error) == (4, None)


def test_the_cheap_client_puts_a_response_of_several_frames_together() -> None:
    """A frame has 16 KiB; the echo writes each of these letters with six."""
    with FakeKServe() as server:
        records = _receive(Job(server.url, "generator", {}, 2, 2, ["echo " + "é" * 7000] * 2))
    assert [(record.num_tokens, record.error) for record in records] == [(2, None)] * 2


def test_figures_computed_by_hand() -> None:
    """Two streams of 50 tokens in 40 responses all in all, in two seconds."""
    summary = {
        "output_tokens": 100,
        "tokens_per_s": 50.0,
        "responses_per_s": 20.0,
        "tokens_per_response": 2.5,
        "ttft_s": {"p50": 0.020},
        "itl_s": {"p50": 0.030, "p99": 0.090},
        "token_gap_s": {"p50": 0.010, "p99": 0.045},
    }
    cpu_s = {"server": 0.010, "stub": 0.020, "engine": 0.050, "client": 0.001}
    found = figures(Measured(summary, cpu_s, 0.25))
    assert found["server_us_per_token"] == pytest.approx(100)
    assert found["host_us_per_token"] == pytest.approx(300)
    assert found["host_us_per_response"] == pytest.approx(750)
    assert found["client_us_per_response"] == pytest.approx(25)
    assert (found["itl_p99_ms"], found["token_p99_ms"], found["ttft_p50_ms"]) == pytest.approx((90, 45, 20))


def test_a_row_is_the_median_of_each_figure_over_the_rounds() -> None:
    runs = [
        *(
            (4, "now", {"tokens_per_s": rate, "x floor": ratio})
            for rate, ratio in ((30, 1.1), (10, 1.3), (20, 1.2))
        ),
        (4, "now in process", {"tokens_per_s": 40.0}),
        (16, "now", {"tokens_per_s": 7.0, "x floor": 2.0}),
    ]
    rows = medians(runs)
    assert rows[0] == Row(4, "now", {"tokens_per_s": 20, "x floor": 1.2})
    assert [(row.streams, row.who) for row in rows] == [(4, "now"), (4, "now in process"), (16, "now")]
    assert table(rows).splitlines() == [
        "| streams | of | tok/s | x floor |",
        "| --- | --- | --- | --- |",
        "| 4 | now | 20 | 1.20 |",
        "| 4 | now in process | 40 | - |",
        "| 16 | now | 7 | 2.00 |",
    ]


@pytest.mark.slow
@pytest.mark.server
def test_a_fake_device_and_the_floor_behind_the_server(tmp_path: Path) -> None:
    """Every stream has the tokens and the one FINAL that were asked for, or the client complains."""
    options, vocab_size = engine_options("fake", [8], 16, 30, {})
    plan = Plan(options, vocab_size, [8], 16, 30, env=environment(20.0))
    rows = medians(run(plan, 1, None, tmp_path))
    assert [row.who for row in rows] == ["floor of now", "floor, anew of now", "now in process", "now"]
    found = {row.who: row.figures for row in rows}
    for who in ("now", "now in process"):
        assert found[who]["tokens_per_s"] <= 8 * 30 / (29 * 0.020), "more than the device gives"
    for role in ("server", "stub", "engine", "client"):
        assert found["now"][f"{role}_us_per_token"] > 0, role
    assert found["floor of now"]["engine_us_per_token"] < found["now"]["engine_us_per_token"]
    assert found["now"]["x floor"] > 0


@pytest.mark.row("G33", clauses=("cpu", "batched"))
@pytest.mark.slow
@pytest.mark.server
def test_what_a_token_costs_at_sixty_four_streams(tmp_path: Path) -> None:
    """The row's bound on CPU time of server and stub; an idle machine of two cores needs two thirds of it."""
    options, vocab_size = engine_options("fake", [64], 64, 256, {})
    plan = Plan(options, vocab_size, [64], 64, 256, env=environment(10.0))
    rows = medians(run(plan, 1, None, tmp_path))
    (ours,) = (row.figures for row in rows if row.who == "now")
    assert ours["host_us_per_token"] < 150
    assert ours["tokens_per_response"] > 2


BURST = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        kind = pb_utils.MetricFamily
        self.family = kind(name="burst", description="b", kind=kind.COUNTER)
        self.metric = self.family.Metric(labels={"model": "burst"})

    def execute(self, requests):
        for _ in range(int(pb_utils.get_input_tensor_by_name(requests[0], "count").as_numpy()[0])):
            self.metric.increment(1.0)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("done", np.array([1], np.int32))])]
"""
_INT = "data_type: TYPE_INT32, dims: [ 1 ]"
BURST_CONFIG = (
    f'backend: "python"\ninput [{{ name: "count", {_INT} }}]\noutput [{{ name: "done", {_INT} }}]\n'
)


def seconds_of(call: Callable[[], object], times: int) -> float:
    """CPU seconds of one call, of this thread."""
    begin = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - begin) / times


def tritons_cpu_s(processes: dict[str, list[int]]) -> float:
    """CPU time of the server and of the threads that stubs have beside their main ones, which call it."""
    return cpu_s(processes["server"] + processes["stub"]) - sum(main_cpu_s(pid) for pid in processes["stub"])


@pytest.mark.row("G1", clauses=("overhead",))
@pytest.mark.slow
@pytest.mark.server
def test_metrics_cost_less_than_a_hundredth_of_a_token(tmp_path: Path) -> None:
    """Of the CPU time that server, stub and engine take for 64 streams of a fake device, which computes
    nothing: with a real one there is more beside. All parts are measured where they can be told apart:

    - the thread that sends figures, by the kernel's count of its time,
    - Triton's side of each update, from a model that does nothing else; there are no more updates than this
      thread has waits, as each is one,
    - what the responder's thread is told of each response and request, and the engine's figures on both
      sides, twice a second: here, by this thread's CPU time for each.
    """
    options, vocab_size = engine_options("fake", [64], 64, 256, {})
    plan = Plan(options, vocab_size, [64], 64, 256, env=environment(10.0))
    prompts = [plan.prompts(64, number) for number in range(3)]
    repository = plan.write_repository(tmp_path / "repository")
    write_model(repository, "burst", BURST_CONFIG, BURST)
    with served(repository, log=tmp_path / "log", env=plan.env) as server:
        processes = server.processes()
        count = 2000
        infer(server.url, "burst", {"count": 10})
        before = tritons_cpu_s(processes)
        infer(server.url, "burst", {"count": count})
        update_s = (tritons_cpu_s(processes) - before) / count
        before, waits = (
            cpu_s(processes["stub"], "quire-metrics"),
            waits_of(processes["stub"], "quire-metrics"),
        )
        measured = measure_generator(server, MODEL, [one for part in prompts for one in part], 256, 64)
        sending_s = cpu_s(processes["stub"], "quire-metrics") - before
        num_updates = waits_of(processes["stub"], "quire-metrics") - waits
    summary = measured.summary
    num_responses = summary["responses_per_s"] * summary["duration_s"]

    config = EngineConfig.from_mapping(options)
    core = EngineCore(config, RunnerExecutor(FakeDevice(config, 10.0), depth=2))
    params = SamplingParams(max_tokens=256, ignore_eos=True)
    for number in range(64):
        core.add_request(f"{number}", plan.prompts(64, 1)[number], params)
    core.step()

    def tell() -> SchedulerStats:
        told = engine_message_decoder.decode(encoder.encode(Stats(core.stats())))
        assert isinstance(told, Stats)
        return told.scheduler

    board = MetricsBoard(None)
    requests = RequestMetrics(board, "generator", "1")
    engine = EngineMetrics(board, tmp_path, "generator", "1")
    info = _engine_info(core)
    record = RequestEnded(
        request_id="1", external_id="", model="generator", is_stream=True, n=1, arrived_at=1.0,
        admitted_at=1.1, first_token_at=1.2, first_sent_at=1.2, ended_at=4.0, num_prompt_tokens=64,
        num_output_tokens=256, finish_reason="length",
    )  # fmt: skip
    stats = tell()
    parts = {
        "sending": sending_s,
        "Triton's side": num_updates * update_s,
        "responses": num_responses * seconds_of(lambda: requests.interval(0.012, 2), 20_000),
        "requests": summary["requests"] * seconds_of(lambda: requests.ended(record), 2000),
        "engine's figures": 2
        * summary["duration_s"]
        * (seconds_of(tell, 300) + seconds_of(lambda: engine.update(stats, info), 300)),
    }
    core.close()
    engine.close()
    whole_s = sum(seconds for role, seconds in measured.cpu_s.items() if role != "client")
    share = sum(parts.values()) / whole_s
    told = ", ".join(f"{name} {1e6 * part / summary['output_tokens']:.2f}" for name, part in parts.items())
    print(
        f"metrics: {100 * share:.2f} % of {1e6 * whole_s / summary['output_tokens']:.0f} us a token; "
        f"{told}; "
        f"{num_updates} updates of {1e6 * update_s:.0f} us in {summary['duration_s']:.1f} s"
    )
    assert num_updates > 0 and sending_s > 0
    assert share < 0.01
