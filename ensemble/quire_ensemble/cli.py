"""`quire repository`: commands that write and show model repositories. `quire.cli` adds the group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from quire_common.errors import HubError
from quire_common.hub import find_checkpoint
from quire_ensemble.builder import PLACEMENTS, build_repository, has_chat_template
from quire_ensemble.errors import BuildError


@click.group()
def repository() -> None:
    """Write and show Triton model repositories."""


@repository.command()
@click.option(
    "--checkpoint",
    required=True,
    help="Hugging Face directory, .gguf file, or a hub's OWNER/NAME[/FILE.gguf|:TYPE][@REVISION].",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory of the repository.")
@click.option("--name-prefix", default="", help="Put before every model's name.")
@click.option(
    "--instances",
    "instance_count",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Frontends of the generator.",
)
@click.option(
    "--placement",
    default="link",
    show_default=True,
    type=click.Choice(PLACEMENTS),
    help="How the checkpoint gets into the repository: symbolic link, copy, or only its absolute path.",
)
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Key of quire.json, such as max_num_seqs=128; may be repeated.",
)
@click.option("--generator-name", default="generator", show_default=True, help="Name of the generator.")
@click.option("--force", is_flag=True, help="Overwrite models that exist.")
def build(checkpoint: str, out: Path, options: tuple[str, ...], **arguments: Any) -> None:
    """Write a complete model repository for a checkpoint."""
    try:
        engine_options = dict(map(parse_option, options))
        place = find_checkpoint(checkpoint)
        written = build_repository(place, out, engine_options=engine_options, **arguments)
    except (BuildError, HubError) as error:
        raise click.ClickException(str(error)) from None
    for path in written:
        click.echo(path)
    if not has_chat_template(place):
        click.echo("note: the checkpoint has no chat template; `messages` will be refused", err=True)
    click.echo(f"serve it with: quire serve --model-repository {out}", err=True)


@repository.command()
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--tensors", is_flag=True, help="List inputs and outputs too.")
def show(directory: Path, tensors: bool) -> None:
    """List the models of a repository."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    paths = sorted(directory.glob("*/config.pbtxt"))
    if not paths:
        raise click.ClickException(f"{directory}: no */config.pbtxt; not a model repository")
    for path in paths:
        config = model_config_pb2.ModelConfig()
        try:
            text_format.Parse(path.read_text(encoding="utf-8"), config)
        except text_format.ParseError as error:
            raise click.ClickException(f"{path}: {error}") from None
        click.echo(f"{path.parent.name:24} {_describe(config)}")
        if tensors:
            for kind, specs in (("in", config.input), ("out", config.output)):
                for spec in specs:
                    datatype = model_config_pb2.DataType.Name(spec.data_type).removeprefix("TYPE_")
                    click.echo(f"    {kind:3} {spec.name:28} {datatype:7} {list(spec.dims)}")


def _describe(config: Any) -> str:
    if config.platform == "ensemble":
        return "ensemble: " + " -> ".join(step.model_name for step in config.ensemble_scheduling.step)
    count = sum(group.count for group in config.instance_group)
    kind = "streaming" if config.model_transaction_policy.decoupled else "one response"
    return f"backend {config.backend}, {kind}, {count} instance{'' if count == 1 else 's'}"


def parse_option(text: str) -> tuple[str, Any]:
    """Parses KEY=VALUE. VALUE is JSON or, if it is not valid JSON, a text. Raises click.BadParameter if the
    key or the "=" is missing."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise click.BadParameter(f"{text!r} must have the form KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
