"""What pyproject.toml cannot say: a wheel for x86-64 brings the CPU kernels of every instruction set.

It then needs no compiler where it is installed, and its tag names the processor and the oldest glibc, but no
version of Python: the kernels are loaded through ctypes. Without a compiler, on another processor, and where
Quire is installed for editing, nothing is compiled here: the kernels are, when they are first used.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "common"))
# By its file: the package that it belongs to needs torch.
spec = importlib.util.spec_from_file_location("compiler", HERE / "kernels/quire_kernels/cpu/compiler.py")
assert spec is not None and spec.loader is not None
compiler = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compiler)


class BuildWithKernels(build_py):
    kernels: tuple[Path, ...] = ()

    def run(self) -> None:
        super().run()
        if not self.editable_mode and compiler.can_prebuild():
            folder = Path(self.build_lib) / "quire_kernels" / "cpu" / compiler.PREBUILT.name
            shutil.rmtree(folder, ignore_errors=True)  # of other sources
            self.kernels = tuple(compiler.prebuild(folder))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *map(str, self.kernels)]


class WheelOfKernels(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        if self.root_is_pure:
            return python, abi, platform
        needed = b"".join(kernel.read_bytes() for kernel in self.get_finalized_command("build_py").kernels)
        if versions := re.findall(rb"\0GLIBC_2\.(\d+)(?=\0)", needed):
            platform = f"manylinux_2_{max(map(int, versions))}_x86_64"
        return "py3", "none", platform


class WithKernels(Distribution):
    def has_ext_modules(self) -> bool:
        return compiler.can_prebuild()


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfKernels}, distclass=WithKernels)
