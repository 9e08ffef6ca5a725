"""What the kernel tests share: every implementation on every device of this machine, and a forced choice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import quire_kernels.ops  # noqa: F401  (registers the implementations)
from quire_kernels import registry


def devices() -> list[str]:
    """Devices of this machine that kernels are tested on."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def every_implementation(operator: str) -> list[Any]:
    """Parameters (implementation name, device) of all implementations that run on this machine."""
    return [
        pytest.param(found.name, device, id=f"{found.name}-{device}")
        for found in registry.implementations(operator)
        for device in devices()
        if not found.devices or device in found.devices
    ]


@contextmanager
def forced(operator: str, name: str) -> Iterator[None]:
    """The operator is computed by this implementation inside the block."""
    registry.configure({operator: name})
    try:
        yield
    finally:
        registry.configure(None)
