"""The structures that kernels take, as ctypes: field by field those of src/*.cu."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Address of a tensor's first element; None for none."""
    return None if tensor is None else tensor.data_ptr()


class PlanParams(Structure):
    """attention.cu"""

    _fields_ = [
        *[
            (name, c_void_p)
            for name in ("query_start_loc", "seq_lens", "items", "starts", "total", "tickets")
        ],
        *[
            (name, c_int32)
            for name in ("num_seqs", "query_tiles", "tokens_per_tile", "num_heads", "window", "num_blocks")
        ],
    ]


class AttentionParams(Structure):
    """attention.cu"""

    _fields_ = [
        *[
            (name, c_void_p)
            for name in (
                "query",
                "out",
                "data",
                "scales",
                "block_table",
                "items",
                "starts",
                "total",
                "states",
                "tickets",
            )
        ],
        *[
            (name, c_int64)
            for name in (
                "query_token_stride",
                "query_head_stride",
                "block_stride",
                "kv_stride",
                "head_stride",
                "scale_block_stride",
                "scale_kv_stride",
                "scale_head_stride",
                "table_stride",
            )
        ],
        ("scale", c_float),
        ("softcap", c_float),
        *[
            (name, c_int32)
            for name in (
                "window",
                "block_shift",
                "groups",
                "num_kv_heads",
                "head_tiles",
                "rows",
                "tokens_per_tile",
                "query_tiles",
                "num_items",
            )
        ],
    ]


class NormParams(Structure):
    """elementwise.cu"""

    _fields_ = [
        *[(name, c_void_p) for name in ("x", "residual", "weight", "out", "sum")],
        ("x_stride", c_int64),
        ("residual_stride", c_int64),
        ("eps", c_float),
        ("size", c_int32),
    ]


class GateParams(Structure):
    """elementwise.cu"""

    _fields_ = [
        ("x", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("size", c_int32),
        ("activation", c_int32),
    ]


class WriteParams(Structure):
    """cache.cu"""

    _fields_ = [
        *[
            (name, c_void_p)
            for name in (
                "query",
                "key",
                "value",
                "out",
                "query_norm",
                "key_norm",
                "cos",
                "sin",
                "data",
                "scales",
                "slots",
            )
        ],
        *[
            (name, c_int64)
            for name in (
                "query_token_stride",
                "query_head_stride",
                "key_token_stride",
                "key_head_stride",
                "value_token_stride",
                "value_head_stride",
                "angle_stride",
                "block_stride",
                "kv_stride",
                "head_stride",
                "scale_block_stride",
                "scale_kv_stride",
                "scale_head_stride",
            )
        ],
        ("eps", c_float),
        *[
            (name, c_int32)
            for name in (
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "half",
                "block_size",
                "norm_is_float",
                "cache",
            )
        ],
    ]


class CopyParams(Structure):
    """copy.cu"""

    _fields_ = [
        *[(name, c_void_p) for name in ("from_", "to", "source", "target")],
        *[(name, c_int64) for name in ("from_stride", "to_stride", "bytes")],
    ]


class ArgmaxParams(Structure):
    """sampling.cu"""

    _fields_ = [("x", c_void_p), ("out", c_void_p), ("stride", c_int64), ("size", c_int32)]


class EditParams(Structure):
    """sampling.cu, as a part of SampleParams; without any pointer: no edits."""

    _fields_ = [
        (name, c_void_p)
        for name in (
            "starts",
            "factors",
            "penalty_ids",
            "output_counts",
            "bias_ids",
            "biases",
            "ban_ids",
            "newest",
            "saved",
        )
    ]


class SampleParams(Structure):
    """sampling.cu"""

    _fields_ = [
        *[
            (name, c_void_p)
            for name in (
                "logits",
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "seeds",
                "positions",
                "out",
            )
        ],
        ("edits", EditParams),
        ("stride", c_int64),
        ("size", c_int32),
    ]


class LinearParams(Structure):
    """linear.cu"""

    _fields_ = [
        *[(name, c_void_p) for name in ("x", "weight", "bias", "out", "partial", "tickets")],
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        *[
            (name, c_int32)
            for name in (
                "num_tokens",
                "num_inputs",
                "num_rows",
                "num_columns",
                "slices",
                "activation",
                "out_is_float",
            )
        ],
    ]
