"""The arithmetic of the benchmarks, on exports small enough to be computed by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest

from benchmarks import history, load, machine, perf_analyzer, report
from benchmarks.perf_analyzer import parse_export
from benchmarks.report import SLO, RequestRecord, Row, percentile, summarize
from tests.rows import ROOT
from tests.unit.fake_kserve import FakeKServe, read_inputs

MS = 1_000_000
T0 = 1_795_187_335_337_698_478
"""A send time in nanoseconds as perf_analyzer writes them; beyond the exact integers of a float."""


def request(at: int, *responses: int, outputs: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "timestamp": T0 + at * MS,
        "response_timestamps": [T0 + r * MS for r in responses],
    }
    if outputs is not None:
        entry["response_outputs"] = outputs
    return entry


def export(*requests: dict[str, Any]) -> dict[str, Any]:
    return {"experiments": [{"experiment": {"mode": "concurrency", "value": 1}, "requests": list(requests)}]}


# Two requests. The first: sent at 0 ms, responses at 10, 30, 60 with 1, 2 and 2 tokens. The second: sent at
# 20 ms, responses at 60, 100 with 1 token each.
DOCUMENT = export(
    request(0, 10, 30, 60, outputs=[{"output_ids": 5}, {"output_ids": [5, 6]}, {"output_ids": [7, 8]}]),
    request(20, 60, 100, outputs=[{"output_ids": 5}, {"output_ids": 9}]),
)


@pytest.mark.row("G24")
def test_summary_of_an_export_computed_by_hand() -> None:
    summary = summarize(parse_export(DOCUMENT), slo=SLO(ttft=0.010, itl=0.040))
    assert summary["requests"] == summary["completed"] == 2
    assert summary["duration_s"] == pytest.approx(0.100)  # first send at 0, last response at 100 ms
    assert summary["output_tokens"] == 7
    assert summary["tokens_per_s"] == pytest.approx(70)
    assert summary["responses_per_s"] == pytest.approx(50)
    assert summary["requests_per_s"] == pytest.approx(20)
    assert summary["tokens_per_response"] == pytest.approx(1.4)
    # TTFT 10 and 40 ms; p90 = 10 + 0.9 * 30.
    assert summary["ttft_s"] == pytest.approx({"mean": 0.025, "p50": 0.025, "p90": 0.037, "p99": 0.0397})
    # Gaps 20, 30, 40 ms; p90 at rank 1.8, p99 at rank 1.98.
    assert summary["itl_s"] == pytest.approx({"mean": 0.030, "p50": 0.030, "p90": 0.038, "p99": 0.0398})
    # 50 ms for the 4 tokens after the first response, 40 ms for 1.
    assert summary["tpot_s"]["mean"] == pytest.approx((0.0125 + 0.040) / 2)
    assert summary["latency_s"]["p50"] == pytest.approx(0.070)  # 60 and 80 ms
    # Only the first meets a TTFT of 10 ms.
    assert summary["goodput"]["share"] == 0.5
    assert summary["goodput"]["requests_per_s"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("samples", "q", "expected"),
    [
        ([7], 99, 7),
        ([1, 2], 50, 1.5),
        ([4, 1, 3, 2], 50, 2.5),
        (list(range(101)), 99, 99),
        ([1, 2, 3], 100, 3),
    ],
)
def test_percentile(samples: list[float], q: float, expected: float) -> None:
    assert percentile(samples, q) == pytest.approx(expected)


@pytest.mark.parametrize("count", [0, 3, 1945655314])
def test_tokens_are_the_output_ids_and_bare_finals_do_not_count(count: int) -> None:
    """2.50 shows memory's contents for a number that a response does not hold: any value, small ones too."""
    ids: list[dict[str, Any]] = [{"output_ids": [262, 49]}, {"output_ids": 50}, {"output_ids": []}]
    outputs = [{"num_output_tokens": count, **output} for output in ids]
    (record,) = parse_export(export(request(0, 10, 20, 30, outputs=outputs)))
    assert record.response_tokens == (2, 1)
    assert record.latency == pytest.approx(0.020)


def test_tokens_without_any_count_come_from_max_tokens() -> None:
    (record,) = parse_export(export(request(0, 10, 20, 30)), max_tokens=8)
    assert record.response_tokens == (2, 2, 4)


def test_nanoseconds_are_not_rounded() -> None:
    document = export({"timestamp": T0, "response_timestamps": [T0 + 1, T0 + 3]})
    (record,) = parse_export(document, max_tokens=2)
    assert record.ttft == pytest.approx(1e-9, rel=1e-9)
    assert record.itls == pytest.approx([2e-9], rel=1e-9)


def test_failed_and_empty_requests_count_as_errors_only() -> None:
    good = RequestRecord(0.0, (0.1,), (1,))
    failed = RequestRecord(0.0, (0.05,), (1,), error="UNAVAILABLE")
    summary = summarize([good, failed, RequestRecord(0.0, (), ())], slo=SLO(1, 1))
    assert summary["errors"] == {"EMPTY": 1, "UNAVAILABLE": 1}
    assert summary["completed"] == 1 and summary["output_tokens"] == 1
    assert summary["itl_s"] is None and summary["tpot_s"] is None
    assert summary["goodput"]["share"] == pytest.approx(1 / 3)
    assert "completed" in summarize([failed]) and "tokens_per_s" not in summarize([failed])


def test_table_shows_the_median_repeat_and_the_spread() -> None:
    row = Row(
        "x1", "generator", [{**summarize(parse_export(DOCUMENT)), "tokens_per_s": v} for v in (90, 70, 80)]
    )
    header, _, line = report.markdown_table([row]).splitlines()
    cells = dict(zip(header.split("|"), line.split("|"), strict=True))
    assert cells[" tok/s "].strip() == "80.0"
    assert cells[" ±% "].strip() == "12"  # (90 - 70) / 80 / 2
    assert cells[" TTFT p50 "].strip() == "25.0"


def test_table_of_a_run_in_which_everything_failed() -> None:
    row = Row("x1", "chat", [summarize([RequestRecord(0, (), (), "UNAVAILABLE")])])
    assert report.markdown_table([row]).splitlines()[2].startswith("| chat | x1 | 1 | 1 | - |")


def test_saved_files(tmp_path: Path) -> None:
    env = machine.environment()
    text = report.save(tmp_path, [Row("x1", "m", [summarize(parse_export(DOCUMENT))])], env, {"tool": "t"})
    document = json.loads((tmp_path / "summary.json").read_text())
    assert document["rows"][0]["median"]["output_tokens"] == 7
    assert document["environment"]["usable_cores"] >= 1
    assert env["cpu"] in text and "load average" in text


def test_folders_of_the_same_second_do_not_collide(tmp_path: Path) -> None:
    assert len({report.output_directory(tmp_path) for _ in range(3)}) == 3


# --- perf_analyzer's binary ---


@pytest.mark.row("G24")
def test_perf_analyzer_binary_runs_here(tmp_path: Path) -> None:
    libraries = perf_analyzer.library_path(tmp_path)
    words = perf_analyzer.check_binary(perf_analyzer.find_binary(), libraries)
    assert "Perf Analyzer" in words
    assert {p.name for p in tmp_path.iterdir()} == set(perf_analyzer.NEEDED_LIBRARIES)
    assert perf_analyzer.library_path(tmp_path) == libraries  # existing links are fine


def test_perf_analyzer_starts_by_hand() -> None:
    """The binary of the wheel itself does not: the loader finds no libb64.so.0d."""
    command = [sys.executable, "-m", "benchmarks.perf_analyzer", "--version"]
    done = subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.PIPE, text=True)
    assert "Perf Analyzer" in done.stderr


def test_links_follow_a_reinstalled_wheel(tmp_path: Path) -> None:
    libs = tmp_path / "site" / "nvidia_pytriton.libs"
    libs.mkdir(parents=True)
    for generation in ("aaa", "bbb"):
        for old in libs.iterdir():
            old.unlink()
        (libs / f"libb64-{generation}.so.0d").touch()
        perf_analyzer.library_path(tmp_path / "cache", tmp_path / "site")
        assert (tmp_path / "cache" / "libb64.so.0d").readlink().name == f"libb64-{generation}.so.0d"


def test_binary_that_does_not_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "perf_analyzer"
    broken.write_text("#!/bin/sh\necho 'libb64.so.0d: cannot open' >&2; exit 127\n")
    broken.chmod(0o755)
    with pytest.raises(click.ClickException, match=r"libb64\.so\.0d: cannot open"):
        perf_analyzer.check_binary(broken, "")


def run_with_exports(folder: Path, monkeypatch: pytest.MonkeyPatch, *exports: bytes) -> list[RequestRecord]:
    """What `run` makes of two requests where perf_analyzer writes these exports, the last one ever again."""
    for number, content in enumerate(exports):
        (folder / f"{number}.json").write_bytes(content)
    binary = folder / "perf_analyzer"
    binary.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")"\n'
        'if [ -e out.json ]; then echo "Path must not already exist"; exit 1; fi\n'
        f"echo x >> tries; n=$(($(wc -l < tries) - 1)); last={len(exports) - 1}\n"
        'cp "$((n < last ? n : last)).json" out.json\n'
    )
    binary.chmod(0o755)
    monkeypatch.setattr(perf_analyzer, "find_binary", lambda: binary)
    monkeypatch.setattr(perf_analyzer, "library_path", lambda: "")
    return perf_analyzer.run("", "m", 1, 2, perf_analyzer.Workload(), export=folder / "out.json")


def test_a_cut_export_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """perf_analyzer refuses a file that exists, so the attempt after an empty export once failed at that; and
    an export cut at 64 KiB ended `make bench` with a JSON error, since only empty ones were tried again."""
    long = json.dumps({"version": "ü" * 2**16, **DOCUMENT}, ensure_ascii=False).encode()
    assert len(run_with_exports(tmp_path, monkeypatch, b"", long[: 2**16], long)) == 2
    assert (tmp_path / "tries").read_text().count("x") == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps(DOCUMENT).encode()[:-1], "no whole export in 3 attempts; the last has [0-9]{3} bytes"),
        (json.dumps(export(request(0, 10))).encode(), "lost requests: its export has 1 of 2"),
    ],
)
def test_an_export_that_is_not_whole_is_an_error(
    content: bytes, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(perf_analyzer.PerfAnalyzerError, match=words):
        run_with_exports(tmp_path, monkeypatch, content)


def test_input_data_has_fixed_lengths_and_different_prompts() -> None:
    entries = perf_analyzer.Workload(max_tokens=12, num_prompts=20).input_data()["data"]
    assert all(e["max_tokens"] == [12] and e["ignore_eos"] == [True] for e in entries)
    assert len({e["text_input"]["content"][0] for e in entries}) == 20
    assert all(e["text_input"]["shape"] == [1] for e in entries)


# --- load generator ---


def test_poisson_arrivals_have_the_rate_and_are_reproducible() -> None:
    mix = load.Mix(output_tokens=(3, 5), seed=4)
    arrivals = mix.arrivals(4000, rate=50.0)
    gaps = [b.at - a.at for a, b in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 50, rel=0.1)
    assert deviation == pytest.approx(mean, rel=0.1)  # exponential
    assert {a.max_tokens for a in arrivals} == {3, 4, 5}
    assert mix.arrivals(4000, rate=50.0) == arrivals


def test_trace_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at": 0.5, "prompt_tokens": 3, "max_tokens": 2}\n\n{"at": 0, "prompt": "hi", "max_tokens": 1}\n'
    )
    assert load.read_trace(path) == [load.Arrival(0, "hi", 1), load.Arrival(0.5, "1 1 1 ", 2)]
    path.write_text('{"at": 0.5}\n')
    with pytest.raises(click.ClickException, match=r"trace\.jsonl:1: KeyError 'prompt_tokens'"):
        load.read_trace(path)


@pytest.mark.row("G24", clauses=("load",))
@pytest.mark.parametrize("kind", [{"rate": 200.0}, {"concurrency": 3}])
def test_load_over_the_client(tmp_path: Path, kind: dict[str, Any]) -> None:
    trace = tuple(load.Arrival(i / 100, f"tokens {i + 1}", 9) for i in range(6))
    bad = load.Arrival(0.06, "error UNAVAILABLE queue full", 9)
    with FakeKServe() as server:
        plan = load.Plan("generator", trace=(*trace, bad), slo=SLO(10, 10), **kind)
        (row,) = load.run(server.url, plan, tmp_path, repeats=2, warmup=0)
    assert len(row.summaries) == 2
    for summary in row.summaries:
        assert summary["requests"] == 7 and summary["errors"] == {"UNAVAILABLE": 1}
        assert summary["output_tokens"] == 21
        assert summary["goodput"]["share"] == pytest.approx(6 / 7)
    assert len(list(tmp_path.glob("load-*.json"))) == 1


def test_each_tenant_and_priority_of_a_trace_has_a_row(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"at": 0, "prompt": "tokens 4", "max_tokens": 9}
    bad = {**line, "prompt": "error UNAVAILABLE queue full", "tenant": "light", "priority": -3}
    lines = [line, line, {**line, "tenant": "light", "priority": -3}, bad]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    with FakeKServe() as server:
        plan = load.Plan("generator", trace=tuple(load.read_trace(path)))
        rows = load.run(server.url, plan, tmp_path, repeats=1, warmup=0)
    sent = [read_inputs(request) for request in server.requests]
    classes = [(one.get("tenant"), one.get("request_priority")) for one in sent]
    assert classes.count(([b"light"], [-3])) == classes.count((None, None)) == 2
    assert [row.load for row in rows] == ["trace", "trace, others", "trace, tenant light, priority -3"]
    counts = [(row.summaries[0]["requests"], row.summaries[0]["completed"]) for row in rows]
    assert counts == [(4, 3), (2, 2), (2, 1)]


# --- history ---


def line(tokens: float, ttft: float, machine: str = "cpu x2") -> dict[str, Any]:
    figures = {"tokens_per_s": tokens, "ttft_p50_ms": ttft, "itl_p50_ms": None, "latency_p99_ms": 50.0}
    return {
        "date": "2026-11-20T00:00:00",
        "commit": "c" * 40,
        "dirty": False,
        "machine": machine,
        "figures": {"generator x1": figures},
    }


@pytest.mark.row("G24")
def test_history_flags_what_moved_on_the_same_machine() -> None:
    lines = [line(100, 10), line(500, 1, "another"), line(104, 10), line(102, 10), line(80, 8)]
    found = {c.figure: c for c in history.changes(lines, threshold=10)}
    assert set(found) == {"tokens_per_s", "ttft_p50_ms"}
    assert found["tokens_per_s"].percent == pytest.approx(-21.57, abs=0.01)  # against the median, 102
    assert found["tokens_per_s"].is_worse
    assert not found["ttft_p50_ms"].is_worse
    assert history.changes(lines, threshold=25) == []
    assert history.changes(lines[:1], threshold=1) == []


def test_history_file(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert history.read(path) == []
    env = machine.environment()
    for _ in range(2):
        history.append(
            history.entry([Row("x1", "generator", [summarize(parse_export(DOCUMENT))])], env), path
        )
    lines = history.read(path)
    assert lines[1]["figures"]["generator x1"]["tokens_per_s"] == 70
    assert lines[1]["figures"]["generator x1"]["ttft_p50_ms"] == 25
    assert len(history.table(lines).splitlines()) == 4
