"""Display of `quire-client top`: a frame of text, made from one or two scrapes of a server's /metrics."""

from __future__ import annotations

import math

from quire_client._metrics import Interval, Scrape
from quire_client._terminal import without_controls

_BAR = 20


def frame(now: Scrape, before: Scrape | None, address: str) -> str:
    """Returns a frame as text: running, waiting and cached per engine, tokens and latencies per model.

    Args:
        before: an earlier scrape: rates and latencies cover the time since it. None: latencies cover the time
            since the server's start, and rates are 0.
    """
    seen = Interval(now, before)
    models = now.values_of("quire_requests_total", "model")
    engines = now.values_of("quire_requests_running", "engine")
    lines = [f"quire {address}", ""]
    if not engines:
        lines.append("no engine has told of itself yet")
    for engine in engines:
        lines += _engine(seen, engine)
    if models:
        header = ("MODEL", "REQ/S", "ERR/S", "IN/S", "OUT/S", "TTFT P50", "P95", "ITL P50", "P95", "E2E P95")
        rows = [header, *(_model(seen, model) for model in models)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  ".join(
                cell.ljust(width) if not index else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
    return "\n".join(map(without_controls, lines)) + "\n"


def _engine(seen: Interval, engine: str) -> list[str]:
    now = seen.now

    def total(name: str, **labels: str) -> int:
        return int(now.total(f"quire_{name}", engine=engine, **labels))

    names = sorted({labels.get("model", "") for labels, _ in now.of_name("quire_engine_info", engine=engine)})
    reasons = [
        f"{labels.get('reason', '')} {value:.0f}"
        for labels, value in now.of_name("quire_requests_waiting_for", engine=engine)
        if value
    ]
    blocks = {state: total("kv_blocks", state=state) for state in ("free", "cached", "in_use", "pinned")}
    num_blocks = max(blocks["free"] + blocks["cached"] + blocks["in_use"], 1)
    use = min(blocks["in_use"] / num_blocks, 1.0)
    queried = seen.grown("quire_prefix_queried_tokens_total", engine=engine)
    hits = seen.grown("quire_prefix_cached_tokens_total", engine=engine)
    return [
        f"engine {engine}  {', '.join(names)}",
        f"  running {total('requests_running')}   waiting {total('requests_waiting')}"
        + (f" ({', '.join(reasons)})" if reasons else "")
        + f"   last step {total('batch_rows')} rows, {total('batch_tokens')} tokens"
        + f"   {_number(seen.rate('quire_steps_total', engine=engine))} steps/s",
        f"  KV [{'#' * round(_BAR * use):{_BAR}}] {use:4.0%} of {num_blocks} blocks"
        f"   {blocks['cached']} cached, {blocks['pinned']} pinned",
        f"  prefix hits {hits / queried if queried else 0:.0%}"
        f"   preemptions {total('preemptions_total')}   restarts {total('engine_restarts_total')}",
        "",
    ]


def _model(seen: Interval, model: str) -> tuple[str, ...]:
    def rate(name: str, **labels: str) -> str:
        return _number(seen.rate(f"quire_{name}_total", model=model, **labels))

    def quantile(share: float, name: str) -> str:
        seconds = seen.quantile(share, f"quire_{name}_seconds", model=model)
        if math.isnan(seconds):
            return "-"
        return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"

    return (
        model,
        rate("requests"),
        rate("requests", finish_reason="error"),
        rate("input_tokens"),
        rate("output_tokens"),
        quantile(0.5, "time_to_first_token"),
        quantile(0.95, "time_to_first_token"),
        quantile(0.5, "inter_token"),
        quantile(0.95, "inter_token"),
        quantile(0.95, "request"),
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
