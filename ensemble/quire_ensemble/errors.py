"""Errors of the ensemble's members."""

from __future__ import annotations

from quire_common.errors import ReportedError


class TokenizerError(ReportedError):
    """A checkpoint's tokenizer is missing or broken; the message is one line that names the file or
    directory."""


class VisionError(ReportedError):
    """A checkpoint's vision part is missing, broken or unsupported; the message is one line that names the
    file."""


class BuildError(ReportedError):
    """A model repository cannot be built; the message is one line that names the file and what to do."""
