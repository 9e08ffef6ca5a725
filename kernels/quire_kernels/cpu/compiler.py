"""Compiles the C++ kernels for this machine, once, and keeps the result.

Nothing here is a hard dependency: without a compiler, or on a processor that has none of the instruction
sets, `load` raises BuildError and the operators' PyTorch reference is used.
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
from pathlib import Path

from quire_kernels.cache import cache_directory, keep, kept, locked, private_directory

logger = logging.getLogger("quire_kernels")

SOURCES = Path(__file__).with_name("src")
ENVIRONMENT_ISA = "QUIRE_CPU_ISA"
"""Names the instruction set to use, or `none` for the PyTorch reference."""
ENVIRONMENT_COMPILER = "CXX"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno")

_BASE = "-march=x86-64-v4"
_BF16 = ("-mavx512bf16", "-mavx512vnni")
ISAS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "amx": (
        ("avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"),
        (_BASE, *_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    ),
    "avx512_bf16": (("avx512_bf16", "avx512_vnni"), (_BASE, *_BF16)),
    "avx512": (("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"), (_BASE,)),
    "avx2": (("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"), ("-march=x86-64-v3",)),
}
"""Instruction sets, the best first: flags of /proc/cpuinfo each needs (and of all below it), and of g++."""


class BuildError(RuntimeError):
    """The kernels cannot be had here; says why."""


@functools.cache
def supported_isas() -> tuple[str, ...]:
    """Instruction sets of this processor, the best first; what the environment names is the only one."""
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
    """File name of an instruction set's library: stands for its sources, the compiler and the flags.

    Raises:
        BuildError: there is no compiler.
    """
    return f"quire-{isa}-{_key(_compiler(), _flags(isa))}.so"


def load(isa: str) -> ctypes.CDLL:
    """The shared library for an instruction set, compiled if it is not there yet, or damaged.

    Where it cannot be kept, or what is kept cannot be loaded, it is compiled for this process alone.

    Raises:
        BuildError: no compiler, or it failed.
        OSError: what was compiled just now cannot be loaded.
    """
    path = cache_directory("kernels") / library_name(isa)
    with locked(path.with_suffix(".lock")):
        if kept(path) is not None:
            try:
                return _open(path)
            except OSError as error:
                logger.warning("%s is whole but cannot be loaded: %s", path, error)
        made = _compile(_compiler(), _flags(isa), path.name)
        try:
            keep(path, made.read_bytes())
            return _open(made)
        finally:
            made.unlink()  # what is loaded stays


def _open(path: Path) -> ctypes.CDLL:
    """The library; from a copy in memory where nothing may be executed (mounted noexec).

    Raises:
        OSError: it cannot be loaded from either.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        if not os.statvfs(path).f_flag & os.ST_NOEXEC:
            raise
    # Never closed: the loader takes a name that it has seen for the library that it loaded by it.
    fd = os.memfd_create(path.name)
    with open(fd, "wb", closefd=False) as copy:
        copy.write(path.read_bytes())
    return ctypes.CDLL(f"/proc/self/fd/{fd}")


def _compiler() -> str:
    compiler = shutil.which(os.environ.get(ENVIRONMENT_COMPILER) or "g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError(f"no C++ compiler: install g++, or name one in {ENVIRONMENT_COMPILER}")
    return compiler


def _flags(isa: str) -> tuple[str, ...]:
    return (*FLAGS, *ISAS[isa][1])


def _compile(compiler: str, flags: tuple[str, ...], name: str) -> Path:
    """The library in a folder of this process: the cache may be full."""
    begin = time.monotonic()
    made = private_directory() / name
    command = [compiler, *flags, str(SOURCES / "quire.cpp"), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    logger.info("compiled %s in %.1f s", name, time.monotonic() - begin)
    return made


@functools.cache
def _key(compiler: str, flags: tuple[str, ...]) -> str:
    """Digest of all that the library depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
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
