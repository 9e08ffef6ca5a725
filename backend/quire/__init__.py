"""Quire: an LLM generation backend for NVIDIA Triton Inference Server.

The package imports nothing heavy by itself: Triton usually loads a backend in a short-lived second
interpreter before it loads a model, and `import quire` must cost milliseconds there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from quire.llm import LLM
    from quire.request.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from quire.llm import LLM

        return LLM
    if name == "SamplingParams":
        from quire.request.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
