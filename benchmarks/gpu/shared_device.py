"""Plugin of pytest: tests in several processes share one GPU, and a broken context ends only its process.

What fails is written to the file that QUIRE_FAILURES names, as soon as it does.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from quire.worker.kv_cache import DeviceMemory

SHARE = 3 << 30
"""Bytes for the KV cache of an engine that is not told how many."""


def _share(device: torch.device) -> DeviceMemory:
    return DeviceMemory(SHARE)


DeviceMemory.measure = staticmethod(_share)  # type: ignore[method-assign,assignment]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """After an illegal access every call fails: pytest-xdist begins another process for what is left."""
    if torch.cuda.is_available() and torch.cuda.is_initialized() and "PYTEST_XDIST_WORKER" in os.environ:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(70)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = os.environ.get("QUIRE_FAILURES")
    if file and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(file).open("a", encoding="utf-8") as out:
            out.write(f"# {report.nodeid}\n{report.longreprtext[-1500:]}\n\n")
