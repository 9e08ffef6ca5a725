"""Triton kernels: attention against dense attention, and what they compile to."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_kernels import ops, registry
from quire_kernels.metadata import AttentionMetadata
from quire_kernels.triton_lang import operators
from tests.kernels.common import every_implementation, forced
from tests.kernels.test_paged_attention import KV_DTYPES, LargestTensor, check, make_case

ROOT = Path(__file__).resolve().parents[2]
DEVICES = [
    one.values[1]
    for one in every_implementation("paged_attention", kv_dtypes=[None])
    if one.values[0] == "triton"
]
"""Those that the kernels compute on; a machine with Triton has one, if only in the interpreter."""


def fuzzed(seed: int, longest: int, device: str) -> tuple[Any, dict[str, Any]]:
    """A batch whose lengths lie at and around borders of blocks, tiles and parts, and attention's options."""
    draw = random.Random(1000 + seed)
    lengths = []
    for _ in range(draw.randint(1, 4)):
        border = draw.choice([16, 64, 128, 256, 1024, 4096])
        seq_len = max(1, min(border + draw.randint(-1, 1), longest))
        if draw.random() < 0.3:
            seq_len = draw.randint(1, longest)
        query_len = min(seq_len, draw.choice([1, 1, 1, 2, 17, 65, 130]))
        lengths.append((query_len, seq_len))
    case = make_case(
        lengths,
        num_kv_heads=draw.choice([1, 2]),
        groups=draw.choice([1, 4, 8]),
        head_dim=draw.choice([64, 128]),
        block_size=draw.choice([16, 32]),
        dtype=draw.choice([torch.float32, torch.bfloat16]),
        kv_dtype=draw.choice(KV_DTYPES),
        device=device,
        seed=seed,
    )
    options: dict[str, Any] = {"sliding_window": draw.choice([None, None, 1, 64, 100, 1000])}
    options["softcap"] = draw.choice([None, None, 30.0])
    return case, options


def test_triton_is_tested_somewhere() -> None:
    assert DEVICES, "Triton is installed: without a GPU conftest.py turns its interpreter on"


@pytest.mark.skipif(not operators.is_interpreted(), reason="on a GPU they are meant to be picked")
def test_nothing_picks_an_interpreted_kernel_by_itself() -> None:
    for operator in registry.operators():
        names = [one.name for one in registry.implementations(operator)]
        assert "triton" not in names[:-1], operator


@pytest.mark.row("D4", clauses=("attention",))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_batches_equal_dense_attention(device: str, seed: int) -> None:
    case, options = fuzzed(seed, 1100, device)
    with forced("paged_attention", "triton"):
        check(case, **options)


@pytest.mark.slow
@pytest.mark.row("D4")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_fuzzed_batches_up_to_4k(device: str, seed: int) -> None:
    case, options = fuzzed(seed, 4097, device)
    with forced("paged_attention", "triton"):
        check(case, **options)


@pytest.mark.row("D4")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [4000, 4096])
def test_a_context_of_4k_in_many_parts(device: str, length: int) -> None:
    case = make_case(
        [(1, length), (3, length)], num_kv_heads=1, groups=8, head_dim=128, block_size=32, device=device
    )
    with forced("paged_attention", "triton"):
        check(case)
        check(case, sliding_window=1000)


@pytest.mark.row("D4")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("groups", "head_dim", "block_size"), [(7, 80, 16), (1, 256, 128), (3, 48, 2), (33, 16, 64)]
)
def test_sizes_that_are_no_powers_of_two(device: str, groups: int, head_dim: int, block_size: int) -> None:
    case = make_case(
        [(1, 200), (20, 90), (1, 1)], groups=groups, head_dim=head_dim, block_size=block_size, device=device
    )
    with forced("paged_attention", "triton"):
        check(case)
        check(case, sliding_window=70)


@pytest.mark.row("D4")
@pytest.mark.parametrize("device", DEVICES)
def test_a_token_decoded_beside_others_equals_itself_alone(device: str) -> None:
    """Parts depend on the own length only, so that the result has the same bits beside whatever else."""
    lengths = [(1, 900), (5, 40), (1, 1), (1, 333), (70, 70)]
    case = make_case(lengths, groups=4, head_dim=64, block_size=16, device=device)
    with forced("paged_attention", "triton"):
        together = case.run()
        for row, start in ((0, 0), (3, 7)):
            meta = AttentionMetadata.build(
                [1], [lengths[row][1]], [case.meta.block_table[row].tolist()], 16, device
            )
            alone = ops.paged_attention(case.query[start : start + 1], case.kv_layer, meta, scale=case.scale)
            assert torch.equal(alone[0], together[start])


@pytest.mark.row("D4")
@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_pad_a_captured_batch_are_zeros(device: str) -> None:
    """A graph's batch is filled up with sequences that have no context; the others do not notice."""
    case = make_case([(1, 300), (1, 17), (1, 64)], groups=2, head_dim=64, block_size=16, device=device)
    with forced("paged_attention", "triton"):
        expected = case.run()
        case.meta.seq_lens[1] = 0
        case.meta.shared_plans.clear()
        padded = case.run()
    assert torch.equal(padded[[0, 2]], expected[[0, 2]])
    assert not padded[1].any()


@pytest.mark.row("D4")
@pytest.mark.parametrize("device", DEVICES)
def test_lengths_are_read_from_the_device(device: str) -> None:
    """As in a replay: the host's lengths are those of the capture, the device's are the step's."""
    case = make_case([(1, 300), (1, 513), (1, 64)], groups=2, head_dim=64, block_size=16, device=device)
    stale = AttentionMetadata.build([1] * 3, [1] * 3, case.meta.block_table.tolist(), 16, device)
    stale.seq_lens.copy_(case.meta.seq_lens)
    with forced("paged_attention", "triton"):
        out = ops.paged_attention(case.query, case.kv_layer, stale, scale=case.scale)
        assert torch.equal(out, case.run())


@pytest.mark.parametrize("device", DEVICES)
def test_a_prompt_needs_no_scratch_memory(device: str) -> None:
    case = make_case([(100, 400)], groups=4, head_dim=64, block_size=16, device=device)
    with forced("paged_attention", "triton"), LargestTensor() as largest:
        case.run()
    assert largest.numel <= case.query.numel()


@pytest.mark.parametrize("device", DEVICES)
def test_what_the_kernels_cannot_do_is_refused(device: str) -> None:
    triton = {one.name: one for one in registry.implementations("paged_attention")}["triton"]
    facts = {"head_dim": 128, "num_groups": 4, "block_size": 16, "kv_dtype": torch.bfloat16}
    assert triton.can_do(device, torch.bfloat16, facts)
    for change in (
        {"head_dim": 72},
        {"head_dim": 320},
        {"block_size": 24},
        {"block_size": 256},
        {"num_groups": 71},
        {"kv_dtype": torch.float8_e5m2},
    ):
        assert not triton.can_do(device, torch.bfloat16, facts | change), change


ARCHITECTURES = ["sm_80", "sm_89", "sm_90", "sm_100"]
MAY_SPILL = {"attention.ragged.": 128, "attention.decode.gemma2-9b": 24, "attention.decode.tiny-fp32": 16}
"""Bytes, by the beginning of a name: tiles of prompts were chosen by time, on an H200 with 96 bytes."""


def compile_kernels(kernel: str, arch: str) -> None:
    """Compiles the kernels whose name contains this, outside the interpreter, and looks at what came out."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "kernels")
    command = [sys.executable, "-m", "quire_kernels.triton_lang.compiler", "--kernel", kernel]
    command += [f"--arch={arch}"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert {result["arch"] for result in results} == {arch}, run.stderr
    for result in results:
        assert not result["problems"], result
        most = max((size for name, size in MAY_SPILL.items() if result["name"].startswith(name)), default=0)
        assert result["spill_bytes"] <= most and (most or not result["spill_instructions"]), result


def test_kernels_of_a_model_compile_without_spills() -> None:
    """For a GPU that is not here: tensor cores where they are needed, and not too much shared memory."""
    compile_kernels("llama-8b", "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernels", ["attention.", "lora."])
def test_all_kernels_compile_without_spills(arch: str, kernels: str) -> None:
    compile_kernels(kernels, arch)
