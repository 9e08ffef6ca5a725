"""Which library of the CPU kernels a processor gets: one it can run, and one that need not be compiled first.

What a wheel brings is tested whole in `tests/unit/test_packages.py`.
"""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire_kernels.cpu import compiler

# What /proc/cpuinfo calls what g++ may use, by the macros that g++ defines then.
CPU_FLAGS = {
    "__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16": "cx16",
    "__LAHF_SAHF__": "lahf_lm",
    "__POPCNT__": "popcnt",
    "__CRC32__": "sse4_2",
    "__SSE3__": "pni",
    "__SSSE3__": "ssse3",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__AVX__": "avx",
    "__AVX2__": "avx2",
    "__FMA__": "fma",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__F16C__": "f16c",
    "__MOVBE__": "movbe",
    "__LZCNT__": "abm",
    "__XSAVE__": "xsave",
    "__AVX512F__": "avx512f",
    "__AVX512BW__": "avx512bw",
    "__AVX512CD__": "avx512cd",
    "__AVX512DQ__": "avx512dq",
    "__AVX512VL__": "avx512vl",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512VNNI__": "avx512_vnni",
    "__AMX_TILE__": "amx_tile",
    "__AMX_BF16__": "amx_bf16",
    "__AMX_INT8__": "amx_int8",
}


def flags_up_to(isa: str) -> frozenset[str]:
    """All that `isa` needs: its own flags and those of the instruction sets below it."""
    names = list(compiler.ISAS)
    return frozenset(flag for name in names[names.index(isa) :] for flag in compiler.ISAS[name][0])


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Callable[[frozenset[str]], tuple[str, ...]]:
    """The instruction sets that a processor with the flags given gets."""
    monkeypatch.delenv(compiler.ENVIRONMENT_ISA, raising=False)

    def choose(flags: frozenset[str]) -> tuple[str, ...]:
        monkeypatch.setattr(compiler, "_cpu_flags", lambda: flags)
        return compiler.supported_isas.__wrapped__()

    return choose


@pytest.mark.parametrize("isa", compiler.ISAS)
def test_a_processor_gets_no_instruction_that_it_lacks(
    chosen: Callable[[frozenset[str]], tuple[str, ...]], isa: str
) -> None:
    """An illegal instruction ends the engine: with any of its flags missing, a set is not chosen."""
    names, every = list(compiler.ISAS), flags_up_to(isa)
    assert chosen(every) == tuple(names[names.index(isa) :])
    for missing in every:
        left = chosen(every - {missing})
        assert isa not in left, missing
        assert all(missing not in flags_up_to(name) for name in left)


def test_the_environment_names_an_instruction_set_that_the_processor_has(
    chosen: Callable[[frozenset[str]], tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = flags_up_to("avx2")
    for asked, expected in (("avx2", ("avx2",)), ("none", ())):
        monkeypatch.setenv(compiler.ENVIRONMENT_ISA, asked)
        assert chosen(flags) == expected
    for asked in ("avx512", "sse9"):
        monkeypatch.setenv(compiler.ENVIRONMENT_ISA, asked)
        with pytest.raises(compiler.BuildError, match=f"QUIRE_CPU_ISA={asked}: this machine has avx2"):
            chosen(flags)


@pytest.mark.parametrize("isa", compiler.ISAS)
def test_what_the_compiler_may_use_is_asked_of_the_processor(isa: str) -> None:
    """The AVX2 library was compiled for all of x86-64-v3, and chosen without a look at LZCNT: a processor
    that lacks it takes it for another instruction."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")

    def macros(*flags: str) -> set[str]:
        command = ["g++", *flags, "-dM", "-E", "-x", "c++", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return {line.split()[1] for line in done.stdout.splitlines()}

    used = {
        name
        for name in macros(*compiler.ISAS[isa][1]) - macros("-march=x86-64")
        if not name.startswith("__FP_FAST_")
    }
    assert used <= CPU_FLAGS.keys(), "features this test has no name for"
    assert {CPU_FLAGS[name] for name in used} <= flags_up_to(isa)


def test_another_processor_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.platform, "machine", lambda: "aarch64")
    assert compiler._cpu_flags() == frozenset()
    assert not compiler.can_prebuild()


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a wheel's libraries lie: a small source for one instruction set, made as setup.py does."""
    sources, folder = tmp_path / "sources", tmp_path / "prebuilt"
    sources.mkdir()
    (sources / "quire.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(compiler, "SOURCES", sources)
    monkeypatch.setattr(compiler, "PREBUILT", folder)
    monkeypatch.setattr(compiler, "ISAS", {"any": ((), ())})
    monkeypatch.setattr(compiler, "_names", {})
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    compiler._key.cache_clear()
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    assert [path.parent for path in compiler.prebuild(folder)] == [folder]
    yield folder
    compiler._key.cache_clear()


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")


def answer(library: ctypes.CDLL) -> int:
    return int(library.answer())


def test_what_a_wheel_brings_needs_no_compiler_and_no_cache(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_compiler(monkeypatch)
    assert answer(compiler.load("any")) == 42
    assert compiler.library_name("any") == next(wheel.iterdir()).name
    assert not (tmp_path / "cache").exists() and not caplog.records


def test_changed_sources_are_compiled(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sources" / "quire.cpp").write_text('extern "C" int answer() { return 43; }\n')
    compiler._key.cache_clear()
    assert answer(compiler.load("any")) == 43
    assert compiler.library_name("any") == next((tmp_path / "cache").rglob("*.so")).name
    no_compiler(monkeypatch)
    with pytest.raises(compiler.BuildError, match="install g\\+\\+"):
        compiler.load("any")


def test_other_flags_are_compiled(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # None that changes the process: a library linked by -ffast-math makes its subnormal numbers zero.
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-fno-exceptions"))
    assert answer(compiler.load("any")) == 42
    assert compiler.library_name("any") not in [path.name for path in wheel.iterdir()]


@pytest.mark.parametrize("how", ["cut short", "of another system"])
def test_what_cannot_be_loaded_is_compiled(wheel: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    (library,) = wheel.iterdir()
    if how == "cut short":
        library.write_bytes(library.read_bytes()[:-100])
    else:
        library.write_bytes(compiler.sealed(b"not a library"))
    assert answer(compiler.load("any")) == 42
    assert compiler.library_name("any") != library.name
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_an_instruction_set_that_the_compiler_does_not_know_is_left_out(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiler, "ISAS", {"newer": ((), ("-munheard-of",)), "any": ((), ())})
    made = compiler.prebuild(tmp_path / "other")
    assert [path.name for path in made] == [path.name for path in wheel.iterdir()]
    assert "no prebuilt kernels for newer" in caplog.text
