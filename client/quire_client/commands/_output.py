"""Output that several commands share: tables, and errors in one line."""

from __future__ import annotations

from collections.abc import Sequence

import click

from quire_client._terminal import without_controls
from quire_client.errors import QuireClientError


def print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        click.echo(without_controls(line))


def one_line(error: QuireClientError) -> str:
    return f"{error.code}: {' '.join(error.message.split())}"
