"""`quire-client cache`: the KV cache of a generator, and the memory of its engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from quire_client.client import Client
from quire_client.commands._options import url_option
from quire_client.protocol import GENERATOR_MODEL


@click.group()
def cache() -> None:
    """Shows, empties or unpins a generator's KV cache; frees the memory of cache and weights until wake."""


def _cache_command(name: str, help_text: str, ask: Callable[..., dict[str, Any]]) -> click.Command:
    @cache.command(name, help=help_text)
    @url_option
    @click.option("--model", default=GENERATOR_MODEL, show_default=True)
    def command(url: str, model: str, **options: Any) -> None:
        with Client(url) as client:
            answer = ask(client, model=model, **options)
        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))

    return command


_cache_command("reset", "Forget all cached prefixes; running requests go on.", Client.cache_reset)
_cache_command("inspect", "Sizes, hit counters, pins, sessions, tiers.", Client.cache_inspect)
_unpin = _cache_command("unpin", "Unpin what SESSION has pinned; default: all.", Client.cache_unpin)
_sleep = _cache_command("sleep", "Give back the memory of weights and KV cache until wake.", Client.sleep)
_sleep.params += [click.Option(["--drain"], is_flag=True, help="Wait for the ends of requests.")]
_cache_command("wake", "Load the weights again and take requests.", Client.wake)
_unpin.params += [click.Option(["--session"]), click.Option(["--tenant"], default="")]
