"""Virtual environments of the peers, under `benchmarks/out/venvs`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import machine
from benchmarks.peers.registry import Venv

DIRECTORY = machine.ROOT / "benchmarks" / "out" / "venvs"
_CHECK_TORCH = """
import importlib.util
if importlib.util.find_spec("torch"):
    import torch
    raise SystemExit(f"torch {torch.__version__} is a CUDA build" if torch.version.cuda else 0)
"""


class PeerUnavailable(Exception):
    """Says in one line why a peer cannot run here."""


def python_of(venv: Venv | None) -> Path:
    """Interpreter of a venv that has been installed."""
    return Path(sys.executable) if venv is None else DIRECTORY / venv.name / "bin" / "python"


def ensure(
    venv: Venv | None, *, install: bool = True, progress: Callable[[str], None] = lambda _: None
) -> Path:
    """The interpreter, installed now where it is not.

    Args:
        venv: None: the project's own.
        install: whether to install at all; else a missing one is unavailable.
        progress: told when something is installed.

    Raises:
        PeerUnavailable: it is not for this processor, is missing, or pip failed; the log says how.
    """
    python = python_of(venv)
    if venv is None:
        return python
    if venv.only_on and venv.only_on != machine.cpuinfo().get("vendor_id"):
        raise PeerUnavailable(f"for processors of {venv.only_on} only")
    folder = DIRECTORY / venv.name
    stamp = folder / ".installed"
    recipe = repr((venv.pip, venv.env))
    if stamp.is_file() and stamp.read_text() == recipe:
        return python
    if not install:
        raise PeerUnavailable("not installed")
    progress(f"installing {venv.name} into {folder}")
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{venv.name}.log")
    with log.open("w") as output:
        commands: list[list[str]] = [[sys.executable, "-m", "venv", str(folder)]]
        commands += [[str(python), "-m", "pip", *arguments] for arguments in venv.pip]
        commands += [[str(python), "-c", _CHECK_TORCH]]
        for command in commands:
            done = subprocess.run(
                ["nice", "-n", "19", *command],
                env=os.environ | venv.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            if done.returncode != 0:
                tail = log.read_text(errors="replace").strip().splitlines()
                raise PeerUnavailable(
                    f"{' '.join(command[1:5])} ... failed, see {log}: {tail[-1] if tail else ''}"[:300]
                )
    stamp.write_text(recipe)
    return python
