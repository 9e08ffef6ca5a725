"""The head of a GGUF file in Hugging Face's terms, so that one path reads both. No torch in here."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor

from quire.errors import CheckpointError
from quire.models.hf_config import HFConfig

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`general.architecture` to HF's name; Mistral's files say llama."""
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with divisors of the rotary frequencies: llama3 scaling, worked out by the converter."""

_TYPE_TO_DTYPE = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}


def open_gguf(file: Path) -> GGUFReader:
    """Maps a file and reads its head.

    Raises:
        CheckpointError: not a GGUF file, truncated, or of an unknown version.
    """
    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError, UnicodeDecodeError, struct.error) as error:
        text = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{file}: broken GGUF file: {text}") from None
    if field(reader, "general.architecture") is None:
        raise CheckpointError(f"{file}: broken GGUF file: it names no general.architecture")
    return reader


def field(reader: GGUFReader, key: str) -> Any:
    """A metadata value, or None."""
    found = reader.get_field(key)
    return None if found is None else found.contents()


def read_gguf_config(file: Path) -> HFConfig:
    """config.json's keys from GGUF metadata; raises CheckpointError."""
    reader = open_gguf(file)
    arch = field(reader, "general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{file}: GGUF architecture {arch!r} is not supported; supported: {known}")
    tensors: dict[str, ReaderTensor] = {tensor.name: tensor for tensor in reader.tensors}
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file}: holds no token_embd.weight")
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        # GGUF states shapes with the fastest dimension first.
        "vocab_size": int(embedding.shape[1]),
        "hidden_size": field(reader, f"{arch}.embedding_length"),
        "intermediate_size": field(reader, f"{arch}.feed_forward_length"),
        "num_hidden_layers": field(reader, f"{arch}.block_count"),
        "num_attention_heads": field(reader, f"{arch}.attention.head_count"),
        "num_key_value_heads": field(reader, f"{arch}.attention.head_count_kv"),
        "head_dim": field(reader, f"{arch}.attention.key_length"),
        "max_position_embeddings": field(reader, f"{arch}.context_length"),
        "rms_norm_eps": field(reader, f"{arch}.attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "rope_parameters": _rope(reader, arch, tensors),
        "eos_token_id": _eos(reader),
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "dtype": _TYPE_TO_DTYPE.get(embedding.tensor_type, "float32"),
    }
    return HFConfig(file, values)


def _rope(reader: GGUFReader, arch: str, tensors: dict[str, ReaderTensor]) -> dict[str, Any]:
    prefix = f"{arch}.rope."
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": field(reader, f"{prefix}freq_base") or 10000.0,
    }
    scaling = field(reader, f"{prefix}scaling.type")
    if scaling not in (None, "none"):
        rope |= {
            "rope_type": scaling,
            "factor": field(reader, f"{prefix}scaling.factor"),
            "original_max_position_embeddings": field(reader, f"{prefix}scaling.original_context_length"),
        }
    if ROPE_FACTORS in tensors:
        rope["frequency_factors"] = tensors[ROPE_FACTORS].data.astype("float32").tolist()
    return rope


def _eos(reader: GGUFReader) -> list[int]:
    ids = [field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return [token_id for token_id in ids if token_id is not None]
