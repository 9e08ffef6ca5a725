"""Draws the panels of the Grafana dashboard from what a Prometheus has recorded, for the documents.

Grafana itself is in no package registry that tests may use: panels and queries are those of the dashboard, a
real Prometheus answers them, and matplotlib draws.

    python -m benchmarks.dashboard --prometheus http://127.0.0.1:9090 --seconds 120 --out dashboard.png
"""

from __future__ import annotations

import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

DASHBOARD = (
    Path(__file__).resolve().parent.parent / "docker" / "kubernetes" / "quire" / "files" / "dashboard.json"
)


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    return found


def targets(
    panel: dict[str, Any], *, rate_interval: str, service: str = ".*", price: str = "1"
) -> Iterator[tuple[str, str]]:
    """Name and expression of each of a panel's queries, with Grafana's variables replaced."""
    values = {"__rate_interval": rate_interval, "service": service, "price": price}
    for target in panel["targets"]:
        expr = re.sub(r"\$(\w+)", lambda mark: values[mark[1]], target["expr"])
        yield target["legendFormat"], expr


def ask(prometheus: str, path: str, **values: Any) -> Any:
    """What Prometheus' HTTP API answers; urllib.error.HTTPError for a query that it cannot parse."""
    url = f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(values)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())["data"]


@click.command()
@click.option("--prometheus", default="http://127.0.0.1:9090", show_default=True)
@click.option("--seconds", default=600.0, show_default=True, help="Of the past, to be shown.")
@click.option("--rate-interval", default="15s", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(prometheus: str, seconds: float, rate_interval: str, out: Path) -> None:
    """Draws all panels into one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown, end = panels(), time.time()
    figure, axes = pyplot.subplots(
        math.ceil(len(shown) / 3), 3, figsize=(15, 2.6 * math.ceil(len(shown) / 3))
    )
    for panel, axis in zip(shown, axes.flat, strict=False):
        for legend, expr in targets(panel, rate_interval=rate_interval):
            found = ask(
                prometheus,
                "query_range",
                query=expr,
                start=end - seconds,
                end=end,
                step=max(seconds / 200, 1),
            )
            for series in found["result"]:
                name = re.sub(
                    r"\{\{(\w+)\}\}", lambda mark, s=series: s["metric"].get(mark[1], "") or "-", legend
                )
                times, values = zip(
                    *((at - end, float(value)) for at, value in series["values"]), strict=True
                )
                axis.plot(times, values, label=name.strip(), linewidth=1)
        axis.set_title(f"{panel['title']} ({panel['fieldConfig']['defaults']['unit']})", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=6, loc="upper left")
    figure.tight_layout()
    figure.savefig(out, dpi=80)


if __name__ == "__main__":
    main()
