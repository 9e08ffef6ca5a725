"""`quire-client chat`: an answer to one message, or a conversation at a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from quire_client.commands import INTERRUPTED
from quire_client.commands._answers import AnswerRun
from quire_client.commands._options import FILE, prompt_text, request_options, url_option
from quire_client.commands._output import one_line
from quire_client.errors import QuireClientError
from quire_client.types import Message


@click.command()
@click.argument("prompt", required=False)
@url_option
@click.option("--model", help="Default: chat, or vision_chat with images.")
@click.option("--system", help="System message.")
@click.option("--image", "images", multiple=True, metavar="FILE", help="An image; may be repeated.")
@click.option("--tools", type=FILE, help="JSON list of tools, as in OpenAI's API; calls are shown.")
@request_options
def chat(
    prompt: str | None,
    url: str,
    model: str | None,
    system: str | None,
    images: tuple[str, ...],
    tools: Path | None,
    **options: Any,
) -> None:
    """Answers PROMPT as a chat message; `-` reads it from stdin.

    Without PROMPT and --image at a terminal: a conversation. Ctrl-C ends an answer, Ctrl-D the conversation.
    """
    start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    run = AnswerRun(url, model, options, tools)
    with run.client:
        if prompt is None and sys.stdin.isatty() and not images:
            _converse(run, start)
            return
        text = prompt_text(prompt)
        if run.answer(messages=[*start, {"role": "user", "content": text}], images=images) is None:
            raise SystemExit(INTERRUPTED)


def _converse(run: AnswerRun, messages: list[Message]) -> None:
    messages = list(messages)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            click.echo()
            return
        except KeyboardInterrupt:
            click.echo()
            continue
        if not text:
            continue
        question: Message = {"role": "user", "content": text}
        try:
            answer = run.answer(messages=[*messages, question])
        except QuireClientError as error:
            # The conversation goes on: the user may shorten the message or wait for the server.
            click.echo(f"error: {one_line(error)}", err=True)
            continue
        if answer is not None:
            said: Message = {"role": "assistant", "content": answer.text}
            if answer.tool_calls:
                said["tool_calls"] = list(answer.tool_calls)
            messages += [question, said]
