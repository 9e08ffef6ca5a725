"""Compiles CUDA C++ to machine code through NVRTC, and keeps the machine code in the cache folder.

    python -m quire_kernels.cuda.compiler [--arch sm_90a] [--source linear]

compiles every kernel, or those of one source, and prints a line of JSON with each kernel's resources. It does
so for four architectures if none is named. It needs no GPU and no CUDA toolkit; it needs the packages
cuda-core, cuda-bindings and nvidia-cuda-nvrtc, and triton for its cuobjdump. Importing this module imports
none of them.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quire_common.cache import cache_directory, keep, kept

logger = logging.getLogger("quire_kernels")

SOURCES = Path(__file__).with_name("src")
INCLUDES = Path(__file__).with_name("include")
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100")
"""Architectures for which `main` compiles if none is named: A100; L40S and RTX 40; H100 and H200; B200."""
STANDARD = "c++17"


class CompileError(RuntimeError):
    """A kernel cannot be compiled, loaded or examined here. The message says why."""


@dataclass(frozen=True)
class Unit:
    """One source file with values for its macros: the unit of compilation."""

    source: str
    """Name of a file in src/, without its suffix."""
    defines: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.source}({', '.join(f'{name}={value}' for name, value in self.defines)})"


@dataclass(frozen=True)
class Resources:
    """Resources of a multiprocessor that a kernel uses, per thread or per block."""

    registers: int
    """32-bit registers per thread."""
    local_bytes: int
    """Bytes of local memory per thread, for spilled registers and arrays that are indexed at run time."""
    shared_bytes: int
    """Bytes of static shared memory per block."""


def is_installed() -> bool:
    """Whether the package cuda.core, through which NVRTC is called, is installed. The function looks for the
    package's folder and imports nothing. NVRTC itself may be missing."""
    spec = importlib.util.find_spec("cuda")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    return any((place / "core").is_dir() for place in places)


def attention_units() -> Iterator[Unit]:
    """Yields a unit for each variant of paged attention: head size, type of the query, type of the cache."""
    for query in ("BFloat16", "Float16"):
        for head_dim in (64, 80, 96, 128, 256):
            for cache in (0, 1, 2) if head_dim in (64, 128, 256) else (0,):
                yield attention_unit(query, head_dim, cache)


def attention_unit(query: str, head_dim: int, cache: int) -> Unit:
    """Returns the unit of paged attention. `query`: name of the query's type in numbers.cuh. `cache`: 0 for
    the query's type, 1 for int8, 2 for e4m3."""
    return Unit("attention", (("QUERY", query), ("HEAD_DIM", str(head_dim)), ("CACHE", str(cache))))


def linear_unit(number: str, codes: str) -> Unit:
    """Returns the unit of products with quantised weights. `number`: type of x; `codes`: type of the codes.
    Both are names in numbers.cuh."""
    return Unit("linear", (("TYPE", number), ("CODES", codes)))


def all_units() -> list[Unit]:
    """Returns every variant that the operators may request."""
    units = list(attention_units())
    for number in ("BFloat16", "Float16", "Float32"):
        units += [Unit("elementwise", (("TYPE", number),)), Unit("cache", (("TYPE", number),))]
        if number != "Float32":
            units += [linear_unit(number, codes) for codes in ("INT8", "E4M3", "INT4")]
    units += [Unit("copy"), Unit("sampling")]
    return units


def cubin(unit: Unit, arch: str) -> bytes:
    """Returns the machine code of a unit for one architecture, from the cache on disk or newly compiled.

    Args:
        unit: what to compile.
        arch: NVRTC's name of the architecture, such as "sm_90a".

    Raises:
        CompileError: there is no NVRTC, or it refused the source.
    """
    path = cache_directory("cuda") / f"{unit.source}-{arch}-{_key(unit, arch)}.cubin"
    code = kept(path)
    if code is None:
        begin = time.monotonic()
        code = _compile(unit, arch)
        keep(path, code)
        logger.info("compiled %s for %s in %.2f s", unit, arch, time.monotonic() - begin)
    return code


def _compile(unit: Unit, arch: str) -> bytes:
    core = _core()
    options = core.ProgramOptions(
        arch=arch, std=STANDARD, include_path=[str(INCLUDES)], define_macro=[*unit.defines] or None
    )
    try:
        program = core.Program((SOURCES / f"{unit.source}.cu").read_text(), "c++", options)
        return bytes(program.compile("cubin").code)
    except Exception as error:
        raise CompileError(f"{unit} for {arch}: {error}") from error


@functools.cache
def _core() -> Any:
    """Returns the module of cuda.core with NVRTC, whose name depends on cuda.core's version; raises
    CompileError if there is none."""
    errors = []
    for name in ("cuda.core", "cuda.core.experimental"):
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            errors.append(str(error))
            continue
        if hasattr(module, "Program"):
            return module
    raise CompileError(f"no cuda.core with NVRTC: {'; '.join(errors)}")


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Returns NVRTC's (major, minor) version.

    Raises:
        CompileError: there is no NVRTC, or it cannot be loaded.
    """
    try:
        _, major, minor = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    except Exception as error:
        raise CompileError(f"no NVRTC: {error}") from error
    return int(major), int(minor)


def _key(unit: Unit, arch: str) -> str:
    """Returns a digest of a unit, its source, the headers, the architecture and NVRTC's version."""
    digest = hashlib.sha256(repr((unit, arch, STANDARD, nvrtc_version())).encode())
    for path in [SOURCES / f"{unit.source}.cu", *sorted(INCLUDES.iterdir())]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def tool(name: str) -> str | None:
    """Returns the path of a CUDA tool, such as cuobjdump, from PATH or Triton's wheel; None: missing."""
    found = shutil.which(name)
    spec = None if found else importlib.util.find_spec("triton")
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(place) / "backends" / "nvidia" / "bin" / name
        if path.exists():
            found = str(path)
    return found


def resources(code: bytes) -> dict[str, Resources]:
    """Returns the resources of a cubin's kernels, by the kernels' names. No GPU is needed.

    Raises:
        CompileError: there is no cuobjdump, or it failed.
    """
    text = _cuobjdump(code, "--dump-resource-usage")
    pattern = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
    return {
        name: Resources(int(registers), int(stack) + int(local), int(shared))
        for name, registers, stack, shared, local in pattern.findall(text)
    }


def disassembly(code: bytes) -> str:
    """Returns the SASS of a cubin; raises CompileError if there is no cuobjdump, or if it failed."""
    return _cuobjdump(code, "--dump-sass")


def _cuobjdump(code: bytes, option: str) -> str:
    program = tool("cuobjdump")
    if program is None:
        raise CompileError("no cuobjdump: it comes with the CUDA toolkit and with Triton")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        # nvdisasm lies beside it, where there is no toolkit.
        path = f"{Path(program).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        done = subprocess.run(
            [program, option, file.name], capture_output=True, text=True, env={**os.environ, "PATH": path}
        )
    if done.returncode:
        raise CompileError(f"cuobjdump failed: {done.stderr}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles the kernels that the command line's arguments select, by default all, and prints a line of
    JSON for each. Returns 1 if a kernel uses local memory, as spilled registers do, else 0."""
    parser = argparse.ArgumentParser(description="compile the CUDA kernels and report what they need")
    parser.add_argument("--arch", action="append", help=f"may repeat; default: {', '.join(ARCHITECTURES)}")
    parser.add_argument("--source", help="compile this source only")
    options = parser.parse_args(arguments)
    spills = False
    for arch in options.arch or ARCHITECTURES:
        for unit in all_units():
            if options.source not in (None, unit.source):
                continue
            for kernel, found in resources(cubin(unit, arch)).items():
                row = {"arch": arch, "kernel": kernel, "variant": dict(unit.defines), **asdict(found)}
                print(json.dumps(row), flush=True)
                spills |= found.local_bytes > 0
    return int(spills)


if __name__ == "__main__":
    sys.exit(main())
