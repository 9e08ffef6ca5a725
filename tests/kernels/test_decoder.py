"""All layers in one call against the same layers operator by operator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from quire.config import AdapterConfig, ModelConfig
from quire.layers.context import AdapterStep
from quire.loader.load import load_model
from quire.models.decoder import DecoderModel
from quire.models.interface import ForwardInputs
from quire.worker.adapter_memory import AdapterMemory, adaptable
from quire.worker.kv_cache import KVCache
from quire_kernels import ops, registry
from quire_kernels.cpu.compiler import supported_isas
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.weights import JoinedLinear
from tests.fixtures.checkpoints import DENSE_FAMILIES, MOE_FAMILIES, make_checkpoint
from tests.kernels.test_grouped_linear import make_weight

BLOCK_SIZE = 8
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LENGTHS = [(1, 20), (7, 7), (1, 3), (30, 61)]
"""(new tokens, context) of each sequence."""


@contextmanager
def all_operators(name: str) -> Iterator[None]:
    """Each operator that has the implementation is computed by it."""
    names = {
        operator: name
        for operator in registry.operators()
        if name in (one.name for one in registry.implementations(operator))
    }
    with registry.forced(names):
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("decoder")
    return make_checkpoint(request.param, path, tokenizer=False)


def load(path: Path, dtype: str, quantization: str | None = None) -> DecoderModel:
    config = ModelConfig(model=str(path), dtype=dtype, quantization=quantization)
    model = load_model(config, torch.device("cpu")).model
    assert isinstance(model, DecoderModel)
    return model


class Batch:
    """A ragged batch with random keys and values of what came before."""

    def __init__(self, model: DecoderModel, kv_cache_dtype: str = "auto") -> None:
        config, generator = model.config, torch.Generator().manual_seed(3)
        blocks = [-(-context // BLOCK_SIZE) for _, context in LENGTHS]
        ids = torch.randperm(sum(blocks), generator=generator).split(blocks)
        group_layers = max(len(group.layers) for group in model.kv_groups)
        self.kv_cache = KVCache(
            sum(blocks) * len(model.kv_groups),
            model.kv_spec(kv_cache_dtype),
            group_layers,
            BLOCK_SIZE,
            torch.device("cpu"),
        )
        self.metas = [
            AttentionMetadata.build(
                [new for new, _ in LENGTHS],
                [context for _, context in LENGTHS],
                [(sequence + group * sum(blocks)).tolist() for sequence in ids],
                BLOCK_SIZE,
            )
            for group in range(len(model.kv_groups))
        ]
        past = self.kv_cache.blocks
        if kv_cache_dtype == "auto":
            noise = torch.randn(past.numel() // config.dtype.itemsize, generator=generator)
            past.view(-1).copy_(noise.to(config.dtype).view(torch.uint8))
        else:
            past.zero_()
        self.ids = torch.randint(5, 500, (self.metas[0].num_tokens,), generator=generator)
        self.positions = torch.cat([torch.arange(context - new, context) for new, context in LENGTHS])

    def inputs(self, rows: torch.Tensor | None, adapters: AdapterStep | None) -> ForwardInputs:
        return ForwardInputs(
            self.ids, self.positions, self.kv_cache, self.metas, rows=rows, adapters=adapters
        )

    def run(
        self, model: DecoderModel, rows: torch.Tensor | None, adapters: AdapterStep | None = None
    ) -> torch.Tensor:
        return model.forward(self.inputs(rows, adapters))

    def next_tokens(
        self, model: DecoderModel, rows: torch.Tensor, adapters: AdapterStep | None = None
    ) -> torch.Tensor:
        return model.next_tokens(self.inputs(rows, adapters))


@pytest.mark.row("D3")
@pytest.mark.row("D6")
@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_one_call_is_the_composition(checkpoint: Path, isa: str, dtype: str, kv_cache_dtype: str) -> None:
    with all_operators("reference"):
        reference = load(checkpoint, dtype)
        expected = Batch(reference, kv_cache_dtype)
        hidden = expected.run(reference, None)
    with all_operators(isa):
        model = load(checkpoint, dtype)
        actual = Batch(model, kv_cache_dtype)
        assert model.is_fused
        out = actual.run(model, None)
    assert out.dtype == hidden.dtype
    tolerance = 1e-4 if dtype == "float32" and kv_cache_dtype == "auto" else 0.1
    torch.testing.assert_close(out, hidden, atol=tolerance, rtol=tolerance)
    # bfloat16 rounds differently here and there; most numbers are much nearer.
    assert float((out - hidden).float().abs().mean()) < tolerance / 5
    with all_operators(isa):
        rows = torch.tensor([0, 7, 8, 38])
        fresh = Batch(model, kv_cache_dtype)
        assert torch.equal(fresh.run(model, rows), out[rows]), "the rows asked for are those of the whole"
        assert torch.equal(fresh.kv_cache.blocks, actual.kv_cache.blocks)
        fresh = Batch(model, kv_cache_dtype)
        assert torch.equal(fresh.next_tokens(model, rows), model.best_tokens(out[rows]))
        assert torch.equal(fresh.kv_cache.blocks, actual.kv_cache.blocks)
        fresh = Batch(model, kv_cache_dtype)
        assert fresh.run(model, rows[:0]).shape == (0, model.config.hidden_size)
        assert torch.equal(fresh.kv_cache.blocks, actual.kv_cache.blocks), (
            "keys and values are there all the same"
        )


@pytest.mark.row("D18")
@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
def test_quantised_layers(checkpoint: Path, quantization: str) -> None:
    with all_operators("reference"):
        reference = load(checkpoint, "float32", quantization)
        hidden = Batch(reference).run(reference, None)
    model = load(checkpoint, "float32", quantization)
    out = Batch(model).run(model, None)
    torch.testing.assert_close(out, hidden, atol=2e-4, rtol=2e-4)
    rows = torch.tensor([0, 38])
    assert torch.equal(Batch(model).next_tokens(model, rows), model.best_tokens(out[rows]))


@pytest.mark.parametrize("isa", supported_isas())
def test_queries_keys_and_values_of_different_kinds(checkpoint: Path, isa: str) -> None:
    """As files of mixed types have them: two or three products in place of one."""
    with all_operators(isa):
        model = load(checkpoint, "bfloat16")
        batch = Batch(model)
        config = model.config
        heads, kv_heads = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
        kinds = [
            [("Q4_0", heads), ("Q8_0", 2 * kv_heads)],
            [("Q4_1", heads), ("Q5_1", kv_heads), ("Q8_0", kv_heads)],
        ]
        for layer, parts in zip(model.layers, kinds, strict=True):
            layer.self_attn.qkv.packed = JoinedLinear(
                [
                    ops.pack_linear(make_weight(kind, count, config.hidden_size), dtype=torch.bfloat16)
                    for kind, count in parts
                ]
            )
        model._native = model._fuse()
        assert model.is_fused
        out = batch.run(model, None)
        model._native = None
        assert torch.equal(Batch(model).run(model, None), out)


@pytest.mark.row("E14")
@pytest.mark.parametrize("family", [*MOE_FAMILIES, *DENSE_FAMILIES, "gemma", "gemma2", "gemma3"])
@pytest.mark.parametrize("isa", supported_isas())
def test_layers_of_other_kinds(family: str, isa: str, tmp_path: Path) -> None:
    """Experts beside dense layers, windows, attention sinks, caps; norms on both sides, of float32, or behind
    what is added alone, or of all heads; another rotation in some layers, or of a part of each head, or none;
    factors: in one call what operators give, to the bit."""
    path = make_checkpoint(family, tmp_path, tokenizer=False)
    rows = torch.tensor([0, 7, 8, 38])
    with all_operators(isa):
        for dtype, quantization in (("float32", None), ("bfloat16", None), ("bfloat16", "w4a8")):
            model = load(path, dtype, quantization)
            assert model.is_fused
            out, some = Batch(model).run(model, None), Batch(model).run(model, rows)
            model._native = None
            assert torch.equal(Batch(model).run(model, None), out)
            assert torch.equal(some, out[rows])


@pytest.mark.parametrize("isa", supported_isas())
def test_chunked_layers(isa: str, tmp_path: Path) -> None:
    """Of a Llama 4 without its experts, which one call does not know: what operators give, to the bit."""
    path = make_checkpoint("llama4", tmp_path, tokenizer=False, moe_layers=[])
    with all_operators(isa):
        model = load(path, "float32")
        assert model.is_fused and any(layer.is_chunked for layer in model.layers)
        out = Batch(model).run(model, None)
        model._native = None
        assert torch.equal(Batch(model).run(model, None), out)


def fill_slots(model: DecoderModel) -> None:
    """Adapters of ranks 8, 3 and 24 in three slots; the second changes values and what is above only."""
    AdapterMemory(model, AdapterConfig(enable_lora=True, max_loras=3, max_lora_rank=24), torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    for _, layer in adaptable(model):
        for index, part in enumerate(layer.slots):
            for slot, rank in enumerate((8, 3, 24)):
                if slot == 1 and (len(layer.slots), index) not in ((3, 2), (2, 1)):
                    continue
                a, b = (
                    torch.randn(shape, generator=generator).to(part.a.dtype) / shape[1] ** 0.5
                    for shape in ((rank, part.a.shape[2]), (part.b.shape[1], rank))
                )
                part.fill(slot, a, b)


def step_of(*slots: int) -> AdapterStep:
    """Of each sequence."""
    tokens = [slot for slot, (new, _) in zip(slots, LENGTHS, strict=True) for _ in range(new)]
    return AdapterStep(torch.tensor(tokens, dtype=torch.int32), frozenset(slots) - {-1})


@pytest.mark.row("E19")
@pytest.mark.row("D3")
@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        ("qwen2", "float32", None),
        ("qwen3", "bfloat16", None),
        ("llama", "bfloat16", "int8"),
        ("llama", "float32", "w8a8"),
        ("mistral", "bfloat16", "w4a8"),
        ("qwen3_moe", "float32", None),
        ("gemma3", "float32", None),
    ],
)
def test_adapters(family: str, dtype: str, quantization: str | None, isa: str, tmp_path: Path) -> None:
    """Of rows side by side: what operators give, but for where the type rounds; to the bit, what each
    sequence has alone, or without one."""
    path = make_checkpoint(family, tmp_path, tokenizer=False)
    rows = torch.tensor([0, 3, 7, 8, 38])
    with all_operators(isa):
        model = load(path, dtype, quantization)
        assert model.is_fused
        plain = Batch(model).run(model, None)
        fill_slots(model)
        step = step_of(2, 0, -1, 1)
        together = Batch(model)
        out = together.run(model, None, step)
        some = Batch(model).run(model, rows, step)
        assert torch.equal(some, out[rows])
        best = Batch(model).next_tokens(model, rows, step)
        assert torch.equal(best, model.best_tokens(out[rows]))
        first = 0
        for sequence, (new, _) in enumerate(LENGTHS):
            own = slice(first, first := first + new)
            slots = [-1] * len(LENGTHS)
            slots[sequence] = (2, 0, -1, 1)[sequence]
            assert torch.equal(Batch(model).run(model, None, step_of(*slots))[own], out[own])
            assert torch.equal(out[own], plain[own]) == (slots[sequence] == -1)
        model._native = None
        composed = Batch(model)
        expected = composed.run(model, None, step)
    tolerance = 1e-4 if dtype == "float32" else 0.25
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    assert float((out - expected).float().abs().mean()) < tolerance / 10
    moved = (expected - plain).float().abs().mean()
    assert float(moved) > 10 * float((out - expected).float().abs().mean())


def test_a_forced_operator_is_not_fused_away(checkpoint: Path) -> None:
    with registry.forced({"paged_attention": "reference"}):
        assert not load(checkpoint, "float32").is_fused
