"""Translates a GGUF file's metadata to the keys of Hugging Face's config.json. This module does not import
torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType

from quire.errors import CheckpointError
from quire.layers.hf_config import MAX_HEADS, HFConfig
from quire_common.errors import shown
from quire_common.gguf_file import GGUFError, GGUFFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
}
"""Hugging Face's architecture by `general.architecture`. Files of Mistral say llama, and so do those of
Mixtral, which have experts."""
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with divisors of the rotary frequencies: llama3 scaling as the converter computed it."""
_UNSUPPORTED_SCALING = {
    "attn_factor": 1,
    "yarn_attn_factor": 1,
    "yarn_ext_factor": 1,
    "yarn_log_multiplier": 0,
}
"""Keys of rotary scaling that are not supported, without their prefix, and the value of each that has no
effect."""
_ENDS = frozenset((
    "</s>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "[EOS]", "<|eot_id|>", "<|eom_id|>",
    "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]",
    "<|return|>", "<|call|>",
))  # fmt: skip
"""Names of tokens that end a generation even if the file does not say so. llama.cpp recognises them by these
names."""

_WITHOUT_EFFECT = ("vocab_size", "attention.value_length")
"""Keys of an architecture that are not read, because the tensors' shapes say the same and are checked."""

_TYPE_TO_DTYPE = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


def open_gguf(file: Path) -> GGUFFile:
    """Reads a file's head.

    Raises:
        CheckpointError: the file cannot be read, is no GGUF file, is truncated or of an unknown version, or
            names no general.architecture.
    """
    try:
        opened = GGUFFile.open(file)
    except (OSError, GGUFError) as error:
        raise CheckpointError(f"{file}: broken GGUF file: {error}") from None
    if "general.architecture" not in opened.metadata:
        raise CheckpointError(f"{file}: broken GGUF file: it names no general.architecture")
    return opened


def read_gguf_config(file: Path) -> HFConfig:
    """Returns config.json's keys, read from GGUF metadata; raises CheckpointError."""
    opened = open_gguf(file)
    tensors, stated = opened.tensors, _Stated(opened)
    arch = stated("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{file}: GGUF architecture {shown(arch)} is not supported; supported: {known}")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file}: holds no token_embd.weight")
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "vocab_size": embedding.shape[0],
        "hidden_size": stated(f"{arch}.embedding_length"),
        "intermediate_size": stated(f"{arch}.feed_forward_length"),
        "num_hidden_layers": stated(f"{arch}.block_count"),
        "num_attention_heads": stated(f"{arch}.attention.head_count"),
        "num_key_value_heads": stated(f"{arch}.attention.head_count_kv"),
        "sliding_window": stated(f"{arch}.attention.sliding_window"),
        "head_dim": stated(f"{arch}.attention.key_length"),
        "max_position_embeddings": stated(f"{arch}.context_length"),
        "rms_norm_eps": stated(f"{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "rope_parameters": _rope(opened, stated, arch),
        "eos_token_id": _eos(opened),
        "bos_token_id": stated("tokenizer.ggml.bos_token_id"),
        "dtype": _dtype(opened, embedding.kind),
    }
    if stated(f"{arch}.expert_count"):
        values |= {
            "architectures": ["MixtralForCausalLM" if is_mixtral(opened) else ARCHITECTURES[arch]],
            "num_local_experts": stated(f"{arch}.expert_count"),
            "num_experts_per_tok": stated(f"{arch}.expert_used_count"),
            "moe_intermediate_size": stated(f"{arch}.expert_feed_forward_length"),
            "shared_expert_intermediate_size": stated(f"{arch}.expert_shared_feed_forward_length"),
            "norm_topk_prob": arch != "qwen2moe",  # no key says so; this is what llama.cpp does
        }
    return HFConfig(file, values, opened, stated.unused(arch))


class _Stated:
    """A file's metadata, which records the keys that were read."""

    def __init__(self, opened: GGUFFile) -> None:
        self._metadata = opened.metadata
        self._asked: set[str] = set()

    def __call__(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return self._metadata.get(key, default)

    def unused(self, arch: str) -> tuple[str, ...]:
        """Returns the keys of the architecture that were never read, without those of _WITHOUT_EFFECT."""
        passed_over = {*self._asked, *(f"{arch}.{name}" for name in _WITHOUT_EFFECT)}
        return tuple(key for key in self._metadata if key.startswith(f"{arch}.") and key not in passed_over)


def is_mixtral(opened: GGUFFile) -> bool:
    """Whether a file's experts have Mixtral's names at Hugging Face."""
    stated = opened.metadata.get
    return stated("general.architecture") == "llama" and bool(stated("llama.expert_count"))


def _dtype(opened: GGUFFile, kind: GGMLQuantizationType) -> str:
    """Returns the dtype name of activations, keys and values. If no tensor is quantised, it is the
    embedding's type.

    A file with quantised tensors gives bfloat16. Its weights have lost more precision than bfloat16 takes
    from activations, and 16-bit keys and values are read in half the time of float32.
    """
    is_plain = all(tensor.kind in _TYPE_TO_DTYPE for tensor in opened.tensors.values())
    return _TYPE_TO_DTYPE[kind] if is_plain else "bfloat16"


def _rope(opened: GGUFFile, stated: _Stated, arch: str) -> dict[str, Any]:
    prefix = f"{arch}.rope."
    rotated, size = stated(f"{prefix}dimension_count"), stated(f"{arch}.attention.key_length")
    heads, hidden_size = stated(f"{arch}.attention.head_count"), stated(f"{arch}.embedding_length")
    if size is None and type(heads) is type(hidden_size) is int and heads > 0:
        size = hidden_size // heads
    if None not in (rotated, size) and rotated != size:
        raise CheckpointError(
            f"{opened.path}: {prefix}dimension_count is {shown(rotated)}, of heads of {shown(size)} "
            "dimensions: not supported"
        )
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": stated(f"{prefix}freq_base") or 10000.0,
    }
    factor = stated(f"{prefix}scaling.factor") or stated(f"{prefix}scale_linear")
    scaling = stated(f"{prefix}scaling.type", "linear" if factor else "none")
    if scaling != "none":
        for key, neutral in _UNSUPPORTED_SCALING.items():
            if stated(f"{prefix}scaling.{key}", neutral) != neutral:
                raise CheckpointError(
                    f"{opened.path}: {prefix}scaling.{key} is {shown(stated(f'{prefix}scaling.{key}'))}: not "
                    f"supported, only {neutral}"
                )
        betas = {key: stated(f"{prefix}scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
        rope |= {
            **{key: value for key, value in betas.items() if value is not None},
            "rope_type": scaling,
            "factor": factor or 1.0,  # as llama.cpp; transformers would divide the lengths
            "original_max_position_embeddings": stated(f"{prefix}scaling.original_context_length"),
            "truncate": arch != "gpt-oss",  # whose files do not say that its checkpoints have it so
        }
    factors = opened.tensors.get(ROPE_FACTORS)
    if factors is not None:
        kind, shape = factors.kind, factors.shape
        if kind != GGMLQuantizationType.F32 or len(shape) != 1 or shape[0] > MAX_HEADS:
            raise CheckpointError(f"{opened.path}: {ROPE_FACTORS} is {kind.name} of the shape {list(shape)}")
        try:
            rope["frequency_factors"] = opened.data(factors).view("<f4").tolist()
        except (OSError, GGUFError) as error:
            raise CheckpointError(f"{opened.path}: broken GGUF file: {error}") from None
    return rope


def _eos(opened: GGUFFile) -> list[int]:
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = [opened.metadata.get(key) for key in keys]
    for key, token_id in zip(keys, ids, strict=True):
        if token_id is not None and type(token_id) is not int:
            raise CheckpointError(f"{opened.path}: {key} must be a whole number, got {token_id!r:.40}")
    tokens = opened.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        named = {one: at for at, one in enumerate(tokens) if isinstance(one, str) and one in _ENDS}
        if {"<|return|>", "<|call|>"} <= named.keys():
            named.pop("<|end|>", None)  # gpt-oss' messages end so, of which an answer has several
        ids += named.values()
    return [token_id for token_id in dict.fromkeys(ids) if token_id is not None]
