"""The CUDA kernels' machine code for every architecture, its cache, and the chain of fallbacks: no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire_kernels import registry
from quire_kernels.cuda import compiler, copy, kernels, launch, operators
from quire_kernels.cuda.compiler import ARCHITECTURES, CompileError, Unit, all_units

needs_nvrtc = pytest.mark.skipif(not compiler.is_installed(), reason="needs cuda-core and NVRTC")
needs_cuobjdump = pytest.mark.skipif(compiler.tool("cuobjdump") is None, reason="needs cuobjdump")
needs_headers = pytest.mark.skipif(
    shutil.which("g++") is None or importlib.util.find_spec("triton") is None,
    reason="needs g++, and NVIDIA's headers, which Triton brings",
)
ADD = Unit("add", (("TYPE", "float"),))


@needs_nvrtc
@needs_cuobjdump
@pytest.mark.parametrize("source", ["attention", "cache", "copy", "elementwise", "linear", "sampling"])
@pytest.mark.parametrize(
    "arch",
    [arch if arch == "sm_90a" else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHITECTURES],
)
def test_every_kernel_compiles_and_none_spills(arch: str, source: str) -> None:
    units = [unit for unit in all_units() if unit.source == source]
    if source == "attention":
        # One of each cache and size; `python -m quire_kernels.cuda.compiler` reports all.
        units = [unit for unit in units if dict(unit.defines)["QUERY"] == "BFloat16"]
    assert units
    for unit in units:
        code = compiler.cubin(unit, arch)
        for kernel, found in compiler.resources(code).items():
            assert found.local_bytes == 0, (unit, kernel, found)
            assert found.registers <= 255
        if source in ("attention", "linear") and unit == units[0]:
            assert "HMMA" in compiler.disassembly(code), "tensor cores are used"


@needs_nvrtc
@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_variants(arch: str) -> None:
    for unit in all_units():
        assert compiler.cubin(unit, arch)


def test_attention_fits_into_shared_memory() -> None:
    """Of an RTX 40, 99 KiB per block, up to heads of 128; larger ones of an A100, 163 KiB."""
    for head_dim in kernels.HEAD_DIMS:
        for cache in (0, 1):
            if cache == 0 or head_dim in kernels.QUANTIZED_HEAD_DIMS:
                limit = (99 if head_dim <= 128 else 163) << 10
                assert kernels.attention_shared_bytes(head_dim, cache) <= limit


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small kernel and an empty cache."""
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    path = tmp_path / "add.cu"
    path.write_text('extern "C" __global__ void add(TYPE* x) { x[threadIdx.x] += 1; }')
    yield path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Unit]:
    """What NVRTC has compiled."""
    units: list[Unit] = []
    compile_unit = compiler._compile

    def counted(unit: Unit, arch: str) -> bytes:
        units.append(unit)
        return compile_unit(unit, arch)

    monkeypatch.setattr(compiler, "_compile", counted)
    return units


@needs_nvrtc
@pytest.mark.row("D5")
def test_machine_code_is_cached(source: Path, compiled: list[Unit], tmp_path: Path) -> None:
    first = compiler.cubin(ADD, "sm_90a")
    assert compiler.cubin(ADD, "sm_90a") == first and len(compiled) == 1
    compiler.cubin(ADD, "sm_80")
    compiler.cubin(Unit("add", (("TYPE", "int"),)), "sm_90a")
    source.write_text(source.read_text().replace("+= 1", "+= 2"))
    assert compiler.cubin(ADD, "sm_90a") != first
    assert len(compiled) == 4, "another architecture, other macros, another source"
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) == 4
    assert not list((tmp_path / "cache").rglob("tmp*")), "written in one step"


@needs_nvrtc
@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_entry_is_compiled_again(
    source: Path, compiled: list[Unit], tmp_path: Path, damage: bytes | None
) -> None:
    first = compiler.cubin(ADD, "sm_90a")
    (path,) = (tmp_path / "cache").rglob("*.cubin")
    path.write_bytes(path.read_bytes()[:-1] + b"\x00" if damage is None else damage)
    path.write_bytes(path.read_bytes()[:-8] + bytes(8) if damage is None else damage)
    again = compiler.cubin(ADD, "sm_90a")
    assert len(compiled) == 2 and again == first
    assert compiler.cubin(ADD, "sm_90a") == first and len(compiled) == 2, "and is whole afterwards"


@needs_nvrtc
def test_a_wrong_source_is_an_error_that_says_where(source: Path) -> None:
    source.write_text("nonsense")
    with pytest.raises(CompileError, match=r"(?s)add.*sm_90a.*nonsense"):
        compiler.cubin(ADD, "sm_90a")


def test_a_cache_that_cannot_be_written_is_no_error(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "cache_directory", lambda name: Path("/dev/null/cache") / name)
    monkeypatch.setattr(compiler, "_compile", lambda unit, arch: b"code")
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (13, 0))
    assert compiler.cubin(ADD, "sm_90a") == b"code"
    assert "cannot be kept" in caplog.text


@needs_nvrtc
@needs_cuobjdump
def test_the_report_names_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert compiler.main(["--arch", "sm_90a", "--source", "copy"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["arch"], row["kernel"], row["local_bytes"]) == ("sm_90a", "copy_rows", 0)
    assert 0 < row["registers"] <= 255


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Selection as on a machine with an H100, where every kernel loads."""
    monkeypatch.setattr(operators, "is_available", lambda: True)
    monkeypatch.setattr(operators, "compiles", lambda *probe: True)
    registry._picked.clear()
    yield
    registry._picked.clear()


FACTS: dict[str, dict[str, Any]] = {
    "paged_attention": {
        "head_dim": 128,
        "num_groups": 4,
        "block_size": 16,
        "kv_dtype": torch.bfloat16,
        "sliding_window": False,
        "softcap": False,
        "long_queries": False,
    },
    "rms_norm": {"size": 4096},
    "gate_mul": {"size": 4096},
}


def chain(operator: str) -> list[str]:
    """What may be picked, the preferred ones first."""
    found = registry.implementations(operator)
    return [one.name for one in found if one.can_do("cuda", torch.bfloat16, FACTS[operator])]


@pytest.mark.row("D5", clauses=("order",))
def test_cuda_comes_before_triton_and_torch() -> None:
    """In a process of its own, without Triton's interpreter, in which priorities are others."""
    code = (
        "import torch\n"
        "from quire_kernels import ops, registry\n"
        "from quire_kernels.cuda import operators\n"
        "from quire_kernels.triton_lang import operators as triton\n"
        "operators.is_available = triton.is_available = lambda: True\n"
        "operators.compiles = lambda *probe: True\n"
        f"for operator, facts in {FACTS!r}.items():\n"
        "    found = registry.implementations(operator)\n"
        "    print(*[one.name for one in found if one.can_do('cuda', torch.bfloat16, facts)])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["cuda triton reference", "cuda reference", "cuda reference"]


@pytest.mark.row("D5", clauses=("logged",))
@pytest.mark.parametrize("operator", FACTS)
def test_the_choice_is_made_at_load_and_logged(
    gpu: None, operator: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="quire_kernels"):
        for _ in range(2):
            registry.select(operator, "cuda", torch.bfloat16, **FACTS[operator])
    assert [record.getMessage().split(" on ")[0] for record in caplog.records] == [f"{operator}: cuda"]


def test_long_queries_are_the_nexts_also_where_cuda_is_chosen(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would read the context again for every few tokens of a prompt. A shape that it does not know is not
    such a call: there the choice is refused."""
    facts = FACTS["paged_attention"]

    def picked(wanted: str | None, **changes: Any) -> str:
        return registry.pick(
            "paged_attention", "cuda", torch.bfloat16, wanted=wanted, **{**facts, **changes}
        ).name

    for wanted in (None, "cuda"):
        assert picked(wanted) == "cuda"
        assert picked(wanted, long_queries=True) != "cuda"
    with pytest.raises(registry.KernelError, match="paged_attention=cuda was asked for"):
        picked("cuda", head_dim=72, long_queries=True)


def test_rows_with_typical_p_are_the_references_also_where_cuda_is_chosen(gpu: None) -> None:
    for wanted in (None, "cuda"):
        for typical, expected in ((False, "cuda"), (True, "reference")):
            one = registry.pick("sample", "cuda", torch.float32, wanted=wanted, typical=typical)
            assert one.name == expected


@pytest.mark.row("D5", clauses=("fallback",))
def test_a_kernel_that_cannot_be_had_is_logged_once_and_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operators, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def refuse(*_: Any) -> None:
        raise CompileError("nothing works here")

    monkeypatch.setattr(operators, "loaded", refuse)
    operators.compiles.cache_clear()
    for _ in range(3):
        assert "cuda" not in chain("rms_norm")
    operators.compiles.cache_clear()
    assert caplog.text.count("nothing works here") == 1


@pytest.mark.row("D5", clauses=("optional",))
def test_the_build_is_optional() -> None:
    """Without any package named cuda operators work, nothing is logged, and the compiler names what lacks."""
    code = (
        "import sys, torch\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'cuda': raise ModuleNotFoundError(name)\n"
        "for name in [n for n in sys.modules if n.split('.')[0] == 'cuda']: del sys.modules[name]\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from quire_kernels import ops\n"
        "from quire_kernels.cuda import compiler, operators\n"
        "x = torch.ones(2, 64)\n"
        "assert torch.isfinite(ops.rms_norm(x, x[0], 1e-5)).all()\n"
        "try: compiler.cubin(compiler.Unit('copy'), 'sm_90a')\n"
        "except compiler.CompileError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "no NVRTC" in done.stdout and not done.stderr


DRIVER = r"""
#include <cuda.h>
#include <cstring>
#undef cuMemcpyBatchAsync  // headers of CUDA 13 give its name to a second one
extern "C" {
int num_batches, num_single, answer;
CUresult cuGetErrorString(CUresult, const char **text) { *text = "as it pleases"; return CUDA_SUCCESS; }
CUresult cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, size_t size, CUstream) {
    ++num_single;
    memcpy((void *)target, (void *)source, size);
    return CUDA_SUCCESS;
}
#ifdef BATCHES
CUresult cuMemcpyBatchAsync(CUdeviceptr *targets, CUdeviceptr *sources, size_t *sizes, size_t count,
                            CUmemcpyAttributes *attributes, size_t *indices, size_t number, size_t *failed,
                            CUstream stream) {
    CUmemcpyAttributes expected = {CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    if (answer) return CUresult(answer);
    if (number != 1 || indices[0] || memcmp(attributes, &expected, sizeof(expected)) || !stream)
        return CUDA_ERROR_INVALID_VALUE;
    ++num_batches;
    *failed = 0;
    for (size_t i = 0; i < count; ++i) memcpy((void *)targets[i], (void *)sources[i], sizes[i]);
    return CUDA_SUCCESS;
}
#endif
}
"""
"""A driver whose device is the host; its batch is the first version, which newer drivers export too."""


@pytest.fixture
def make_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ctypes.CDLL]:
    """Builds DRIVER, with these options, and puts it in libcuda's place."""
    spec = importlib.util.find_spec("triton")
    assert spec is not None and spec.origin is not None
    include = Path(spec.origin).parent / "backends" / "nvidia" / "include"

    def make(*options: str) -> ctypes.CDLL:
        library = tmp_path / "libcuda.so"
        (tmp_path / "driver.cpp").write_text(DRIVER)
        command = ["g++", "-shared", "-fPIC", f"-I{include}", *options, "-o", str(library)]
        subprocess.run([*command, str(tmp_path / "driver.cpp")], check=True, timeout=280)
        loaded = ctypes.CDLL(str(library))
        monkeypatch.setattr(copy, "driver", lambda: loaded)
        monkeypatch.setattr(launch, "driver", lambda: loaded)
        return loaded

    return make


def copied(stream: int) -> None:
    """Three copies of several sizes by `copy_batch`, and nothing beside them."""
    source = np.arange(300, dtype=np.uint8).reshape(3, 100)
    target = np.zeros_like(source)
    sizes = [100, 7, 64]
    rows = [[array[i].ctypes.data for i in (2, 0, 1)] for array in (target, source)]
    copy.copy_batch(*rows, sizes, stream)
    for i, size in zip((2, 0, 1), sizes, strict=True):
        assert (target[i, :size] == source[i, :size]).all() and not target[i, size:].any()


def counts(driver: ctypes.CDLL) -> list[int]:
    """How many batches and how many single copies were made."""
    return [ctypes.c_int.in_dll(driver, name).value for name in ("num_batches", "num_single")]


@needs_headers
def test_copies_are_one_call(make_driver: Callable[..., ctypes.CDLL]) -> None:
    driver = make_driver("-DBATCHES")
    copied(stream=9)
    copy.copy_batch([], [], [], stream=9)
    assert counts(driver) == [1, 0]


@needs_headers
@pytest.mark.parametrize("reason", ["an old driver", "not supported", "the legacy stream"])
def test_copies_are_started_one_by_one_without_that_call(
    make_driver: Callable[..., ctypes.CDLL], reason: str
) -> None:
    driver = make_driver(*([] if reason == "an old driver" else ["-DBATCHES"]))
    if reason == "not supported":
        ctypes.c_int.in_dll(driver, "answer").value = 801
    copied(stream=0 if reason == "the legacy stream" else 9)
    assert counts(driver) == [0, 3]


@needs_headers
def test_a_refused_copy_is_an_error(make_driver: Callable[..., ctypes.CDLL]) -> None:
    ctypes.c_int.in_dll(make_driver("-DBATCHES"), "answer").value = 1
    with pytest.raises(RuntimeError, match=r"CUDA driver: as it pleases \(1\)"):
        copied(stream=9)
