"""Model classes by their name in config.json's `architectures`, imported when needed."""

from __future__ import annotations

import importlib

from quire.models.decoder import DecoderModel
from quire.models.hf_config import HFConfig

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "GptOssForCausalLM": "gpt_oss",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "LlavaForConditionalGeneration": "llava",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_vl",
}
"""Architecture to the module of `quire.models` that holds it: a new family is one line and one file."""


def with_head(hf: HFConfig) -> HFConfig:
    """The config of the whole model, for one that was saved without its head (`Qwen3Model`), as those of
    embeddings often are; the table of embeddings stands for it."""
    name = f"{hf.architecture.removesuffix('Model')}ForCausalLM"
    if not hf.architecture.endswith("Model") or name not in ARCHITECTURES:
        return hf
    return hf.replace(architectures=[name], tie_word_embeddings=True)


def model_class(hf: HFConfig) -> type[DecoderModel]:
    """The class for a checkpoint.

    Raises:
        CheckpointError: the architecture is not supported; lists those that are.
    """
    name = hf.architecture
    if name not in ARCHITECTURES:
        raise hf.error(f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    module = importlib.import_module(f"quire.models.{ARCHITECTURES[name]}")
    found = getattr(module, name)
    assert issubclass(found, DecoderModel)
    return found
