"""kv_identity: an identity of the keys and values that this process computes, by what decides their bits.

It uses the weights and frequencies as loaded, not the names of their files. So it also covers how files were
chosen, dummy weights (`load_format=dummy`) and numbers derived from several keys. Instruction sets and
libraries are part of it, because sums in another order have other bits.
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
    """Returns the identity of a model's keys and values, as JSON values; `loaded` must have its weights'
    digest."""
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
