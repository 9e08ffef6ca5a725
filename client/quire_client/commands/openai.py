"""`quire-client openai`: the gateway that serves an OpenAI-compatible API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quire_client.commands._options import FILE
from quire_client.protocol import CHAT_MODEL


@click.command("openai")
@click.option(
    "--url",
    default="localhost:8001",
    envvar="QUIRE_URL",
    show_default=True,
    metavar="HOST:PORT[,HOST:PORT...]",
    help="gRPC endpoints (or the variable QUIRE_URL); several have the same models and share the requests.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=9000, show_default=True, help="0: a free one.")
@click.option("--timeout", type=float, help="Seconds for each answer.")
@click.option(
    "--exit-timeout",
    "grace_s",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="Seconds that answers under way have to end after SIGTERM or Ctrl-C.",
)
@click.option(
    "--allow-image-host",
    "image_hosts",
    multiple=True,
    metavar="HOST",
    help="Fetch image URLs of this host, or of *.suffix; may be repeated. Default: fetch none.",
)
@click.option(
    "--max-image-bytes",
    type=click.IntRange(min=1),
    default=20 * 2**20,
    show_default=True,
    help="Largest image to fetch.",
)
@click.option(
    "--api-keys",
    type=FILE,
    help="JSON file of keys, see `quire-client api-key`; without it nobody is asked for one.",
)
@click.option("--tls-cert", type=FILE, help="PEM file: the certificate and its chain.")
@click.option("--tls-key", type=FILE, help="PEM file: its private key.")
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Lets pages of this origin use it in a browser; may be repeated. Default: none.",
)
@click.option(
    "--served-model-name",
    "served",
    multiple=True,
    metavar="NAME[=MODEL]",
    help="What clients call a model (default: chat); may be repeated. Lists it by this name.",
)
@click.option("--metrics", is_flag=True, help="Serve /metrics for Prometheus.")
@click.option(
    "--access-log",
    type=click.Path(path_type=Path),
    help="Add a line of JSON for each request, without its text; -: stderr.",
)
def openai_gateway(
    url: str,
    host: str,
    port: int,
    timeout: float | None,
    grace_s: int,
    image_hosts: tuple[str, ...],
    max_image_bytes: int,
    tls_cert: Path | None,
    tls_key: Path | None,
    served: tuple[str, ...],
    **options: Any,
) -> None:
    """Serves an OpenAI-compatible API over HTTP. Without --api-keys keep it private."""
    try:
        from quire_client.openai.app import GatewaySettings
        from quire_client.openai.images import ImagePolicy
        from quire_client.openai.names import Names
        from quire_client.openai.server import Tls, serve
    except ImportError as error:
        packages = "starlette uvicorn httpx prometheus-client"
        raise click.ClickException(f"{error}: pip install {packages}") from None
    try:
        images = ImagePolicy(image_hosts, max_image_bytes)
    except ValueError as error:
        raise click.UsageError(f"--allow-image-host: {error}") from None
    try:
        names = Names.parse(served, CHAT_MODEL)
    except ValueError as error:
        raise click.UsageError(f"--served-model-name: {error}") from None
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key go together")
    tls = None if tls_cert is None or tls_key is None else Tls(tls_cert, tls_key)
    try:
        settings = GatewaySettings(url, timeout, images, names=names, **options)
        serve(settings, host, port, listening=click.echo, tls=tls, grace_s=grace_s)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
