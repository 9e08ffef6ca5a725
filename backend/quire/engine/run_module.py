"""`python run_module.py MODULE ...`: like `python -m MODULE ...`, but does not put the working directory on
the import path.

-m puts the working directory first on the import path. Whoever can write there could then have the server run
their code. (Python has -P for this from 3.11 on.) This file is run by its path.
"""

import sys

RUN_MODULE = __file__
"""The path of this file."""

if __name__ == "__main__":
    # Python has put this file's folder first, whose modules are not meant; "" is the working directory.
    _folder = __file__.rpartition("/")[0]
    sys.path[:] = [entry for entry in sys.path if entry not in ("", _folder)]

    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
