"""`quire-client adapters`: the LoRA adapters of a generator."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import click

from quire_client.client import Client
from quire_client.commands._options import url_option
from quire_client.commands._output import print_table
from quire_client.protocol import GENERATOR_MODEL


@click.group()
def adapters() -> None:
    """Lists, loads and unloads a generator's LoRA adapters."""


def _adapter_options(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option("--json", "as_json", is_flag=True, help="The server's answer, as one JSON line.")(
        command
    )
    return url_option(click.option("--model", default=GENERATOR_MODEL, show_default=True)(command))


@adapters.command("list")
@_adapter_options
def list_adapters(url: str, model: str, as_json: bool) -> None:
    """Shows the adapters, and how much they are used."""
    with Client(url) as client:
        answer = client.adapters(model=model)
    _write_adapters(answer, answer.get("adapters", ()), as_json=as_json)


@adapters.command("load")
@click.argument("name")
@click.argument("path")
@_adapter_options
def load_adapter(name: str, path: str, url: str, model: str, as_json: bool) -> None:
    """Loads the adapter in the server's directory PATH, below its lora_root, as NAME for requests."""
    with Client(url) as client:
        answer = client.load_adapter(name, path, model=model)
    _write_adapters(answer, [answer], as_json=as_json)


@adapters.command("unload")
@click.argument("name")
@click.option("--drain", is_flag=True, help="Wait for the ends of its requests.")
@_adapter_options
def unload_adapter(name: str, drain: bool, url: str, model: str, as_json: bool) -> None:
    """Unloads the adapter NAME."""
    with Client(url) as client:
        answer = client.unload_adapter(name, drain=drain, model=model)
    if as_json:
        click.echo(json.dumps(answer, ensure_ascii=False))


def _write_adapters(answer: dict[str, Any], entries: Sequence[Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(answer, ensure_ascii=False))
        return
    columns = ("name", "rank", "slot", "num_running", "num_waiting", "num_hits", "num_loads", "path")
    rows: list[tuple[str, ...]] = [("NAME", "RANK", "SLOT", "RUNNING", "WAITING", "HITS", "LOADS", "PATH")]
    for entry in entries:
        told = {name: str(entry.get(name, "-")) for name in columns}
        rows.append(tuple("-" if told[name] == "-1" else told[name] for name in columns))
    print_table(rows)
