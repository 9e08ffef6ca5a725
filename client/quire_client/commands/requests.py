"""`quire-client requests`: the requests that run or wait in a generator."""

from __future__ import annotations

import json

import click

from quire_client.client import Client
from quire_client.commands._options import url_option
from quire_client.commands._output import print_table
from quire_client.protocol import GENERATOR_MODEL


@click.command()
@url_option
@click.option("--model", default=GENERATOR_MODEL, show_default=True)
@click.option("--tenant", default="", help="Whose; default: those of nobody in particular.")
@click.option("--json", "as_json", is_flag=True, help="The server's answer, as one JSON line.")
def requests(url: str, model: str, tenant: str, as_json: bool) -> None:
    """Lists a tenant's requests that run or wait in a generator, and what each waits for."""
    with Client(url) as client:
        answer = client.requests(model=model, tenant=tenant)
    if as_json:
        click.echo(json.dumps(answer, ensure_ascii=False))
        return
    columns = ("id", "state", "waits_for", "num_prompt_tokens", "num_output_tokens", "age_ms")
    rows: list[tuple[str, ...]] = [("ID", "STATE", "WAITS FOR", "PROMPT", "OUTPUT", "AGE MS")]
    rows += [
        tuple(str(entry.get(name) or "-") for name in columns)
        for entry in answer.get("requests", ())
        if isinstance(entry, dict)
    ]
    print_table(rows)
