"""`quire-client api-key`: a new key for the gateway."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command("api-key")
@click.argument("name")
@click.option("--tenant", help="On whose account its requests run; default: NAME.")
@click.option("--tokens-per-minute", type=click.IntRange(min=1), help="Of prompts and answers.")
@click.option("--admin", is_flag=True, default=None, help="May load and unload LoRA adapters.")
def api_key(name: str, **options: Any) -> None:
    """Makes a new key for the gateway. Prints the key, which is stored nowhere, on stderr, and its entry for
    the file of --api-keys on stdout."""
    from quire_client.openai.keys import entry_of, new_key

    key = new_key()
    click.echo(key, err=True)
    stated = {field: value for field, value in options.items() if value is not None}
    click.echo(json.dumps({name: {**entry_of(key), **stated}}, ensure_ascii=False))
