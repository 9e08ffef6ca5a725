"""The cheap client of `benchmarks.path` against a real gRPC server, and the arithmetic, computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.path.client import Job, Measured, _receive
from benchmarks.path.run import Plan, Row, engine_options, figures, medians, run, table
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
    options, vocab_size = engine_options("fake", 20.0, [8], 16, 30, {})
    rows = medians(run(Plan(options, vocab_size, [8], 16, 30), 1, None, tmp_path))
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
    options, vocab_size = engine_options("fake", 10.0, [64], 64, 256, {})
    rows = medians(run(Plan(options, vocab_size, [64], 64, 256), 1, None, tmp_path))
    (ours,) = (row.figures for row in rows if row.who == "now")
    assert ours["host_us_per_token"] < 150
    assert ours["tokens_per_response"] > 2
