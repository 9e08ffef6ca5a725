"""A row of attention, and of a linear layer, is the same to the last bit however its batch is cut.

A machine without AMX runs the sources for it on tile instructions in plain C++ (`amx_emulator`).
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_kernels.cpu import compiler, native, operators
from quire_kernels.cpu.compiler import supported_isas
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.reference.moe import LoopedExperts
from tests.kernels.test_paged_attention import Case, make_case

EMULATED = "amx, emulated"
EMULATOR = Path(__file__).with_name("amx_emulator") / "amx_emulated.h"
ISAS = [*supported_isas()]
if "avx512_bf16" in ISAS and "amx" not in ISAS:
    ISAS.append(pytest.param(EMULATED, marks=pytest.mark.slow))  # type: ignore[arg-type]
CHUNKS = (1, 3, 5, 16, 64)
NUM_CASES = 16


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], ctypes.CDLL]:
    """Compiles the emulated library when it is first called."""
    made: list[ctypes.CDLL] = []

    def library() -> ctypes.CDLL:
        if not made:
            flags = [*compiler.FLAGS, *compiler.ISAS["avx512_bf16"][1], "-O1", "-include", str(EMULATOR)]
            path = tmp_path_factory.mktemp("amx") / "quire.so"
            path.write_bytes(compiler._compile(compiler._compiler(), tuple(flags), "amx.so").read_bytes())
            made.append(ctypes.CDLL(str(path)))
            for name, (result, arguments) in native.declarations().functions("quire_").items():
                function = getattr(made[0], name)
                function.restype, function.argtypes = result, arguments
            made[0].quire_set_num_threads(2)
        return made[0]

    return library


@pytest.fixture
def attend(
    monkeypatch: pytest.MonkeyPatch, emulated: Callable[[], ctypes.CDLL]
) -> Callable[..., torch.Tensor]:
    """`paged_attention` of an instruction set."""

    def run(isa: str, *args: Any) -> torch.Tensor:
        if isa == EMULATED:
            monkeypatch.setattr(operators, "_kernels", lambda _: emulated())
        return operators.paged_attention(isa, *args)

    return run


def rows_of(case: Case, first: int, stop: int, window: int | None) -> AttentionMetadata:
    """The tokens [first, stop) of the case's only sequence; blocks before the window are others', all NaN."""
    blocks = case.meta.block_table[0].tolist()
    unused = next(block for block in range(case.pool.shape[0]) if block not in blocks)
    block_size = (
        case.kv_layer.shape[3] if isinstance(case.kv_layer, torch.Tensor) else case.kv_layer.data.shape[3]
    )
    gone = max(first - window + 1, 0) // block_size if window else 0
    return AttentionMetadata.build(
        [stop - first], [stop], [[unused] * gone + blocks[gone:]], block_size, "cpu"
    )


@pytest.mark.row("A12", clauses=("chunks", "prefix"))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("seed", range(NUM_CASES))
def test_attention_does_not_depend_on_how_a_prompt_is_cut(
    attend: Callable[..., torch.Tensor], isa: str, seed: int
) -> None:
    """The last rows of a prompt, in chunks of any size, against the prompt whole."""
    draw = random.Random(seed)
    length = draw.choice([draw.randint(2, 70), draw.randint(200, 300), draw.randint(500, 1100)])
    case = make_case(
        [(length, length)],
        num_kv_heads=draw.choice([1, 2, 3]),
        groups=draw.choice([1, 2, 3, 4, 7, 16]),
        head_dim=draw.choice([16, 48, 64, 80, 128, 256]),
        block_size=draw.choice([5, 8, 16, 32]),
        dtype=draw.choice([torch.float32, torch.bfloat16]),
        kv_dtype=draw.choice([None, None, torch.int8]),
        seed=seed,
    )
    window = draw.choice([None, None, draw.randint(1, 400)])
    sinks = torch.linspace(-2.0, 3.0, case.query.shape[1])
    options = case.scale, window, draw.choice([None, None, 20.0]), draw.choice([None, sinks])
    whole = attend(isa, case.query, case.kv_layer, case.meta, *options)
    assert not whole.isnan().any()
    for size in (*CHUNKS, draw.randint(1, length)):
        starts = [0, *draw.sample(range(length), min(length, 6))]
        for first in starts:
            stop = min(first + size, length)
            meta = rows_of(case, first, stop, window)
            part = attend(isa, case.query[first:stop], case.kv_layer, meta, *options)
            assert torch.equal(part, whole[first:stop]), f"tokens {first} to {stop} of {length}"


@pytest.mark.row("A12", clauses=("batch",))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("seed", range(3))
def test_attention_does_not_depend_on_the_batch(
    attend: Callable[..., torch.Tensor], isa: str, seed: int
) -> None:
    """Chunks, single tokens and sequences whose contexts begin with the same blocks, together and alone."""
    draw = random.Random(seed)
    dtype = [torch.bfloat16, torch.float32, torch.bfloat16][seed]
    length, groups, block_size = 700, draw.choice([1, 2, 4]), 16
    case = make_case(
        [(length, length)],
        num_kv_heads=2,
        groups=groups,
        head_dim=64,
        block_size=block_size,
        dtype=dtype,
        seed=seed,
    )
    blocks = case.meta.block_table[0].tolist()
    seq_lens = [draw.randint(300, length) for _ in range(16)]
    query_lens = [1] * 13 + [draw.randint(2, 90) for _ in range(3)]
    query = torch.randn((sum(query_lens), 2 * groups, 64), generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )
    together = attend(
        isa,
        query,
        case.kv_layer,
        AttentionMetadata.build(query_lens, seq_lens, [blocks] * 16, block_size, "cpu"),
        case.scale,
        None,
        None,
    )
    start = 0
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        meta = AttentionMetadata.build([query_len], [seq_len], [blocks], block_size, "cpu")
        rows = slice(start, start + query_len)
        alone = attend(isa, query[rows], case.kv_layer, meta, case.scale, None, None)
        assert torch.equal(alone, together[rows])
        start += query_len


@pytest.mark.row("A12", clauses=("batch",))
@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("quantization", [None, "int8", "int4", "w8a8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_do_not_depend_on_the_number_of_rows(
    isa: str, quantization: str | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn((96, 1088), generator=generator) / 33).to(dtype)
    x = torch.randn((300, 1088), generator=generator).to(dtype)
    layer = operators.linear(isa, weight, None, None, quantization)
    whole = layer(x)
    for count in (1, 2, 3, 5, 7, 12, 13, 16, 31, 64, 73, 193):
        first = (17 * count) % (300 - count)
        assert torch.equal(layer(x[first : first + count]), whole[first : first + count]), count


@pytest.mark.row("A12")
@pytest.mark.parametrize("isa", ISAS[len(supported_isas()) :])
@pytest.mark.parametrize("quantization", [None, "int8", "w8a8"])
def test_experts_on_tiles(
    isa: str, quantization: str | None, emulated: Callable[[], ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1 to 100 rows; tests/kernels/test_moe.py has the other instruction sets."""
    monkeypatch.setattr(operators, "_kernels", lambda _: emulated())
    layers = [
        [
            operators.linear(isa, weight.bfloat16(), None, activation, quantization)
            for weight in torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 16
        ]
        for shape, activation in (((5, 640, 256), "silu"), ((5, 256, 320), None))
    ]
    moe = operators.moe(isa, *layers)
    x = torch.randn(104, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    experts = torch.tensor([[0, 3]] * 100 + [[3, 1]] * 3 + [[2, 0]])
    shares = torch.rand(104, 2, generator=torch.Generator().manual_seed(2))
    out = moe(x, experts, shares)
    for rows in (slice(0, 1), slice(100, 101), slice(103, 104), slice(60, 102), slice(20, 90)):
        assert torch.equal(moe(x[rows], experts[rows], shares[rows]), out[rows])
    loop = LoopedExperts(*layers)(x, experts, shares)
    torch.testing.assert_close(out, loop, atol=0.02, rtol=0.02)
