"""`quire-client embed`: embeddings of texts, as lines of JSON."""

from __future__ import annotations

import json
from typing import Any

import click

from quire_client.client import Client
from quire_client.commands._options import prompt_text, url_option
from quire_client.protocol import GENERATOR_MODEL


@click.command("embed")
@click.argument("texts", nargs=-1)
@url_option
@click.option("--model", default=GENERATOR_MODEL, show_default=True)
@click.option("--dimensions", type=click.IntRange(min=1), help="The first so many alone.")
@click.option("--timeout", type=float, help="Seconds for all of them.")
def embed_texts(texts: tuple[str, ...], url: str, model: str, **options: Any) -> None:
    """Prints the embedding of each TEXT as a line of JSON; without any, of each non-empty line of stdin."""
    if not texts:
        texts = tuple(line for line in prompt_text(None).split("\n") if line)
    with Client(url) as client:
        for vector in client.embed(texts, model=model, **options).vectors:
            click.echo(json.dumps(vector))
