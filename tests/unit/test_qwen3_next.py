"""Forks, prefixes and turns of a chat through layers with a state; of Qwen3-Next and Qwen3.5 the size of
blocks, and the files. test_models.py and test_oracle_matrix.py have them among the other families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import SamplingParams
from quire.config import CacheConfig, EngineConfig, ModelConfig
from quire.errors import CheckpointError, ConfigError
from quire.layers.hf_config import HFConfig
from quire.loader.load import empty_model
from quire.models.decoder import DecoderModel
from quire.models.qwen3_next import HybridModel, Qwen3NextForCausalLM
from quire.models.registry import ARCHITECTURES, model_class
from quire.request.sampling_params import choice_seed
from quire.worker.kv_cache import KVLayout
from quire_kernels.ranks import Ranks
from tests.fixtures.checkpoints import DELTA_FAMILIES, HYBRID_FAMILIES, make_checkpoint
from tests.fixtures.drive import Driver, hf_greedy, hf_logits, hf_model
from tests.unit.test_oracle_matrix import GREEDY, PROMPTS, engine

TURNS = 6


@pytest.fixture(scope="module", params=HYBRID_FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family."""
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def test_choices_are_those_of_requests_alone(path: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0}
    reference = engine(path, enable_prefix_caching=False, max_num_batched_tokens=512)
    llm = engine(path, max_num_batched_tokens=16)
    for prompt in PROMPTS[:4]:
        (output,) = llm.generate([prompt], SamplingParams(n=3, seed=5, **options))
        for index, choice in enumerate([output, *output.others]):
            params = SamplingParams(seed=choice_seed(5, index), **options)
            assert choice.token_ids == reference.generate([prompt], params)[0].token_ids
    llm.core.scheduler.check_integrity()


def test_a_turn_computes_its_new_tokens_and_at_most_a_block(path: Path) -> None:
    """Six turns of a chat, each with all those before it in its prompt."""
    model, llm = hf_model(path), engine(path, max_model_len=256, max_num_batched_tokens=24)
    block_size = llm.core.kv.block_size
    history: list[int] = []
    for turn in range(TURNS):
        question = [(7 * place + 31 * turn) % 500 + 5 for place in range(9 + 4 * turn)]
        prompt = history + question
        (output,) = llm.generate([prompt], GREEDY)
        assert output.token_ids == hf_greedy(model, prompt, GREEDY.max_tokens), turn
        assert len(prompt) - output.num_cached_tokens <= len(question) + block_size, turn
        history = prompt + output.token_ids
    llm.core.scheduler.check_integrity()


# The size of blocks.


def layout(path: Path, **cache: Any) -> KVLayout:
    config = EngineConfig(model=ModelConfig(model=str(path), dtype="float32"), cache=CacheConfig(**cache))
    return KVLayout.from_config(config, empty_model(config.model, torch.device("meta")).model)


@pytest.mark.parametrize("path", DELTA_FAMILIES, indirect=True)
def test_keys_of_a_block_are_as_large_as_a_state(path: Path) -> None:
    of_states = layout(path)
    state_bytes = max(group.state_bytes for group in of_states.groups)
    # 4 heads of 16 x 32 numbers, and 3 inputs of 2 * 2 * 16 + 4 * 32 channels.
    assert state_bytes == 4 * (4 * 16 * 32 + 3 * (64 + 128))
    per_token = of_states.spec.layer_bytes(1)
    assert of_states.block_size == 64 and of_states.layer_bytes == 64 * per_token >= state_bytes
    assert layout(path, block_size=8).block_size == 8
    assert layout(path, block_size=8).layer_bytes == state_bytes


@pytest.mark.parametrize("path", DELTA_FAMILIES, indirect=True)
def test_the_engine_serves_blocks_of_that_size(path: Path) -> None:
    llm = engine(path, block_size=None, max_model_len=256)
    core = llm.core
    assert core.kv.block_size == core.config.cache.block_size == core.info.block_size == 64
    prompt = [(7 * place) % 500 + 5 for place in range(150)]
    expected = hf_greedy(hf_model(path), prompt, GREEDY.max_tokens)
    for num_cached in (0, 128):
        (output,) = llm.generate([prompt], GREEDY)
        assert (output.token_ids, output.num_cached_tokens) == (expected, num_cached)


def test_real_shapes() -> None:
    """Of Qwen3-Next-80B-A3B in bfloat16: a state of 2 MiB and its convolution's inputs."""
    hf = HFConfig(Path("config.json"), QWEN3_NEXT)
    config = Qwen3NextForCausalLM.parse_config(hf, torch.bfloat16)
    assert config.state_layers == tuple(layer for layer in range(48) if layer % 4 != 3)
    assert config.state.state_bytes(torch.bfloat16) == 2 * 2**20 + 3 * 8192 * 2
    assert config.rope.rotary_dim == 64 and config.num_weights == pytest.approx(80e9, rel=0.02)


QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
"""What its config.json says of the model."""
_HAS_DEFAULTS = (
    *("head_dim", "num_key_value_heads", "partial_rotary_factor", "full_attention_interval"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
    *(
        "linear_num_value_heads",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
        "tie_word_embeddings",
    ),
)


@pytest.mark.parametrize("key", _HAS_DEFAULTS)
def test_a_key_that_is_missing_has_the_value_of_transformers(key: str) -> None:
    few = {name: value for name, value in QWEN3_NEXT.items() if name != key}
    configs = [
        Qwen3NextForCausalLM.parse_config(HFConfig(Path("config.json"), values), torch.bfloat16)
        for values in (QWEN3_NEXT, few)
    ]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "layer_types must be 48 of linear_attention and full_att"),
        ({"layer_types": ["mamba"] * 48}, "layer_types must be 48 of linear_attention and full_attention"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads=24 is no multiple of linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2, got 1"),
        ({"full_attention_interval": 0}, "full_attention_interval must be a positive whole number"),
        ({"attn_output_gate": False}, "attn_output_gate false is not supported"),
    ],
)
def test_what_is_not_supported_is_refused(values: dict[str, Any], message: str) -> None:
    hf = HFConfig(Path("config.json"), {**QWEN3_NEXT, **values})
    with pytest.raises(CheckpointError, match=message):
        Qwen3NextForCausalLM.parse_config(hf, torch.float32)


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with a layer's experts in two tensors."""
    out: dict[str, torch.Tensor] = {}
    parts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) for part in name.split(".") if part.isdigit()]):
        prefix, separator, rest = name.partition(".mlp.experts.")
        if not separator:
            out[name] = tensors[name]
        elif rest.endswith(".gate_proj.weight"):
            both = (tensors[name], tensors[name.replace("gate_proj", "up_proj")])
            parts.setdefault(f"{prefix}.mlp.experts.gate_up_proj", []).append(torch.cat(both))
        elif rest.endswith(".down_proj.weight"):
            parts.setdefault(f"{prefix}.mlp.experts.down_proj", []).append(tensors[name])
    return out | {name: torch.stack(experts) for name, experts in parts.items()}


@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3_5Moe"])
def test_the_text_part_of_a_qwen3_5_with_a_tower(kind: str, tmp_path: Path) -> None:
    """As its checkpoints are: a nested config, a prefix, a tower, and layers that predict further tokens."""
    family = {"Qwen3_5": "qwen3_5", "Qwen3_5Moe": "qwen3_5_moe"}[kind]
    plain = make_checkpoint(family, tmp_path / "plain", tokenizer=False)
    ids = [(7 * place) % 500 + 5 for place in range(40)]
    expected = hf_logits(hf_model(plain), ids)
    whole = make_checkpoint(family, tmp_path / "whole", tokenizer=False)
    tensors = fused(load_file(whole / "model.safetensors"))
    named = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in tensors.items()
    }
    others = ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight")
    named |= {name: torch.ones(2, 2) for name in others}
    save_file(named, whole / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((whole / "config.json").read_text())
    rope = {**text.pop("rope_parameters"), "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text |= {"rope_parameters": rope, "mtp_num_hidden_layers": 1, "attn_output_gate": True}
    del text["architectures"]
    config = {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "model_type": family,
        "text_config": text,
        "vision_config": {"model_type": family},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    text.pop("intermediate_size" if kind == "Qwen3_5Moe" else "bos_token_id", None)
    (whole / "config.json").write_text(json.dumps(config))
    driver = Driver.load(whole, dtype="float32")
    assert type(driver.model).__name__ == config["architectures"][0]
    assert driver.model.config.rope.mrope_section == (2, 1, 1) and driver.model.accepts_image_embeds
    torch.testing.assert_close(driver.logits(ids), expected, atol=1e-4, rtol=0.0)


def test_families_whose_images_need_more_than_embeddings_accept_none() -> None:
    kinds = {
        name: model_class(HFConfig(Path("config.json"), {"architectures": [name]})) for name in ARCHITECTURES
    }
    decoders = {name: kind for name, kind in kinds.items() if issubclass(kind, DecoderModel)}
    text_only = {name for name, kind in decoders.items() if not kind.accepts_image_embeds}
    hybrids = {name for name, kind in kinds.items() if issubclass(kind, HybridModel)}
    text = {name for name in hybrids if "Conditional" not in name}
    assert text_only == {"Llama4ForConditionalGeneration", *text}


def test_ranks_do_not_divide_it() -> None:
    config = Qwen3NextForCausalLM.parse_config(HFConfig(Path("config.json"), QWEN3_NEXT), torch.float32)
    with pytest.raises(ConfigError, match="ranks do not divide layers of different shapes"):
        config.of_rank(Ranks(0, 2))
