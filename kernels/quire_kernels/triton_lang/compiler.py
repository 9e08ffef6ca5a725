"""Compiles every Triton kernel ahead of time, for GPUs that need not be present, and reports on the machine
code.

    python -m quire_kernels.triton_lang.compiler --arch sm_80 --arch sm_90 [--kernel NAME]

prints one JSON object per line.

A module with kernels has `compile_cases(capability: int) -> list[CompileCase]`. It lists its kernels with the
types, constants and launch options of models with common shapes. Registers and bytes of local memory are read
from the resource section of the cubin. Spill and tensor-core instructions are counted in its disassembly.
TRITON_INTERPRET must not be 1, because the interpreter does not compile.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from quire_kernels.cuda.compiler import disassembly, resources
from quire_kernels.triton_lang import operators

MODULES = ("attention", "lora")
"""Modules of this package with `compile_cases`."""
ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100")
SHARED_LIMIT = {80: 166912, 89: 101376, 90: 232448, 100: 232448}
"""Most bytes of shared memory per thread block, by compute capability."""
# Of Ampere and Ada, Hopper, Blackwell.
_TENSOR_CORES = re.compile(r"\b(?:HMMA|IMMA|QMMA|DMMA|HGMMA|IGMMA|QGMMA|UTC\w*MMA)\b")
_SPILL = re.compile(r"\b(?:LDL|STL)\b")


@dataclass(frozen=True)
class CompileCase:
    """A kernel with the types, constants and options with which it is compiled."""

    name: str
    kernel: Any
    """The `triton.jit` function."""
    arguments: dict[str, Any]
    """Parameters by name; names that the kernel does not have are ignored. A string is a type: "*bf16",
    "i32", "fp32", with ":16" appended if the pointer or number is divisible by 16. Anything else is the value
    of a constant."""
    options: dict[str, Any] = field(default_factory=dict)
    """Launch options: num_warps, num_stages, ..."""
    tensor_cores: bool = False
    """Whether the machine code must use tensor cores."""


@dataclass(frozen=True)
class CompileResult:
    """Result of compiling one kernel for one architecture."""

    name: str
    arch: str
    registers: int
    """Registers per thread."""
    spill_bytes: int
    """Bytes of stack and local memory per thread."""
    spill_instructions: int
    """Number of instructions that load from or store to local memory."""
    shared_bytes: int
    tensor_core_instructions: int
    needs_tensor_cores: bool
    seconds: float
    error: str | None = None

    @property
    def problems(self) -> list[str]:
        """Reasons why the kernel would not run or would be slow: a compiler error, no use of tensor cores
        that it needs, or too much shared memory. Spilled registers are no reason."""
        if self.error is not None:
            return [self.error]
        found = []
        if self.needs_tensor_cores and not self.tensor_core_instructions:
            found.append("no tensor-core instructions")
        if self.shared_bytes > SHARED_LIMIT[_capability(self.arch)]:
            found.append(f"{self.shared_bytes} bytes of shared memory are more than a block may have")
        return found


def compile_cases(capability: int) -> list[CompileCase]:
    """Returns the cases of all modules, with the launch options of this compute capability (80, 89, 90,
    100)."""
    cases: list[CompileCase] = []
    for name in MODULES:
        cases += importlib.import_module(f"{__package__}.{name}").compile_cases(capability)
    return cases


def compile_case(case: CompileCase, arch: str) -> CompileResult:
    """Compiles one case. A compiler error becomes part of the result."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    missing = set(names) - set(case.arguments)
    assert not missing, f"{case.name}: {missing} have no type or value"
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        value = case.arguments[name]
        if isinstance(value, str):
            signature[name], _, divisor = value.partition(":")
            if divisor:
                attributes[(index,)] = [["tt.divisibility", int(divisor)]]
        else:
            signature[name], constants[(index,)] = "constexpr", value
    start = time.perf_counter()
    try:
        compiled = triton.compile(
            ASTSource(case.kernel, signature, constants, attributes),
            target=GPUTarget("cuda", _capability(arch), 32),
            options=case.options,
        )
        cubin, shared = compiled.asm["cubin"], compiled.metadata.shared
    except Exception as error:  # the compiler raises RuntimeError, CompilationError, its subprocesses' errors
        lines = str(error).strip().splitlines() or [""]
        return CompileResult(
            case.name, arch, 0, 0, 0, 0, 0, case.tensor_cores, 0.0, f"{type(error).__name__}: {lines[-1]}"
        )
    seconds = time.perf_counter() - start
    (usage,) = resources(cubin).values()
    code = disassembly(cubin)
    return CompileResult(
        case.name,
        arch,
        usage.registers,
        usage.local_bytes,
        len(_SPILL.findall(code)),
        shared,
        len(_TENSOR_CORES.findall(code)),
        case.tensor_cores,
        round(seconds, 2),
    )


def _capability(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line of JSON per case and architecture. Returns 1 if one has problems, else 0."""
    parser = argparse.ArgumentParser(prog="quire_kernels.triton_lang.compiler", description=__doc__)
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="default: all of them")
    parser.add_argument("--kernel", default="", help="only cases whose name contains this")
    options = parser.parse_args(arguments)
    if operators.is_interpreted():
        parser.error("TRITON_INTERPRET is set: there is nothing to compile")
    failed = False
    for arch in options.arch or ARCHITECTURES:
        for case in compile_cases(_capability(arch)):
            if options.kernel not in case.name:
                continue
            result = compile_case(case, arch)
            failed |= bool(result.problems)
            print(json.dumps({**asdict(result), "problems": result.problems}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
