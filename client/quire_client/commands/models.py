"""`quire-client models`: the models that a server has."""

from __future__ import annotations

import json

import click

from quire_client.client import Client
from quire_client.commands._options import url_option
from quire_client.commands._output import print_table


@click.command()
@url_option
@click.option("--json", "as_json", is_flag=True, help="One JSON line per model.")
def models(url: str, as_json: bool) -> None:
    """Lists the server's models."""
    with Client(url) as client:
        infos = client.models()
    if as_json:
        for info in infos:
            fields = {name: getattr(info, name) for name in type(info).__slots__}
            click.echo(json.dumps(fields, ensure_ascii=False))
        return
    rows = [("NAME", "VERSION", "STATE", "KIND", "STREAMS", "REASON")]
    streams = {True: "yes", False: "no", None: "-"}
    for info in infos:
        kind = info.kind or "-"
        rows.append((info.name, info.version or "-", info.state, kind, streams[info.decoupled], info.reason))
    print_table(rows)
