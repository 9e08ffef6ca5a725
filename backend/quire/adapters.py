"""LoRA adapters, as engine, scheduler and runner speak of them. No torch in here.

An adapter adds `scaling * B A x` to products of linear layers ("LoRA: Low-Rank Adaptation of Large Language
Models", arXiv 2106.09685). Steps compute with those in *slots*, places among the model's weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt


@dataclass(eq=False, slots=True)
class Adapter:
    """An adapter that requests may name; another content of the same name is another object."""

    name: str
    path: str
    """Path of its directory: of several with this content, the one that was loaded last."""
    rank: int
    """The largest of its layers."""
    digest: bytes
    """Stands for its weights as they are computed with."""
    number: int
    """No other adapter of the engine has or had it."""
    num_hits: int = 0
    """Requests that found it in a slot when they began, since it was loaded."""
    num_loads: int = 0
    """How often it was brought into a slot."""


class AdapterTarget(NamedTuple):
    """A product that adapters may change: a part of a linear layer."""

    name: str
    """Name of the part among the model's layers: "layers.0.self_attn.q_proj"."""
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter's weights in host memory."""

    parts: list[tuple[int, int]]
    """(index among the model's targets, rank) of each product that it changes, in ascending order."""
    data: npt.NDArray[np.uint8]
    """A [rank, in_features] and `scaling * B` [out_features, rank] of each, in the model's type."""


class AdapterLoad(NamedTuple):
    """An adapter to be brought into a slot, in the place of what is there."""

    slot: int
    weights: AdapterWeights


class AdapterStatus(msgspec.Struct, frozen=True):
    """An adapter, for clients and metrics."""

    name: str
    path: str
    rank: int
    digest: str
    """Hexadecimal: equal for equal weights, whatever their names."""
    slot: int
    """Where it lies; -1: in none."""
    num_running: int
    """Requests that are computed with it."""
    num_waiting: int
    num_hits: int
    """Requests that found it in a slot when they began."""
    num_loads: int
    """How often it was brought into a slot."""


class SavedAdapter(msgspec.Struct, frozen=True):
    """An adapter as the next engine is to have it again."""

    path: str
    digest: str
    """Hexadecimal."""


SavedAdapters = dict[str, SavedAdapter]
"""Saved adapters by name."""
