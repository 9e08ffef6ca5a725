"""Describes a layer of the paged KV cache to the Triton-language kernels."""

from __future__ import annotations

import torch

from quire_kernels.quantized_kv import KV_KINDS, KVLayer, QuantizedKV, data_of

PLAIN, INT8, E4M3 = 0, 1, 2


def kind_of(dtype: torch.dtype) -> int:
    """Returns PLAIN, INT8 or E4M3 for the stored type of keys and values."""
    return KV_KINDS.get(dtype, PLAIN)


def kv_memory(kv_layer: KVLayer) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Returns (keys and values, their scales, the strides that the kernels need). Float8 keys and values are
    returned as their bits, in int8. For a plain cache, the scales are an arbitrary tensor."""
    data = data_of(kv_layer)
    assert data.stride(4) == 1, "the numbers of a head are neighbours"
    if not isinstance(kv_layer, QuantizedKV):
        return data, data, (*data.stride()[:4], 0, 0, 0)
    scales = kv_layer.scales
    assert scales.shape[3] == 1 or scales.stride(3) == 1, "the scales of a head are neighbours"
    # Bits of float8, because not every GPU can load it.
    return data.view(torch.int8), scales, (*data.stride()[:4], *scales.stride()[:3])
