"""The cache of compiled kernels: damaged, full, read-only, vanished, homeless, or open to other users."""

from __future__ import annotations

import ctypes
import logging
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_common import cache
from quire_kernels.cpu import compiler


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has just begun, whose temporary directory is empty."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    for cached in (cache._root, cache._warn_once, cache.private_directory):
        cached.cache_clear()
    yield
    for cached in (cache._root, cache._warn_once, cache.private_directory):
        cached.cache_clear()


@pytest.fixture
def wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A small source in place of the kernels; what the compiler was run for."""
    sources = tmp_path / "sources"
    sources.mkdir()
    # Zeros in the file: a library cut short in them is mapped, and a read of them is SIGBUS.
    (sources / "quire.cpp").write_text(
        'static const char table[1 << 16] = {1};\nextern "C" int answer() { return 41 + table[0]; }\n'
    )
    monkeypatch.setattr(compiler, "SOURCES", sources)
    monkeypatch.setattr(compiler, "ISAS", {"any": ((), ())})
    made: list[str] = []
    compile_library = compiler._compile

    def counted(compiler: str, flags: tuple[str, ...], name: str) -> Path:
        made.append(name)
        return compile_library(compiler, flags, name)

    monkeypatch.setattr(compiler, "_compile", counted)
    compiler._key.cache_clear()
    yield made
    compiler._key.cache_clear()


def answer(library: ctypes.CDLL) -> int:
    return int(library.answer())


def in_new_process(folder: Path, sources: Path) -> int:
    """Loads the library there, as the next start does, and says how often it was compiled."""
    # By its file: the package that it belongs to imports torch, which takes seconds.
    program = (
        "import importlib.util, pathlib, sys\n"
        "spec = importlib.util.spec_from_file_location('compiler', sys.argv[2])\n"
        "compiler = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(compiler)\n"
        "compiler.SOURCES = pathlib.Path(sys.argv[1])\ncompiler.ISAS = {'any': ((), ())}\n"
        "made, compile_library = [], compiler._compile\n"
        "compiler._compile = lambda *given: made.append(1) or compile_library(*given)\n"
        "assert compiler.load('any').answer() == 42\nprint(len(made))\n"
    )
    command = [sys.executable, "-c", program, str(sources), compiler.__file__]
    environment = {**os.environ, "QUIRE_CACHE_DIR": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return int(done.stdout)


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_truncated_library_is_compiled_again(
    wanted: Path, tmp_path: Path, compilations: list[str], part: float
) -> None:
    """A file cut short by a full disk or a crash was loaded for ever: an error at each start or, where the
    loader could map it, a SIGBUS in the middle of a step."""
    assert answer(compiler.load("any")) == 42
    (path,) = wanted.rglob("*.so")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    assert in_new_process(wanted, tmp_path / "sources") == 1
    assert path.read_bytes() == whole, "and is kept"


def test_a_whole_file_that_cannot_be_loaded_is_made_again(
    wanted: Path, tmp_path: Path, compilations: list[str]
) -> None:
    compiler.load("any")
    (path,) = wanted.rglob("*.so")
    assert in_new_process(wanted, tmp_path / "sources") == 0
    assert cache.keep(path, b"not a library")
    assert in_new_process(wanted, tmp_path / "sources") == 1


def test_a_full_disk_costs_a_compilation_and_one_line(
    tmp_path: Path, wanted: Path, compilations: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    wanted.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k,mode=700", "none", str(wanted)], check=False
    )
    if mounted.returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        for _ in range(2):
            assert answer(compiler.load("any")) == 42
        assert len(compilations) == 2, "nothing was kept"
        assert not list(wanted.rglob("*.tmp")), "nothing half written stays"
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "No space left on device" in caplog.text
    finally:
        subprocess.run(["umount", "-l", str(wanted)], check=True)


def test_a_disk_that_can_be_read_only_gives_what_it_has(
    wanted: Path, tmp_path: Path, compilations: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    compiler.load("any")
    if subprocess.run(["mount", "--bind", str(wanted), str(wanted)], check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(wanted)], check=True)
        assert answer(compiler.load("any")) == 42
        assert len(compilations) == 1, "from the cache"
        (tmp_path / "sources" / "more.h").write_text("// another key")
        compiler._key.cache_clear()
        assert answer(compiler.load("any")) == 42
        assert len(compilations) == 2
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert "Read-only file system" in caplog.text
    finally:
        subprocess.run(["umount", "-l", str(wanted)], check=True)


def test_where_nothing_may_be_executed_it_is_compiled_once_and_loaded_from_memory(
    wanted: Path, tmp_path: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache and the temporary directory of a hardened container are mounted noexec: the kernels were
    compiled at every start and loaded at none."""
    wanted.mkdir()
    mounted: list[Path] = []
    try:
        for folder in (wanted, tmp_path / "tmp"):
            command = ["mount", "-t", "tmpfs", "-o", "noexec,mode=700", "none", str(folder)]
            if subprocess.run(command, check=False).returncode:
                pytest.skip("a tmpfs cannot be mounted here")
            mounted.append(folder)
        assert answer(compiler.load("any")) == 42
        monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
        assert in_new_process(wanted, tmp_path / "sources") == 0
        source = tmp_path / "sources" / "quire.cpp"
        source.write_text(source.read_text().replace("41", "42"))
        compiler._key.cache_clear()
        assert answer(compiler.load("any")) == 43, "the loader took it for the first one"
        assert answer(compiler.load("any")) == 43
        assert len(compilations) == 2
        (path,) = (path for path in wanted.rglob("*.so") if path.name == compilations[-1])
        cache.keep(path, b"not a library")
        assert answer(compiler.load("any")) == 43
        assert len(compilations) == 3
    finally:
        for folder in mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_directory_that_vanishes_is_made_again(wanted: Path, compilations: list[str]) -> None:
    compiler.load("any")
    shutil.rmtree(wanted)
    assert answer(compiler.load("any")) == 42
    assert len(list(wanted.rglob("*.so"))) == 1


def test_without_a_home_the_cache_is_this_users_below_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A container run with a user id it does not know has no HOME: Path.home() raised at the first kernel."""
    for name in ("QUIRE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_entry(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    own = tmp_path / "tmp" / f"quire-cache-{os.getuid()}"
    assert cache.cache_directory("kernels") == own / "kernels"
    assert cache.cache_directory("tuning") == own / "tuning"
    assert own.stat().st_mode & 0o777 == 0o700
    assert len(caplog.records) == 1 and "no home directory" in caplog.text


@pytest.mark.parametrize("prepared", ["link", "open", "foreign", "file"])
def test_what_somebody_else_put_in_the_temporary_directory_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared: str
) -> None:
    """The cache is executed: whoever can write there can be us."""
    monkeypatch.setattr(cache, "_wanted", lambda: None)
    own = tmp_path / "tmp" / f"quire-cache-{os.getuid()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if prepared == "link":
        own.symlink_to(elsewhere)
    elif prepared == "file":
        own.touch()
    else:
        own.mkdir()
        if prepared == "open":
            own.chmod(0o777)
        elif os.geteuid() == 0:
            os.chown(own, 4242, -1)
        else:
            pytest.skip("only root can give a folder away")
    folder = cache.cache_directory("kernels")
    assert folder.parent == cache.private_directory() != own
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("which", ["", "kernels"])
def test_a_cache_that_others_can_write_is_not_used(
    wanted: Path, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    (wanted / "kernels").mkdir(parents=True, mode=0o755)
    (wanted / which).chmod(0o775)
    assert not cache.cache_directory("kernels").is_relative_to(wanted)
    assert cache.lasting_directory("kernels") is None, "gigabytes would lie below the temporary directory"
    assert "other users can write in" in caplog.text and "mode 775" in caplog.text
    (wanted / which).chmod(0o755)
    cache._root.cache_clear()
    assert cache.cache_directory("kernels") == cache.lasting_directory("kernels") == wanted / "kernels"
