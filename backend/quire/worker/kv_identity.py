"""kv_identity: what decides the bits of the keys and values that this process computes.

Weights and frequencies as they are in memory, not the files they came from: whatever chose the files, made
them up (`load_format=dummy`) or derived a number from several keys is covered without being known here. The
instruction sets and the libraries belong to it, since sums rounded in another order have other bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from quire.layers.rotary import RotaryEmbedding
from quire.layers.scheme import SCHEMES
from quire.loader.identity import code_identity, model_identity
from quire.loader.load import LoadedModel


def kv_identity(loaded: LoadedModel, device: torch.device) -> dict[str, Any]:
    """The identity of keys and values as JSON can hold it; `loaded` must have its weights' digest."""
    assert loaded.weights_digest, "the weights were not looked at before they were packed"
    model, scheme = loaded.model, loaded.config.scheme
    config = dataclasses.asdict(dataclasses.replace(loaded.config, scheme=SCHEMES[None], whole=None))
    config |= {"dtype": str(loaded.config.dtype), "scheme": scheme.identity()}
    return {
        "weights": loaded.weights_digest,
        "model": model_identity(model),
        "config": config,
        "rotary": [
            layer.identity() for _, layer in model.named_modules() if isinstance(layer, RotaryEmbedding)
        ],
        **code_identity(device),
    }
