"""What reaches Triton's metrics: each figure once, what changed, and what really was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from quire.config import EngineConfig
from quire.core.request import FinishReason
from quire.engine.core import EngineCore
from quire.engine.executor import RunnerExecutor
from quire.engine.messages import EngineInfo
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.stop_matcher import StopAutomaton
from quire.outputs import EngineCoreOutput, ExpertCounts, SchedulerStats, WaitingCounts
from quire.request.sampling_params import SamplingParams
from tests.fixtures import fake_pb_utils
from tests.fixtures.fake_engine import FakeEngine
from tests.fixtures.fake_metrics import FakeMetricFamily
from tests.fixtures.fake_runner import FakeRunner

fake_pb_utils.install()

from quire.request.scheduling_params import SchedulingParams  # noqa: E402
from quire.triton import metrics, metrics_board  # noqa: E402
from quire.triton.metrics import EngineMetrics, RequestMetrics  # noqa: E402
from quire.triton.metrics_board import HISTOGRAMS, MetricsBoard  # noqa: E402
from quire.triton.observers import RequestEnded  # noqa: E402
from quire.triton.vllm_metrics import VllmBackendMetrics, buckets_1_2_5  # noqa: E402
from tests.fixtures.mortal_engine import Frontend as MortalFrontend  # noqa: E402
from tests.fixtures.waiting import wait_until  # noqa: E402
from tests.triton.test_responder import Harness  # noqa: E402

shown = FakeMetricFamily.shown
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _families(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeMetricFamily.reset(monkeypatch, fake_pb_utils)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "quire-0-123-5eed"
    path.mkdir()
    return path


@pytest.fixture
def board() -> MetricsBoard:
    return MetricsBoard(fake_pb_utils)


def info(pid: int = 10) -> EngineInfo:
    return EngineInfo(pid, 64, 600, 8, False, 100, 16, 0, "float32", "cpu")


def stats(**values: Any) -> SchedulerStats:
    """Of a pool of 100 blocks: 40 without content, 25 cached, 35 in use."""
    given: dict[str, Any] = {
        "step": 7,
        "num_running": 3,
        "num_waiting": 2,
        "num_waiting_tokens": 50,
        "num_blocks": 100,
        "num_free_blocks": 65,
        "num_preemptions": 1,
        "num_scheduled_tokens": 900,
        "num_cached_tokens": 64,
        "num_cached_blocks": 25,
        "num_pinned_blocks": 5,
        "num_queried_tokens": 400,
        "num_draft_tokens": 30,
        "num_accepted_drafts": 20,
        "num_batch_rows": 3,
        "num_batch_tokens": 12,
        "waiting": WaitingCounts(seats=2),
        **values,
    }
    return SchedulerStats(**given)


ENGINE = {
    "quire_requests_running": 3,
    "quire_requests_loading": 0,
    "quire_requests_waiting": 2,
    'quire_requests_waiting_for{reason="choices"}': 0,
    'quire_requests_waiting_for{reason="tenant"}': 0,
    'quire_requests_waiting_for{reason="seats"}': 2,
    'quire_requests_waiting_for{reason="blocks"}': 0,
    'quire_requests_waiting_for{reason="budget"}': 0,
    'quire_requests_waiting_for{reason="step"}': 0,
    'quire_requests_waiting_for{reason="adapter"}': 0,
    "quire_batch_rows": 3,
    "quire_batch_tokens": 12,
    "quire_kv_use_ratio": 0.35,
    'quire_kv_blocks{state="free"}': 40,
    'quire_kv_blocks{state="cached"}': 25,
    'quire_kv_blocks{state="in_use"}': 35,
    'quire_kv_blocks{state="pinned"}': 5,
    "quire_prefix_queried_tokens_total": 400,
    "quire_prefix_cached_tokens_total": 64,
    "quire_kv_loaded_tokens_total": 0,
    "quire_preemptions_total": 1,
    "quire_swaps_total": 0,
    "quire_draft_tokens_total": 30,
    "quire_accepted_draft_tokens_total": 20,
    "quire_steps_total": 7,
    "quire_scheduled_tokens_total": 900,
    "quire_engine_restarts_total": 0,
}


def of_engine() -> dict[str, float]:
    """Without the information, whose labels are many."""
    return {name: value for name, value in shown("engine").items() if "info" not in name}


# --- the engine's ---


@pytest.mark.row("E29", clauses=("gauges",))
def test_every_figure_of_an_engine_and_only_changes_are_sent(board: MetricsBoard, directory: Path) -> None:
    engine = EngineMetrics(board, directory, "generator", "1")
    engine.update(stats(), info())
    board.send()
    assert of_engine() == ENGINE
    assert all(metric.labels["engine"] == "5eed" for metric in FakeMetricFamily.all_metrics.values())
    before = FakeMetricFamily.num_calls()
    engine.update(stats(), info())
    board.send()
    assert FakeMetricFamily.num_calls() == before, "nothing has changed"
    engine.update(stats(num_running=0, num_swaps=2, num_scheduled_tokens=950), info())
    board.send()
    assert FakeMetricFamily.num_calls() == before + 3
    changed = {"quire_requests_running": 0, "quire_swaps_total": 2, "quire_scheduled_tokens_total": 950}
    assert of_engine() == {**ENGINE, **changed}


@pytest.mark.row("E18", clauses=("metrics",))
def test_an_engine_that_offloads_experts_counts_them(board: MetricsBoard, directory: Path) -> None:
    EngineMetrics(board, directory, "generator", "1", offloads=True).update(
        stats(experts=ExpertCounts(90, 10, 12, 7, 2**20)), info()
    )
    board.send()
    assert {name: value for name, value in of_engine().items() if name not in ENGINE} == {
        "quire_expert_hits_total": 90,
        "quire_expert_misses_total": 10,
        "quire_expert_prefetches_total": 12,
        "quire_expert_prefetch_hits_total": 7,
        "quire_expert_loaded_bytes_total": 2**20,
    }


def test_counters_never_fall_and_go_on_over_an_engines_death(board: MetricsBoard, directory: Path) -> None:
    engine = EngineMetrics(board, directory, "generator", "1")
    for pid, cached, expected, restarts in (
        (10, 64, 64, 0),
        (10, 48, 64, 0),  # a load has failed
        (10, 80, 80, 0),
        (11, 96, 80 + 96, 1),
        (12, 1, 80 + 96 + 1, 2),
    ):
        engine.update(stats(num_cached_tokens=cached), info(pid))
        board.send()
        values = of_engine()
        assert values["quire_prefix_cached_tokens_total"] == expected
        assert values["quire_engine_restarts_total"] == restarts


def test_an_engine_is_shown_once_whatever_its_models(directory: Path) -> None:
    """`generator` and `generator_unary` each showed the figures of their engine: sums counted them twice."""
    boards = [MetricsBoard(fake_pb_utils) for _ in range(3)]
    models = ("generator", "generator", "generator_unary")
    engines = [EngineMetrics(b, directory, m, "1") for b, m in zip(boards, models, strict=True)]

    def update(**values: int) -> None:
        for board, engine in zip(boards, engines, strict=True):
            if engine is not None:
                engine.update(stats(**values), info())
                board.send()

    update()
    assert of_engine() == ENGINE
    infos = [labels.labels for (name, _), labels in FakeMetricFamily.all_metrics.items() if "info" in name]
    assert [one["model"] for one in infos] == ["generator", "generator_unary"], "each tells of its engine"
    assert {one["block_size"] for one in infos} == {"16"}
    # The model that showed them is unloaded: another goes on, and nothing is counted again.
    boards[0].start()
    boards[0].stop(WAIT_S)
    engines.pop(0).close()
    boards.pop(0)
    assert of_engine()["quire_requests_running"] == 0
    update(num_running=3, num_scheduled_tokens=950)
    update(num_running=3, num_scheduled_tokens=1000)
    assert of_engine() == {**ENGINE, "quire_scheduled_tokens_total": 950}
    # What was computed between the last look of one and the first of the other is lost: half a second.


def test_vllms_names_are_shown_besides(directory: Path) -> None:
    board = MetricsBoard(fake_pb_utils, {"model_name": "generator", "engine": "5eed"})
    EngineMetrics(board, directory, "generator", "1").update(stats(), info())
    requests = RequestMetrics(board, "generator", "1")
    requests.ended(record(finish_reason="tool_calls"))
    requests.ended(record(finish_reason="cancelled", error_code="CANCELLED", tenant="acme"))
    board.send()
    values = shown("engine")
    named = {name: value for name, value in values.items() if name.startswith("vllm:")}
    model = 'model_name="generator"'
    assert named[f"vllm:num_requests_running{{{model}}}"] == 3
    assert named[f"vllm:num_requests_waiting{{{model}}}"] == 2
    assert named[f"vllm:kv_cache_usage_perc{{{model}}}"] == 0.35
    assert named[f"vllm:spec_decode_num_draft_tokens_total{{{model}}}"] == 30
    assert named[f"vllm:spec_decode_num_accepted_tokens_total{{{model}}}"] == 20
    assert named[f'vllm:cache_config_info{{{model},block_size="16",num_gpu_blocks="100"}}'] == 1
    assert named[f'vllm:request_success_total{{{model},finished_reason="stop"}}'] == 1
    assert named[f'vllm:request_success_total{{{model},finished_reason="abort"}}'] == 1
    assert named[f'vllm:request_queue_time_seconds_bucket{{{model},le="+Inf"}}'] == 2
    assert not any("time_to_first_token" in name for name in named), "vllm_backend's own"
    assert any(name.startswith("vllm:lora_requests_info{") for name in named)
    assert of_engine().items() >= ENGINE.items()


# --- requests ---


def record(**values: Any) -> RequestEnded:
    """It did not stream: 0.5 s in the queue, 0.25 s of prefill, 10 further tokens in 1 s."""
    given: dict[str, Any] = {
        "request_id": "r",
        "external_id": "",
        "model": "generator",
        "params": SamplingParams(),
        "n": 1,
        "arrived_at": 100.0,
        "admitted_at": 100.5,
        "first_token_at": 100.75,
        "first_sent_at": 101.75,
        "ended_at": 101.75,
        "num_prompt_tokens": 40,
        "num_cached_tokens": 16,
        "num_output_tokens": 11,
        "finish_reason": "length",
        **values,
    }
    return RequestEnded(**given)


def histogram(name: str) -> tuple[float, float, str]:
    """Sum, count, and the first bucket that holds all; checks that buckets only grow."""
    values = shown("model", "version")
    bounds = [f"{bound:g}" for bound in HISTOGRAMS[name][1]] + ["+Inf"]
    counts = [values[f'{name}_bucket{{le="{bound}"}}'] for bound in bounds]
    assert counts == sorted(counts) and counts[-1] == values[f"{name}_count"]
    return values[f"{name}_sum"], counts[-1], bounds[counts.index(counts[-1])]


def test_where_a_requests_time_went(board: MetricsBoard) -> None:
    requests = RequestMetrics(board, "generator", "1")
    requests.ended(record())
    board.send(all_of_them=True)
    assert histogram("quire_queue_seconds") == (0.5, 1, "0.5")
    assert histogram("quire_prefill_seconds") == (0.25, 1, "0.25")
    assert histogram("quire_decode_seconds") == (1.0, 1, "1.28")
    assert histogram("quire_request_seconds") == (1.75, 1, "2.56")
    assert histogram("quire_time_to_first_token_seconds") == (0.75, 1, "0.75")
    assert histogram("quire_time_per_output_token_seconds") == (pytest.approx(0.1), 1, "0.1")
    assert histogram("quire_inter_token_seconds") == (0, 0, "0.001")


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        ({"is_stream": True}, {"queue": 1, "prefill": 1, "request": 1, "time_to_first_token": 0}),
        ({"num_output_tokens": 1}, {"time_per_output_token": 0, "request": 1}),
        ({"n": 2}, {"time_per_output_token": 1}),
        ({"finish_reason": "cancelled", "error_code": "CANCELLED"}, {"queue": 1, "prefill": 1, "request": 0}),
        ({"finish_reason": "timeout", "first_token_at": 0.0}, {"queue": 1, "prefill": 0, "decode": 0}),
        ({"finish_reason": "error", "admitted_at": 0.0, "first_token_at": 0.0}, {"queue": 0, "request": 0}),
        ({"is_command": True}, {"queue": 0, "request": 0}),
    ],
)
def test_what_did_not_happen_is_not_measured(
    board: MetricsBoard, values: dict[str, Any], counts: dict[str, int]
) -> None:
    RequestMetrics(board, "generator", "1").ended(record(**values))
    board.send(all_of_them=True)
    for name, count in counts.items():
        assert histogram(f"quire_{name}_seconds")[1] == count


def test_ends_are_counted_by_reason_and_code(board: MetricsBoard) -> None:
    requests = RequestMetrics(board, "generator", "1")
    for values in (
        {},
        {"finish_reason": "stop", "paused_s": 0.5, "num_continuations": 1},
        {"error_code": "UNAVAILABLE", "paused_s": 0.5},
        {"finish_reason": "error", "error_code": "INVALID_ARG", "admitted_at": 0.0},
        {"finish_reason": "error", "error_code": "INVALID_ARG", "admitted_at": 0.0},
        {"finish_reason": "cancelled", "error_code": "CANCELLED"},
        {"is_command": True},
    ):
        requests.ended(record(**values))
    board.send()
    values = shown("model", "version")
    assert values['quire_requests_total{finish_reason="length",code=""}'] == 1
    assert values['quire_requests_total{finish_reason="stop",code=""}'] == 1
    assert values['quire_requests_total{finish_reason="error",code="INVALID_ARG"}'] == 2
    assert values['quire_requests_total{finish_reason="cancelled",code="CANCELLED"}'] == 1
    assert values['quire_commands_total{code=""}'] == 1
    assert values["quire_requests_continued_total"] == 1


def test_tokens_by_tenant_and_clients_cannot_invent_series(
    board: MetricsBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_TENANTS", 2)
    requests = RequestMetrics(board, "generator", "1", tenants=["gold"])
    for tenant in ("", "a", "b", "c", "gold", "a", "d"):
        requests.ended(record(tenant=tenant, num_reasoning_tokens=1))
    board.send()
    found = {
        tuple(metric.labels[key] for key in ("tenant", "adapter")): metric.value
        for (name, _), metric in FakeMetricFamily.all_metrics.items()
        if name == "quire_output_tokens_total"
    }
    # One place was kept for "gold", which came late; `d` found none.
    assert found == {("", ""): 11, ("a", ""): 22, ("b", ""): 11, ("gold", ""): 11, ("other", ""): 22}
    values = shown("model", "version", "adapter")
    for name, count in (("input", 40), ("cached_input", 16), ("reasoning", 1)):
        assert values[f'quire_{name}_tokens_total{{tenant="a"}}'] == 2 * count


def test_instances_of_a_model_add_up(board: MetricsBoard) -> None:
    for each in (board, MetricsBoard(fake_pb_utils)):
        RequestMetrics(each, "generator", "1").ended(record())
        each.send(all_of_them=True)
    assert histogram("quire_request_seconds") == (3.5, 2, "2.56")


# --- streams ---


@pytest.mark.parametrize("mode", ["delta", "cumulative"])
def test_streams_are_measured_as_they_are_sent(mode: str, tmp_path: Path, board: MetricsBoard) -> None:
    """First responses and the tokens of further ones, against the times at which Triton was handed them."""
    requests = RequestMetrics(board, "generator", "1")
    harness = Harness(tmp_path)
    harness.responder._sender._meter = requests
    harness.responder._ends._observers = [requests, harness.ended]
    try:
        harness.runner.hold_after_token_of = "t-0"
        sender = harness.submit(
            [5, 6, 7], max_tokens=40, ignore_eos=True, stream_interval=3, cumulative=mode == "cumulative"
        )
        assert sender.first.wait(WAIT_S)
        harness.runner.gate.set()
        quiet = harness.submit([5, 6, 8], max_tokens=40, ignore_eos=True, stream=False)
        assert sender.final.wait(WAIT_S) and quiet.final.wait(WAIT_S)
        done = {one.request_id: one for one in harness.ended.wait(2)}
    finally:
        harness.close()
    board.send(all_of_them=True)
    sizes = [len(response.tensors["output_ids"]) for response in sender.responses]
    total, count, _ = histogram("quire_inter_token_seconds")
    assert count == (sum(sizes[1:]) if mode == "delta" else sizes[-1] - sizes[0]) > 30
    streamed, whole = done["t-0"], done["t-1"]
    # All gaps together are the time from the first response to the last with tokens.
    assert 0 < total <= streamed.ended_at - streamed.first_sent_at
    total, count, _ = histogram("quire_time_to_first_token_seconds")
    times = (one.first_sent_at - one.arrived_at for one in (streamed, whole))
    assert count == 2 and total <= sum(times)
    assert total >= streamed.first_sent_at - streamed.arrived_at


def test_what_vllm_backend_shows_is_counted_as_there(tmp_path: Path) -> None:
    """A choice counts as a request, and each token is measured from the one before it, streamed or not."""
    own = MetricsBoard(fake_pb_utils, period_s=0.0)
    harness = Harness(tmp_path)
    harness.responder._on_output = VllmBackendMetrics(own, "m", "1", max_model_len=400).on_output
    try:
        senders = [
            harness.submit([5, 6, 7], max_tokens=20, ignore_eos=True),
            harness.submit([5, 6, 7, 8], max_tokens=10, ignore_eos=True, stream=False, n=2),
        ]
        assert all(sender.final.wait(WAIT_S) for sender in senders)
    finally:
        harness.close()
    own.send()
    values = shown("model", "version")
    assert values["vllm:prompt_tokens_total"] == 3 + 2 * 4
    assert values["vllm:generation_tokens_total"] == 20 + 2 * 10
    observed = {name: metric.observed for (name, _), metric in FakeMetricFamily.all_metrics.items()}
    assert set(metrics_board.OBSERVATIONS) == {name for name, found in observed.items() if found}
    assert len(observed["vllm:time_to_first_token_seconds"]) == 3
    assert len(observed["vllm:time_per_output_token_seconds"]) == 19 + 2 * 9
    assert sorted(observed["vllm:request_prompt_tokens"]) == [3, 4, 4]
    assert sorted(observed["vllm:request_generation_tokens"]) == [10, 10, 20]
    assert sorted(observed["vllm:request_params_n"]) == [1, 2]
    assert sum(observed["vllm:time_per_output_token_seconds"]) <= sum(
        observed["vllm:e2e_request_latency_seconds"]
    )
    assert buckets_1_2_5(400) == (1, 2, 5, 10, 20, 50, 100, 200)


def test_vllm_backend_counts_no_choice_twice_and_no_first_token_that_never_came(tmp_path: Path) -> None:
    """The engine's last word on a choice that a stop string had ended here counted as a second end of it,
    while other choices went on; that on a request which had waited in vain counted as its first token."""
    own = MetricsBoard(fake_pb_utils, period_s=0.0)
    frontend = MortalFrontend(
        lambda: EngineCore(
            EngineConfig.from_mapping({"model": "fake", "block_size": 4, "max_num_seqs": 2}),
            RunnerExecutor(FakeRunner(256, 4, max_model_len=400)),
        ),
        on_output=VllmBackendMetrics(own, "m", "1", max_model_len=400).on_output,
    )
    try:
        params = SamplingParams(max_tokens=20, ignore_eos=True, n=2)
        sender = frontend.submit([[5, 6, 7]], params)
        late = frontend.submit([[9]], params, external_id="late")
        frontend.step()
        frontend.step()
        generation, _ = frontend.responder._requests.generations.values()
        ended = generation.processor.choices[0]
        ended.finish(FinishReason.STOP)  # as a stop string does
        frontend.responder._queue.mark(generation.handle, ended)
        frontend.engine.abort([f"{generation.message.request_id}#0", "t-1"], FinishReason.TIMEOUT)
        frontend.run([sender, late])
    finally:
        frontend.close()
    own.send()
    observed = {name: metric.observed for (name, _), metric in FakeMetricFamily.all_metrics.items()}
    assert shown("model", "version")["vllm:prompt_tokens_total"] == 2 * 3
    assert len(observed["vllm:time_to_first_token_seconds"]) == 2
    assert observed["vllm:request_generation_tokens"] == [20], "that of the other choice"
    assert len(observed["vllm:e2e_request_latency_seconds"]) == len(observed["vllm:request_params_n"]) == 1


# --- the board ---


def test_the_board_sends_by_itself_histograms_too(
    board: MetricsBoard, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_board, "PERIOD_S", 0.01)
    monkeypatch.setattr(metrics_board, "HISTOGRAM_PERIOD_S", 0.05)
    requests = RequestMetrics(board, "generator", "1")
    engine = EngineMetrics(board, directory, "generator", "1")
    board.start()
    try:
        name = 'quire_request_seconds_count{model="generator",version="1"}'
        for count in (1, 2):
            requests.ended(record())
            wait_until(lambda count=count: shown().get(name) == count)
        engine.update(stats(), info())
    finally:
        board.stop(WAIT_S)
    assert not board.is_alive()
    values = of_engine()
    assert values["quire_scheduled_tokens_total"] == 900, "what was left is sent"
    assert values["quire_requests_running"] == values['quire_kv_blocks{state="free"}'] == 0, "no longer true"


def test_a_server_without_metrics_serves_all_the_same(
    board: MetricsBoard, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> Any:
        raise fake_pb_utils.TritonModelException("metrics are disabled")

    refuse.COUNTER = refuse.GAUGE = ""  # type: ignore[attr-defined]
    monkeypatch.setattr(fake_pb_utils, "MetricFamily", refuse, raising=False)
    engine, requests = EngineMetrics(board, directory, "g", "1"), RequestMetrics(board, "g", "1")
    board.start()
    engine.update(stats(), info())
    board.join(WAIT_S)
    assert not board.is_alive()
    engine.update(stats(), info())
    requests.ended(record())
    board.stop(WAIT_S)


# --- five moments ---


class Shown:
    """A real scheduler whose figures are sent when a test asks for them."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.engine = FakeEngine(**options)
        self._board = MetricsBoard(fake_pb_utils)
        self._metrics = EngineMetrics(self._board, directory, "generator", "1")

    def check(self, **expected: Any) -> None:
        self._metrics.update(self.engine.scheduler.stats(), info())
        self._board.send()
        values = {name.removeprefix("quire_").removesuffix("_total"): v for name, v in of_engine().items()}
        waiting = {
            k.split('"')[1]: v for k, v in values.items() if k.startswith("requests_waiting_for{") and v
        }
        blocks = [values[f'kv_blocks{{state="{state}"}}'] for state in ("free", "cached", "in_use")]
        assert sum(waiting.values()) == values["requests_waiting"]
        assert sum(blocks) == self.engine.kv.num_blocks
        assert values["kv_use_ratio"] == pytest.approx(blocks[2] / sum(blocks), abs=0.001)
        told = {
            "running": values["requests_running"],
            "waiting": waiting,
            "blocks": tuple(blocks),
            "prefix": (values["prefix_queried_tokens"], values["prefix_cached_tokens"]),
            "preemptions": values["preemptions"],
            "batch": (values["batch_rows"], values["batch_tokens"]),
        }
        assert told == expected


@pytest.fixture
def moments(directory: Path) -> Iterator[Shown]:
    yield Shown(
        directory,
        num_blocks=8,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        cache={"enable_prefix_caching": True},
        tenants={"small": {"max_running": 1}},
    )


@pytest.mark.row("G2", clauses=("frozen",))
def test_five_moments_of_a_scripted_run(moments: Shown) -> None:
    engine = moments.engine
    prompt = list(range(1, 9))
    small = SchedulingParams(tenant="small")
    # Two requests have come, nothing was planned yet.
    engine.add("a", 8, 7, prompt=prompt)
    engine.add("b", 8, 7, prompt=[*prompt[:4], 30, 31, 32, 33], scheduling=small)
    moments.check(
        running=0, waiting={"step": 2}, blocks=(8, 0, 0), prefix=(0, 0), preemptions=0, batch=(0, 0)
    )
    # Both run; b found a's first block, in the very step that computes it: 8 + 4 tokens. Two more wait.
    engine.step()
    engine.add("c", 4, 2, scheduling=small)
    engine.add("d", 4, 2)
    engine.step()
    moments.check(
        running=2,
        waiting={"tenant": 1, "seats": 1},
        blocks=(3, 0, 5),
        prefix=(16, 4),
        preemptions=0,
        batch=(2, 2),
    )
    # Until they end with 7 tokens, d waits for a place and c for its tenant; then both run, and what a and b
    # left is cached: 15 tokens each make 3 full blocks, of which they share one.
    while not {"a", "b"} <= engine.reasons.keys():
        engine.step()
    engine.step()
    moments.check(running=2, waiting={}, blocks=(1, 5, 2), prefix=(24, 4), preemptions=0, batch=(2, 8))
    # They have ended. A prompt of 20 tokens takes a whole step's budget and a block that was cached; f waits.
    engine.run()
    engine.add("e", 20, 12)
    engine.add("f", 4, 12)
    engine.step()
    moments.check(
        running=1, waiting={"budget": 1}, blocks=(0, 4, 4), prefix=(44, 4), preemptions=0, batch=(1, 16)
    )
    # Both run until all 8 blocks are in use: f gives up two, one to e and one, which is full, to the cache.
    for _ in range(50):
        if engine.scheduler.roster.num_preemptions:
            break
        engine.step()
    moments.check(
        running=1, waiting={"blocks": 1}, blocks=(0, 1, 7), prefix=(48, 4), preemptions=1, batch=(1, 1)
    )
    engine.run()
    engine.check_outputs()


LETTERS = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate("abcdef")}))
LETTERS.decoder = decoders.Fuse()


def test_tokens_behind_a_stop_string_are_not_counted() -> None:
    """A step with drafts brings several, and what decides on the stop is one of the first."""
    own = MetricsBoard(fake_pb_utils, period_s=0.0)
    shows = VllmBackendMetrics(own, "m", "1", max_model_len=400)
    choice = OutputProcessor("r", 3, SamplingParams(stop=("bc",)), LETTERS, 0, StopAutomaton(("bc",)))
    handle: Any = SimpleNamespace(arrived_at=0.0, processors=[SimpleNamespace(choices=[choice])])
    for token_ids in ([0], [0, 1, 2, 3, 4]):
        output = EngineCoreOutput("r", token_ids)
        choice.process(output)
        shows.on_output(handle, choice, output)
    assert (choice.num_output_tokens, choice.finish_reason) == (4, "stop")
    own.send()
    assert shown("model", "version")["vllm:generation_tokens_total"] == 4
