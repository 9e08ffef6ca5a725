"""Families of models in GGUF files: names of tensors and keys of metadata by `general.architecture`, as
llama.cpp's converter writes them. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Own = Callable[[str], Any]
"""Function that returns the value of a key of the metadata, named without the architecture before it, such as
"block_count" for "llama.block_count"; None: the file does not state it."""
Values = Mapping[str, Any]
"""Values by their keys in config.json."""

TOP = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""Hugging Face's names of the tensors outside layers, by their names in GGUF files; both without the last
part, such as ".weight"."""
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Hugging Face's names of a layer's tensors, by their names in GGUF files; usually both without the last
part, such as ".weight". Some families have other names in `Family.names`."""
PARAMETERS = ("attn_sinks", "exp_probs_b", "ssm_a", "ssm_dt")
"""Names in GGUF files of tensors whose Hugging Face names have no last part such as ".weight"."""


class Family(NamedTuple):
    """Description of the GGUF files of one kind of model, for reading them as Hugging Face's checkpoints."""

    architecture: str
    """Name of the model's class, for `architectures` in config.json."""
    names: Mapping[str, str] = MappingProxyType({})
    """Hugging Face's names of a layer's tensors that differ from IN_LAYER or are missing there, by their
    names in GGUF files."""
    keys: Mapping[str, str] = MappingProxyType({})
    """Keys of the metadata that the family reads besides the usual ones, without the architecture, by their
    keys in config.json. If the file does not state one, config.json lacks its key."""
    derived: Callable[[Own, Values], Values] | None = None
    """Function that returns further values of config.json; None: there are none. Its first argument reads
    keys, its second holds the values known so far."""
    is_paired: bool = False
    """Whether the file's query and key projections have their rows reordered, so that rotary embedding pairs
    neighbouring dimensions."""
    has_whole_norms: bool = False
    """Whether the file stores norms' scales as they are used, and Hugging Face's checkpoints store most of
    them less 1."""
    rotates_partly: bool = False
    """Whether rotary embedding may rotate only some of a head's dimensions."""
    sliding_theta: float | None = None
    """Rotary theta of layers with a window if the file states none for them; 0: that of the other layers.
    None: config.json has one set of rotary parameters for all layers."""


def _with_windows(own: Own, values: Values) -> Values:
    """Returns config.json's `layer_types`, or nothing for a file with a window and no pattern of it. If the
    file states no window, no layer has one, whatever the class's default is."""
    pattern, count = own("attention.sliding_window_pattern"), values["num_hidden_layers"]
    if not values["sliding_window"]:
        return {"sliding_window": None, "layer_types": ["full_attention"] * _number(count)}
    if type(pattern) is int and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(_number(count))]
    if not isinstance(pattern, list):
        return {}
    return {"layer_types": ["sliding_attention" if one else "full_attention" for one in pattern]}


def _number(value: Any, most: int = 2**16) -> int:
    """Returns a value of the metadata if it is a whole number from 0 to `most`, else 0."""
    return value if type(value) is int and 0 <= value <= most else 0


def _gemma(values: Values, largest: int) -> Values:
    """Returns Gemma's `query_pre_attn_scalar`, the square of the divisor of attention scores. It is the size
    of a head, except in the model with `largest` layers, and no key says so."""
    heads = _number(values["num_attention_heads"])
    is_largest = values["num_hidden_layers"] == largest and heads > 0
    size = _number(values["hidden_size"]) // heads if is_largest else values["head_dim"]
    return {"query_pre_attn_scalar": size}


def _gemma2(own: Own, values: Values) -> Values:
    return _gemma(values, 46)


def _gemma3(own: Own, values: Values) -> Values:
    return {**_gemma(values, 62), **_with_windows(own, values)}


def _scoring(own: Own, values: Values) -> Values:
    """Returns config.json's `scoring_func`, or nothing if the file does not state it."""
    scoring = own("expert_gating_func")
    named = {1: "softmax", 2: "sigmoid"}.get(_number(scoring), scoring)
    return {} if scoring is None or scoring == 0 else {"scoring_func": named}


def _shares(own: Own, values: Values) -> Values:
    """Returns config.json's values for the choice of experts and their shares, under DeepSeek's keys. If the
    file does not state one, llama.cpp's default counts, but `scoring_func` is left out."""
    return {
        **_scoring(own, values),
        "norm_topk_prob": own("expert_weights_norm") or False,
        "routed_scaling_factor": own("expert_weights_scale") or 1.0,
        "n_group": own("expert_group_count") or 1,
        "topk_group": own("expert_group_used_count") or 1,
        "first_k_dense_replace": own("leading_dense_block_count") or 0,
    }


def _latent(own: Own, values: Values) -> Values:
    """Returns the sizes of latent attention, and what `_shares` returns. Files of before April 2025 have no
    keys that end in "_mla"; their other lengths are those of the heads that latents are expanded to."""
    rotated = _number(own("rope.dimension_count"))
    size = own("attention.key_length_mla") or own("attention.key_length")
    shares = _shares(own, values)
    return {
        **shares,
        "q_lora_rank": own("attention.q_lora_rank"),
        "kv_lora_rank": own("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": _number(size) - rotated,
        "v_head_dim": own("attention.value_length_mla") or own("attention.value_length"),
    }


def _deepseek_v2(own: Own, values: Values) -> Values:
    found = _latent(own, values)
    return {**found, "topk_method": "greedy" if found["n_group"] == 1 else "group_limited_greedy"}


def _lfm2(own: Own, values: Values) -> Values:
    """Returns LFM2's values of config.json, such as the kinds of layers. A layer without KV heads is a
    convolution."""
    heads = own("attention.head_count_kv")
    found = {**_scoring(own, values), "norm_eps": values["rms_norm_eps"]}
    if not isinstance(heads, list) or not heads:
        return found
    return {
        **found,
        "block_auto_adjust_ff_dim": False,
        "num_key_value_heads": max(map(_number, heads)),
        "layer_types": ["full_attention" if _number(one) else "conv" for one in heads],
    }


def _delta(own: Own, values: Values) -> Values:
    """Returns the sizes of gated DeltaNet, and which layers have it."""
    heads, layers = own("ssm.time_step_rank"), own("attention.recurrent_layers")
    found: dict[str, Any] = {
        "linear_num_key_heads": own("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": own("ssm.state_size"),
        "linear_value_head_dim": _number(own("ssm.inner_size"), 2**32) // max(_number(heads), 1),
        "linear_conv_kernel_dim": own("ssm.conv_kernel"),
        "full_attention_interval": own("full_attention_interval"),
    }
    if isinstance(layers, list):
        kinds = ["linear_attention" if one else "full_attention" for one in layers]
        found["layer_types"] = kinds[: _number(values["num_hidden_layers"])]
    return found


_EXPERTS = {"num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}
_LOCAL = {"num_local_experts": "expert_count", **_EXPERTS}
_DEEPSEEK = {"n_routed_experts": "expert_count", "n_shared_experts": "expert_shared_count", **_EXPERTS}
_GRANITE = {
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b": "block_sparse_moe.gate.e_score_correction_bias",
    "ffn_gate": "block_sparse_moe.w1",
    "ffn_up": "block_sparse_moe.w3",
    "ffn_down": "block_sparse_moe.w2",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.gate.e_score_correction_bias",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_SANDWICH = {"ffn_norm": "pre_feedforward_layernorm"}
_CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

FAMILIES = {
    "llama": Family("LlamaForCausalLM", is_paired=True),
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen2moe": Family(
        "Qwen2MoeForCausalLM",
        _SHARED_EXPERT,
        {**_LOCAL, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        lambda own, values: {"norm_topk_prob": False},  # no key says so; this is what llama.cpp does
    ),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM", keys=_LOCAL, derived=lambda own, values: {"norm_topk_prob": True}
    ),
    "gpt-oss": Family("GptOssForCausalLM", {"ffn_gate_inp": "mlp.router"}, _LOCAL),
    "gemma": Family("GemmaForCausalLM", has_whole_norms=True),
    "gemma2": Family("Gemma2ForCausalLM", _SANDWICH, _CAPS, _gemma2, has_whole_norms=True),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        _SANDWICH,
        {"final_logit_softcapping": "final_logit_softcapping"},
        _gemma3,
        has_whole_norms=True,
        sliding_theta=10000.0,
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"ffn_up": "mlp.gate_up_proj"},
        {"original_max_position_embeddings": "rope.scaling.original_context_length"},
        rotates_partly=True,
    ),
    "granite": Family("GraniteForCausalLM", keys=_GRANITE, is_paired=True),
    "granitemoe": Family("GraniteMoeForCausalLM", keys={**_GRANITE, **_LOCAL}, is_paired=True),
    "smollm3": Family("SmolLM3ForCausalLM", is_paired=True),
    "olmo2": Family("Olmo2ForCausalLM"),
    "olmoe": Family("OlmoeForCausalLM", keys={**_EXPERTS, "num_experts": "expert_count"}),
    "glm4": Family(
        "Glm4ForCausalLM",
        {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        rotates_partly=True,
    ),
    "glm4moe": Family("Glm4MoeForCausalLM", keys=_DEEPSEEK, derived=_shares, rotates_partly=True),
    "dots1": Family("Dots1ForCausalLM", keys=_DEEPSEEK, derived=_shares),
    "exaone4": Family("Exaone4ForCausalLM", derived=_with_windows),
    "seed_oss": Family("SeedOssForCausalLM"),
    "ernie4_5": Family("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": Family(
        "Ernie4_5_MoeForCausalLM",
        keys={
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_start_index": "leading_dense_block_count",
            "moe_layer_interval": "interleave_moe_layer_step",
        },
    ),
    "hunyuan-dense": Family("HunYuanDenseV1ForCausalLM"),
    "minimax-m2": Family("MiniMaxM2ForCausalLM", _MIXTRAL, _LOCAL, _scoring, rotates_partly=True),
    "lfm2": Family("Lfm2ForCausalLM", _LFM2, {"conv_L_cache": "shortconv.l_cache"}, _lfm2),
    "lfm2moe": Family(
        "Lfm2MoeForCausalLM",
        _LFM2,
        {
            **_EXPERTS,
            "num_experts": "expert_count",
            "num_dense_layers": "leading_dense_block_count",
            "conv_L_cache": "shortconv.l_cache",
        },
        _lfm2,
    ),
    "qwen35": Family("Qwen3_5ForCausalLM", _DELTA, {}, _delta, has_whole_norms=True, rotates_partly=True),
    "qwen35moe": Family(
        "Qwen3_5MoeForCausalLM",
        {**_DELTA, **_SHARED_EXPERT},
        {
            **_EXPERTS,
            "num_experts": "expert_count",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        _delta,
        has_whole_norms=True,
        rotates_partly=True,
    ),
    "deepseek2": Family("DeepseekV2ForCausalLM", keys=_DEEPSEEK, derived=_deepseek_v2),
}
"""Families by `general.architecture`, without those that only `family_of` tells apart."""
_MIXTURE_OF_LLAMA = Family("MixtralForCausalLM", _MIXTRAL, _LOCAL, is_paired=True)
_OLMO3 = Family("Olmo3ForCausalLM", derived=_with_windows, sliding_theta=0)
_DEEPSEEK_V3 = Family("DeepseekV3ForCausalLM", keys=_DEEPSEEK, derived=_latent)
_YOUTU = Family("YoutuForCausalLM", derived=_latent)


def family_of(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Family | None:
    """Returns the family of a file; None: it is not supported. Some architectures stand for several families,
    which other keys or tensors tell apart.

    Args:
        metadata: the file's.
        tensors: the file's tensors by name.
    """
    arch = metadata.get("general.architecture")
    if arch == "llama" and metadata.get("llama.expert_count"):
        return _MIXTURE_OF_LLAMA
    if arch == "olmo2" and metadata.get("olmo2.attention.sliding_window"):
        return _OLMO3
    if arch == "deepseek2" and not metadata.get("deepseek2.expert_count"):
        return _YOUTU
    if arch == "deepseek2" and any(name.endswith(".exp_probs_b.bias") for name in tensors):
        return _DEEPSEEK_V3
    return FAMILIES.get(arch) if isinstance(arch, str) else None
