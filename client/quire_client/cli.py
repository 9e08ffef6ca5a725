"""`quire-client chat|generate|embed|models|requests|adapters|top|cache|profile|openai|api-key|completion`.

The commands are in `commands/`, each in the file of its name. This module holds the entry point, which turns
their exceptions into an exit status, and the command `completion`.

Exit status: 0 done, 1 something failed (mostly with one line on stderr), 2 wrong usage, 130 Ctrl-C, 143
SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys

import click
from click.shell_completion import get_completion_class

from quire_client import __version__
from quire_client.commands import INTERRUPTED
from quire_client.commands._output import one_line
from quire_client.commands.adapters import adapters
from quire_client.commands.api_key import api_key
from quire_client.commands.cache import cache
from quire_client.commands.chat import chat
from quire_client.commands.embed import embed_texts
from quire_client.commands.generate import generate
from quire_client.commands.models import models
from quire_client.commands.openai import openai_gateway
from quire_client.commands.profile import profile
from quire_client.commands.requests import requests
from quire_client.commands.top import top
from quire_client.errors import QuireClientError

PROGRAM = "quire-client"
COMPLETE_VARIABLE = "_QUIRE_CLIENT_COMPLETE"
"""Environment variable by which the shell asks for completions."""

_COMMANDS: list[click.Command] = [
    adapters,
    api_key,
    cache,
    chat,
    embed_texts,
    generate,
    models,
    openai_gateway,
    profile,
    requests,
    top,
]


@click.group(commands=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quire-client")
def cli() -> None:
    """Commands for a Quire server, mostly over gRPC."""


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Prints the completion script for a shell; in bash: eval "$(quire-client completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, PROGRAM, COMPLETE_VARIABLE).source())


def _terminate(signum: int, frame: object) -> None:
    # As an exception, so that a running stream is cancelled on the server on the way out.
    raise SystemExit(128 + signum)


def main(args: list[str] | None = None) -> None:
    """Entry point of `quire-client`."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        status = cli.main(args, prog_name=PROGRAM, complete_var=COMPLETE_VARIABLE, standalone_mode=False)
    except QuireClientError as error:
        click.echo(f"quire-client: {one_line(error)}", err=True)
        status = 1
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left (`| head`); nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
