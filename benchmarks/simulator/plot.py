"""Plots: what each request of a trace did in every step."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import InvalidArgumentError, QuireError

WAITING, PREFILL, DECODE, PREEMPTED = "waiting", "prefill", "decode", "preempted"
COLOURS = {WAITING: "#d9d9d9", PREFILL: "#1f77b4", DECODE: "#2ca02c", PREEMPTED: "#d62728"}
END_COLOUR = "#222222"
DEFAULT_MAX_REQUESTS = 500

_ROW_HEIGHT, _LABEL_WIDTH, _PLOT_WIDTH = 14, 170, 1100  # px


@dataclass
class Bar:
    """States of one request over time."""

    request_id: str
    arrival: float
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """(state, from, to), in order and without gaps."""
    reason: str = ""
    """The reason why it ended; empty: it had not."""
    num_preemptions: int = 0


def timeline(records: Iterable[dict[str, Any]], *, by_step: bool = False) -> list[Bar]:
    """The requests of a trace in the order of their arrival.

    A request without a row in a step stays in the state it was in; choices with rows of their own are bars
    of their own.

    Args:
        by_step: one unit is a step (counted from 0) instead of a second since the first record.
    """
    steps = [record for record in records if "scheduled" in record]
    origin = steps[0]["time"] if steps else 0.0
    bars: dict[str, Bar] = {}
    prompts: dict[str, int] = {}
    states: dict[str, tuple[str, float]] = {}

    def change(request_id: str, state: str, at: float) -> None:
        old = states.get(request_id)
        if old is None or old[0] != state:
            if old is not None and at > old[1]:
                bars[request_id].spans.append((*old, at))
            states[request_id] = state, at

    for index, record in enumerate(steps):
        begin = float(index) if by_step else record["time"] - origin
        end = index + 1.0 if by_step else record["end"] - origin
        for entry in record["arrivals"]:
            at = begin if by_step else entry["time"] - origin
            bars[entry["id"]], prompts[entry["id"]] = Bar(entry["id"], at), entry["prompt"]
            change(entry["id"], WAITING, at)
        for request_id in record["preempted"]:
            if request_id in bars:
                bars[request_id].num_preemptions += 1
                change(request_id, PREEMPTED, begin)
        for request_id, computed, count in record["scheduled"]:
            if request_id not in bars:  # a choice
                bars[request_id] = Bar(request_id, begin)
                prompts[request_id] = prompts.get(request_id.rpartition("#")[0], 0)
            is_prefill = count > 1 or computed < prompts[request_id]
            change(request_id, PREFILL if is_prefill else DECODE, begin)
        for entry in record["finished"]:
            if entry["id"] in states:
                state, since = states.pop(entry["id"])
                bars[entry["id"]].spans.append((state, since, max(since, end)))
                bars[entry["id"]].reason = entry["reason"]
    if steps:
        last = float(len(steps)) if by_step else steps[-1]["end"] - origin
        for request_id, (state, since) in states.items():
            bars[request_id].spans.append((state, since, max(since, last)))
    return sorted(bars.values(), key=lambda bar: bar.arrival)


def plot_timeline(
    records: Sequence[dict[str, Any]],
    path: Path,
    *,
    by_step: bool = False,
    max_requests: int = DEFAULT_MAX_REQUESTS,
) -> int:
    """Writes the timeline of a trace as .png or as one self-contained .html file.

    Args:
        max_requests: most requests drawn, the first that arrived.

    Returns:
        How many requests are left out.

    Raises:
        InvalidArgumentError: the name ends otherwise, or the trace holds no steps.
        QuireError: a .png is wanted and matplotlib is not installed.
    """
    bars = timeline(records, by_step=by_step)
    if not bars:
        raise InvalidArgumentError("trace", "there are no requests in it")
    shown = bars[:max_requests]
    if path.suffix == ".html":
        path.write_text(_html(shown, len(bars) - len(shown), by_step=by_step), encoding="utf-8")
    elif path.suffix == ".png":
        _png(shown, path, by_step=by_step)
    else:
        raise InvalidArgumentError("out", f"must end in .png or .html, got {path.name!r}")
    return len(bars) - len(shown)


def _png(bars: list[Bar], path: Path, *, by_step: bool) -> None:
    try:
        import matplotlib
    except ImportError:
        raise QuireError("plots as .png need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(14, min(100, 1.5 + 0.14 * len(bars))))
    for state, colour in COLOURS.items():
        axes.broken_barh([(0, 0)], (0, 0), color=colour, label=state)  # for the legend
    for row, bar in enumerate(bars):
        spans = [(begin, end - begin) for _, begin, end in bar.spans]
        colours = [COLOURS[state] for state, _, _ in bar.spans]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colours)
    ends = [(bar.spans[-1][2], row) for row, bar in enumerate(bars) if bar.reason]
    axes.plot([x for x, _ in ends], [y for _, y in ends], "|", color=END_COLOUR, label="finished")
    axes.set_yticks(range(len(bars)), [bar.request_id for bar in bars], fontsize=5)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlabel("step" if by_step else "seconds")
    axes.legend(loc="upper right", fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _html(bars: list[Bar], num_left_out: int, *, by_step: bool) -> str:
    unit = "step" if by_step else "s"
    last = max(bar.spans[-1][2] for bar in bars)
    first = min(bar.arrival for bar in bars)
    scale = _PLOT_WIDTH / max(last - first, 1e-9)
    height = _ROW_HEIGHT * len(bars)
    parts = []
    for row, bar in enumerate(bars):
        y, name = row * _ROW_HEIGHT, html.escape(bar.request_id)
        parts.append(f'<text x="{_LABEL_WIDTH - 6}" y="{y + 10}" text-anchor="end">{name}</text>')
        for state, begin, end in bar.spans:
            x, width = _LABEL_WIDTH + (begin - first) * scale, max(0.4, (end - begin) * scale)
            parts.append(
                f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="{_ROW_HEIGHT - 4}" '
                f'class="{state}"><title>{name}: {state} {begin:.4g} to {end:.4g} {unit}</title></rect>'
            )
        if bar.reason:
            x = _LABEL_WIDTH + (bar.spans[-1][2] - first) * scale
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="2" height="{_ROW_HEIGHT}" class="finished">'
                f"<title>{name}: {html.escape(bar.reason)}, {bar.num_preemptions} preemptions</title></rect>"
            )
    styles = "".join(f".{state}{{fill:{colour}}}" for state, colour in COLOURS.items())
    legend = " ".join(
        f'<span style="background:{colour}">&nbsp;&nbsp;&nbsp;</span> {state}'
        for state, colour in {**COLOURS, "finished": END_COLOUR}.items()
    )
    left_out = f"; {num_left_out} later requests are left out" if num_left_out else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Quire trace</title>'
        f"<style>body{{font:12px sans-serif}}svg text{{font:10px monospace}}{styles}"
        f".finished{{fill:{END_COLOUR}}}</style></head><body>"
        f"<p>{legend}</p><p>{len(bars)} requests, {first:.4g} to {last:.4g} {unit}{left_out}</p>"
        f'<svg width="{_LABEL_WIDTH + _PLOT_WIDTH + 10}" height="{height}">{"".join(parts)}</svg>'
        "</body></html>\n"
    )
