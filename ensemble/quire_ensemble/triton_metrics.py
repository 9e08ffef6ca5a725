"""A guard against a fault of Triton's custom metrics, for our models that make them."""

from __future__ import annotations

import ctypes
from typing import TypeVar

Made = TypeVar("Made")


def immortal(made: Made) -> Made:
    """Keeps a metric, or a family of metrics, from its destructor for as long as the process lives.

    The destructor deletes the metric in the server, where metrics of the same name and labels share one
    value. Each family counts only its own references to this value (`MetricFamily::Remove` in core's
    metric_family.cc, the same from 24.10 to June 2026), so the first deletion frees the value. Others who
    made the same metric, in this process or another, then write into freed memory, and the server may die of
    a corrupted heap.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made
