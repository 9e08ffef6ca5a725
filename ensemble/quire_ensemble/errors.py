"""Errors of the tokenizer and vision models of an ensemble, and of the repository builder."""

from __future__ import annotations

from quire_common.errors import ReportedError


class TokenizerError(ReportedError):
    """A checkpoint's tokenizer is missing or broken; the message is one line that names the file or
    directory."""


class VisionError(ReportedError):
    """A checkpoint's vision part is missing, broken or unsupported, or cannot run on the device or in the
    dtype that is asked for. The message is one line that names the file, device or dtype."""


class BuildError(ReportedError):
    """A model repository cannot be built; the message is one line that names the wrong file or argument."""
