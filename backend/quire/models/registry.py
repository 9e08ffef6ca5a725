"""Model classes by their name in config.json's `architectures`, imported when needed."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from quire.errors import ConfigError, describe
from quire.layers.hf_config import HFConfig
from quire.layers.pooling import CLASSIFIER
from quire.models.interface import Model
from quire.named_code import load_class

ENTRY_POINTS = "quire.models"
"""Entry point group in which installed packages offer classes of other models. An entry's name is the model's
name in `architectures`."""
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "GlmMoeDsaForCausalLM": "deepseek_v32",
    "Glm4MoeLiteForCausalLM": "deepseek_v3",
    "MiniCPM3ForCausalLM": "deepseek_v3",
    "YoutuForCausalLM": "deepseek_v3",
    "Dots1ForCausalLM": "dots1",
    "Glm4MoeForCausalLM": "glm4_moe",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "OlmoeForCausalLM": "olmoe",
    "GraniteMoeForCausalLM": "granite_moe",
    "GraniteMoeHybridForCausalLM": "granite_moe_hybrid",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Phi3ForCausalLM": "phi3",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm",
    "GraniteForCausalLM": "granite",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "SmolLM3ForCausalLM": "smollm3",
    "SeedOssForCausalLM": "seed_oss",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Exaone4ForCausalLM": "exaone4",
    "HunYuanDenseV1ForCausalLM": "hunyuan",
    "InternLM2ForCausalLM": "internlm",
    "InternLM3ForCausalLM": "internlm",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2",
    "NemotronHForCausalLM": "nemotron_h",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava",
    "LlavaOnevisionForConditionalGeneration": "llava",
    "InternVLForConditionalGeneration": "llava",
    "Mistral3ForConditionalGeneration": "llava",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "BertModel": "bert",
    "BertForSequenceClassification": "bert",
    "RobertaModel": "bert",
    "RobertaForSequenceClassification": "bert",
    "XLMRobertaModel": "bert",
    "XLMRobertaForSequenceClassification": "bert",
    "ModernBertModel": "modernbert",
    "ModernBertForSequenceClassification": "modernbert",
}
"""Module of `quire.models` for each architecture of whole models. A new family usually needs one line here
and one file."""
HEADS = {
    "LlamaForCausalLMEagle": "eagle",
    "EagleLlamaForCausalLM": "eagle",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
}
"""Module of `quire.models` for each architecture of draft heads. Such a checkpoint is allowed only as
`draft_model`."""


def with_head(hf: HFConfig) -> HFConfig:
    """Returns a config that names an architecture with a language model's head: `Qwen3ForCausalLM` in place
    of `Qwen3Model`, which embedding models often state, or of `Qwen3ForSequenceClassification`. The
    embeddings then count as tied to the head. A config with another ending of the name, or whose name with a
    head is not in ARCHITECTURES, is returned as it is."""
    stem, found, _ = hf.architecture.rpartition(CLASSIFIER)
    name = f"{stem if found else hf.architecture.removesuffix('Model')}ForCausalLM"
    if not hf.architecture.endswith(("Model", CLASSIFIER)) or name not in ARCHITECTURES:
        return hf
    return hf.replace(architectures=[name], tie_word_embeddings=True)


def _checked(name: str, found: Any) -> type[Model]:
    if not isinstance(found, type) or Model not in found.__mro__:
        raise ConfigError(f"{name}: {found!r:.200} does not inherit from quire.models.interface.Model")
    return found


def uses_transformers(architecture: str, model_impl: str) -> bool:
    """Whether `model_impl` (see `ModelConfig`) means that transformers' code computes an architecture. What
    comes before `model_impl` is not regarded: `model_class`, entry points and draft heads."""
    return model_impl == "transformers" or (model_impl == "auto" and architecture not in ARCHITECTURES)


def model_class(hf: HFConfig, model_impl: str = "quire", named: str = "") -> type[Model]:
    """Returns the model class for a checkpoint.

    Args:
        model_impl: see `ModelConfig`.
        named: `ModelConfig.model_class`; empty: the architecture decides.

    Raises:
        CheckpointError: the checkpoint names no architecture, or one that is not supported; then the message
            lists those that are.
        ConfigError: the class `named`, or that of an entry point, cannot be loaded or is no Model.
    """
    if named:
        return _checked("model_class", load_class("model_class", named))
    name = hf.architecture
    for entry in () if name in ARCHITECTURES else metadata.entry_points(group=ENTRY_POINTS, name=name):
        try:
            loaded = entry.load()
        except Exception as error:
            raise ConfigError(
                f"entry point {entry.value!r:.200} of {ENTRY_POINTS}: {describe(error)}"
            ) from error
        return _checked(entry.value, loaded)
    if uses_transformers(name, model_impl) and name not in HEADS:
        from quire.models.transformers_fallback import TransformersModel

        return TransformersModel
    known = ARCHITECTURES | HEADS
    if name not in known:
        raise hf.error(f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    module = importlib.import_module(f"quire.models.{known[name]}")
    found: type[Model] = getattr(module, name)
    return found
