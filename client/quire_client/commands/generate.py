"""`quire-client generate`: raw text that continues a prompt."""

from __future__ import annotations

from typing import Any

import click

from quire_client.commands import INTERRUPTED
from quire_client.commands._answers import AnswerRun
from quire_client.commands._options import prompt_text, request_options, url_option
from quire_client.protocol import GENERATOR_MODEL


@click.command()
@click.argument("prompt", required=False)
@url_option
@click.option("--model", default=GENERATOR_MODEL, show_default=True)
@request_options
def generate(prompt: str | None, url: str, model: str, **options: Any) -> None:
    """Continues PROMPT as raw text, without a chat template; `-` reads it from stdin."""
    run = AnswerRun(url, model, options)
    with run.client:
        if run.answer(prompt_text(prompt)) is None:
            raise SystemExit(INTERRUPTED)
