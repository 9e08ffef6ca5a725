"""`quire quantize` and `quire perplexity`: the command lines."""

from __future__ import annotations

from pathlib import Path

import click

from quire.errors import QuireError
from quire_common.errors import HubError, InputError
from quire_ensemble.errors import TokenizerError

_FAILURES = (QuireError, HubError, InputError, TokenizerError)
_SCHEMES = ("awq", "gptq", "w8a8", "w4a8", "fp8")
_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("--checkpoint", required=True, help="A directory, a .gguf file, or a hub's OWNER/NAME.")
@click.option("--scheme", required=True, type=click.Choice(_SCHEMES))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A new directory.")
@click.option(
    "--calibration", "calibration_file", type=_file, help="A text; else the topics of Python's help."
)
def quantize(checkpoint: str, scheme: str, out: Path, calibration_file: Path | None) -> None:
    """Quantise a checkpoint, and measure the perplexity before and after.

    The decoder's linear layers become 4-bit (awq, gptq, w4a8) or 8-bit (w8a8, fp8) numbers, stored in
    compressed-tensors' format. Embeddings and head are not quantised. Schemes except fp8 are calibrated with
    the first three quarters of the text. Perplexity is measured with the last quarter. Of both parts, at most
    16384 tokens are used.
    """
    from quire_common.hub import find_checkpoint
    from quire_quantize.perplexity import perplexity, split, text_of
    from quire_quantize.quantize import quantize as run

    try:
        path = find_checkpoint(checkpoint)
        calibrating, measuring = split(text_of(calibration_file))
        num_bytes = run(path, scheme, out, calibrating, _show_progress)
        click.echo(f"{out}: {num_bytes / 1e6:.1f} MB of tensors, {scheme}")
        before, count = perplexity(path, measuring)
        after, _ = perplexity(out, measuring)
    except _FAILURES as error:
        raise click.ClickException(str(error)) from error
    click.echo(
        f"perplexity of {count} tokens: {before:.4f} before, {after:.4f} after ({after / before - 1:+.2%})"
    )


@click.command()
@click.argument("checkpoint")
@click.option("--text", "text_file", type=_file, help="A text; else what `quire quantize` measures with.")
@click.option("--option", "settings", multiple=True, help="A configuration key, such as quantization=w8a8.")
def perplexity(checkpoint: str, text_file: Path | None, settings: tuple[str, ...]) -> None:
    """Measure a checkpoint's perplexity on a text, with the engine.

    The text is cut into windows of usually 512 tokens. Windows with at most 16384 tokens in all are used. In
    each of them, all tokens except the first count.
    """
    from quire_ensemble.cli import parse_option
    from quire_quantize.perplexity import perplexity as measure
    from quire_quantize.perplexity import split, text_of

    try:
        text = split(text_of(None))[1] if text_file is None else text_of(text_file)
        found, count = measure(checkpoint, text, **dict(map(parse_option, settings)))
    except _FAILURES as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{checkpoint}: perplexity {found:.4f} of {count} tokens")


def _show_progress(done: int, count: int) -> None:
    click.echo(f"\rlayer {done} of {count}", err=True, nl=done == count)
