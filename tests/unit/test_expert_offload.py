"""Offloaded experts: a few slots in memory, the others in a file."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import SamplingParams
from quire.config import ModelConfig
from quire.engine.cache_commands import Sleep
from quire.errors import ConfigError
from quire.layers import expert_offload
from quire.layers.expert_offload import OffloadedExperts
from quire.layers.moe import MixtureOfExperts
from quire.loader.load import empty_model
from quire.outputs import ExpertCounts
from quire.worker.draft_model import draft_config
from quire_kernels import ops
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.drive import Driver, hf_greedy, hf_model
from tests.fixtures.graphs import recorded_steps
from tests.unit.test_engine import random_prompts
from tests.unit.test_oracle_matrix import engine

FAMILIES = ("mixtral", "qwen3_moe", "qwen2_moe", "llama4", "gpt_oss")
"""Eight experts and more: alone, with a shared one, with scaled inputs, with biases."""
PROMPT = random_prompts(1, longest=1, seed=4)[0] * 40


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("offload")
    return {family: make_checkpoint(family, root / family) for family in FAMILIES}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files are."""
    monkeypatch.setattr(expert_offload, "lasting_directory", lambda name: tmp_path / name)
    return tmp_path / "experts"


def open_files(directory: Path) -> list[str]:
    """Files of this process in a directory, with or without a name."""
    links = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return [link for link in links if link.startswith(str(directory))]


@pytest.mark.row("E18", clauses=("equal",))
@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("is_device", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_engine_equals_transformers(
    family: str, is_device: bool, num_slots: int, checkpoints: dict[str, Path]
) -> None:
    """Chunks of prompts beside decodes, with the kernels and with PyTorch's operators."""
    prompts = [*random_prompts(3, seed=3), PROMPT]
    hf = hf_model(checkpoints[family])
    expected = [hf_greedy(hf, prompt, 8) for prompt in prompts]
    with recorded_steps() if is_device else nullcontext():
        llm = engine(checkpoints[family], max_num_batched_tokens=7, max_resident_experts=num_slots)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert [output.token_ids for output in llm.generate(prompts, params)] == expected
    counts = llm.core.stats().experts
    assert counts.num_misses > num_slots and counts.num_loaded_bytes > 0
    assert counts.num_prefetches >= counts.num_prefetch_hits > 0
    llm.core.close()


def test_ranks_have_a_part_of_each_resident_expert(checkpoints: dict[str, Path]) -> None:
    llm = engine(checkpoints["mixtral"], max_resident_experts=2, tensor_parallel_size=2)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    (output,) = llm.generate([PROMPT], params)
    assert output.token_ids == hf_greedy(hf_model(checkpoints["mixtral"]), PROMPT, 8)
    assert llm.core.stats().experts.num_prefetches > 0
    llm.core.close()


@pytest.mark.row("E18", clauses=("equal",))
@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in FAMILIES),
        ("mixtral", {"dtype": "bfloat16"}),
        ("qwen2_moe", {"quantization": "w8a8"}),
        ("qwen3_moe", {"quantization": "w4a8", "dtype": "bfloat16"}),
        ("qwen3_moe", {"load_format": "dummy"}),
    ],
)
def test_bits_are_those_of_a_model_in_memory(
    family: str, options: dict[str, Any], checkpoints: dict[str, Path]
) -> None:
    expected = Driver.load(checkpoints[family], **options).logits(PROMPT, chunk=9)
    for num_slots in (1, 2, 5):
        driver = Driver.load(checkpoints[family], max_resident_experts=num_slots, **options)
        assert torch.equal(driver.logits(PROMPT, chunk=9), expected)


def layer_of(num_slots: int, num_experts: int = 8) -> OffloadedExperts:
    """A layer of experts that each multiply by another number."""
    layer = OffloadedExperts(num_experts, num_slots)
    for expert in range(num_experts):
        weight = torch.eye(32).repeat(2, 1) * (expert + 1)
        layer.gate_up.keep(expert, ops.pack_linear(weight, activation="silu"))
        layer.down.keep(expert, ops.pack_linear(torch.eye(32)))
    layer.finish([], [], device_type="cpu", dtype=torch.float32)
    return layer


def run(layer: OffloadedExperts, *tokens: Sequence[int]) -> None:
    """One step, in which each token has these experts."""
    x, experts = torch.ones(len(tokens), 32), torch.tensor(tokens)
    scale = (experts + 1.0).unsqueeze(2) * x.unsqueeze(1)
    expected = (torch.nn.functional.silu(scale) * scale).sum(1)
    torch.testing.assert_close(layer(x, experts, torch.ones(experts.shape)), expected)


def counts_of(layer: OffloadedExperts) -> tuple[int, int]:
    return layer.counts.num_hits, layer.counts.num_misses


def test_the_least_recently_used_expert_makes_room() -> None:
    layer = layer_of(3)
    for experts, hits, misses in (
        ([0, 1], 0, 2),
        ([1, 2], 1, 3),
        ([0, 2], 3, 3),
        ([2, 3], 4, 4),  # in place of 1
        ([0, 3], 6, 4),
        ([1, 0], 7, 5),  # in place of 2
        ([2, 3], 8, 6),
    ):
        run(layer, experts)
        assert counts_of(layer) == (hits, misses), experts
    each = (2 * 32 + 32) * 32 * 4
    assert layer.counts.num_loaded_bytes == 6 * each and layer.nbytes == 3 * each


def test_a_batch_that_needs_more_experts_than_there_are_slots() -> None:
    """All of them are computed, in groups; those that are needed later keep their slots."""
    layer = layer_of(3)
    run(layer, [0, 1], [2, 3], [4, 5], [6, 7], [0, 7])
    assert counts_of(layer) == (0, 8)
    run(layer, [0, 1], [2, 3], [4, 5], [6, 7], [0, 7])
    assert counts_of(layer) == (2, 14)
    layer = layer_of(1)
    run(layer, [0, 1], [2, 3])
    run(layer, [3, 2])
    assert counts_of(layer) == (0, 6)


@pytest.mark.row("E18", clauses=("metrics",))
def test_experts_that_are_expected_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get no slot before they are needed, so that no expectation changes hits and misses."""
    layer = layer_of(3)
    read: list[int] = []
    homes = enumerate([*layer.gate_up.homes, *layer.down.homes])
    places = {home.data_ptr(): number % layer.num_experts for number, home in homes}
    monkeypatch.setattr(expert_offload, "read_ahead", lambda memory: read.append(places[memory.data_ptr()]))
    for expected, experts, prefetches, prefetch_hits, reads in (
        ([0, 1], [0, 1], 2, 2, [0, 1]),
        ([1, 2], [1, 3], 3, 2, [2, 3]),  # 1 has a slot; 3 is read when it is needed
        ([6, 7], [3, 4], 5, 2, [6, 7, 4]),  # 4 in place of 0
        ([5, 1], [5, 0], 6, 3, [5, 0]),
    ):
        layer.expect(torch.tensor([expected]))
        run(layer, experts)
        counts = layer.counts
        assert (counts.num_prefetches, counts.num_prefetch_hits) == (prefetches, prefetch_hits), expected
        assert read == [expert for expert in reads for _ in ("gate_up", "down")]
        read.clear()
    assert counts_of(layer) == (2, 6)


def test_what_is_in_memory_is_counted(checkpoints: dict[str, Path], directory: Path) -> None:
    """As the plan foretells it; and sleep gives the slots and the file back."""
    path = str(checkpoints["mixtral"])
    config = ModelConfig(model=path, max_resident_experts=2)
    whole, few = (
        empty_model(one, torch.device("meta")).model.packed_bytes("cpu")
        for one in (ModelConfig(model=path), config)
    )
    model = Driver.load(checkpoints["mixtral"]).model
    (layer, *others) = (one for one in model.modules() if isinstance(one, MixtureOfExperts))
    each = layer.unread_bytes // 6
    assert whole - few == 6 * each * (1 + len(others))
    llm = engine(checkpoints["mixtral"], max_resident_experts=2)
    assert len(open_files(directory)) == 2 * (1 + len(others)), "one for each kind of matrix in a layer"
    assert list(directory.iterdir()) == [], "nothing is left by a process that is killed"
    before = llm.core.stats().experts
    llm.core.begin_sleep(Sleep())
    llm.core.sleep()
    assert open_files(directory) == []
    llm.core.wake()
    llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert llm.core.stats().experts.num_misses > before.num_misses, "counts go on"
    llm.core.close()


@contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """This process cannot make larger files, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_an_error_at_load(checkpoints: dict[str, Path], directory: Path) -> None:
    message = rf"max_resident_experts: {directory} has no room for 0\.[35] MB of a layer's experts: File too"
    with small_files(2**16), pytest.raises(ConfigError, match=message) as caught:
        Driver.load(checkpoints["mixtral"], max_resident_experts=2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "options", "complaint"),
    [
        ("llama", {}, "the model has no experts"),
        (
            "mixtral",
            {"model_impl": "transformers"},
            "the model has no experts, or transformers computes",
        ),
        ("nemotron_h", {}, "experts without a gate stay resident"),
    ],
)
def test_what_is_refused(family: str, options: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path / family, tokenizer=False)
    with pytest.raises(ConfigError, match=f"^max_resident_experts: {complaint}"):
        Driver.load(path, max_resident_experts=2, **options)


def test_forms_that_are_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="max_resident_experts: on the CPU only"):
        config = ModelConfig(model=str(checkpoints["mixtral"]), max_resident_experts=2)
        empty_model(config, torch.device("cuda"))
    matrices = OffloadedExperts(2, 1).down
    matrices.keep(0, ops.pack_linear(torch.eye(32)))
    with pytest.raises(ConfigError, match="weights of different forms"):
        matrices.keep(1, ops.pack_linear(torch.eye(32), quantization="int8"))


def test_a_budget_for_all_experts_is_none(checkpoints: dict[str, Path]) -> None:
    model = Driver.load(checkpoints["mixtral"], max_resident_experts=8).model
    assert model.is_fused and not model.count_experts(ExpertCounts())
    target = model.config
    draft = draft_config(ModelConfig(draft_model="mtp", max_resident_experts=2), target)
    assert draft.max_resident_experts is None
