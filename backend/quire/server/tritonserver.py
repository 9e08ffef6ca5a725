"""Finds a tritonserver and its libraries, and makes the backend directory for it.

The server is searched in this order: an explicit path, `/opt/tritonserver`, PATH, and the PyPI wheel
`nvidia-pytriton`, of which only the server files are used (the package is never imported). It has one of two
layouts:

- *official*: `<root>/bin`, `<root>/lib`, `<root>/backends/python` with the one stub of the image's Python;
- *wheel*: `<root>/bin`, `<root>/python_backend_stubs/<X.Y>` for many Pythons, libraries in
  `nvidia_pytriton.libs` beside the package, found by relative RPATHs that do not survive a copy.

A backend directory with `python/` (of the running Python's version) and `quire/` is assembled in the user's
cache (`quire_common.cache`) for each combination of a server, a Python and a copy of Quire, and again if some
of its files are missing.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

import quire
from quire.errors import ConfigError
from quire_common.cache import ENVIRONMENT, cache_directory, locked, private_directory

logger = logging.getLogger("quire")

OFFICIAL_BINARY = Path("/opt/tritonserver/bin/tritonserver")
STUB = "triton_python_backend_stub"
UTILS = "triton_python_backend_utils.py"
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

# What backend/model.py comes down to where the packages are installed and need no searching.
_INSTALLED_MODEL_PY = """\
import locale
import sys

sys.path[:] = filter(None, sys.path)  # of the server's working directory
locale.setlocale(locale.LC_ALL, "C.UTF-8")
from quire.triton.frontend import TritonPythonModel
"""


@dataclass(frozen=True)
class TritonServer:
    """One tritonserver installation: its binary, its stock backends and the folder of its libraries."""

    binary: Path
    backends: Path
    libraries: Path
    stub: Path
    is_wheel: bool

    def environment(self) -> dict[str, str]:
        """Returns the environment for the server: this process's, with the paths that the server's stubs and
        our engine need.

        The stub ignores PYTHONPATH and uses the packages of the environment whose `python3` is first on
        PATH. It finds libpython through the loader. The running Python's own libpython must come before a
        system one of the same version, which may lack symbols that extension modules need.
        """
        env = dict(os.environ)
        library_path = [str(libpython_directory()), str(self.libraries), env.get("LD_LIBRARY_PATH", "")]
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, library_path))
        env["PATH"] = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), env.get("PATH", "")]))
        env["QUIRE_PYTHON"] = sys.executable
        env["PYTHONUTF8"] = "1"  # for the engine and its workers; the stub does not look at it
        return env

    def flags(self, backend_directory: Path) -> frozenset[str]:
        """Returns the names of the command-line flags that this server knows, without the leading dashes.

        They were recorded when the backend directory was assembled.
        """
        return frozenset((backend_directory / "flags.txt").read_text("utf-8").split())


def find(explicit: str | None = None) -> TritonServer:
    """Finds the tritonserver to use; raises ConfigError with one line that says what is missing or does not
    fit.

    Args:
        explicit: path of the binary; None: it is searched.
    """
    if explicit is not None:
        binary = Path(explicit)
        if not (binary.is_file() and os.access(binary, os.X_OK)):
            raise ConfigError(f"tritonserver: {explicit} is not an executable file")
        return _from_binary(binary.resolve())
    if OFFICIAL_BINARY.is_file():
        return _from_binary(OFFICIAL_BINARY)
    if (on_path := shutil.which("tritonserver")) is not None:
        return _from_binary(Path(on_path).resolve())
    # find_spec of a top-level package does not import it.
    spec = importlib.util.find_spec("pytriton")
    if spec is not None and spec.submodule_search_locations:
        binary = Path(next(iter(spec.submodule_search_locations))) / "tritonserver" / "bin" / "tritonserver"
        if binary.is_file():
            return _from_binary(binary)
    raise ConfigError(
        "no tritonserver found: not in /opt/tritonserver, not on PATH, and the wheel is not installed "
        "(pip install nvidia-pytriton==0.7.0 'numpy<2')"
    )


def _from_binary(binary: Path) -> TritonServer:
    root = binary.parent.parent
    stubs = root / "python_backend_stubs"
    is_wheel = stubs.is_dir()
    if is_wheel:
        stub = stubs / PYTHON_VERSION / STUB
        if not stub.is_file():
            known = ", ".join(
                sorted((p.name for p in stubs.iterdir()), key=lambda v: [*map(int, v.split("."))])
            )
            raise ConfigError(f"tritonserver's wheel has Python stubs for {known}; this is {PYTHON_VERSION}")
        _require_numpy_1()
        libraries = root.parent.parent / "nvidia_pytriton.libs"
    else:
        stub = root / "backends" / "python" / STUB
        if not stub.is_file():
            raise ConfigError(f"{binary} has no Python backend: {stub} is missing")
        linked = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
        if linked is not None and linked.group(1).decode() != PYTHON_VERSION:
            raise ConfigError(
                f"the Python backend of {binary} is built for Python {linked.group(1).decode()}; "
                f"this is {PYTHON_VERSION}: run quire with that Python"
            )
        libraries = root / "lib"
    return TritonServer(binary, root / "backends", libraries, stub, is_wheel)


def _require_numpy_1() -> None:
    # With numpy 2 the stubs of this server read BYTES inputs as garbage and end at the first request.
    version = importlib.metadata.version("numpy")
    if int(version.split(".")[0]) >= 2:
        raise ConfigError(f"the embedded tritonserver needs numpy < 2; numpy {version} is installed")


@functools.cache
def libpython_directory() -> Path:
    """Returns the folder of the running Python's own shared libpython; raises ConfigError if it has none."""
    name = f"libpython{PYTHON_VERSION}.so.1.0"
    libdir = Path(sysconfig.get_config_var("LIBDIR") or "")
    base = (
        Path(sys.base_prefix) / "lib"
    )  # relocated Pythons (conda, uv) record a LIBDIR of their build machine
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for directory in (libdir, libdir / multiarch, base, base / multiarch):
        if (directory / name).is_file():
            return directory
    raise ConfigError(
        f"{sys.executable} has no shared {name} (looked in {libdir} and {base}): Triton's Python stub needs "
        "a Python built with --enable-shared, as those of Debian, conda, uv and the official images are"
    )


def backend_directory(server: TritonServer, cache: Path | None = None) -> Path:
    """Returns the `--backend-directory` for this server, Python and copy of Quire; makes it if it is missing.

    If two processes start at once, the second usually waits and uses the first one's directory. A finished
    directory is left alone, unless it has lost files (by cleaners of temporary directories, or a crash): then
    it is made anew. If the cache cannot be written, the directory is made for this process alone.

    Args:
        server: the server that the directory is for.
        cache: folder that has or gets `backends/`; None: the user's cache, see `quire_common.cache`.

    Raises:
        ConfigError: the server does not run, this Python has no shared library, or files in the directory
            cannot be executed.
    """
    parent = cache / "backends" if cache is not None else cache_directory("backends")
    source = backend_source()
    stat = server.binary.stat()
    identity = [
        server.binary,
        stat.st_size,
        stat.st_mtime_ns,
        server.stub,
        source,
        quire.__version__,
        PYTHON_VERSION,
    ]
    digest = hashlib.sha256("\0".join(map(str, identity)).encode()).hexdigest()[:16]
    final = parent / f"{PYTHON_VERSION}-{digest}"
    with locked(parent.with_suffix(".lock")):
        if not _is_whole(server, final):
            try:
                _make(server, source, final)
            except OSError as error:
                logger.warning("the backend directory cannot be kept in %s: %s", parent, error.strerror)
                final = private_directory() / final.name
                _make(server, source, final)
            else:
                _forget_removed_checkouts(parent)
    _check_executable(server, final)
    return final


def _is_whole(server: TritonServer, directory: Path) -> bool:
    try:
        flags = server.flags(directory)
    except (OSError, UnicodeDecodeError):
        return False
    copies = {directory / "python" / file.name: file.stat().st_size for file in _copied_files(server)}
    needed = (directory / "quire" / "model.py", directory / "python" / UTILS)
    return (
        "model-repository" in flags
        and all(path.is_file() for path in needed)
        and all(path.is_file() and path.stat().st_size == size for path, size in copies.items())
    )


def _make(server: TritonServer, source: Path | None, final: Path) -> None:
    final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=final.parent))
    try:
        _assemble(server, source, building)
        shutil.rmtree(final, ignore_errors=True)
        building.rename(final)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _check_executable(server: TritonServer, directory: Path) -> None:
    """Raises ConfigError if the directory has a copy of a stub and is mounted noexec."""
    if server.is_wheel and os.statvfs(directory).f_flag & os.ST_NOEXEC:
        raise ConfigError(
            f"{directory} is mounted noexec, and tritonserver's Python backend has to run there: set "
            f"{ENVIRONMENT} to a folder where programs may run"
        )


def _copied_files(server: TritonServer) -> tuple[Path, ...]:
    """Returns the files of a wheel's Python backend that have to be copied, with the stub for this Python;
    empty for an official server."""
    stock = server.backends / "python"
    return (stock / "libtriton_python.so", stock / UTILS, server.stub) if server.is_wheel else ()


def _assemble(server: TritonServer, source: Path | None, target: Path) -> None:
    target.chmod(0o755)
    python = target / "python"
    if server.is_wheel:
        python.mkdir()
        for file in _copied_files(server):
            shutil.copy2(file, python / file.name)
        (python / STUB).chmod(0o755)
    else:
        for backend in server.backends.iterdir():
            if backend.name != "quire":
                (target / backend.name).symlink_to(backend)
    if source is not None:
        (target / "quire").symlink_to(source)
    else:
        (target / "quire").mkdir()
        (target / "quire" / "model.py").write_text(_INSTALLED_MODEL_PY, "utf-8")
    usage = subprocess.run(
        [server.binary, "--help"],
        env=server.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    flags = sorted(set(re.findall(r"^\s+--([a-z][a-z0-9-]+)", usage.stdout + usage.stderr, re.MULTILINE)))
    if "model-repository" not in flags:
        reason = (usage.stderr or usage.stdout).strip().splitlines()
        raise ConfigError(
            f"{server.binary} does not run: {reason[0] if reason else f'status {usage.returncode}'}"
        )
    (target / "flags.txt").write_text("\n".join(flags) + "\n", "utf-8")


def _forget_removed_checkouts(parent: Path) -> None:
    for entry in parent.iterdir():
        link = entry / "quire"
        if link.is_symlink() and not link.exists():
            shutil.rmtree(entry, ignore_errors=True)


def backend_source() -> Path | None:
    """Returns the folder that has our `model.py` beside the `quire` package (a checkout or an installed
    backend); None if only the packages are installed."""
    folder = Path(quire.__file__).resolve().parent.parent
    return folder if (folder / "model.py").is_file() else None


def install_backend(out: Path) -> list[Path]:
    """Copies `model.py` and Quire's own packages that it needs into `out`, for use as `backends/quire`.

    If `out` exists, these parts are replaced, and other files are left alone.

    Returns:
        Paths of `model.py` and of the packages' folders.

    Raises:
        ConfigError: a package is not installed, or `out` is where Quire itself is.
    """
    out.mkdir(parents=True, exist_ok=True)
    source = backend_source()
    written = [out / "model.py"]
    written[0].write_text(
        (source / "model.py").read_text("utf-8") if source is not None else _INSTALLED_MODEL_PY, "utf-8"
    )
    for package in ("quire", "quire_kernels", "quire_ensemble", "quire_common"):
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"package {package} is not installed; it belongs to the backend")
        origin = Path(next(iter(spec.submodule_search_locations)))
        target = out / package
        if target.resolve() == origin.resolve():
            raise ConfigError(f"--out {out} is where Quire itself lies")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(target)
        shutil.copytree(origin, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        written.append(target)
    return written
