"""LFM2, Nemotron-H and Granite 4: the spellings of their files, what is refused, and quantised weights.
test_models.py, test_oracle_matrix.py and test_qwen3_next.py have them among the other families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config import ModelConfig
from quire.errors import CheckpointError
from quire.layers.hf_config import HFConfig
from quire.layers.states import StatesConfig
from quire.loader.load import load_model
from quire.models.registry import model_class
from quire_quantize.source import SourceCheckpoint
from tests.fixtures.checkpoints import MAMBA_FAMILIES, Checkpoints, make_checkpoint
from tests.fixtures.drive import Driver, hf_logits, hf_model

IDS = [(7 * place) % 500 + 5 for place in range(60)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each family."""
    return Checkpoints(tmp_path_factory.mktemp("families"))


def parsed(values: dict[str, Any]) -> StatesConfig:
    hf = HFConfig(Path("config.json"), values)
    config = model_class(hf).parse_config(hf, torch.bfloat16)
    assert isinstance(config, StatesConfig)
    return config


LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "tie_embedding": True,
    "vocab_size": 65536,
}
"""Keys of LFM2-1.2B's config.json."""
NEMOTRON_H: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "chunk_size": 128,
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "ssm_state_size": 128,
    "time_step_limit": [0.0, float("inf")],
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
"""Keys of Nemotron-H-8B's config.json."""
GRANITE_4: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 512,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "logits_scaling": 6,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "mamba_proj_bias": False,
    "max_position_embeddings": 131072,
    "model_type": "granitemoehybrid",
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}
"""Keys of Granite-4.0-H-Tiny's config.json."""


@pytest.mark.parametrize(
    ("values", "num_weights", "num_states", "state_bytes"),
    [
        (LFM2, 1.17e9, 10, 2 * 2048 * 2),
        (NEMOTRON_H, 8.1e9, 24, 2**22 + 3 * 10240 * 2),
        (GRANITE_4, 6.9e9, 36, 48 * 64 * 128 * 4 + 3 * 3328 * 2),
    ],
    ids=["lfm2", "nemotron_h", "granite_4"],
)
def test_real_shapes(values: dict[str, Any], num_weights: float, num_states: int, state_bytes: int) -> None:
    config = parsed(values)
    assert config.num_weights == pytest.approx(num_weights, rel=0.02)
    assert len(config.state_layers) == num_states
    assert config.state.state_bytes(torch.bfloat16) == state_bytes


def test_an_inner_size_of_lfm2_is_adjusted_unless_the_file_says_it_is_not() -> None:
    assert parsed(LFM2).intermediate_size == 8192
    assert parsed({**LFM2, "block_auto_adjust_ff_dim": False}).intermediate_size == 12288
    assert parsed({**LFM2, "block_ffn_dim_multiplier": 0.6}).intermediate_size == 5120
    del (later := dict(LFM2))["block_ff_dim"]
    assert parsed({**later, "intermediate_size": 6144}).intermediate_size == 4096


def test_layers_of_lfm2_are_said_in_two_ways() -> None:
    config = parsed(LFM2)
    types = ["conv" if layer in config.state_layers else "full_attention" for layer in range(16)]
    assert parsed({**LFM2, "full_attn_idxs": None, "layer_types": types}) == config
    assert parsed({**LFM2, "full_attn_idxs": None}).state_layers == ()


def test_layers_of_nemotron_h_are_said_in_two_ways() -> None:
    config, names = parsed(NEMOTRON_H), {"M": "mamba", "*": "attention", "-": "mlp"}
    types = [names[letter] for letter in NEMOTRON_H["hybrid_override_pattern"]]
    assert parsed({**NEMOTRON_H, "layers_block_type": types, "hybrid_override_pattern": None}) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**LFM2, "conv_L_cache": 1}, "conv_L_cache must be at least 2, got 1"),
        ({**LFM2, "layer_types": ["conv"]}, "layer_types must be 16 of conv, full_attention, attention, got"),
        ({**LFM2, "layer_types": ["mamba"] * 16}, "layer_types must be 16 of conv, full_attention, att"),
        ({**LFM2, "full_attn_idxs": "all"}, "full_attn_idxs must be a list of layers' numbers, got 'all'"),
        ({**LFM2, "block_ff_dim": 0}, "block_ff_dim must be a positive whole number"),
        (
            {**NEMOTRON_H, "hybrid_override_pattern": "M-X"},
            r"hybrid_override_pattern must be a list of M, \*",
        ),
        ({**NEMOTRON_H, "hybrid_override_pattern": None}, r"hybrid_override_pattern must be a list of M, \*"),
        ({**NEMOTRON_H, "layers_block_type": ["conv"]}, "layers_block_type must be a list of linear_att"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "-M"}, "hybrid_override_pattern: feed-forward layer 0 w"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "M-E"}, "hybrid_override_pattern: feed-forward layer 2 w"),
        ({**NEMOTRON_H, "mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not supported; supported: rel"),
        ({**NEMOTRON_H, "attention_bias": True}, "attention_bias True is not supported; supported: False"),
        ({**NEMOTRON_H, "tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
        ({**NEMOTRON_H, "n_groups": 3}, "mamba_num_heads=128 is no multiple of n_groups=3"),
        ({**NEMOTRON_H, "conv_kernel": 1}, "conv_kernel must be at least 2, got 1"),
        ({**NEMOTRON_H, "time_step_limit": [1, 0]}, "time_step_limit must be two numbers in ascending order"),
        (
            {**NEMOTRON_H, "hybrid_override_pattern": "M*E", "mlp_bias": True},
            "mlp_bias true is not supported in models with experts",
        ),
        ({**GRANITE_4, "layer_types": ["mamba"]}, "layer_types must be 40 of linear_attention, mamba"),
        ({**GRANITE_4, "mamba_d_head": 32}, "mamba_n_heads=48 of mamba_d_head=32 do not make mamba_expand"),
        ({**GRANITE_4, "position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supp"),
        ({**GRANITE_4, "hidden_act": "gelu"}, "hidden_act 'gelu' is not supported with Mamba-2"),
        ({**GRANITE_4, "shared_intermediate_size": 0}, "shared_intermediate_size must be a positive whole"),
    ],
)
def test_what_is_not_supported_is_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    """When the model is loaded, in one line that names the file and the key."""
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=message) as raised:
        load_model(ModelConfig(model=str(tmp_path)), torch.device("cpu"))
    assert str(raised.value).startswith(f"{tmp_path}/config.json: ") and "\n" not in str(raised.value)


_HAS_DEFAULTS = {
    "lfm2": (
        LFM2,
        *("conv_L_cache", "conv_bias", "norm_eps", "rope_theta", "num_key_value_heads", "tie_embedding"),
        *("block_ff_dim", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"),
    ),
    "nemotron_h": (
        NEMOTRON_H,
        *("conv_kernel", "head_dim", "intermediate_size", "layer_norm_epsilon", "mamba_head_dim", "n_groups"),
        *("mamba_num_heads", "num_key_value_heads", "ssm_state_size", "time_step_limit", "use_bias"),
        *("use_conv_bias", "mlp_bias", "mlp_hidden_act", "mamba_hidden_act", "attention_bias"),
    ),
    "granitemoehybrid": (
        GRANITE_4,
        *("mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_expand", "mamba_n_groups"),
        *("mamba_proj_bias", "position_embedding_type", "shared_intermediate_size"),
    ),
}


@pytest.mark.parametrize(
    ("family", "key"), [(family, key) for family, (_, *keys) in _HAS_DEFAULTS.items() for key in keys]
)
def test_a_key_that_is_missing_has_the_value_of_transformers(family: str, key: str) -> None:
    values = _HAS_DEFAULTS[family][0]
    assert parsed({name: value for name, value in values.items() if name != key}) == parsed(values)


def altered(path: Path, **values: Any) -> Path:
    """The checkpoint with other values in config.json; None: without the key."""
    file = path / "config.json"
    config = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return path


def check_logits(path: Path) -> None:
    expected = hf_logits(hf_model(path), IDS)
    torch.testing.assert_close(Driver.load(path).logits(IDS), expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("lfm2", {"conv_bias": False, "conv_L_cache": 5, "tied": False}),
        ("lfm2", {"block_auto_adjust_ff_dim": False, "full_attn_idxs": [0, 1, 3]}),
        ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 0.7}),
        ("nemotron_h", {"moe_latent_size": 48, "n_group": 4, "topk_group": 2}),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*-", "mlp_bias": True, "use_bias": True}),
        ("nemotron_h", {"use_conv_bias": False, "conv_kernel": 2, "n_groups": 8, "norm_topk_prob": False}),
        ("granitemoehybrid", {"mamba_proj_bias": True, "mamba_conv_bias": False, "tied": True}),
        ("granitemoehybrid", {"position_embedding_type": "rope", "attention_bias": True}),
        # Whose layers one native call computes, as no layer keeps a state.
        ("granitemoehybrid_dense", {"layer_types": ["full_attention"] * 4}),
        ("granitemoehybrid_dense", {"layer_types": [*["linear_attention"] * 3, "full_attention"]}),
    ],
)
def test_switches_equal_transformers(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    check_logits(make_checkpoint(family, tmp_path, tokenizer=False, **options))


def test_spellings_of_files_equal_transformers(tmp_path: Path) -> None:
    """As the files that were published first have them."""
    lfm2 = make_checkpoint("lfm2", tmp_path / "lfm2", tokenizer=False)
    check_logits(
        altered(
            lfm2,
            block_ff_dim=256,
            full_attn_idxs=[1, 3],
            tie_embedding=True,
            **dict.fromkeys(("intermediate_size", "layer_types", "tie_word_embeddings")),
        )
    )
    nemotron = make_checkpoint("nemotron_h", tmp_path / "nemotron_h", tokenizer=False)
    names = [name for name in load_file(nemotron / "model.safetensors") if name.startswith("backbone.")]
    assert names, "transformers writes the names of NVIDIA's files"
    check_logits(altered(nemotron, hybrid_override_pattern="MM-*-MEM*E", layers_block_type=None))
    granite = make_checkpoint("granitemoehybrid", tmp_path / "granite", tokenizer=False)
    check_logits(altered(granite, layer_types=["mamba", "attention"] * 2, mamba_d_head="auto"))


def test_layers_that_predict_further_tokens_are_not_loaded(tmp_path: Path) -> None:
    path = make_checkpoint("nemotron_h", tmp_path, tokenizer=False)
    expected = Driver.load(path).logits(IDS)
    tensors = load_file(path / "model.safetensors") | {"mtp.layers.0.mixer.q_proj.weight": torch.ones(2, 2)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(Driver.load(path).logits(IDS), expected)


@pytest.mark.parametrize("family", MAMBA_FAMILIES)
def test_eight_bit_weights_are_close(family: str, checkpoints: dict[str, Path]) -> None:
    exact = Driver.load(checkpoints[family]).logits(IDS)
    ours = Driver.load(checkpoints[family], quantization="int8").logits(IDS)
    of_tokens = (ours - exact).square().mean(1)
    # Some tokens choose other experts, by a hair.
    assert 0 < float(of_tokens.median().sqrt() / exact.std()) < 0.2


def test_the_quantiser_refuses_states(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"Lfm2ForCausalLM has .* other layers than Llama's"):
        SourceCheckpoint(checkpoints["lfm2"])
