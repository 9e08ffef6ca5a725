"""Provides the C++ kernels for this machine: those of a wheel, or else compiled here, and kept if possible.

A wheel's libraries are in `prebuilt/`, named by a digest of their sources and flags; if these have changed
since, the library is compiled. No compiler is required: the operators' PyTorch reference is used if there is
neither a prebuilt library nor a compiler, and on a processor with none of the instruction sets. setup.py runs
this module without its package, so the module imports neither torch nor numpy.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire_common.cache import cache_directory, keep, kept, locked, private_directory, sealed

logger = logging.getLogger("quire_kernels")

SOURCES = Path(__file__).with_name("src")
PREBUILT = Path(__file__).with_name("prebuilt")
ENVIRONMENT_ISA = "QUIRE_CPU_ISA"
"""Environment variable with the instruction set to use, or `none` for the PyTorch reference."""
ENVIRONMENT_COMPILER = "CXX"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno")

_BASE = "-march=x86-64-v4"
# All of x86-64-v3: on a processor without `abm`, lzcnt runs as another instruction, without a fault.
_V3 = "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2 avx avx2 fma bmi1 bmi2 f16c movbe abm xsave"
_BF16 = ("-mavx512bf16", "-mavx512vnni")
ISAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "amx": (
        ("avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"),
        (_BASE, *_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    "avx512_bf16": (("avx512_bf16", "avx512_vnni"), (_BASE, *_BF16)),
    "avx512": (("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"), (_BASE,)),
    "avx2": (tuple(_V3.split()), ("-march=x86-64-v3",)),
}
"""Instruction sets, best first. Each has the flags of /proc/cpuinfo that it needs, in addition to those of
all sets after it, and the compiler's flags."""


class BuildError(RuntimeError):
    """The kernels cannot be built here, or this processor does not support the instruction set that
    QUIRE_CPU_ISA names. The message says why."""


@functools.cache
def supported_isas() -> tuple[str, ...]:
    """Returns the instruction sets that this processor supports, best first. If QUIRE_CPU_ISA names one, only
    that one is returned; if it is `none`, the result is empty. Raises BuildError if the processor does not
    support the named one."""
    flags = _cpu_flags()
    names = list(ISAS)
    supported = tuple(
        name
        for index, name in enumerate(names)
        if all(flags.issuperset(ISAS[below][0]) for below in names[index:])
    )
    asked = os.environ.get(ENVIRONMENT_ISA)
    if not asked:
        return supported
    if asked != "none" and asked not in supported:
        raise BuildError(
            f"{ENVIRONMENT_ISA}={asked}: this machine has {', '.join(supported) or 'none of them'}"
        )
    return tuple(name for name in supported if name == asked)


def library_name(isa: str) -> str:
    """Returns the file name of the library that `load` returned for an instruction set. It identifies the
    library's sources and flags, and the compiler unless it is prebuilt. Raises KeyError before `load` has
    returned it."""
    return _names[isa]


def load(isa: str) -> ctypes.CDLL:
    """Returns the library for an instruction set: prebuilt, kept from an earlier start, or compiled.

    A compiled library that cannot be kept serves this process only. A kept one that cannot be loaded is
    compiled again.

    Raises:
        BuildError: there is neither a prebuilt library nor a compiler, or the compiler failed.
        OSError: the newly compiled library cannot be written or loaded.
    """
    path = PREBUILT / _file_name(isa, None)
    if (library := _load_kept(path)) is None:
        compiler = _compiler()
        path = cache_directory("kernels") / _file_name(isa, compiler)
        with locked(path.with_suffix(".lock")):
            if (library := _load_kept(path)) is None:
                made = _compile(compiler, _flags(isa), path.name)
                try:
                    keep(path, made.read_bytes())
                    library = _open(made)
                finally:
                    made.unlink()  # what is loaded stays
    _names[isa] = path.name
    return library


def can_prebuild() -> bool:
    """Whether this is an x86-64 machine with a C++ compiler. It can then also build libraries for
    instruction sets that it does not have."""
    try:
        return platform.machine() == "x86_64" and bool(_compiler())
    except BuildError:
        return False


def prebuild(folder: Path) -> list[Path]:
    """Builds the libraries of all instruction sets into a folder, for a wheel. Returns the paths of those
    that were built.

    A library that this compiler cannot build is left out, and that is logged.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def make(isa: str) -> Path | None:
        path = folder / _file_name(isa, None)
        try:
            made = _compile(_compiler(), _flags(isa), path.name)
        except BuildError as error:
            logger.warning("no prebuilt kernels for %s: %s", isa, error)
            return None
        path.write_bytes(sealed(made.read_bytes()))
        return path

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return [path for path in threads.map(make, ISAS) if path is not None]


_names: dict[str, str] = {}


def _load_kept(path: Path) -> ctypes.CDLL | None:
    """Loads a kept or prebuilt library. None: the file is missing, cannot be read or loaded, or is damaged.
    Damage and a failure to load are logged."""
    if kept(path) is None:
        return None
    try:
        return _open(path)
    except OSError as error:
        logger.warning("%s is whole but cannot be loaded: %s", path, error)
        return None


def _open(path: Path) -> ctypes.CDLL:
    """Loads a library. If its folder does not allow execution (noexec), it is loaded from a copy in memory.

    Raises:
        OSError: the library cannot be loaded.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        if not os.statvfs(path).f_flag & os.ST_NOEXEC:
            raise
    # Never closed: for a name that it has seen, the loader returns the library that it loaded before.
    fd = os.memfd_create(path.name)
    with open(fd, "wb", closefd=False) as copy:
        copy.write(path.read_bytes())
    return ctypes.CDLL(f"/proc/self/fd/{fd}")


def _compiler() -> str:
    compiler = shutil.which(os.environ.get(ENVIRONMENT_COMPILER) or "g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError(f"no C++ compiler: install g++, or name one in {ENVIRONMENT_COMPILER}")
    return compiler


def _file_name(isa: str, compiler: str | None) -> str:
    return f"quire-{isa}-{_key(compiler, _flags(isa))}.so"


def _flags(isa: str) -> tuple[str, ...]:
    return (*FLAGS, *ISAS[isa][1])


def _compile(compiler: str, flags: tuple[str, ...], name: str) -> Path:
    """Compiles a library into a folder of this process, because the cache may be full. Returns its path.
    Raises BuildError if the compiler fails."""
    begin = time.monotonic()
    made = private_directory() / name
    command = [compiler, *flags, str(SOURCES / "quire.cpp"), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    logger.info("compiled %s in %.1f s", name, time.monotonic() - begin)
    return made


@functools.cache
def _key(compiler: str | None, flags: tuple[str, ...]) -> str:
    """Returns a digest of a library's sources and flags, and of the compiler unless that is None."""
    version = compiler and subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    digest = hashlib.sha256(repr((compiler, version, flags)).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_flags() -> frozenset[str]:
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
