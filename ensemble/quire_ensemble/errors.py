"""Errors of the tokenizer and vision models of an ensemble, and of the repository builder."""

from __future__ import annotations

from quire_common.errors import ReportedError


class TokenizerError(ReportedError):
    """A checkpoint's tokenizer or chat template cannot be used: it is missing, broken or not supported, for
    example. The message is one line that names the file or directory."""


class VisionError(ReportedError):
    """A checkpoint's vision part is missing, broken or unsupported, or cannot run on the device or in the
    dtype that is asked for. The message is one line. It usually names the file, device or dtype."""


class BuildError(ReportedError):
    """A model repository cannot be built; the message is one line that names the wrong file or argument."""
