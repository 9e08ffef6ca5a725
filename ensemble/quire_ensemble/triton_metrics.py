"""Custom metrics of Triton's, as every model of ours makes them."""

from __future__ import annotations

import ctypes
from typing import TypeVar

Made = TypeVar("Made")


def immortal(made: Made) -> Made:
    """Keeps a metric, or a family of metrics, from its destructor for as long as the process lives.

    The destructor deletes it in the server, where metrics of the same name and labels are one value. Each
    family counts only its own references to that (`MetricFamily::Remove` in core's metric_family.cc, the same
    from 24.10 to June 2026), so the first who deletes the metric frees the value, and whoever else has made
    it, in this process or another, goes on to write there: the server dies of a corrupted heap.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made
