"""Quire's packages: what their wheels bring, and the one tested version of what they need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from quire.cli import main
from tests.rows import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYTHONS = ("3.10", "3.11", "3.12", "3.13")


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
    assert re.fullmatch(r"quire_triton-[\d.]+-py3-none-manylinux_2_\d+_x86_64.whl", wheel.name)
    with zipfile.ZipFile(wheel) as file:
        file.extractall(unpacked)
        names = file.namelist()
    ours = {"quire", "quire_quantize", "quire_common", "quire_ensemble", "quire_kernels"}
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {*ours, "quire_triton"}
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


@pytest.mark.slow
def test_the_client_is_a_package_alone(tmp_path: Path) -> None:
    """Neither Quire nor torch: what is imported from its wheel is tritonclient, click and numpy."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "client", source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("quire_triton_client-*-py3-none-any.whl")
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(unpacked)
    assert {path.name for path in unpacked.iterdir() if path.suffix != ".dist-info"} == {"quire_client"}
    assert (unpacked / "quire_client" / "py.typed").is_file()
    code = (
        "import sys, quire_client, quire_client.cli\n"
        "assert quire_client.__file__.startswith(sys.argv[1])\n"
        "print(*sorted({'quire', 'torch', 'transformers', 'starlette'} & set(sys.modules)))"
    )
    env = os.environ | {"PYTHONPATH": str(unpacked)}
    assert run(sys.executable, "-c", code, str(unpacked), env=env, cwd=tmp_path).strip() == ""


def requirements() -> dict[str, list[Requirement]]:
    """Requirements of both packages by name of the extra; of the package itself under an empty one."""
    found: dict[str, list[Requirement]] = {}
    for file in (ROOT / "pyproject.toml", ROOT / "client" / "pyproject.toml"):
        project = tomllib.loads(file.read_text("utf-8"))["project"]
        for extra, lines in {"": project["dependencies"], **project["optional-dependencies"]}.items():
            found.setdefault(extra, []).extend(map(Requirement, lines))
    return found


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_has_one_tested_version(python: str) -> None:
    here = {"python_version": python, "python_full_version": f"{python}.1"}
    pinned: dict[str, SpecifierSet] = {}
    for one in constraints():
        if one.marker is None or one.marker.evaluate(here):
            assert one.name not in pinned, f"{one.name}: two versions for Python {python}"
            pinned[one.name] = one.specifier
    for extra, needed in requirements().items():
        if extra == "flashinfer":  # CUDA's compiler and libraries of its own
            continue
        for requirement in needed:
            (version,) = pinned[requirement.name]
            assert version.operator == "==" and requirement.specifier.contains(version.version), requirement


def test_the_backend_needs_neither_a_client_nor_a_web_server_nor_numpy_1() -> None:
    (torch,) = (one for one in constraints() if one.name == "torch")
    assert f"TORCH       ?= {torch}\n" in (ROOT / "Makefile").read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    needed = {one.name: one.specifier for one in map(Requirement, project["dependencies"])}
    assert not needed.keys() & {"tritonclient", "starlette", "uvicorn", "httpx", "protobuf", "grpcio"}
    assert all(needed["numpy"].contains(version) for version in ("1.26.4", "2.5.0"))


@pytest.mark.slow
def test_the_tested_versions_are_those_that_the_resolver_takes() -> None:
    """On each Python, to serve and to develop: nothing but the constraints, and nothing against them."""
    pinned = {(one.name, str(one.specifier)) for one in constraints()}
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header"]
    files = ["-c", "constraints.txt", "pyproject.toml", "client/pyproject.toml"]
    for python in PYTHONS:
        for extras in (("server", "openai"), ("server", "openai", "client", "gpu", "dev")):
            chosen = [word for extra in extras for word in ("--extra", extra)]
            lines = run(*command, "--python-version", python, *chosen, *files, cwd=ROOT).splitlines()
            resolved = {(one.name, str(one.specifier)) for one in map(Requirement, lines)}
            assert resolved <= pinned and ("torch", "==2.13.0") in resolved


def test_a_command_that_needs_the_client_library_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tritonclient"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tritonclient", None)
    result = CliRunner().invoke(main, ["healthcheck"])
    assert result.exit_code == 1
    assert result.output == "Error: this command needs tritonclient: pip install 'tritonclient[grpc]'\n"


def test_no_text_names_packages_of_others() -> None:
    """PyPI's `quire` and `quire-client` are packages of others: our advice would run their code."""
    names = run("git", "ls-files", cwd=ROOT).split()
    texts = {name: ROOT / name for name in names if name.endswith((".py", ".md", ".toml", ".txt", ".yaml"))}
    assert len(texts) > 500
    advice = re.compile(r"\bquire(-client)?\[|pip install[^\n`]* ['\"]?quire(-client)?(?![-\w/.])")
    found = [name for name, path in texts.items() if advice.search(path.read_text("utf-8"))]
    assert found == []
