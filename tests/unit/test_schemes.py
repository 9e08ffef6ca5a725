"""What linear layers say of their tensors: ranks that divide them so compute the whole model's logits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quire.errors import CheckpointError
from quire.layers.linear import Linear
from quire.layers.moe import MixtureOfExperts
from quire.layers.scheme import SCHEMES, LayerTensors, LinearScheme, StoredTensor
from quire.loader.files import NamedTensor
from quire.loader.info import read_configs
from quire.loader.load import fill_weights
from quire.models.decoder import DecoderModel
from quire.models.registry import model_class
from quire_kernels import ops, registry
from quire_kernels.weights import PackedLinear, dequantize_weight, quantize_weight
from tests.fixtures.checkpoints import FAMILIES, GEMMA_FAMILIES, MOE_FAMILIES, make_checkpoint
from tests.fixtures.drive import Driver

RANKS = 2
IDS = torch.randint(5, 512, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(autouse=True)
def layer_by_layer() -> Iterator[None]:
    """One operator after the other: a whole decoder in one call has no place for sums over ranks."""
    with registry.forced({"linear": "reference"}):
        yield


def build(
    path: Path, stored: dict[str, torch.Tensor], scheme: LinearScheme, rank: int | None
) -> DecoderModel:
    """The model of a checkpoint's configuration with these tensors; or a rank's half of it.

    A rank has half of the heads and half of the inner features, of every tensor the half along the dimension
    that its layer says, and of what row-parallel layers add once the whole if it is the first.
    """
    hf, _ = read_configs(path)
    kind = model_class(hf)
    config = replace(kind.parse_config(hf, torch.float32), scheme=scheme)
    if rank is not None:
        config = replace(
            config,
            num_heads=config.num_heads // RANKS,
            num_kv_heads=config.num_kv_heads // RANKS,
            intermediate_size=config.intermediate_size // RANKS,
            experts=config.experts
            and replace(config.experts, intermediate_size=config.experts.intermediate_size // RANKS),
        )
    model = kind(config, 128, torch.device("cpu")).eval()

    parts = (part for name, one in stored.items() for part in model.split(NamedTensor(name, one, path)))
    stored = {part.name: part.tensor for part in parts}

    def tensors() -> Iterator[NamedTensor]:
        for name, _, dim in model.weights():
            is_divided = rank is not None and dim is not None
            tensor = stored[name].chunk(RANKS, dim or 0)[rank or 0] if is_divided else stored[name]
            yield NamedTensor(name, tensor, path)

    fill_weights(model, tensors(), path)
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.parallel == "row" and rank:
            for tensor in layer.tensors.stored():
                if tensor.in_dim is None:
                    tensor.memory.zero_()
    model.pack()
    return model


def logits_of_ranks(models: Sequence[DecoderModel]) -> list[torch.Tensor]:
    """Each rank's logits: all compute at once, and what row-parallel layers give is added up over them; of a
    layer's experts, which are one operator, their sum."""
    barrier = threading.Barrier(len(models), timeout=60)
    given: list[Any] = [None] * len(models)

    def add_up(rank: int) -> Callable[..., torch.Tensor]:
        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            given[rank] = output
            barrier.wait()
            total = torch.stack(given).sum(0)
            barrier.wait()
            return total

        return hook

    def compute(rank: int) -> torch.Tensor:
        for layer in models[rank].modules():
            if isinstance(layer, MixtureOfExperts) or (isinstance(layer, Linear) and layer.parallel == "row"):
                layer.register_forward_hook(add_up(rank))
        try:
            return Driver(models[rank]).logits(IDS)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(compute, range(len(models))))


def check_ranks(path: Path, stored: dict[str, torch.Tensor], scheme: LinearScheme) -> torch.Tensor:
    """Asserts that the ranks' logits are those of the whole model, and returns them."""
    whole = Driver(build(path, stored, scheme, None)).logits(IDS)
    for logits in logits_of_ranks([build(path, stored, scheme, rank) for rank in range(RANKS)]):
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0.0)
    return whole


def stored_tensors(path: Path) -> dict[str, torch.Tensor]:
    stored = load_file(path / "model.safetensors")
    return {**stored, "lm_head.weight": stored.get("lm_head.weight", torch.empty(0))}


@pytest.mark.parametrize(
    ("family", "options"),
    [(family, {"num_key_value_heads": 2}) for family in (*FAMILIES, *GEMMA_FAMILIES, *MOE_FAMILIES)]
    + [("llama", {"attention_bias": True, "mlp_bias": True}), ("gemma2", {"attention_bias": True})],
)
def test_ranks_compute_what_the_whole_model_does(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Every layer of every family is divided as it says, in columns or in rows."""
    path = make_checkpoint(family, tmp_path, tokenizer=False, **options)
    stored = stored_tensors(path)
    whole = check_ranks(path, stored, SCHEMES[None])
    torch.testing.assert_close(whole, Driver.load(path).logits(IDS), atol=1e-4, rtol=0.0)


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
        build(path, {**stored, name: stored[name].float()}, ForeignScheme(), None)
    assert str(raised.value) == f"{path}: {name} has type torch.float32, expected torch.int8"
