"""The wheel of Quire: what it brings, and that it needs no compiler where it is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.rows import ROOT


def run(*command: str, **options: Any) -> str:
    return subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, timeout=600, **options
    ).stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_brings_kernels_that_need_no_compiler(tmp_path: Path) -> None:
    """For every instruction set, and one for this processor that computes; of other folders nothing."""
    source, unpacked, cache = tmp_path / "source", tmp_path / "unpacked", tmp_path / "cache"
    run("git", "clone", "--quiet", str(ROOT), str(source))
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"quire-[\d.]+-py3-none-manylinux_2_\d+_x86_64.whl", wheel.name)
    with zipfile.ZipFile(wheel) as file:
        file.extractall(unpacked)
        names = file.namelist()
    tops = {"quire", "quire_kernels", "quire_ensemble", "quire_client"}
    assert {name.partition("/")[0].partition("-")[0] for name in names} <= tops
    libraries = {name.rpartition("/")[2].split("-")[1] for name in names if name.endswith(".so")}
    assert libraries == {"amx", "avx512_bf16", "avx512", "avx2"}
    code = (
        "from quire_kernels.cpu import compiler, native\n"
        "isa = compiler.supported_isas()[0]\n"
        "assert native.library(isa) is not None\n"
        "print(compiler.PREBUILT / compiler.library_name(isa))"
    )
    env = os.environ | {"PYTHONPATH": str(unpacked), "QUIRE_CACHE_DIR": str(cache), "CXX": "/no/compiler"}
    loaded = Path(run(sys.executable, "-c", code, env=env, cwd=tmp_path).strip())
    assert loaded.is_file() and loaded.is_relative_to(unpacked)
    assert not list(cache.rglob("*.so"))
