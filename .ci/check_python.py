"""Ends with one clear line unless the Python that runs it can carry Quire; run by `make setup`."""

import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036 (this file is what says so)
    sys.exit(f"Quire needs Python >= 3.10; {sys.executable} is older. Another one: make PYTHON=python3.11")

# Nothing is installed yet.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "backend"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

from quire.errors import ConfigError
from quire.server.tritonserver import libpython_directory

try:
    libpython_directory()
except ConfigError as error:
    sys.exit(f"{error}. Another one: make PYTHON=/path/to/python3")
