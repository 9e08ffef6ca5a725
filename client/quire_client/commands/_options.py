"""Options and arguments that several commands have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import click

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def request_options(command: Callable[..., None]) -> Callable[..., None]:
    options = [
        click.option("--max-tokens", type=int, help="Most tokens to generate."),
        click.option("--temperature", type=float, help="0 is greedy."),
        click.option("--top-p", type=float),
        click.option("--top-k", type=int),
        click.option("--seed", type=int, help="Same seed, same answer."),
        click.option("--stop", multiple=True, help="Ends the answer; may be given several times."),
        click.option("--n", type=int, help="Choices to return."),
        click.option("--best-of", type=int, help="Choices to generate; the n most likely are returned."),
        click.option("--beam-width", type=int, help="Beam search; the n best beams are returned."),
        click.option("--priority", type=int, help="A smaller number is more urgent; 0 is usual."),
        click.option("--tenant", help="On whose account the request runs."),
        click.option("--lora-name", help="LoRA adapter to compute with."),
        click.option("--session", help="Conversation whose KV cache stays from turn to turn."),
        click.option("--cache-salt", help="Share cached prefixes only with requests of this salt."),
        click.option("--ttft-deadline-ms", type=int, help="Without a token by then the request ends."),
        click.option("--num-draft", type=int, help="Most tokens that a step tries beyond the next; 0: none."),
        click.option(
            "--param", "params", multiple=True, metavar="NAME=JSON", help="Any other sampling parameter."
        ),
        click.option("--schema", type=FILE, help="JSON schema that the answer has to fit."),
        click.option("--timeout", type=float, help="Seconds for the whole answer."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON line at the end."),
        click.option("--stats", is_flag=True, help="Print TTFT and tokens/s on stderr."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def url_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--url",
        default="localhost:8001",
        envvar="QUIRE_URL",
        show_default=True,
        help="HOST:PORT of the gRPC endpoint (or the variable QUIRE_URL).",
    )(command)


def prompt_text(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("a PROMPT is needed (or `-` for stdin)")
    if prompt is None or prompt == "-":
        # Bytes that are not UTF-8 become lone surrogates and stay invalid on the wire, for the server.
        text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
        return text.removesuffix("\n")
    return prompt
