"""Translates a GGUF file's metadata to the keys of Hugging Face's config.json. This module does not import
torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType

from quire.errors import CheckpointError
from quire.layers.hf_config import MAX_HEADS, HFConfig
from quire.loader.gguf.families import FAMILIES, Family, Own, family_of
from quire_common.errors import shown
from quire_common.gguf_file import GGUFError, GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor with divisors of the rotary frequencies, such as llama3 scaling gives."""
LONG_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
"""Names of the tensors with divisors of longrope's frequencies, by their keys in config.json."""
_UNSUPPORTED_SCALING = {
    "attn_factor": 1,
    "yarn_attn_factor": 1,
    "yarn_ext_factor": 1,
    "yarn_log_multiplier": 0,
}
"""Keys of rotary scaling, without their prefix, and for each the value that has no effect. Another value is
usually refused; `_scaling` has the exceptions."""
_ENDS = frozenset((
    "</s>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "[EOS]", "<|eot_id|>", "<|eom_id|>",
    "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]",
    "<|return|>", "<|call|>",
))  # fmt: skip
"""Texts of tokens that end a generation even if the file does not say so; in gpt-oss, "<|end|>" does not.
llama.cpp recognises them by these texts."""

_WITHOUT_EFFECT = ("vocab_size", "attention.value_length", "expert_shared_feed_forward_length")
"""Keys of an architecture that most families do not read, because the tensors' shapes say the same and are
checked."""

_TYPE_TO_DTYPE = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


def open_gguf(file: Path) -> GGUFFile:
    """Reads the head of a GGUF file, with those of all its parts.

    Raises:
        CheckpointError: a part is missing, broken or of an unknown version, or the file names no
            general.architecture.
    """
    try:
        opened = GGUFFile.open(file)
    except (OSError, GGUFError) as error:
        raise CheckpointError(f"{file}: broken GGUF file: {error}") from None
    if "general.architecture" not in opened.metadata:
        raise CheckpointError(f"{file}: broken GGUF file: it names no general.architecture")
    return opened


def read_gguf_config(file: Path) -> HFConfig:
    """Returns a GGUF file's metadata under the keys of config.json. Raises CheckpointError if the file is
    broken or not supported."""
    opened = open_gguf(file)
    tensors, stated = opened.tensors, _Stated(opened)
    family = family_of(opened.metadata, tensors)
    if family is None:
        known = ", ".join(FAMILIES)
        arch = shown(stated("general.architecture"))
        raise CheckpointError(f"{file}: GGUF architecture {arch} is not supported; supported: {known}")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file}: holds no token_embd.weight")
    own = stated.own
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "vocab_size": embedding.shape[0],
        "hidden_size": own("embedding_length"),
        "intermediate_size": own("feed_forward_length"),
        "num_hidden_layers": num_layers(own),
        "num_attention_heads": own("attention.head_count"),
        "num_key_value_heads": own("attention.head_count_kv"),
        "sliding_window": own("attention.sliding_window") or None,
        "head_dim": own("attention.key_length"),
        "max_position_embeddings": own("context_length"),
        "rms_norm_eps": own("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "use_bias": "blk.0.attn_q.bias" in tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "rope_parameters": _rope(opened, stated, family),
        "eos_token_id": _eos(opened),
        "bos_token_id": stated("tokenizer.ggml.bos_token_id"),
        "dtype": _dtype(opened, embedding.kind),
    }
    found = {key: own(name) for key, name in family.keys.items()}
    values |= {key: value for key, value in found.items() if value is not None}
    if family.derived is not None:
        values |= family.derived(own, values)
    return HFConfig(file, values, opened, stated.unused())


def num_layers(own: Own) -> Any:
    """Returns the number of layers as the metadata states it, unchecked, without those for multi-token
    prediction, which lie behind the others."""
    count, behind = own("block_count"), own("nextn_predict_layers")
    return count - behind if type(count) is type(behind) is int else count


class _Stated:
    """Returns values of a file's metadata, and records which keys were asked for."""

    def __init__(self, opened: GGUFFile) -> None:
        self._metadata = opened.metadata
        self._asked: set[str] = set()
        self.arch = str(opened.metadata["general.architecture"])

    def __call__(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return self._metadata.get(key, default)

    def own(self, name: str, default: Any = None) -> Any:
        """Returns the value of a key that begins with the architecture, named without the architecture; the
        default if the file does not state it."""
        return self(f"{self.arch}.{name}", default)

    def unused(self) -> tuple[str, ...]:
        """Returns the keys that begin with the architecture and were not asked for, without those of
        _WITHOUT_EFFECT."""
        read = {*self._asked, *(f"{self.arch}.{name}" for name in _WITHOUT_EFFECT)}
        return tuple(key for key in self._metadata if key.startswith(f"{self.arch}.") and key not in read)


def _dtype(opened: GGUFFile, kind: GGMLQuantizationType) -> str:
    """Returns the `dtype` for config.json. If all tensors are F32, F16 or BF16, it is the embedding's type.

    Any other file gives bfloat16. Quantised weights have lost more precision than bfloat16 takes from
    activations, and 16-bit keys and values are read in half the time of float32.
    """
    is_plain = all(tensor.kind in _TYPE_TO_DTYPE for tensor in opened.tensors.values())
    return _TYPE_TO_DTYPE[kind] if is_plain else "bfloat16"


def _rope(opened: GGUFFile, stated: _Stated, family: Family) -> dict[str, Any]:
    own, is_latent = stated.own, stated.own("attention.kv_lora_rank") is not None
    rotated, size = own("rope.dimension_count"), own("attention.key_length")
    heads, hidden_size = own("attention.head_count"), own("embedding_length")
    if size is None and type(heads) is type(hidden_size) is int and heads > 0:
        size = hidden_size // heads
    # A latent's rotated part is apart from the rest of the keys.
    if None not in (rotated, size) and rotated != size and not (family.rotates_partly or is_latent):
        raise CheckpointError(
            f"{opened.path}: {stated.arch}.rope.dimension_count is {shown(rotated)}, of heads of "
            f"{shown(size)} dimensions: not supported"
        )
    # Positions of text are equal on all axes. The rows of GLM-4's projections are in another order then.
    if own("rope.dimension_sections") is not None and not stated.arch.startswith("qwen35"):
        raise CheckpointError(f"{opened.path}: {stated.arch}.rope.dimension_sections is not supported")
    if rotated is not None and type(rotated) is not int:
        raise CheckpointError(
            f"{opened.path}: {stated.arch}.rope.dimension_count must be a whole number, got {shown(rotated)}"
        )
    theta = own("rope.freq_base")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0 if theta is None else theta}
    if family.rotates_partly:
        is_known = type(rotated) is type(size) is int and size > 0
        rope["partial_rotary_factor"] = rotated / size if is_known else 1.0
    rope |= _scaling(opened, stated, is_latent)
    if ROPE_FACTORS in opened.tensors:
        rope["frequency_factors"] = _factors(opened, ROPE_FACTORS)
    if family.sliding_theta is None:
        return rope
    theta = own("rope.freq_base_swa") or family.sliding_theta or rope["rope_theta"]
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}


def _scaling(opened: GGUFFile, stated: _Stated, is_latent: bool) -> dict[str, Any]:
    """Returns the parameters of rotary scaling; empty: there is none. Raises CheckpointError if it is not
    supported."""
    own = stated.own
    if opened.tensors.keys() >= set(LONG_FACTORS.values()):
        return {
            **{key: _factors(opened, name) for key, name in LONG_FACTORS.items()},
            "rope_type": "longrope",
            "attention_factor": own("rope.scaling.attn_factor"),
        }
    factor = own("rope.scaling.factor") or own("rope.scale_linear")
    scaling = own("rope.scaling.type", "linear" if factor else "none")
    if scaling == "none":
        return {}
    log_multiplier = own("rope.scaling.yarn_log_multiplier") if is_latent else None
    for key, neutral in _UNSUPPORTED_SCALING.items():
        value = own(f"rope.scaling.{key}", neutral)
        if value != neutral and (key != "yarn_log_multiplier" or not is_latent):
            raise CheckpointError(
                f"{opened.path}: {stated.arch}.rope.scaling.{key} is {shown(value)}: not supported, only "
                f"{neutral}"
            )
    numbers = {key: own(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
    if log_multiplier is not None and type(log_multiplier) is not float:
        raise CheckpointError(
            f"{opened.path}: {stated.arch}.rope.scaling.yarn_log_multiplier must be a number, got "
            f"{shown(log_multiplier)}"
        )
    if log_multiplier:
        # The converter writes a tenth, and no second factor, which all checkpoints have equal to this one.
        numbers |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * log_multiplier)
    return {
        **{key: value for key, value in numbers.items() if value is not None},
        "rope_type": scaling,
        "factor": factor or 1.0,  # as llama.cpp; transformers would divide the lengths
        "original_max_position_embeddings": own("rope.scaling.original_context_length"),
        "truncate": stated.arch != "gpt-oss",  # whose files do not say that its checkpoints have it so
    }


def _factors(opened: GGUFFile, name: str) -> list[float]:
    """Reads the numbers of a tensor of divisors; raises CheckpointError."""
    factors = opened.tensors[name]
    kind, shape = factors.kind, factors.shape
    if kind != GGMLQuantizationType.F32 or len(shape) != 1 or shape[0] > MAX_HEADS:
        raise CheckpointError(f"{opened.path}: {name} is {kind.name} of the shape {list(shape)}")
    try:
        found: list[float] = opened.data(factors).view("<f4").tolist()
    except (OSError, GGUFError) as error:
        raise CheckpointError(f"{opened.path}: broken GGUF file: {error}") from None
    return found


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
