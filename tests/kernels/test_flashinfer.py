"""FlashInfer as an implementation of paged_attention: what it is told, when it is used, and when it is not.

Neither the package nor a GPU is needed: `fake_flashinfer` computes behind the package's signatures.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import EngineConfig, ModelConfig
from quire.errors import ConfigError
from quire.layers.config import AttentionKind
from quire.worker import model_runner
from quire_kernels import ops, registry
from quire_kernels.flashinfer import operators, wrappers
from quire_kernels.metadata import attention_facts
from tests.fixtures.checkpoints import make_checkpoint
from tests.kernels.common import forced
from tests.kernels.fake_flashinfer import fake_module
from tests.kernels.test_paged_attention import TOLERANCE, Case, dense, make_case

CACHES = (operators.why_unavailable, operators.why_it_fails, wrappers._pool, wrappers._workspace)
FACTS = attention_facts(8, 64, 2, 16, torch.bfloat16, None, None)


def forget() -> None:
    for cache in CACHES:
        cache.cache_clear()
    operators._failures.clear()
    registry._picked.clear()


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The fake, on a machine that seems to have a GPU; tensors are on the CPU all the same."""
    module = fake_module()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(wrappers, "WORKSPACE_BYTES", 1 << 20)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    on_cpu = functools.partial(wrappers.try_out, device=torch.device("cpu"))
    monkeypatch.setattr(operators, "try_out", lambda shape, device: on_cpu(shape))
    monkeypatch.setattr(registry, "_implementations", {**registry._implementations})
    forget()
    yield module
    # A call that the package would refuse is handed over, and another implementation hides it.
    assert module.calls.failure is not None or not operators._failures
    forget()


def attend(
    case: Case, sliding_window: int | None = None, softcap: float | None = None, **changes: Any
) -> torch.Tensor:
    meta = dataclasses.replace(case.meta, **changes) if changes else case.meta
    return operators.paged_attention(case.query, case.kv_layer, meta, case.scale, sliding_window, softcap)


BATCHES: dict[str, list[tuple[int, int]]] = {
    "decode": [(1, 1), (1, 16), (1, 17), (1, 33), (1, 90)],
    "prefill": [(1, 1), (16, 16), (33, 33), (50, 50)],
    "chunks": [(5, 40), (32, 64), (17, 18), (20, 90)],
    "mixed": [(1, 90), (40, 40), (1, 3), (7, 71)],
}


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("batch", BATCHES)
def test_ragged_batches_equal_the_reference(
    batch: str, groups: int, head_dim: int, block_size: int, flashinfer: ModuleType
) -> None:
    """In a layer between two others, whose blocks lie apart; all that nobody owns is NaN."""
    case = make_case(BATCHES[batch], groups=groups, head_dim=head_dim, block_size=block_size)
    assert not case.kv_layer.is_contiguous()
    for window in (None, 1, 21, 300):
        for softcap in (None, 4.0):
            with forced("paged_attention", "reference"):
                expected = case.run(sliding_window=window, softcap=softcap)
            found = attend(case, window, softcap)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    kind = "Decode" if batch == "decode" else "Prefill"
    assert {type(one).__name__ for one in flashinfer.calls.made} == {f"Batch{kind}WithPagedKVCacheWrapper"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(8))
def test_random_batches_in_half_precision(dtype: torch.dtype, seed: int) -> None:
    draw = random.Random(seed)
    lengths = []
    for _ in range(draw.randint(1, 9)):
        seq_len = draw.choice([1, 15, 16, 17, draw.randint(1, 200)])
        lengths.append((draw.choice([1, 1, seq_len, draw.randint(1, seq_len)]), seq_len))
    case = make_case(
        lengths, groups=draw.choice([1, 3, 5]), head_dim=64, block_size=16, dtype=dtype, seed=seed
    )
    window, softcap = draw.choice([None, draw.randint(1, 100)]), draw.choice([None, 20.0])
    tolerance = TOLERANCE[dtype]
    expected = dense(case, window, softcap)
    torch.testing.assert_close(
        attend(case, window, softcap).double(), expected, atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("batch", BATCHES)
def test_blocks_before_the_window_are_not_read(batch: str) -> None:
    """They are somebody else's by now: their ids in the table are still valid, their contents any."""
    window = 19
    case = make_case(BATCHES[batch], head_dim=64, block_size=16)
    expected = dense(case, window)
    num_poisoned = 0
    for row, (query_len, seq_len) in enumerate(BATCHES[batch]):
        first = max(seq_len - query_len + 1 - window, 0) // 16
        case.kv_layer[case.meta.block_table[row, :first].long()] = float("nan")
        num_poisoned += first
    assert num_poisoned > 0 or batch == "prefill"
    torch.testing.assert_close(attend(case, window).double(), expected, atol=2e-5, rtol=2e-5)


def test_tables_may_be_wide_and_apart_in_memory() -> None:
    case = make_case(BATCHES["mixed"], head_dim=64, block_size=16)
    wide = torch.nn.functional.pad(case.meta.block_table, (0, 5), value=-(2**30))[:, :-2]
    assert not wide.is_contiguous()
    torch.testing.assert_close(attend(case, block_table=wide, plans={}), attend(case))


def test_the_host_does_not_wait_for_the_device() -> None:
    """On a device without numbers, asking for one is an error; what the host plans by is on the host."""
    meta = make_case(BATCHES["mixed"], head_dim=64, block_size=16).meta
    meta = dataclasses.replace(meta, block_table=meta.block_table.to("meta"))
    for window in (None, 19):
        pages = wrappers.Pages.from_metadata(meta, 16, window)
        assert [one.device.type for one in pages] == ["cpu", "cpu", "meta", "cpu", "cpu"]
        assert len(pages.indices) == pages.starts[-1]


@pytest.mark.parametrize("groups", [1, 3, 4, 8])
def test_single_tokens_of_many_heads_use_tensor_cores(groups: int, flashinfer: ModuleType) -> None:
    attend(make_case(BATCHES["decode"], groups=groups, head_dim=64))
    (wrapper,) = flashinfer.calls.made
    assert wrapper.options["use_tensor_cores"] == (groups >= 4)


def test_a_step_is_planned_once_per_group_and_kind_of_layer(flashinfer: ModuleType) -> None:
    cases = [make_case(BATCHES["mixed"], head_dim=64, seed=seed) for seed in range(2)]
    cases[1].meta = cases[0].meta.with_blocks(cases[1].meta.block_table, cases[1].meta.slot_mapping)
    for _layer in range(5):
        for case in cases:
            for window in (None, 12):
                # Plans of all kinds live side by side: each layer must find its own.
                torch.testing.assert_close(
                    attend(case, window).double(), dense(case, window), atol=2e-5, rtol=2e-5
                )
    assert flashinfer.calls.num_runs == 20
    assert flashinfer.calls.num_plans == 4
    assert len(flashinfer.calls.made) == 4


def test_wrappers_are_used_again_when_a_step_is_over(flashinfer: ModuleType) -> None:
    for seed in range(6):
        case = make_case(BATCHES["mixed"], head_dim=64, seed=seed)
        for window in (None, 12):
            attend(case, window)
        del case
        gc.collect()
    assert flashinfer.calls.num_plans == 12
    assert len(flashinfer.calls.made) == 2
    workspaces = {one.options["float_workspace_buffer"].data_ptr() for one in flashinfer.calls.made}
    assert len(workspaces) == 1, "one per device"


def test_a_wrapper_whose_plan_is_not_on_the_device_yet_is_left_alone(flashinfer: ModuleType) -> None:
    """The device would read the next step's plan, which the host writes to the same pinned memory."""
    pool = wrappers._pool(torch.device("cpu"), False, False)
    busy = SimpleNamespace(query=lambda: False)
    pool.append(wrappers._Slot(wrapper=None, copied=busy))
    case = make_case(BATCHES["mixed"], head_dim=64)
    attend(case)
    assert len(flashinfer.calls.made) == 1 and len(pool) == 1
    busy.query = lambda: True
    assert wrappers._pop_free(pool) is not None and not pool


def test_a_wrapper_made_in_inference_mode_serves_outside_of_it(flashinfer: ModuleType) -> None:
    with torch.inference_mode():
        attend(make_case(BATCHES["mixed"], head_dim=64))
    (wrapper,) = flashinfer.calls.made
    assert not wrapper.options["float_workspace_buffer"].is_inference()


def capable(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> bool:
    (one,) = (one for one in registry.implementations("paged_attention") if one.name == "flashinfer")
    return one.can_do("cuda", dtype, {**FACTS, **changes})


def test_what_it_can_do() -> None:
    assert capable()
    assert capable(torch.float16, kv_dtype=torch.float16, sliding_window=True, softcap=True)
    assert capable(block_size=1) and capable(block_size=48) and capable(head_dim=256)
    assert not capable(torch.float32, kv_dtype=torch.float32)
    assert not capable(kv_dtype=torch.int8) and not capable(kv_dtype=torch.float8_e4m3fn)
    assert not capable(head_dim=80)


def test_it_is_tried_once_per_shape(flashinfer: ModuleType) -> None:
    for _ in range(3):
        assert capable()
    assert flashinfer.calls.num_plans == 1
    assert capable(head_dim=128)
    assert flashinfer.calls.num_plans == 2


@pytest.mark.row("D24")
def test_without_the_package_it_is_no_candidate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert not capable()
    assert operators.why_unavailable() == (
        "flashinfer-python is not installed (pip install flashinfer-python==0.7.2.post1)"
    )
    assert not caplog.records, "nothing is wrong with a machine that has not installed it"


def test_without_a_device_it_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert not capable()
    assert operators.why_unavailable() == "it needs a GPU of compute capability 8.0"


def test_a_package_that_does_not_import_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise RuntimeError('version of the cubins')")
    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not capable() and not capable(head_dim=128) and not capable(block_size=32)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert (
        "the next implementation is used: import flashinfer failed: RuntimeError: version" in record.message
    )


def test_kernels_that_do_not_compile_are_said_once(
    flashinfer: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    flashinfer.calls.failure = FileNotFoundError("nvcc")
    assert not capable() and not capable()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "FileNotFoundError: nvcc" in record.message


def stub(monkeypatch: pytest.MonkeyPatch, **able: bool) -> list[str]:
    """Implementations with flashinfer's and others' places in the order, for any device; what is called."""
    called: list[str] = []

    def named(name: str) -> Callable[..., torch.Tensor]:
        def function(query: torch.Tensor, *_: Any) -> torch.Tensor:
            called.append(name)
            return query

        return function

    def why_not(name: str, **_: Any) -> str | None:
        return None if able[name] else "it is missing"

    found = registry._implementations["paged_attention"]
    chain = {
        name: registry.Implementation(
            "paged_attention",
            name,
            found[name].function if name == "flashinfer" else named(name),
            frozenset(),
            frozenset(),
            10 if name == "triton" else found[name].priority,
            functools.partial(why_not, name),
            found[name].leaves,
        )
        for name in ("cuda", "flashinfer", "triton", "reference")
    }
    monkeypatch.setitem(registry._implementations, "paged_attention", chain)
    registry._picked.clear()
    return called


ALL = {"cuda": True, "flashinfer": True, "triton": True, "reference": True}


def test_decode_is_cudas_and_prompts_are_flashinfers(
    monkeypatch: pytest.MonkeyPatch, flashinfer: ModuleType
) -> None:
    called = stub(monkeypatch, **ALL)
    make_case(BATCHES["decode"], head_dim=64).run()
    assert called == ["cuda"] and not flashinfer.calls.num_runs
    case = make_case(BATCHES["mixed"], head_dim=64)
    torch.testing.assert_close(case.run().double(), dense(case), atol=2e-5, rtol=2e-5)
    assert called == ["cuda"] and flashinfer.calls.num_runs == 1


@pytest.mark.parametrize("missing", ["flashinfer", "cuda"])
def test_the_order_without_one_of_them(
    monkeypatch: pytest.MonkeyPatch, flashinfer: ModuleType, missing: str
) -> None:
    called = stub(monkeypatch, **{**ALL, missing: False})
    for batch in ("decode", "mixed"):
        make_case(BATCHES[batch], head_dim=64).run()
    assert (called, flashinfer.calls.num_runs) == {
        "flashinfer": (["cuda", "triton"], 0),
        "cuda": ([], 2),
    }[missing]


@pytest.mark.parametrize(("batch", "expected"), [("decode", "cuda"), ("mixed", "triton")])
def test_what_cannot_be_planned_is_the_nexts(
    monkeypatch: pytest.MonkeyPatch,
    flashinfer: ModuleType,
    caplog: pytest.LogCaptureFixture,
    batch: str,
    expected: str,
) -> None:
    """By the facts of the batch, as if FlashInfer were not there, also where it was chosen."""
    called = stub(monkeypatch, **ALL)
    flashinfer.calls.failure = RuntimeError("Buffer overflow")
    case = make_case(BATCHES[batch], head_dim=64)
    for meta in (case.meta, case.meta, dataclasses.replace(case.meta, plans={})):
        ops.paged_attention(case.query, case.kv_layer, meta, scale=case.scale, implementation=operators.NAME)
    assert called == [expected] * 3
    (record,) = (one for one in caplog.records if one.levelno == logging.WARNING)
    assert "RuntimeError" in record.message and "Buffer overflow" in record.message


def test_it_is_not_recorded() -> None:
    """It has the lengths from the host: what it recorded would be wrong in every later step."""
    names = {one.name: one.is_recordable for one in registry.implementations("paged_attention")}
    assert not names["flashinfer"] and not names["reference"] and names["cuda"] and names["triton"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def made(family: str) -> Path:
        return make_checkpoint(family, tmp_path_factory.mktemp(family))

    return made


def shape(attention_backend: str) -> Any:
    """What is looked at of a model."""
    return SimpleNamespace(
        attention_kinds=[AttentionKind(8, 2, 64, window, None, has_sinks=False) for window in (None, 12)],
        dtype=torch.bfloat16,
        attention_backend=attention_backend,
    )


def refusal(checkpoint: Path) -> str | None:
    config = EngineConfig(model=ModelConfig(model=str(checkpoint)))
    try:
        model_runner.check_attention_backend(config, shape("flashinfer"), torch.device("cuda"))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.row("D24")
def test_a_choice_of_it_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Callable[[str], Path]
) -> None:
    own = registry._implementations["paged_attention"]["flashinfer"]
    stub(monkeypatch, **ALL)
    assert refusal(checkpoints("llama")) is None
    monkeypatch.setitem(registry._implementations["paged_attention"], "flashinfer", own)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    message = refusal(checkpoints("llama"))
    assert message is not None and "flashinfer-python is not installed" in message


def test_other_choices_do_not_compile_it(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Callable[[str], Path], flashinfer: ModuleType
) -> None:
    config = EngineConfig(model=ModelConfig(model=str(checkpoints("llama"))))
    model_runner.check_attention_backend(config, shape("reference"), torch.device("cuda"))
    assert not flashinfer.calls.num_plans


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3"])
def test_an_engine_of_it_gives_the_references_tokens(
    monkeypatch: pytest.MonkeyPatch,
    checkpoints: Callable[[str], Path],
    flashinfer: ModuleType,
    family: str,
) -> None:
    """Chunks of prompts, decode steps, windows whose blocks are given back, in the layers of a real cache."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = registry._implementations["paged_attention"]
    anywhere = dataclasses.replace(
        names["flashinfer"], devices=frozenset(), dtypes=frozenset(), predicate=None
    )
    monkeypatch.setitem(registry._implementations, "paged_attention", {**names, "flashinfer": anywhere})
    prompts = [[5, 6, 7, 8] * 14, [9, 10], list(range(20, 61))]
    options: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 24, "block_size": 4}
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    expected = LLM(checkpoints(family), attention_backend="reference", **options).generate(prompts, sampling)
    found = LLM(checkpoints(family), attention_backend="flashinfer", **options).generate(prompts, sampling)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert {type(one).__name__[:10] for one in flashinfer.calls.made} == {"BatchPrefi", "BatchDecod"}
    assert flashinfer.calls.num_runs == 2 * flashinfer.calls.num_plans, "each KV group has two layers"


def test_importing_the_operators_does_not_import_it(tmp_path: Path) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise SystemExit('imported')")
    code = "import quire_kernels.ops, quire.worker.model_runner"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=280)
