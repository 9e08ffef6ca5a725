"""LoRA adapters, as engine, scheduler and runner describe them. No torch in here.

An adapter adds `scaling * B A x` to products of linear layers ("LoRA: Low-Rank Adaptation of Large Language
Models", arXiv 2106.09685). Steps compute with the adapters in *slots*: memory beside the model's weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt


@dataclass(eq=False, slots=True)
class Adapter:
    """A LoRA adapter and the name that requests use for it. New content under the same name is another
    object."""

    name: str
    path: str
    """Path of the adapter's directory; the latest one, if the same content was loaded under this name from
    several."""
    rank: int
    """Largest rank among the adapter's layers."""
    digest: bytes
    """Digest of the weights in the form in which steps compute with them."""
    number: int
    """Number that no other adapter of the engine has or had."""
    num_hits: int = 0
    """Number of requests that found the adapter in a slot when they first began to run."""
    num_loads: int = 0
    """Number of times that the adapter was given a slot, into which its weights are then loaded."""


class AdapterTarget(NamedTuple):
    """A matrix product that adapters may change: that of a linear layer, or of one part if it has several."""

    name: str
    """Name of the part in the model, such as "layers.0.self_attn.q_proj"."""
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter's weights in host memory."""

    parts: list[tuple[int, int]]
    """(index among the model's targets, rank) of each product that the adapter changes, in ascending
    order."""
    data: npt.NDArray[np.uint8]
    """Bytes, part after part: A [rank, in_features], then `scaling * B` [out_features, rank], in the model's
    type."""


class AdapterLoad(NamedTuple):
    """A load of an adapter's weights into a slot, in place of any that are there."""

    slot: int
    weights: AdapterWeights


class AdapterStatus(msgspec.Struct, frozen=True):
    """Status of an adapter, for clients and metrics."""

    name: str
    path: str
    rank: int
    digest: str
    """Hexadecimal digest of the weights (`Adapter.digest`)."""
    slot: int
    """Slot that holds the adapter; -1: none does."""
    num_running: int
    """Number of running requests with the adapter. Each choice or beam that has forked counts as one."""
    num_waiting: int
    num_hits: int
    """Number of requests that found the adapter in a slot when they first began to run."""
    num_loads: int
    """Number of times that the adapter was given a slot, into which its weights are then loaded."""


class SavedAdapter(msgspec.Struct, frozen=True):
    """An adapter as an engine saves it, so that the engine that replaces it can load the adapter again."""

    path: str
    digest: str
    """Hexadecimal digest of the weights."""


SavedAdapters = dict[str, SavedAdapter]
"""Saved adapters by name."""
