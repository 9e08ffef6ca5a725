"""Mixture-of-experts layers beside those of `transformers`, and what they read."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import SamplingParams
from quire.config import ModelConfig
from quire.errors import CheckpointError
from quire.layers.linear import Linear
from quire.layers.moe import MixtureOfExperts, Router
from quire.loader.load import empty_model
from quire_quantize.source import SourceCheckpoint
from tests.fixtures.checkpoints import MOE_FAMILIES, make_checkpoint
from tests.fixtures.drive import Driver, hf_greedy, hf_logits, hf_model
from tests.fixtures.graphs import recorded_steps
from tests.fixtures.runner_of import runner_of
from tests.unit.test_engine import random_prompts
from tests.unit.test_oracle_matrix import engine


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("experts")
    return {family: make_checkpoint(family, root / family) for family in MOE_FAMILIES}


def inputs(num_tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, 64, generator=generator).to(dtype)


def experts_of(path: Path, **options: Any) -> MixtureOfExperts:
    """Those of the last layer."""
    mlp = Driver.load(path, **options).model.layers[-1].mlp
    assert isinstance(mlp, MixtureOfExperts)
    return mlp


@pytest.mark.row("E8", clauses=("equal",))
@pytest.mark.row("E14")
@pytest.mark.parametrize("family", MOE_FAMILIES)
@pytest.mark.parametrize("num_tokens", [1, 2, 1000])
@torch.inference_mode()
def test_a_layer_equals_that_of_transformers(
    family: str, num_tokens: int, checkpoints: dict[str, Path]
) -> None:
    x = inputs(num_tokens)
    layer = hf_model(checkpoints[family]).model.layers[-1]
    theirs = (layer.block_sparse_moe if family == "granitemoe" else layer.mlp)(x[None])
    expected = (theirs if isinstance(theirs, torch.Tensor) else theirs[0]).view_as(x)
    torch.testing.assert_close(experts_of(checkpoints[family])(x), expected, atol=1e-4, rtol=1e-5)


@torch.inference_mode()
def test_what_a_step_of_one_token_does_not_read(checkpoints: dict[str, Path]) -> None:
    """See tests/kernels/test_moe.py for what is read."""
    layer = experts_of(checkpoints["mixtral"])
    assert len(layer.gate(inputs(1)).experts.unique()) == 2
    each = sum(one.packed.nbytes for one in layer.experts[0].modules() if isinstance(one, Linear))
    assert layer.unread_bytes == 6 * each


@pytest.mark.row("E14")
@torch.inference_mode()
def test_all_tokens_may_choose_the_same_experts(checkpoints: dict[str, Path]) -> None:
    hf = hf_model(checkpoints["qwen3_moe"]).model.layers[-1].mlp
    x = inputs(1).expand(50, 64).contiguous()
    layer = experts_of(checkpoints["qwen3_moe"])
    torch.testing.assert_close(layer(x), hf(x[None])[0], atol=1e-4, rtol=1e-5)
    assert layer.gate(x).experts.unique().numel() == 3


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "dots1"])
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "w8a8"}])
@torch.inference_mode()
def test_a_token_does_not_depend_on_the_others(
    family: str, options: dict[str, Any], checkpoints: dict[str, Path]
) -> None:
    """In no bit, whoever else its experts compute; a token of NaN stays alone."""
    layer = experts_of(checkpoints[family], **options)
    x = inputs(70, layer.gate.dtype)
    x[33] = torch.nan
    together = layer(x)
    alone = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(together.nan_to_num(), alone.nan_to_num())
    assert together.isnan().any(1).nonzero().flatten().tolist() == [33]


@pytest.mark.row("E7", clauses=("equal",))
@pytest.mark.row("E8", clauses=("equal",))
@pytest.mark.parametrize("is_device", [False, True])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_engine_equals_transformers(family: str, is_device: bool, checkpoints: dict[str, Path]) -> None:
    """Chunks of prompts beside decodes, cold and cached: all layers in one call, or as on a device, where
    nothing is recorded, as steps differ in experts."""
    prompts = [*random_prompts(7, seed=3), random_prompts(1, longest=1)[0] * 50]
    hf = hf_model(checkpoints[family])
    expected = [hf_greedy(hf, prompt, 16) for prompt in prompts]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with recorded_steps() if is_device else nullcontext():
        llm = engine(checkpoints[family], max_num_batched_tokens=7)
    runner = runner_of(llm.core)
    assert runner.graphs is None and runner.prompt_graphs is None
    assert runner.model.is_fused != is_device
    for _ in range(2):
        assert [output.token_ids for output in llm.generate(prompts, params)] == expected
    assert llm.core.stats().num_cached_tokens > 0
    llm.core.close()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mixtral", {"sliding_window": 12}),
        ("mixtral", {"num_experts_per_tok": 8, "tied": True}),
        ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1, "head_dim": 32}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2, "attention_bias": True}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
        ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False, "mlp_only_layers": []}),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 3}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 3}),
        ("dots1", {"norm_topk_prob": False, "n_group": 1, "topk_group": 1, "attention_bias": True}),
        ("dots1", {"n_group": 8, "topk_group": 8, "routed_scaling_factor": 0.5, "n_shared_experts": 1}),
        ("dots1", {"n_group": 8, "topk_group": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 0}),
        ("dots1", {"sliding_window": 12, "max_window_layers": 1, "first_k_dense_replace": 3}),
        ("glm4_moe", {"partial_rotary_factor": 1.0, "use_qk_norm": False, "norm_topk_prob": False}),
        ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_norm_min": 0.6, "tied": False}),
        ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 1}),
        ("minimax_m2", {"rotary_dim": 32, "num_local_experts": 4}),
        ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
        ("granitemoe", {"attention_bias": True, "tied": True}),
    ],
)
def test_switches_of_the_configuration(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path, tokenizer=False, **options)
    ids = random_prompts(1, longest=1, seed=4)[0] * 40
    torch.testing.assert_close(
        Driver.load(path).logits(ids), hf_logits(hf_model(path), ids), atol=3e-4, rtol=0.0
    )


@pytest.mark.row("E8", clauses=("ties",))
@pytest.mark.parametrize(
    ("family", "values"), [("qwen2_moe", {}), ("dots1", {}), ("dots1", {"topk_group": 1})]
)
def test_among_equal_experts_the_first_are_chosen(
    family: str, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in transformers where its `topk` keeps the order of equals, which on a CPU it does not. Of two
    experts with one logit the second one never computes alone, nor one of the second of two equal groups."""
    path = make_checkpoint(family, tmp_path, tokenizer=False, **values)
    tensors = load_file(path / "model.safetensors")
    half = 4 if family == "qwen2_moe" else 8
    for name, tensor in tensors.items():
        if name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
            tensor[half:] = tensor[:half]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    def theirs(is_first: bool) -> torch.Tensor:
        """With the first or the last of equals."""

        def topk(x: torch.Tensor, k: int, dim: int = -1, **_: Any) -> Any:
            x = x if is_first else x.flip(dim)
            order = x.argsort(dim=dim, descending=True, stable=True).narrow(dim, 0, k)
            return x.gather(dim, order), order if is_first else x.shape[dim] - 1 - order

        with monkeypatch.context() as patch:
            patch.setattr(torch, "topk", topk)
            return hf_logits(hf, ids)

    # An odd number of experts, among pairs of equals: the choice ends between two of them.
    driver, hf, ids = Driver.load(path), hf_model(path), random_prompts(1, longest=1, seed=4)[0] * 40
    assert driver.model.is_fused
    torch.testing.assert_close(driver.logits(ids), theirs(True), atol=3e-4, rtol=0.0)
    assert (driver.logits(ids) - theirs(False)).abs().max() > 0.1
    experts = experts_of(path).gate(inputs(200)).experts
    for row in experts.tolist():
        chosen = [one for one in row if one < 2 * half]
        assert all(one - half in chosen for one in chosen if one >= half)


def with_values(path: Path, copy: Path, **values: Any) -> Path:
    """The checkpoint with other values in config.json; None: without the key."""
    copy.mkdir()
    for file in path.iterdir():
        (copy / file.name).symlink_to(file)
    config = {**json.loads((path / "config.json").read_text()), **values}
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    return copy


def test_the_number_of_experts_as_files_of_the_hub_have_it(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """`num_experts`; transformers 5 writes `num_local_experts`."""
    path = checkpoints["qwen3_moe"]
    assert "num_experts" not in json.loads((path / "config.json").read_text())
    copy = with_values(path, tmp_path / "copy", num_local_experts=None, num_experts=8)
    ids = random_prompts(1, longest=1)[0]
    assert torch.equal(Driver.load(copy).logits(ids), Driver.load(path).logits(ids))


def test_what_files_of_the_hub_say_beside_it(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """dots.llm1's have a method's name for scores; GLM-4.5's a layer behind the last one."""
    ids = random_prompts(1, longest=1)[0]
    path, said = (
        checkpoints["dots1"],
        {"scoring_func": "noaux_tc", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    )
    copy = with_values(path, tmp_path / "copy", **said)
    assert torch.equal(Driver.load(copy).logits(ids), Driver.load(path).logits(ids))
    for family in ("glm4_moe", "dots1"):
        path, copy = checkpoints[family], with_values(checkpoints[family], tmp_path / family)
        tensors = load_file(path / "model.safetensors")
        more = {
            name.replace(".2.", ".3.", 1): one.clone()
            for name, one in tensors.items()
            if ".layers.2." in name
        }
        (copy / "model.safetensors").unlink()
        save_file({**tensors, **more}, copy / "model.safetensors", metadata={"format": "pt"})
        if family == "glm4_moe":
            assert torch.equal(Driver.load(copy).logits(ids), Driver.load(path).logits(ids))
        else:
            with pytest.raises(CheckpointError, match=r"unexpected tensors: model\.layers\.3"):
                Driver.load(copy)


@pytest.mark.parametrize(
    ("family", "values", "complaint"),
    [
        ("mixtral", {"num_local_experts": 0}, "num_local_experts must be a positive whole number up to 4096"),
        ("mixtral", {"num_local_experts": "8"}, "num_local_experts must be a positive whole number"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok must be .* number up to 8, got 9"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok must be .*, got 0"),
        ("mixtral", {"num_experts_per_tok": None}, "num_experts_per_tok must be .*, got None"),
        ("mixtral", {"num_local_experts": 4096}, "are too few for the .* weights.* that config.json means"),
        ("mixtral", {"num_local_experts": 9}, r"gate.weight has shape \[8, 64\], config.json means \[9, "),
        ("qwen3_moe", {"mlp_only_layers": None}, "missing tensors: model.layers.1.mlp.experts.0.down_proj"),
        ("qwen3_moe", {"moe_intermediate_size": -1}, "moe_intermediate_size must be a positive whole number"),
        ("qwen3_moe", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false, got 'yes'"),
        ("qwen3_moe", {"use_sliding_window": 1}, "use_sliding_window must be true or false, got 1"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive whole number"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers must be a list of layers' numbers, got 1"),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list of layers' numbers"),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size must be a pos",
        ),
        ("qwen2_moe", {"shared_expert_intermediate_size": 128}, r"has shape \[64, 192\], .* means \[64, 128"),
        ("dots1", {"n_shared_experts": None}, "n_shared_experts must be a positive whole .*, got None"),
        ("dots1", {"n_routed_experts": 10**9}, "n_routed_experts must be a positive whole number up to 4096"),
        ("dots1", {"n_group": 3}, "n_routed_experts=16 in n_group=3: groups must be equal"),
        ("dots1", {"n_group": 16, "topk_group": 4}, "groups must be equal, and have 2 experts or more"),
        ("dots1", {"n_group": "4"}, "n_group must be a positive whole number up to 16, got .4."),
        ("dots1", {"topk_group": 5}, "topk_group must be a positive whole number up to 4, got 5"),
        ("dots1", {"num_experts_per_tok": 9}, "num_experts_per_tok must be .* number up to 8, got 9"),
        ("dots1", {"routed_scaling_factor": "2"}, "routed_scaling_factor must be a number that is not neg"),
        ("dots1", {"first_k_dense_replace": 4}, "first_k_dense_replace must be a number of layers up to 3"),
        ("dots1", {"first_k_dense_replace": True}, "first_k_dense_replace must be a number .*, got True"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: sigmoid"),
        ("dots1", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; supported: noaux_tc"),
        ("dots1", {"topk_method": ["x"]}, r"topk_method \['x'\] is not supported"),
        (
            "ernie4_5_moe",
            {"moe_num_experts": -1},
            "moe_num_experts must be a positive whole number up to 4096",
        ),
        ("ernie4_5_moe", {"moe_k": 9}, "moe_k must be a positive whole number up to 8, got 9"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "must be numbers of layers, got 1, 2 and 0"),
        ("ernie4_5_moe", {"moe_layer_end_index": 10**30}, "must be numbers of layers, got 1, 10000000000"),
        ("ernie4_5_moe", {"moe_num_shared_experts": "2"}, "moe_num_shared_experts must be a number up to"),
        ("ernie4_5_moe", {"moe_norm_min": -1.0}, "moe_norm_min must be a number that is not negative"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias true is not supported: experts have none"),
        (
            "minimax_m2",
            {"scoring_func": "softmax"},
            "scoring_func 'softmax' is not supported; supported: sigm",
        ),
        ("minimax_m2", {"rotary_dim": "64"}, "rotary_dim must be a positive whole number up to 32, got '64'"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported; supported: null"),
        ("granitemoe", {"num_local_experts": 16}, r"has shape \[8, 128, 64\], .* means 16 experts"),
        ("dots1", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; supported: 1"),
    ],
)
def test_values_that_cannot_be_right(
    family: str, values: dict[str, Any], complaint: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = with_values(checkpoints[family], tmp_path / "copy", **values)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        Driver.load(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_router_in_bf16_decides_by_float32_logits(tmp_path: Path) -> None:
    """Rounded to eight bits two experts' logits are often the same, and the first one wins."""
    path = make_checkpoint("mixtral", tmp_path, dtype="bfloat16", tokenizer=False)
    router = next(
        one for one in Driver.load(path, dtype="bfloat16").model.modules() if isinstance(one, Router)
    )
    x = inputs(4000, torch.bfloat16)
    weight = load_file(path / "model.safetensors")["model.layers.0.block_sparse_moe.gate.weight"]
    chosen = (x.double() @ weight.double().T).topk(2).indices
    assert torch.equal(router(x).experts.long().sort().values, chosen.sort().values)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_numbers_of_weights(family: str, checkpoints: dict[str, Path]) -> None:
    """Of all, which bound what a file may claim, and of those that a step of one token reads."""
    path = checkpoints[family]
    empty, _, _ = empty_model(ModelConfig(model=str(path)), torch.device("meta"))
    sizes = {one.name: one.memory.numel() for one in empty.weights() if one.memory.dim() > 1}
    assert empty.config.num_weights == sum(sizes.values())
    model = Driver.load(path).model
    assert model.config.experts is not None
    first = tuple(f".{expert}." for expert in range(model.config.experts.routing.num_chosen))
    read = {
        name: size
        for name, size in sizes.items()
        if "layers" in name and (".experts" not in name or name.partition(".experts")[2].startswith(first))
    }
    work = model.work(0)
    assert work.layer_flops == 2 * sum(read.values())
    # Routers have so few columns that the kernels pad them.
    routers = sum(one.packed.nbytes for one in model.modules() if isinstance(one, Router))
    assert work.layer_bytes == routers + 4 * sum(
        size for name, size in read.items() if not name.endswith(("gate.weight", "router.weight"))
    )


def test_the_quantiser_refuses_experts(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="MixtralForCausalLM has experts, which this tool does not"):
        SourceCheckpoint(checkpoints["mixtral"])
