"""`quire plan`: the command line of capacity and checks."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from quire.config import parse_bytes
from quire.errors import ConfigError, QuireError
from quire.plan import checks
from quire.plan.cost import PRESETS, CostModel
from quire_common.errors import HubError
from quire_common.hub import find_checkpoint
from quire_ensemble.cli import parse_option


def _bytes(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    found = None if value is None else parse_bytes(value)
    if isinstance(found, str):
        raise click.BadParameter(f"must be a number of bytes, such as 80GiB, got {value!r}")
    return found


@click.command()
@click.argument("path")
@click.option("--option", "settings", multiple=True, help="A configuration key, such as kv_cache_dtype=int8.")
@click.option("--memory", callback=_bytes, help="Free bytes of the host or the GPU, such as 80GiB.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Else that of the configuration.")
@click.option("--tokens", "lengths", multiple=True, type=click.IntRange(1), help="Lengths of sequences.")
@click.option("--ttft-ms", type=click.FloatRange(0), help="Longest wait for the first token.")
@click.option("--itl-ms", type=click.FloatRange(0), help="Longest gap between two tokens.")
@click.option("--prompt-tokens", default=512, show_default=True, type=click.IntRange(1))
@click.option("--output-tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option("--cost", help=f"Model of steps' times: {', '.join(PRESETS)} or JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    path: str,
    settings: tuple[str, ...],
    memory: int | None,
    device: str | None,
    lengths: tuple[int, ...],
    ttft_ms: float | None,
    itl_ms: float | None,
    prompt_tokens: int,
    output_tokens: int,
    cost: str | None,
    as_json: bool,
) -> None:
    """Check configurations and predict their capacity; loads nothing.

    PATH is a checkpoint (a directory, a .gguf file, or a hub's OWNER/NAME[/FILE.gguf|:TYPE][@REVISION], which
    is fetched), a quire.json, a model of a repository, or a repository. The exit status is 1 where there is a
    problem, such as one for which an engine would not start. With --cost, the plan says how many clients at a
    time can be served, within a target (--ttft-ms, --itl-ms) if there is one.
    """
    if (ttft_ms is not None or itl_ms is not None) and cost is None:
        raise click.UsageError("--ttft-ms and --itl-ms need a model of steps' times: --cost")
    if device == "cuda" and memory is None:
        raise click.UsageError("--device cuda needs --memory, the bytes of the GPU")
    from quire.plan.capacity import Target

    target = Target(prompt_tokens, output_tokens, ttft_ms, itl_ms)
    try:
        found = checks.read(find_checkpoint(path), dict(map(parse_option, settings)))
    except (QuireError, HubError) as error:
        raise click.ClickException(str(error)) from None
    documents = []
    for planned in found:
        document = {"name": planned.name, **_document(planned, device, memory, lengths, cost, target)}
        document |= {"problems": planned.problems, "advice": planned.advice}
        documents.append(document)
    click.echo(json.dumps(documents) if as_json else "\n".join(map(_text, documents)))
    if any(planned.problems for planned in found):
        raise SystemExit(1)


def _document(
    planned: checks.Planned,
    device: str | None,
    memory: int | None,
    lengths: tuple[int, ...],
    cost: str | None,
    target: Any,
) -> dict[str, Any]:
    """Returns the part of the JSON document about capacity and clients, as far as they can be predicted. Adds
    problems and advice to those of `planned`."""
    from quire.plan.capacity import advise, predict
    from quire.worker.kv_cache import DeviceMemory
    from quire.worker.model_runner import resolve_device

    config = planned.config
    if config is None:
        return {}
    try:
        if memory is not None:
            device = device or ("cuda" if config.model.device == "cuda" else "cpu")
            free, total = memory, memory if device == "cuda" else None
        else:
            place = resolve_device(device or config.model.device)
            device, now = place.type, DeviceMemory.measure(place)
            free, total = now.free, now.total
        host = config.cache.host_cache_memory
        if total is None and host > free:
            planned.problems.append(f"host_cache_memory={host} exceeds the {free} bytes that are free")
        capacity = predict(config, device, free, total, lengths)
    except ConfigError as error:
        planned.problems += error.problems
        return {}
    except QuireError as error:
        planned.problems.append(str(error))
        return {}
    most = capacity.concurrency[capacity.max_model_len]
    if most < config.scheduler.max_num_seqs:
        planned.advice.append(
            f"max_num_seqs={config.scheduler.max_num_seqs}, but the KV cache holds {most} sequences of "
            f"max_model_len={capacity.max_model_len}: longer ones will be preempted, unless kv_cache_memory "
            "grows, kv_cache_dtype=int8, or max_model_len is lower"
        )
    document: dict[str, Any] = {"device": device, "capacity": capacity.as_dict()}
    if cost is not None:
        try:
            advice = advise(config, capacity, cost_model(cost), target)
        except QuireError as error:
            planned.problems.append(str(error))
            return document
        document["clients"] = dataclasses.asdict(advice)
        if not advice.concurrency:
            planned.advice.append("the target is not kept for a single client")
        elif advice.concurrency < config.scheduler.max_num_seqs:
            planned.advice.append(
                f"max_num_seqs={advice.concurrency} keeps the target; more at a time would not"
            )
    return document


def cost_model(text: str) -> CostModel:
    """Returns the cost model that `--cost` states: a name of PRESETS, or JSON. Raises click.BadParameter if
    it states none."""
    if text in PRESETS:
        return PRESETS[text]
    try:
        return CostModel(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise click.BadParameter(
            f"must be one of {', '.join(PRESETS)}, or a JSON object of costs: {error}", param_hint="--cost"
        ) from None


def _text(document: dict[str, Any]) -> str:
    lines = [document["name"]]
    if (found := document.get("capacity")) is not None:
        mib = 2**20
        lines += [
            f"  weights      {found['weight_bytes'] / mib:.1f} MiB, {found['dtype']} on {document['device']}",
            f"  workspace    {found['workspace_bytes'] / mib:.1f} MiB in the largest step, estimated",
            f"  KV cache     {found['kv_cache_bytes'] / mib:.1f} MiB: {found['num_blocks']} blocks of "
            f"{found['block_size']} tokens, {found['bytes_per_token']:.0f} bytes a token, "
            f"{found['kv_tokens']} tokens",
            "  at a time    "
            + ", ".join(f"{count} of {length} tokens" for length, count in found["concurrency"].items()),
        ]
    if (clients := document.get("clients")) is not None:
        lines.append(
            f"  clients      {clients['concurrency']}: first token {clients['ttft_ms']:.1f} ms, gaps "
            f"{clients['itl_ms']:.2f} ms (p95), {clients['tokens_per_s']:.1f} tokens/s"
        )
    lines += [f"  problem: {text}" for text in document["problems"]]
    return "\n".join(lines + [f"  advice: {text}" for text in document["advice"]])
