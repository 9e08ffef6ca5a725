"""What latent attention needs of operators: attention whose values are its keys, products of each head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.models.kv_spec import LatentKV
from quire_kernels import ops, registry
from quire_kernels.metadata import AttentionMetadata, attention_facts
from tests.kernels.common import POISON, every_implementation, forced, is_interpreted

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
BLOCK_SIZE = 8
LENGTHS = [(1, 1), (1, 300), (5, 5), (3, 270), (40, 290), (1, 16)]
"""New tokens, and all, of sequences: one unit of the C++ kernels' and more, whole blocks and not."""


def cases() -> list[Any]:
    """(name, device, type, size of a latent with its rotated part, heads) that an implementation can do."""
    known = {one.name: one for one in registry.implementations("paged_attention")}
    return [
        pytest.param(*one.values, size, num_heads, id=f"{one.id}-{size}-{num_heads}")
        for one in every_implementation("paged_attention", DTYPES)
        for size, num_heads in ((80, 4), (576, 16), (576, 40))
        if known[one.values[0]].can_do(
            *one.values[1:], attention_facts(num_heads, size, 1, BLOCK_SIZE, one.values[2], None, None)
        )
    ]


@pytest.mark.row("C16")
@pytest.mark.parametrize(("name", "device", "dtype", "size", "num_heads"), cases())
def test_attention_whose_values_are_its_keys(
    name: str, device: str, dtype: torch.dtype, size: int, num_heads: int
) -> None:
    """Of the second of three layers, in memory that is NaN where nothing was written."""
    lengths = [(1, 20), (1, 3), (5, 9)] if is_interpreted(name, device) else LENGTHS
    generator = torch.Generator().manual_seed(size)
    counts = [-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths]
    spec, order = LatentKV(size, dtype), torch.randperm(sum(counts) + 2, generator=generator).tolist()
    memory = torch.full((len(order), 3, spec.layer_bytes(BLOCK_SIZE)), POISON, dtype=torch.uint8)
    memory = memory.to(device)
    layer = spec.view(memory[:, 1], BLOCK_SIZE)
    blocks = [[order.pop() for _ in range(count)] for count in counts]
    keys = []
    for (_, seq_len), own in zip(lengths, blocks, strict=True):
        key = torch.randn(seq_len, 1, size, generator=generator).to(device, dtype)
        slots = [own[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(seq_len)]
        with forced("write_kv", "reference" if size > 256 or name == "triton" else name):
            ops.write_kv(key, key, layer, torch.tensor(slots, device=device))
        keys.append(key[:, 0])
    assert (memory[:, ::2] == POISON).all(), "other layers were written"
    query_lens, seq_lens = zip(*lengths, strict=True)
    meta = AttentionMetadata.build(query_lens, seq_lens, blocks, BLOCK_SIZE, device)
    query = torch.randn(meta.num_tokens, num_heads, size, generator=generator).to(device, dtype)
    with forced("paged_attention", name):
        out = ops.paged_attention(query, layer, meta, scale=size**-0.5)
    start = 0
    for key, query_len in zip(keys, query_lens, strict=True):
        rows = slice(start, start + query_len)
        scores = torch.einsum("qhd,kd->hqk", query[rows].double(), key.double()) * size**-0.5
        seen = torch.ones(query_len, len(key), dtype=torch.bool, device=device).tril(len(key) - query_len)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        expected = torch.einsum("hqk,kd->qhd", weights, key.double())
        torch.testing.assert_close(out[rows].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        start += query_len


@pytest.mark.parametrize(("name", "device", "dtype"), every_implementation("head_linear", DTYPES))
@pytest.mark.parametrize(
    ("num_heads", "in_features", "out_features"), [(1, 32, 48), (5, 64, 128), (16, 128, 512)]
)
def test_products_of_each_head(
    name: str, device: str, dtype: torch.dtype, num_heads: int, in_features: int, out_features: int
) -> None:
    """Of parts of wider heads, into such parts, whose other numbers stay as they are."""
    generator = torch.Generator().manual_seed(out_features)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    weight = draw(num_heads, out_features, in_features) / in_features**0.5
    with forced("head_linear", name):
        packed = ops.pack_heads(weight.clone())
    assert packed.nbytes >= weight.nbytes
    for num_tokens in (1, 2, 7, 33, 300):
        x, out = draw(num_tokens, num_heads, in_features + 16), draw(num_tokens, num_heads, out_features + 8)
        before = out.clone()
        packed(x[..., 16:], out[..., :out_features])
        expected = torch.einsum("thi,hoi->tho", x[..., 16:].double(), weight.double())
        tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(out[..., :out_features].double(), expected, **tolerance)
        assert torch.equal(out[..., out_features:], before[..., out_features:])
        if name != "reference":
            alone = torch.empty_like(out[:1])
            packed(x[-1:, :, 16:], alone[..., :out_features])
            assert torch.equal(alone[..., :out_features], out[-1:, :, :out_features]), "other rows matter"
