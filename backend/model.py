"""The file that Triton loads for `backend: "quire"`; the frontend itself is in the package `quire.triton`.

Triton imports this module as plain `model`: in the stub of each instance, and usually in a short-lived
interpreter before a load. It works from a checkout (or a link to one), from a folder written by
`quire backend install`, and with the packages simply installed in the stub's environment.
"""

import sys

# Before any other import: the stub's interpreter looks into the server's working directory first.
sys.path[:] = filter(None, sys.path)

import atexit  # noqa: E402
import gc  # noqa: E402
import locale  # noqa: E402
from pathlib import Path  # noqa: E402

# The stub starts in the C locale, where open() without an encoding reads ASCII: before any other import.
locale.setlocale(locale.LC_ALL, "C.UTF-8")

# The stub ends like any interpreter, with a collection over everything transformers has loaded: seconds on a
# busy machine, which Triton spends waiting. A process that ends needs none.
atexit.register(gc.freeze)

# Packages that came with this file go first: an older installed copy must not be mixed with it.
_HERE = Path(__file__).resolve().parent
for _root, _package in (
    (_HERE.parent / "common", "quire_common"),
    (_HERE.parent / "ensemble", "quire_ensemble"),
    (_HERE.parent / "kernels", "quire_kernels"),
    (_HERE, "quire"),
):
    if (_root / _package / "__init__.py").is_file():
        sys.path.insert(0, str(_root))

from quire.triton.frontend import TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
