"""What linear layers say of their tensors: ranks that divide them so compute the whole model's logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire.errors import CheckpointError, ConfigError
from quire.layers.scheme import SCHEMES, LayerTensors, LinearScheme, StoredTensor
from quire.loader.files import NamedTensor
from quire.loader.info import read_configs
from quire.loader.load import fill_weights, pack
from quire.models.decoder import DecoderModel
from quire.models.registry import model_class
from quire_kernels import ops, registry
from quire_kernels.ranks import ALONE, Ranks
from quire_kernels.weights import PackedLinear, dequantize_weight, quantize_weight
from tests.fixtures.checkpoints import (
    DENSE_FAMILIES,
    FAMILIES,
    GEMMA_FAMILIES,
    MLA_FAMILIES,
    MLA_SIBLINGS,
    MOE_FAMILIES,
    OTHER_FAMILIES,
    make_checkpoint,
)
from tests.fixtures.drive import Driver
from tests.fixtures.ranks import at_once, thread_ranks

ALL_FAMILIES = (
    *FAMILIES,
    *GEMMA_FAMILIES,
    *DENSE_FAMILIES,
    *MOE_FAMILIES,
    *MLA_FAMILIES,
    *MLA_SIBLINGS,
    *OTHER_FAMILIES,
)
UNDIVIDED = {
    "phi3": "projections that a checkpoint holds as one",
    **dict.fromkeys(("glm", "glm4"), "projections that a checkpoint holds as one"),
    **dict.fromkeys(("olmo2", "olmo3", "olmoe", "minimax_m2"), "norms of all heads together"),
    **dict.fromkeys(("gemma4", "gemma4_large", "gemma4_moe"), "layers of different shapes"),
}
"""Families whose models ranks cannot divide, and for what they have."""
IDS = torch.randint(5, 509, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(autouse=True)
def layer_by_layer() -> Iterator[None]:
    """One operator after the other: a whole decoder in one call has no place for sums over ranks."""
    with registry.forced({"linear": "reference"}):
        yield


def build(
    path: Path,
    stored: dict[str, torch.Tensor],
    scheme: LinearScheme = SCHEMES[None],
    ranks: Ranks = ALONE,
) -> DecoderModel:
    """The model of a checkpoint's configuration with these tensors; or a rank's part of it."""
    hf, _ = read_configs(path)
    kind = model_class(hf)
    config = replace(kind.parse_config(hf, torch.float32), scheme=scheme)
    if ranks.size > 1:
        config = config.of_rank(ranks)
    model = kind(config, 128, torch.device("cpu"))
    assert isinstance(model, DecoderModel)
    wanted = {weight.name for weight in model.weights()}
    parts = (part for name, one in stored.items() for part in model.split(NamedTensor(name, one, path)))
    fill_weights(model, (part for part in parts if model.canonical_name(part.name) in wanted), path)
    pack(model)
    return model


def logits_of_ranks(
    path: Path, stored: dict[str, torch.Tensor], scheme: LinearScheme, size: int
) -> list[torch.Tensor]:
    """Each rank's logits, all computing at once."""
    ranks = thread_ranks(size)
    models = [build(path, stored, scheme, rank) for rank in ranks]
    return at_once([lambda model=model: Driver(model).logits(IDS) for model in models], ranks)  # type: ignore[misc]


def check_ranks(
    path: Path, stored: dict[str, torch.Tensor], scheme: LinearScheme, size: int = 2
) -> torch.Tensor:
    """Asserts that the ranks' logits are those of the whole model, and returns them."""
    whole = Driver(build(path, stored, scheme)).logits(IDS)
    for logits in logits_of_ranks(path, stored, scheme, size):
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0.0)
    return whole


def stored_tensors(path: Path) -> dict[str, torch.Tensor]:
    stored = load_file(path / "model.safetensors")
    return {**stored, "lm_head.weight": stored.get("lm_head.weight", torch.empty(0))}


@pytest.mark.row("F1", clauses=("vocab",))
@pytest.mark.parametrize(
    ("family", "options"),
    [
        (family, {} if family in MLA_FAMILIES + MLA_SIBLINGS else {"num_key_value_heads": 2})
        for family in ALL_FAMILIES
        if family not in UNDIVIDED
    ]
    + [("llama", {"attention_bias": True, "mlp_bias": True}), ("gemma2", {"attention_bias": True})]
    + [("llama", {"vocab_size": 509}), ("qwen2", {"vocab_size": 511})],
)
def test_ranks_compute_what_the_whole_model_does(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Every layer of every family is divided as it says, in columns or in rows, and the vocabulary by tokens,
    also one of an odd number."""
    path = make_checkpoint(family, tmp_path, tokenizer=False, **options)
    stored = stored_tensors(path)
    whole = check_ranks(path, stored, SCHEMES[None])
    torch.testing.assert_close(whole, Driver.load(path).logits(IDS), atol=1e-4, rtol=0.0)


@pytest.mark.row("F1", clauses=("vocab",))
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_ranks_without_kv_heads_of_their_own_share_them(kv_heads: int, tmp_path: Path) -> None:
    path = make_checkpoint("qwen3", tmp_path, tokenizer=False, num_key_value_heads=kv_heads)
    check_ranks(path, stored_tensors(path), SCHEMES[None], size=4)


@pytest.mark.parametrize(
    ("options", "size", "complaint"),
    [
        ({}, 3, "tensor_parallel_size=3 does not divide num_attention_heads=4"),
        (
            {"intermediate_size": 129},
            2,
            "tensor_parallel_size=2 does not divide intermediate_size=129",
        ),
        (
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
            4,
            "tensor_parallel_size=4 does not divide num_key_value_heads=3, nor is it a multiple of it",
        ),
    ],
)
def test_what_ranks_cannot_divide_is_refused(
    options: dict[str, Any], size: int, complaint: str, tmp_path: Path
) -> None:
    path = make_checkpoint("llama", tmp_path, tokenizer=False, **options)
    with pytest.raises(ConfigError) as raised:
        build(path, {}, ranks=Ranks(0, size))
    assert str(raised.value) == complaint


@pytest.mark.parametrize("family", UNDIVIDED)
def test_families_that_ranks_cannot_divide_are_refused(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path, tokenizer=False)
    with pytest.raises(ConfigError, match=f"^tensor_parallel_size=2: .* divide {UNDIVIDED[family]}$"):
        build(path, {}, ranks=Ranks(0, 2))


class Foreign:
    """A layer as someone else quantised it: codes by input and output feature, scales of groups of inputs."""

    table = None

    def __init__(self, names: Sequence[str], in_features: int, sizes: Sequence[int]) -> None:
        self.names, self.sizes = names, list(sizes)
        self.codes = torch.empty(in_features, sum(sizes), dtype=torch.int8)
        self.scales = torch.empty(in_features // 32, sum(sizes))

    def stored(self) -> Iterator[StoredTensor]:
        for suffix, joined in (("codes", self.codes), ("scales", self.scales)):
            for name, columns in zip(self.names, joined.split(self.sizes, 1), strict=True):
                yield StoredTensor(f"{name}.{suffix}", columns, out_dim=1, in_dim=0)

    def pack(self, activation: str | None) -> PackedLinear:
        return ops.pack_linear(dequantize_weight(self.codes.T, self.scales.T), activation=activation)


@dataclass(frozen=True)
class ForeignScheme:
    """Layers as Foreign has them, but for those of `plain` names; tables as with int4."""

    plain: str = "none"
    input_multiple: int = 32

    def layer(
        self, names: Sequence[str], in_features: int, sizes: Sequence[int], *, bias: bool, dtype: torch.dtype
    ) -> LayerTensors:
        if any(name.endswith(self.plain) for name in names):
            return SCHEMES[None].layer(names, in_features, sizes, bias=bias, dtype=dtype)
        return Foreign(names, in_features, sizes)

    def table(
        self, name: str, num_rows: int, size: int, *, is_head: bool, dtype: torch.dtype
    ) -> LayerTensors:
        return SCHEMES["int4"].table(name, num_rows, size, is_head=is_head, dtype=dtype)


@pytest.fixture
def foreign(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint's configuration, and its tensors in four bits."""
    path = make_checkpoint("llama", tmp_path, tokenizer=False)
    stored = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if "_proj" not in name:
            stored[name] = tensor
            continue
        codes, scales = quantize_weight(tensor, "int4")
        layer = name.removesuffix("weight")
        stored |= {f"{layer}codes": codes.T, f"{layer}scales": scales.T}
    return path, stored


def test_a_scheme_of_others_needs_no_change_of_layers_loader_and_models(
    foreign: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    """Its tensors are loaded as they are, joined in fused layers, computed, and divided among ranks."""
    logits = check_ranks(*foreign, ForeignScheme())
    assert torch.equal(logits, Driver.load(foreign[0], quantization="int4").logits(IDS))


def test_a_scheme_chooses_by_the_names_of_layers(foreign: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """Files exempt layers by name: here one of each kind, which is a plain matrix then."""
    path, stored = foreign[0], dict(foreign[1])
    layer = "model.layers.1.mlp.down_proj"
    codes, scales = stored.pop(f"{layer}.codes"), stored.pop(f"{layer}.scales")
    stored[f"{layer}.weight"] = dequantize_weight(codes.T, scales.T)
    logits = check_ranks(path, stored, ForeignScheme(plain=layer))
    torch.testing.assert_close(logits, check_ranks(*foreign, ForeignScheme()), atol=1e-4, rtol=0.0)


def test_codes_of_another_type_are_refused(foreign: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """They would be converted like numbers of another precision."""
    path, stored = foreign
    name = "model.layers.0.mlp.up_proj.codes"
    with pytest.raises(CheckpointError) as raised:
        build(path, {**stored, name: stored[name].float()}, ForeignScheme())
    assert str(raised.value) == f"{path}: {name} has type torch.float32, expected torch.int8"
