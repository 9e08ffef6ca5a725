"""The part of FlashInfer that Quire calls: as documented, in PyTorch, with the package's signatures."""

from __future__ import annotations

import importlib.machinery
import inspect
from types import ModuleType
from typing import Any

import torch

VERSION = "0.7.2.post1"
"""Of flashinfer-python, whose sources SIGNATURES was taken from."""
REQUIRED = inspect.Parameter.empty

_COMMON_PLAN: dict[str, Any] = {
    "pos_encoding_mode": "NONE",
    "sm_scale": None,
    "window_left": -1,
    "logits_soft_cap": None,
    "rope_scale": None,
    "rope_theta": None,
    "q_data_type": "float16",
    "kv_data_type": None,
    "o_data_type": None,
    "non_blocking": True,
    "seq_lens": None,
    "block_tables": None,
    "fixed_split_size": None,
    "disable_split_kv": False,
}
_COMMON_RUN: dict[str, Any] = {
    "q": REQUIRED,
    "paged_kv_cache": REQUIRED,
    **dict.fromkeys(("q_scale", "k_scale", "v_scale", "out", "lse")),
    "return_lse": False,
    **dict.fromkeys(("enable_pdl", "window_left", "sinks", "kv_cache_sf")),
    "skip_softmax_threshold_scale_factor": None,
}
SIGNATURES: dict[str, dict[str, dict[str, Any]]] = {
    "BatchPrefillWithPagedKVCacheWrapper": {
        "__init__": {
            "float_workspace_buffer": REQUIRED,
            "kv_layout": "NHD",
            "use_cuda_graph": False,
            "qo_indptr_buf": None,
            "paged_kv_indptr_buf": None,
            "paged_kv_indices_buf": None,
            "paged_kv_last_page_len_buf": None,
            "custom_mask_buf": None,
            "mask_indptr_buf": None,
            "backend": "auto",
            "jit_args": None,
            "jit_kwargs": None,
            "variant_owns_mask": False,
        },
        "plan": {
            "qo_indptr": REQUIRED,
            "paged_kv_indptr": REQUIRED,
            "paged_kv_indices": REQUIRED,
            "paged_kv_last_page_len": REQUIRED,
            "num_qo_heads": REQUIRED,
            "num_kv_heads": REQUIRED,
            "head_dim_qk": REQUIRED,
            "page_size": REQUIRED,
            "head_dim_vo": None,
            "custom_mask": None,
            "packed_custom_mask": None,
            "causal": False,
            "use_fp16_qk_reduction": False,
            **_COMMON_PLAN,
            "prefix_len_ptr": None,
            "token_pos_in_items_ptr": None,
            "token_pos_in_items_len": 0,
            "max_item_len_ptr": None,
            "seq_lens_q": None,
            "max_token_per_sequence": None,
            "max_sequence_kv": None,
            "uniform_q_len": None,
        },
        "run": {
            **_COMMON_RUN,
            "lse_base": "log2",
            "lse_layout": "NH",
            "use_fp16_softmax": None,
            "uses_spcompress": None,
        },
    },
    "BatchDecodeWithPagedKVCacheWrapper": {
        "__init__": {
            "float_workspace_buffer": REQUIRED,
            "kv_layout": "NHD",
            "use_cuda_graph": False,
            "use_tensor_cores": False,
            "paged_kv_indptr_buffer": None,
            "paged_kv_indices_buffer": None,
            "paged_kv_last_page_len_buffer": None,
            "backend": "auto",
            "jit_args": None,
        },
        # What `plan` passes on as **kwargs included: the keywords of `_plan_impl`.
        "plan": {
            "indptr": REQUIRED,
            "indices": REQUIRED,
            "last_page_len": REQUIRED,
            "num_qo_heads": REQUIRED,
            "num_kv_heads": REQUIRED,
            "head_dim": REQUIRED,
            "page_size": REQUIRED,
            **_COMMON_PLAN,
            "window_right": 0,
            "data_type": None,
            "q_len_per_req": 1,
            "is_causal": None,
        },
        "run": {**_COMMON_RUN, "q_len_per_req": None},
    },
}
"""Parameters of the methods, by name, with their defaults; not in their order, as all are given by name but
what `POSITIONAL` has."""
POSITIONAL = {"__init__": ("float_workspace_buffer", "kv_layout"), "plan": (), "run": ("q", "paged_kv_cache")}


def _bind(wrapper: Any, method: str, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call with defaults filled in; TypeError if the method does not take them."""
    names, first = SIGNATURES[type(wrapper).__name__][method], POSITIONAL[method]
    assert len(args) <= len(first), f"the order of the parameters of {method} is not recorded"
    given = dict(zip(first, args, strict=False)) | options
    unknown = given.keys() - names.keys()
    missing = {name for name, default in names.items() if default is REQUIRED} - given.keys()
    if unknown or missing:
        raise TypeError(f"{type(wrapper).__name__}.{method}: unknown {unknown}, missing {missing}")
    return {**names, **given}


class _Wrapper:
    made: list[Any] = []
    num_plans = num_runs = 0
    failure: Exception | None = None
    """What the next plans raise."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.made.append(self)
        self.options = _bind(self, "__init__", args, options)
        assert self.options["kv_layout"] in ("NHD", "HND") and self.options["backend"] == "auto"
        workspace = self.options["float_workspace_buffer"]
        assert workspace.dtype == torch.uint8 and not workspace.any()
        self.planned: dict[str, Any] | None = None

    def plan(self, *args: Any, **options: Any) -> None:
        if _Wrapper.failure is not None:
            raise _Wrapper.failure
        _Wrapper.num_plans += 1
        given = _bind(self, "plan", args, options)
        if "indptr" in given:
            names = {"indptr": "paged_kv_indptr", "indices": "paged_kv_indices", "head_dim": "head_dim_qk"}
            names["last_page_len"] = "paged_kv_last_page_len"
            given = {names.get(name, name): value for name, value in given.items()}
            given["qo_indptr"] = torch.arange(len(given["paged_kv_indptr"]), dtype=torch.int32)
            given["causal"] = False
        starts, last = given["paged_kv_indptr"], given["paged_kv_last_page_len"]
        for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"):
            assert given[name].dtype == torch.int32, name
        assert len(given["paged_kv_indices"]) == starts[-1] and last.min() >= 1
        assert last.max() <= given["page_size"] and (starts.diff() > 0).all()
        if given["seq_lens"] is not None:
            assert torch.equal(given["seq_lens"], (starts.diff() - 1) * given["page_size"] + last)
        assert given["pos_encoding_mode"] == "NONE"
        self.planned = given

    def run(self, *args: Any, **options: Any) -> torch.Tensor:
        _Wrapper.num_runs += 1
        given, plan = _bind(self, "run", args, options), self.planned
        assert plan is not None, "run before plan"
        query, cache = given["q"], given["paged_kv_cache"]
        assert query.dtype == plan["q_data_type"] and cache.dtype == (plan["kv_data_type"] or query.dtype)
        assert query.shape == (plan["qo_indptr"][-1], plan["num_qo_heads"], plan["head_dim_qk"])
        if self.options["kv_layout"] == "NHD":
            cache = cache.transpose(2, 3)
        shape = (plan["num_kv_heads"], plan["page_size"], plan["head_dim_qk"])
        assert cache.dim() == 5 and cache.shape[1:] == (2, *shape) and cache.stride(-1) == 1
        out = torch.zeros_like(query) if given["out"] is None else given["out"]
        starts, pages = plan["qo_indptr"].tolist(), plan["paged_kv_indptr"].tolist()
        for i, last in enumerate(plan["paged_kv_last_page_len"].tolist()):
            blocks = plan["paged_kv_indices"][pages[i] : pages[i + 1]].long()
            length = (len(blocks) - 1) * plan["page_size"] + last
            # [2, num_kv_heads, length, head_dim]
            context = cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].double()
            rows = query[starts[i] : starts[i + 1]].double()
            out[starts[i] : starts[i + 1]] = _attend(rows, context, plan).to(out.dtype)
        return out


def _attend(query: torch.Tensor, context: torch.Tensor, plan: dict[str, Any]) -> torch.Tensor:
    """query [n, num_heads, head_dim] over context [2, num_kv_heads, length, head_dim]."""
    keys, values = context.repeat_interleave(query.shape[1] // context.shape[1], dim=1).unbind()
    scale = query.shape[2] ** -0.5 if plan["sm_scale"] is None else plan["sm_scale"]
    scores = torch.einsum("qhd,hkd->hqk", query, keys) * scale
    if plan["logits_soft_cap"]:
        scores = plan["logits_soft_cap"] * torch.tanh(scores / plan["logits_soft_cap"])
    num_rows, length = scores.shape[1:]
    row, column = torch.arange(num_rows)[:, None], torch.arange(length)
    seen = torch.ones(num_rows, length, dtype=torch.bool)
    if plan["causal"]:
        seen &= column + num_rows <= length + row
    if plan["window_left"] >= 0:
        seen &= row + length <= column + num_rows + plan["window_left"]
    return torch.einsum("hqk,hkd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), values)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """See FlashInfer."""


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    """See FlashInfer."""


def fake_module() -> ModuleType:
    """As it is found in sys.modules; what was counted is forgotten."""
    _Wrapper.made.clear()
    _Wrapper.num_plans = _Wrapper.num_runs = 0
    _Wrapper.failure = None
    module = ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    for one in (BatchPrefillWithPagedKVCacheWrapper, BatchDecodeWithPagedKVCacheWrapper):
        setattr(module, one.__name__, one)
    vars(module)["calls"] = _Wrapper
    return module
