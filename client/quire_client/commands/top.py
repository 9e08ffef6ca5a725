"""`quire-client top`: the figures of a server, live."""

from __future__ import annotations

import time
from http.client import HTTPException

import click

from quire_client._metrics import Scrape
from quire_client._top import frame
from quire_client.errors import QuireClientError


@click.command()
@click.argument("url", default="localhost:8002")
@click.option("--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Print one frame and end; figures are since the server's start.")
def top(url: str, interval: float, once: bool) -> None:
    """Shows live what a server does, from its /metrics. URL is HOST:PORT or a whole URL."""
    before: Scrape | None = None
    while True:
        try:
            now = Scrape.fetch(url)
        except (OSError, ValueError, HTTPException) as error:
            raise QuireClientError(f"{url}: {error}") from None
        # The cursor goes to the top, the screen is cleared and the frame is drawn, all in one write.
        click.echo(frame(now, before, url) if once else f"\x1b[H\x1b[2J{frame(now, before, url)}", nl=False)
        if once:
            return
        before = now
        time.sleep(interval)
