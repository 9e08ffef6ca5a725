"""Turns a result file into tables: medians, limits, ratios.

A run is clean when others had at most 10 % of the CPU. Figures are medians over the clean runs; where there
is none, the least disturbed run stands for them and is a lower bound. Ratios are taken within a round,
between runs minutes apart, and their median is told.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.checkpoints import SHAPES
from benchmarks.peers.limits import Roofline, limit_seconds
from benchmarks.peers.registry import EDGE_TARGETS, PEERS, TARGETS
from benchmarks.peers.workloads import WORKLOADS
from benchmarks.report import table

CLEAN = 0.10

Document = Mapping[str, Any]
RunRecord = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One peer on one workload and shape."""

    runs: Sequence[RunRecord]

    @property
    def counted(self) -> list[RunRecord]:
        """The clean runs, else the least disturbed one."""
        clean = [run for run in self.runs if is_clean(run)]
        return clean or [min(self.runs, key=lambda run: run["others_cpu"])]

    @property
    def num_clean(self) -> int:
        return sum(map(is_clean, self.runs))

    def median(self, figure: Callable[[RunRecord], float]) -> float:
        return statistics.median(map(figure, self.counted))

    def range(self, figure: Callable[[RunRecord], float]) -> tuple[float, float]:
        values = list(map(figure, self.counted))
        return min(values), max(values)


def is_clean(run: RunRecord) -> bool:
    return bool(run["others_cpu"] <= CLEAN)


def tokens_per_s(run: RunRecord) -> float:
    """Output tokens over the whole run."""
    return float(run["num_output_tokens"] / run["wall_s"])


def total_tokens_per_s(run: RunRecord) -> float:
    """Prompt tokens counted too, shared ones once per request."""
    return float((run["num_prompt_tokens"] + run["num_output_tokens"]) / run["wall_s"])


def ttft(run: RunRecord) -> float:
    """Mean over the requests, from the run's start."""
    return statistics.fmean(run["first_token_s"])


def tpot(run: RunRecord) -> float:
    """Mean over the requests of the time per token after their first, seconds."""
    outputs = run["num_outputs"]
    pairs = zip(run["first_token_s"], run["end_s"], outputs, strict=True)
    return statistics.fmean((end - first) / (count - 1) for first, end, count in pairs if count > 1)


def cells(document: Document, shape: str, workload: str) -> dict[str, Cell]:
    """Cells by peer, in the registry's order; peers without a run are left out."""
    found = {}
    for peer in PEERS:
        runs = [
            run
            for run in document["runs"]
            if (run["shape"], run["workload"], run["peer"]) == (shape, workload, peer)
        ]
        if runs:
            found[peer] = Cell(runs)
    return found


def ratio(ours: Cell, theirs: Cell) -> float:
    """Ours over theirs in tokens per second: the median over rounds that both were counted in.

    Where no round has both, the ratio of the medians.
    """
    by_round = {run["round"]: tokens_per_s(run) for run in theirs.counted}
    ratios = [tokens_per_s(run) / by_round[run["round"]] for run in ours.counted if run["round"] in by_round]
    return statistics.median(ratios) if ratios else ours.median(tokens_per_s) / theirs.median(tokens_per_s)


def limit(document: Document, shape: str, workload: str, precision: str) -> float:
    """Output tokens per second at the machine's limit."""
    work = WORKLOADS[workload].scaled(document["settings"]["scale"])
    roofline = Roofline.best(document["roofline"])
    return work.num_output_tokens / limit_seconds(work, SHAPES[shape], roofline, precision)


_COLUMNS = (
    *("case", "peer", "weights", "out tok/s", "min..max", "total tok/s", "TTFT s", "TPOT ms"),
    *("GiB", "runs (clean)", "others' CPU %", "% of limit", "ours / this"),
)


def markdown(document: Document) -> str:
    """Everything of a result file that a reader needs: machine, tables per shape, summary, notes."""
    parts = [machine_note(document)]
    for shape in document["settings"]["shapes"]:
        parts += [
            f"### {shape}",
            summary_table(document, shape),
            edge_note(document, shape),
            shape_table(document, shape),
        ]
    parts.append(notes(document))
    return "\n\n".join(part for part in parts if part) + "\n"


def shape_table(document: Document, shape: str) -> str:
    """One line per workload and peer, the limit first."""
    rows = []
    for workload in document["settings"]["workloads"]:
        found = cells(document, shape, workload)
        if not found:
            continue
        top = limit(document, shape, workload, "bf16")
        rows.append([workload, "*limit*", "bf16", f"{top:.1f}", *[""] * 7, "100", ""])
        for name, cell in sorted(found.items(), key=lambda item: -item[1].median(tokens_per_s)):
            precision = PEERS[name].precision
            rate = cell.median(tokens_per_s)
            low, high = cell.range(tokens_per_s)
            before = PEERS[name].before
            own = found.get(before) if before else _ours(found, precision)
            rows.append(
                [
                    workload,
                    f"**{name}**" if PEERS[name].is_ours else name,
                    precision,
                    f"{rate:.1f}",
                    f"{low:.1f}..{high:.1f}",
                    f"{cell.median(total_tokens_per_s):.1f}",
                    f"{cell.median(ttft):.2f}",
                    f"{cell.median(tpot) * 1e3:.1f}",
                    f"{max(run['rss_gib'] for run in cell.runs):.1f}",
                    f"{len(cell.runs)} ({cell.num_clean})",
                    f"{cell.median(lambda run: run['others_cpu']) * 100:.1f}",
                    f"{100 * rate / limit(document, shape, workload, precision):.0f}",
                    "" if own is None or PEERS[name].is_ours else f"{ratio(own, cell):.2f}",
                ]
            )
    return table(_COLUMNS, rows)


def best_peer(found: Mapping[str, Cell], precision: str) -> tuple[str, Cell] | None:
    """The fastest engine at a precision that is not ours, now or before."""
    others = [
        item
        for item in found.items()
        if PEERS[item[0]].precision == precision and not (PEERS[item[0]].is_ours or PEERS[item[0]].before)
    ]
    return max(others, key=lambda item: item[1].median(tokens_per_s), default=None)


def _ours(found: Mapping[str, Cell], precision: str) -> Cell | None:
    """The fastest of ours at a precision."""
    ours = [c for name, c in found.items() if PEERS[name].is_ours and PEERS[name].precision == precision]
    return max(ours, key=lambda cell: cell.median(tokens_per_s), default=None)


def summary_table(document: Document, shape: str) -> str:
    """Ours against the best peer per workload and precision."""
    rows = []
    for workload in document["settings"]["workloads"]:
        found = cells(document, shape, workload)
        for precision in ("bf16", "int8", "int4"):
            ours, best = _ours(found, precision), best_peer(found, precision)
            if ours is None or best is None:
                continue
            rate = ours.median(tokens_per_s)
            target = TARGETS.get(workload) if precision == "bf16" else None
            rows.append(
                [
                    workload,
                    precision,
                    f"{rate:.1f}",
                    f"{100 * rate / limit(document, shape, workload, precision):.0f}",
                    f"{best[0]}: {best[1].median(tokens_per_s):.1f}",
                    f"{ratio(ours, best[1]):.2f}",
                    "" if target is None else f"{target:.2f}",
                ]
            )
    columns = ("case", "weights", "ours, out tok/s", "% of limit", "best peer", "ratio", "target")
    return table(columns, rows) if rows else ""


def edge_note(document: Document, shape: str) -> str:
    """Small models in eight bits: what is asked for and what was reached; empty where it was not measured."""
    lines = []
    for (name, workload, peer), target in EDGE_TARGETS.items():
        cell = cells(document, name, workload).get(peer) if name == shape else None
        if cell is not None:
            rate = cell.median(tokens_per_s)
            verdict = "reached" if rate >= target else "missed"
            lines.append(f"{workload} by {peer}: {rate:.1f} tokens/s, target {target:g}: {verdict}.")
    return " ".join(lines)


def figures(document: Document) -> dict[str, dict[str, float]]:
    """Medians of our own engines, for the history, by "shape workload engine"."""
    found = {}
    for shape in document["settings"]["shapes"]:
        for workload in document["settings"]["workloads"]:
            for name, cell in cells(document, shape, workload).items():
                if PEERS[name].is_ours:
                    found[f"{shape} {workload} {name}"] = {
                        "tokens_per_s": round(cell.median(tokens_per_s), 1),
                        "ttft_p50_ms": round(cell.median(ttft) * 1e3, 2),
                        "itl_p50_ms": round(cell.median(tpot) * 1e3, 2),
                    }
    return found


def agreement(document: Document) -> dict[str, tuple[int, int]]:
    """(requests whose first output token is ours, requests both answered) by bf16 peer."""
    ours = {}
    for run in document["runs"]:
        if run["peer"] == "quire":
            ours[run["shape"], run["workload"], run["round"]] = [tokens[0] for tokens in run["first_tokens"]]
    counts: dict[str, tuple[int, int]] = {}
    for run in document["runs"]:
        expected = ours.get((run["shape"], run["workload"], run["round"]))
        if expected is None or PEERS[run["peer"]].precision != "bf16" or run["peer"] == "quire":
            continue
        same, total = counts.get(run["peer"], (0, 0))
        same += sum(tokens[0] == token for tokens, token in zip(run["first_tokens"], expected, strict=True))
        counts[run["peer"]] = same, total + len(expected)
    return counts


def machine_note(document: Document) -> str:
    """The machine and its roofline, in a few lines."""
    env, roofline = document["environment"], document["roofline"]
    facts = env.get("lscpu", {})
    best = Roofline.best(roofline)
    reads = {count: [one["read_gb_s"][count] for one in roofline] for count in roofline[0]["read_gb_s"]}
    rates = ", ".join(
        f"{max(values):.1f} GB/s with {count} thread{'' if count == '1' else 's'} (worst {min(values):.1f})"
        for count, values in reads.items()
    )
    worst = min(one["matrix_gflop_s"] for one in roofline)
    return (
        f"{env['cpu']} ({facts.get('Hypervisor vendor', 'no hypervisor')}), "
        f"{env['usable_cores']} of {env['cores']} cores, "
        f"L2 {facts.get('L2 cache', '?')}, L3 {facts.get('L3 cache', '?')}, {env['memory_gib']} GiB, "
        f"{' '.join(env.get('cpu_flags', []))}. {env['date']}, commit {(env['commit'] or 'unknown')[:12]}"
        f"{' (changed)' if env['dirty'] else ''}, load average before {env['loadavg'][0]:g}.\n\n"
        f"Roofline, measured {len(roofline)} times between the rounds: reads {rates}; bf16 products "
        f"{best.matrix_gflop_s:.0f} GFLOP/s (worst {worst:.0f}; {roofline[0]['matrix_method']})."
    )


def notes(document: Document) -> str:
    """Peers that did not run and why, versions, handicaps, agreement of outputs."""
    lines = [f"- {name}: **not measured**: {reason}" for name, reason in document["skipped"].items()]
    same = agreement(document)
    for name, engine in document["engines"].items():
        versions = ", ".join(f"{package} {version}" for package, version in engine["versions"].items())
        line = f"- {name}: {versions}; {PEERS[name].notes}"
        if name in same:
            line += f"; first token as ours in {same[name][0]} of {same[name][1]} requests"
        lines.append(line)
    scale = document["settings"]["scale"]
    if scale != 1.0:
        lines.append(f"- **all lengths x {scale:g}**: a trial, no result")
    return "\n".join(lines)
