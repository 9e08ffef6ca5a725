"""The command `quire`. The subcommands in `_COMMANDS` are in other modules, which are not imported before
they are needed; the small ones, `completion` and `backend install`, are here."""

from __future__ import annotations

import importlib
from typing import Any

import click
from click.shell_completion import get_completion_class

from quire import __version__

_COMMANDS = {
    "serve": ("quire.server.serve:serve", "Serve a model repository with tritonserver."),
    "healthcheck": ("quire.server.healthcheck:healthcheck", "Ask a served model for one token; for probes."),
    "plan": ("quire.plan.command:plan", "Check configurations and predict their capacity."),
    "quantize": ("quire_quantize.command:quantize", "Quantise a checkpoint, and measure what that costs."),
    "perplexity": ("quire_quantize.command:perplexity", "Measure how well a checkpoint foretells a text."),
    "repository": ("quire_ensemble.cli:repository", "Build model repositories from checkpoints."),
}


class LazyGroup(click.Group):
    """A click group whose help lists the commands in `_COMMANDS`, each with a short text, without importing
    them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, attribute = _COMMANDS[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "tritonclient":
                raise
            text = "this command needs tritonclient: pip install 'tritonclient[grpc]'"
            raise click.ClickException(text) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = {name: command.get_short_help_str(80) for name, command in self.commands.items()}
        rows = sorted({**own, **{name: text for name, (_, text) in _COMMANDS.items()}}.items())
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="quire")
def main() -> None:
    """Quire: text generation on NVIDIA Triton Inference Server."""


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script by which a shell completes `quire`; in bash: eval "$(quire completion bash)"."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(main, {}, "quire", "_QUIRE_COMPLETE").source())


@main.group()
def backend() -> None:
    """Prepare the backend for a tritonserver that `quire serve` does not start."""


@backend.command()
@click.option("--out", required=True, type=click.Path(file_okay=False), help="For example backends/quire.")
def install(out: str) -> None:
    """Copy model.py and the packages of Quire that it needs into one folder."""
    from pathlib import Path

    from quire.errors import QuireError
    from quire.server.tritonserver import install_backend

    try:
        written = install_backend(Path(out))
    except QuireError as error:
        raise click.ClickException(str(error)) from error
    for path in written:
        click.echo(path)


if __name__ == "__main__":
    main(prog_name="quire")
