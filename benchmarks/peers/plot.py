"""The PNG of a result file: per shape and workload, every engine's share of the machine's limit."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.registry import PEERS
from benchmarks.peers.table import Document, cells, limit, tokens_per_s


def save_plot(document: Document, file: Path) -> None:
    """Writes the figure: one panel per shape, one group of bars per workload, bars with their tokens/s."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes, workloads = document["settings"]["shapes"], document["settings"]["workloads"]
    names = [name for name in PEERS if any(run["peer"] == name for run in document["runs"])]
    colours = {name: pyplot.get_cmap("tab10")(number % 10) for number, name in enumerate(names)}
    figure, panels = pyplot.subplots(
        len(shapes),
        1,
        figsize=(2 + 1.9 * len(workloads), 3.8 * len(shapes)),
        squeeze=False,
        layout="constrained",
    )
    width = 0.85 / max(1, len(names))
    for panel, shape in zip(panels[:, 0], shapes, strict=True):
        for at, workload in enumerate(workloads):
            top = limit(document, shape, workload, "bf16")
            found = cells(document, shape, workload)
            for number, name in enumerate(names):
                if name not in found:
                    continue
                rate = found[name].median(tokens_per_s)
                low, high = (100 * value / top for value in found[name].range(tokens_per_s))
                x, height = at + (number - (len(names) - 1) / 2) * width, 100 * rate / top
                panel.bar(
                    x,
                    height,
                    width,
                    color=colours[name],
                    edgecolor="black" if PEERS[name].is_ours else "none",
                )
                panel.vlines(x, low, high, color="black", linewidth=0.8)
                panel.annotate(
                    f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}",
                    (x, high),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=6,
                    rotation=90,
                )
        panel.axhline(100, color="black", linestyle="--", linewidth=0.8)
        panel.set_xticks(range(len(workloads)), workloads)
        panel.set_ylabel("% of the bf16 limit")
        panel.set_title(f"{shape}: output tokens/s over each bar", fontsize=9)
        panel.margins(y=0.12)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[name]) for name in names]
    figure.legend(handles, names, loc="outside upper center", ncols=min(6, max(1, len(names))), fontsize=8)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
